"""Before and after learn the same from the same recorded experiences, and differ in a few lines."""

from __future__ import annotations

import ast
import asyncio
import difflib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from mps_trainer.operator.recording import Recording, read_recording
from mps_trainer.sidecar.auc import area_under_curve
from mps_trainer.workbench import learn

EXAMPLE = Path(__file__).parents[2] / "examples/port_your_operator"


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    names = ("before", "after", "make_experiences")
    yield {name: importlib.import_module(name) for name in names}
    for name in names:
        del sys.modules[name]


@pytest.fixture
def recording() -> Recording:
    return read_recording(EXAMPLE / "experiences.jsonl")


def code_lines(name: str) -> list[str]:
    """Without docstrings, comments and empty lines, as Python prints them."""
    tree = ast.parse((EXAMPLE / name).read_text())
    del tree.body[0]
    return ast.unparse(tree).replace("\n\n", "\n").splitlines()


def test_ten_lines_are_new() -> None:
    before, after = code_lines("before.py"), code_lines("after.py")
    new = [line for line in difflib.ndiff(before, after) if line.startswith("+ ") and line[2:].strip()]
    assert 5 <= len(new) <= 10, new
    assert len(after) < len(before)


def test_after_learns_what_before_does(modules: dict[str, ModuleType], recording: Recording) -> None:
    make = modules["make_experiences"]
    rng, fresh_rng = np.random.default_rng(449), np.random.default_rng(7)
    direction = rng.standard_normal(make.WIDTH)
    fresh = [make.experience(99, i, direction, fresh_rng) for i in range(2000)]
    hidden = torch.tensor(np.stack([e.info["hidden_state"] for e in fresh]), dtype=torch.float32)
    reward = np.array([e.reward for e in fresh])

    def auc(model: torch.nn.Module) -> float:
        with torch.inference_mode():
            found = area_under_curve(model(hidden).squeeze(-1).numpy(), reward)
        assert found is not None
        return found

    async def run(operator) -> list[int]:  # type: ignore[no-untyped-def]
        # All but the tenth that `learn` holds out.
        return [len((await operator.process(batch))[0]) for batch in recording.batches[:17]]

    torch.manual_seed(0)
    operator = modules["before"].OutlierRewardFilter()
    kept = asyncio.run(run(operator))
    assert set(kept) == {38}, "the operator itself works: 2 of 40 dropped"
    # As many steps of as many experiences as the operator took.
    learnt = learn(modules["after"].OutlierRewardFilter(), recording.batches, steps=68, batch_size=40)
    assert learnt.held_out == 72
    before, after = auc(operator.model), auc(learnt.trainer.model)
    assert after > 0.9
    assert after >= before - 0.005, (before, after)


def test_the_recording_is_small_and_what_the_script_makes(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    assert (EXAMPLE / "experiences.jsonl").stat().st_size < 200_000
    modules["make_experiences"].main(tmp_path / "e.jsonl")
    made, kept = read_recording(tmp_path / "e.jsonl"), read_recording(EXAMPLE / "experiences.jsonl")
    for one, other in zip(made.batches, kept.batches, strict=True):
        assert [e.eid for e in one] == [e.eid for e in other]
        assert [e.reward for e in one] == [e.reward for e in other]
        assert np.array_equal([e.info["hidden_state"] for e in one], [e.info["hidden_state"] for e in other])
