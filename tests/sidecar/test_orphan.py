"""A killed supervisor leaves nothing, even when the task hangs."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import numpy as np
import pytest
from real_sidecar import token_rows

from mps_trainer.run import Status
from mps_trainer.transport.sweep import remove_run

QUICK = (
    "import sys; import mps_trainer.sidecar.orphan as o; o.LIMIT_S = 3.0; "
    "from mps_trainer.sidecar.__main__ import main; sys.exit(main())"
)


def test_a_sidecar_that_hangs_ends_itself_after_its_supervisor_was_killed(
    make_run: Any, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    support = request.path.parents[1] / "support"
    monkeypatch.setenv("PYTHONPATH", str(support), prepend=os.pathsep)
    run = make_run(task="hanging_task:Hangs", min_experiences=8)
    child, answer = run.start(sys.executable, "-c", QUICK)
    assert answer["state"] == "ready", answer
    with run.channel() as channel:
        channel.send(token_rows(np.random.default_rng(0), 32), request_id=1, want_scores=False)
        deadline = time.monotonic() + 90
        while "hangs now" not in run.log():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        run.supervisor.release()
        assert child.wait(90) == 1
    status = Status.load(run.run_dir)
    assert "ended itself" in status.error
    log = (run.run_dir / "sidecar.log").read_text()
    assert "hanging_task.py" in log, "its stacks"
    # As the next `up` or `doctor --clean` does.
    remove_run(run.run_id)


def test_an_orphan_that_can_end_in_order_does(make_run: Any) -> None:
    run = make_run()
    child, answer = run.start(sys.executable, "-c", QUICK.replace("3.0", "90.0"))
    assert answer["state"] == "ready", answer
    run.supervisor.release()
    assert child.wait(90) == 0
    assert Status.load(run.run_dir).state.value == "stopped"
