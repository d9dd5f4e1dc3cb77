"""The writer, the reader and both at once are stopped at every line that they execute in the transport.

scripts/kill_transport.py does the same for every bytecode and every pass through a loop.
"""

import pytest
from channel_peers import COLUMNS, SMALL, Child
from scenarios import (
    both_act,
    both_check,
    reader_act,
    reader_check,
    send,
    writer_act,
    writer_check,
)
from step_killer import Stepper

from mps_trainer.transport import OperatorChannel, locks
from mps_trainer.transport.semaphores import Doorbell


def run_until(act, run_id, stop_at, said):
    """Run `act` in a child until step `stop_at`; True when it was killed there."""

    def body(report):
        stepper = Stepper(stop_at, repeats=1)
        act(run_id, stepper, report)
        report(f"steps {stepper.count}")

    child = Child(body)
    status = child.wait()
    said += child.said
    assert status in (0, -9), said
    return status == -9


def reader_trial(run_id, stop_at, said):
    with OperatorChannel.create(run_id, COLUMNS, SMALL, backpressure="drop_newest") as channel:
        for i in (1, 2, 3):
            send(channel, i, want_scores=True)
        killed = run_until(reader_act, run_id, stop_at, said)
        reader_check(channel, run_id, said)
    return killed


def writer_trial(run_id, stop_at, said):
    killed = run_until(writer_act, run_id, stop_at, said)
    writer_check(run_id, said)
    return killed


def both_trial(run_id, stop_at, said):
    killed = run_until(both_act, run_id, stop_at, said)
    both_check(run_id, said)
    return killed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trial", "ordered"), [(writer_trial, True), (writer_trial, False), (reader_trial, True), (both_trial, False)]
)
def test_a_kill_at_any_line_loses_nothing_and_tears_nothing(run_id, monkeypatch, trial, ordered):
    monkeypatch.setattr(locks, "TOTAL_STORE_ORDER", ordered)
    # A living member of the run: what the dead leave is then nobody else's to sweep.
    member = Doorbell(run_id)
    said = []
    assert not trial(run_id, None, said)
    steps = int(said[-1].split()[1])
    stop_at = 1
    while trial(run_id, stop_at, []):
        stop_at += 1
    # How often a contended lock is tried differs from run to run, the rest does not.
    member.close(unlink_if_alone=True)
    assert stop_at > max(200, 0.97 * steps)
