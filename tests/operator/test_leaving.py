"""How an operator leaves a run that has ended while it was between two batches."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from test_aux_trainer import experiences, operator

from mps_trainer.operator import aux_trainer, feeder
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
