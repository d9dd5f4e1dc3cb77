"""`score_where: operator` against a real sidecar process: scores go on when it is dead, and grow older."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from test_aux_trainer import experiences, operator

from mps_trainer.config import load_settings
from mps_trainer.errors import TaskError, TransportError
from mps_trainer.operator.feeder import Exchange, Feeder
from mps_trainer.transport import SendResult, WeightsEntry, WeightsReader, WeightsWriter, leftovers
from mps_trainer.transport.sweep import remove_run


@pytest.fixture
def run_id() -> Iterator[str]:
    name = f"o{secrets.token_hex(6)}"
    yield name
    remove_run(name)


def test_scores_go_on_without_the_sidecar(make_run: Any) -> None:
    args = {"use": "filter", "score_where": "operator", "snapshot_every": "0s"}
    run = make_run(min_experiences=8, **args)
    child, _ = run.start()
    aux = operator(run, filter={"value": 0.25}, min_version=1, max_staleness="1h", **args)

    reader = WeightsReader(run.run_id)

    async def main() -> list[tuple[int, dict[str, Any]]]:
        found = []
        await aux.prepare()
        for seed in range(3):
            kept, metrics = await aux.process(experiences(seed))
            found.append((len(kept), metrics))
            version = run.settings.steps_per_batch * (seed + 1)
            # The snapshot is published after the steps; no batch waits for that.
            for _ in range(3600):
                snapshot = reader.look()
                if snapshot is not None and snapshot.head.version == version:
                    break
                await asyncio.sleep(0.025)
            else:
                raise AssertionError(f"no snapshot of step {version} within 90 s")
        reader.close()
        child.kill()
        child.wait()
        await asyncio.sleep(0.2)
        kept, metrics = await aux.process(experiences(3))
        found.append((len(kept), metrics))
        assert f"mpst.{run.run_id}.w" in leftovers(run.run_id), "it waits for a successor"
        run.supervisor.release()
        await aux.close()
        return found

    found = asyncio.run(main())
    assert found[0][0] == 32
    assert found[0][1]["aux_trainer/model_version"] == 0, "the first snapshot is there before READY"
    assert found[0][1]["aux_trainer/score_too_early"] == 1
    assert [kept for kept, _ in found[1:]] == [24, 24, 24]
    for _, metrics in found:
        assert metrics["aux_trainer/scored"] == metrics["aux_trainer/fed"] == 32
        assert metrics["aux_trainer/score_latency_ms"] > 0
        assert metrics["aux_trainer/snapshot_errors_total"] == metrics["aux_trainer/errors_total"] == 0
        assert all(type(value) in (int, float) for value in metrics.values())
    last = found[-1][1]
    assert last["aux_trainer/sidecar_up"] == 0
    assert last["aux_trainer/score_age_s"] >= 0.2
    assert last["aux_trainer/model_version"] == 3 * run.settings.steps_per_batch
    assert leftovers(run.run_id) == [], "the operator was the last to use it"
    assert run.status().scored == 0, "nobody asked the sidecar"


def test_a_batch_is_fed_whatever_its_scores_here_do() -> None:
    sent = []

    class Channel:
        def send(self, rows: Any, **_: Any) -> SendResult:
            sent.append(rows)
            return SendResult(1)

    class Broken:
        def refresh(self, deadline: float) -> None:
            raise TaskError("it does not fit")

    feeder = Feeder(load_settings({"use": "filter"}), "")
    feeder._own_scores = Broken()  # type: ignore[assignment]
    extracted = feeder._extract(experiences(0))
    out = Exchange(np.full(32, np.nan, np.float32), late=np.zeros(32, bool))
    with pytest.raises(TaskError, match="does not fit"):
        feeder._send(Channel(), extracted, out, True)  # type: ignore[arg-type]
    assert sent == [extracted.rows]


def test_a_look_ends_at_its_deadline(run_id: str) -> None:
    writer = WeightsWriter(run_id, [WeightsEntry("w", "float32", (4,))])
    writer.publish([memoryview(bytes(16))], version=1, trained_ns=1)
    reader = WeightsReader(run_id)
    with pytest.raises(TransportError, match="not copied in time"):
        reader.look(time.monotonic())
    snapshot = reader.look(time.monotonic() + 60, tries=1)
    assert snapshot is not None
    assert snapshot.head.version == 1
    reader.close()
    writer.close()
