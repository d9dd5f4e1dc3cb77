"""How an operator leaves a run that has ended while it was between two batches."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from typing import Any

import pytest
from test_aux_trainer import experiences, operator

from mps_trainer.cli import screen
from mps_trainer.cli.screen import Subject
from mps_trainer.operator import aux_trainer, feeder
from mps_trainer.report import summarize, write_page
from mps_trainer.run import State, Status, try_hold
from mps_trainer.run.figures import Watcher
from mps_trainer.transport import OperatorChannel, leftovers

pytestmark = pytest.mark.usefixtures("no_sidecar")


def end_as_the_supervisor_does(run: Any) -> None:
    run.paths.remove(keep_record=True)
    run.supervisor.release()


def test_an_idle_operator_gives_back_the_memory_of_an_ended_run(make_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aux_trainer, "LOOK_IDLE_S", 0.05)
    run = make_run()
    aux = operator(run, use="feed")

    async def main() -> dict[str, Any]:
        await aux.prepare()
        await asyncio.sleep(0.2)
        assert len(leftovers(run.run_id)) == 4, "a live run was left"
        end_as_the_supervisor_does(run)
        deadline = time.monotonic() + 90
        while leftovers(run.run_id):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        _, metrics = await aux.process(experiences(0))
        await aux.close()
        return metrics

    metrics = asyncio.run(main())
    assert metrics["aux_trainer/connected"] == 0
    assert metrics["aux_trainer/errors_total"] == 0
    assert not run.paths.run_file.exists()


def test_the_last_of_two_operators_takes_the_run_file_along(make_run: Any) -> None:
    run = make_run()
    first, second = operator(run, use="feed"), operator(run, use="feed")

    async def main() -> None:
        await first.prepare()
        await second.prepare()
        end_as_the_supervisor_does(run)
        await first.close()
        assert len(leftovers(run.run_id)) == 4
        assert run.paths.run_file.exists()
        await second.close()

    asyncio.run(main())
    assert leftovers(run.run_id) == []
    assert not run.paths.run_file.exists()


def test_an_operator_that_joins_while_the_run_ends_leaves_nothing(
    make_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run()

    class Late(OperatorChannel):
        @classmethod
        def create(cls, *args: Any, **kwargs: Any) -> OperatorChannel:
            channel = OperatorChannel.create(*args, **kwargs)
            run.paths.remove()
            run.supervisor.release()
            return channel

    monkeypatch.setattr(feeder, "OperatorChannel", Late)
    aux = operator(run, use="feed", on_error="pass")
    asyncio.run(aux.prepare())
    assert leftovers(run.run_id) == []


def test_what_an_ended_run_left_unread_is_counted_and_told(make_run: Any, caplog: pytest.LogCaptureFixture) -> None:
    """No sidecar ever came: two batches are in the ring, the third found no room, and then the run ends."""
    run = make_run()
    aux = operator(run, use="feed", ring_slots=2, backpressure="drop_newest")

    async def main() -> dict[str, Any]:
        await aux.prepare()
        for seed in range(3):
            _, metrics = await aux.process(experiences(seed))
        end_as_the_supervisor_does(run)
        await aux.close()
        return metrics

    metrics = asyncio.run(main())
    assert (metrics["aux_trainer/lost_here_total"], metrics["aux_trainer/lost_total"]) == (32, 32)
    last = json.loads((run.run_dir / "operator.jsonl").read_text().splitlines()[-1])
    assert last["lost_here_total"] == 96
    Status(run_id=run.run_id).save(run.run_dir)
    found = Watcher(run.run_dir).look()
    assert (found.lost, found.seen) == (96, 96)
    assert (
        "96 lost to a full ring"
        in dict(row[:2] for row in screen.rows(Subject.of_folder(run.run_dir), found, alive=False))["drops"]
    )
    assert summarize(run.run_dir).seen == 96
    assert write_page(run.run_dir, run.run_dir / "report.html").exists()
    assert leftovers(run.run_id) == []


def test_what_a_sidecar_without_its_supervisor_still_takes_is_not_lost(make_run: Any) -> None:
    run = make_run()
    sidecar = try_hold(run.paths.sidecar_lock)
    assert sidecar is not None
    aux = operator(run, use="feed")

    async def main() -> None:
        await aux.prepare()
        await aux.process(experiences(0))
        # Killed; the sidecar drains what is in the ring.
        run.supervisor.release()
        await aux.close()

    asyncio.run(main())
    lines = [json.loads(line) for line in (run.run_dir / "operator.jsonl").read_text().splitlines()]
    assert [line["lost_here_total"] for line in lines] == [0]
    assert run.paths.run_file.exists(), "the sidecar removes it"
    sidecar.release()
    run.paths.remove()


def test_trinitys_log_says_once_what_the_sidecar_cannot_write_though_the_run_folder_is_gone(make_run: Any) -> None:
    run = make_run()
    aux = operator(run, use="feed")
    shutil.rmtree(run.run_dir)
    status = Status(run_id=run.run_id, trouble="the run folder cannot be written: No space left on device")
    with pytest.raises(OSError, match="No such file"):
        status.save(run.run_dir, run.paths.spare_status)
    said: list[str] = []
    feeder.logger.addFilter(lambda record: said.append(record.getMessage()) or True)

    async def main() -> list[dict[str, Any]]:
        await aux.prepare()
        found = [(await aux.process(experiences(seed)))[1] for seed in range(2)]
        run.supervisor.release()
        status.state, status.error = State.FAILED, "no sidecar can be started"
        with pytest.raises(OSError, match="No such file"):
            status.save(run.run_dir, run.paths.spare_status)
        # What the supervisor leaves while an operator is there.
        run.paths.remove(keep_record=True)
        _, last = await aux.process(experiences(2))
        await aux.close()
        return [*found, last]

    *metrics, last = asyncio.run(main())
    feeder.logger.filters.clear()
    assert [found["aux_trainer/fed"] for found in metrics] == [32, 32]
    assert sum("the sidecar: the run folder cannot be written: No space" in text for text in said) == 1
    assert sum("no sidecar can be started" in text for text in said) == 1
    assert (last["aux_trainer/connected"], last["aux_trainer/kept"]) == (0, 32)
    assert not run.paths.spare_status.exists()
    assert leftovers(run.run_id) == []
    run.run_dir.mkdir()
