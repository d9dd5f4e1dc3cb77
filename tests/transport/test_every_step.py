"""The writer, the reader and both at once are stopped at every line that they execute in the transport.

Alone, beside a living other side, and with the other side stopped inside a step of its own. Steps are sampled here:
each scenario takes every few lines, from a line of its own on. scripts/kill_transport.py takes every line, every
bytecode and every pass through a loop, of all scenarios and with both memory orders.
"""

import pytest
from exchanges import EXCHANGES, pair_trial
from scenarios import TRIALS
from step_killer import ACTING

from mps_trainer.transport import locks
from mps_trainer.transport.semaphores import Doorbell

ALL = {**TRIALS, **EXCHANGES}


@pytest.fixture
def member(run_id):
    """A living member of the run: what the dead leave is then nobody else's to sweep."""
    bell = Doorbell(run_id)
    yield
    bell.close(unlink_if_alone=True)


def count_steps(trial, run_id, **steps):
    """How many steps the trial has when nobody is killed."""
    said = []
    assert not trial(run_id, None, said, **steps)
    return int(said[-1].split()[1])


@pytest.mark.slow
@pytest.mark.usefixtures("member")
@pytest.mark.parametrize(
    ("name", "ordered", "first", "stride"),
    [
        ("writer", True, 1, 4),
        ("writer", False, 3, 4),
        ("reader", True, 2, 4),
        ("reader", False, 4, 4),
        ("both", True, 1, 6),
        ("both", False, 4, 6),
        ("operator beside a sidecar", True, 1, 10),
        ("operator beside a sidecar", False, 6, 10),
        ("sidecar beside an operator", True, 3, 10),
        ("sidecar beside an operator", False, 8, 10),
    ],
)
def test_a_kill_at_sampled_lines_loses_nothing_and_tears_nothing(run_id, monkeypatch, name, ordered, first, stride):
    monkeypatch.setattr(locks, "TOTAL_STORE_ORDER", ordered)
    trial = ALL[name]
    steps = count_steps(trial, run_id)
    stop_at = first
    while trial(run_id, stop_at, []):
        stop_at += stride
    # How often a contended lock is tried differs from run to run, more so on a busy machine, and so does whether a wait
    # sleeps; the rest does not.
    assert stop_at > max(200, (0.85 if "beside" in name else 0.9) * steps)


@pytest.mark.slow
@pytest.mark.usefixtures("member")
@pytest.mark.parametrize("name", ALL)
def test_a_kill_at_sampled_bytecodes_loses_nothing_and_tears_nothing(run_id, name):
    trial = ALL[name]
    steps = count_steps(trial, run_id, steps=ACTING)
    assert steps > 300
    kills = 0
    for stop_at in range(1 + len(name), steps, steps // 40):
        kills += trial(run_id, stop_at, [], steps=ACTING)
    assert kills > 30


@pytest.mark.slow
@pytest.mark.usefixtures("member", "brief_mutex")
@pytest.mark.parametrize("reader_first", [True, False])
def test_a_kill_while_the_other_side_stands_inside_a_step_loses_nothing(run_id, memory_order, reader_first):
    reached = []
    for trial, writer_at in enumerate(range(3, 480, 17)):
        reader_at = 1 + 37 * writer_at % 500
        dies = ("writer", "reader", "both")[trial % 3]
        reached.append(pair_trial(run_id, writer_at, reader_at, dies, reader_first=reader_first, repeats=1))
    both_stood = sum(writer and reader for writer, reader in reached)
    assert both_stood > len(reached) // 4, reached
