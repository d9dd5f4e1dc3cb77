"""How fast the neighbour of `scripts/gpu_step_shapes.py` is said to be: a mocked engine's rounds, a switch by hand."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    yield
    for name in [name for name in sys.modules if name.startswith("gpu_")]:
        del sys.modules[name]


def test_an_engine_is_as_fast_as_its_whole_rounds(tmp_path: Path) -> None:
    from gpu_step_neighbour import EngineRounds

    log = tmp_path / "rounds.jsonl"
    engine = EngineRounds(tmp_path)
    assert not engine.enough(0.0)
    rounds = [{"begin": begin, "end": begin + 2, "tokens": 200.0 * begin} for begin in (1.0, 3.0, 5.0)]
    log.write_text("".join(json.dumps(r) + "\n" for r in rounds) + '{"begin": 7.0, "en')
    assert engine.enough(3.0)
    assert engine.rate(3.0) == 400.0
    assert not engine.enough(5.0)
    assert engine.rate(9.0) is None


def test_a_stand_in_is_as_fast_as_its_pieces_between_their_ends(tmp_path: Path) -> None:
    from gpu_step_neighbour import SETTINGS, StandIn, Switch

    switch = Switch(tmp_path / "switch")
    neighbour = StandIn(switch.path, SETTINGS)
    neighbour.enter("nobody")
    assert neighbour.alone("nobody") is None
    switch.setting = "decode"
    switch.done()
    since = neighbour.begin()
    begin = switch.look()[1]
    assert neighbour.rate(since) == 0.0
    for _ in range(3):
        assert not neighbour.enough(since)
        switch.done()
    assert neighbour.enough(since)
    assert neighbour.rate(since) == pytest.approx(3e9 / (switch.look()[1] - begin))


def test_a_stand_in_works_as_its_switch_says_and_ends_with_it(tmp_path: Path) -> None:
    from gpu_step_neighbour import SETTINGS, StandIn, Switch, serve

    switch = Switch(tmp_path / "switch")
    neighbour = StandIn(switch.path, SETTINGS)
    job = threading.Thread(target=serve, args=(str(switch.path), "cpu"))
    job.start()
    try:
        for setting in ("decode", "prompts", "decode"):
            neighbour.enter(setting)
            neighbour.begin()
        neighbour.enter("nobody")
        # One piece may have been begun before.
        assert switch.wait_for(1, 60)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            before = switch.value
            threading.Event().wait(0.05)
            if switch.value == before:
                break
        assert switch.value == before
    finally:
        switch.stop()
        job.join(60)
    assert not job.is_alive()
