"""The writer, the reader and both at once are stopped at every line that they execute in the transport.

scripts/kill_transport.py does the same for every bytecode and every pass through a loop.
"""

import pytest
from scenarios import TRIALS

from mps_trainer.transport import locks
from mps_trainer.transport.semaphores import Doorbell


@pytest.mark.slow
@pytest.mark.parametrize(("trial", "ordered"), [("writer", True), ("writer", False), ("reader", True), ("both", False)])
def test_a_kill_at_any_line_loses_nothing_and_tears_nothing(run_id, monkeypatch, trial, ordered):
    monkeypatch.setattr(locks, "TOTAL_STORE_ORDER", ordered)
    # A living member of the run: what the dead leave is then nobody else's to sweep.
    member = Doorbell(run_id)
    said, trial = [], TRIALS[trial]
    assert not trial(run_id, None, said)
    steps = int(said[-1].split()[1])
    stop_at = 1
    while trial(run_id, stop_at, []):
        stop_at += 1
    # How often a contended lock is tried differs from run to run, the rest does not.
    member.close(unlink_if_alone=True)
    assert stop_at > max(200, 0.97 * steps)
