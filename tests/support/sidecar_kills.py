"""A sidecar that is killed at random moments while an operator goes on sending, against one that never is.

    killed run:    start > (random moment > SIGKILL > start) x kills > everything taken > SIGTERM > last checkpoint
    unbroken run:  the same batches to one sidecar                                      > SIGTERM > last checkpoint

Both checkpoints must be the same to the last bit: weights, optimizer, learning-rate schedule, random states, and in the
replay buffer the same experiences, each drawn as often. So nothing that was sent is lost, and nothing is trained on
twice. On the CPU with one thread, which is what both runs have; on a GPU sums are not the same bit for bit.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from real_sidecar import Run, token_rows
from safetensors.numpy import load_file
from warm_sidecar import ColdSidecars, WarmSidecars

from mps_trainer.errors import RunError
from mps_trainer.run import State, Status
from mps_trainer.transport import OperatorChannel

Sidecars: TypeAlias = "WarmSidecars | ColdSidecars"
ROWS = 48
LIMIT_S = 120.0
#: A life lasts so many batches at most, and then so many seconds.
MOST_BATCHES = 8
MOST_S = 0.1
BASE = {"batch_size": 64, "steps_per_batch": 2, "checkpoint_every": 10, "replay_capacity": 400, "seed": 5}
VARIANTS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "priority": {
        "replay": {"sampling": "priority"},
        "schedule": {"rate": "cosine", "rate_warmup": 20, "rate_steps": 1000},
    },
    "recency": {
        "replay": {"sampling": "recency", "half_life": 100, "class_balance": True},
        "replay_bytes": "256KiB",
        "schedule": {"train_every": 2, "rate": "linear", "rate_steps": 500},
    },
    "epochs": {"steps_per_batch": 4, "schedule": {"train": "epochs", "epochs": 2, "train_every": 3}},
    # When its steps are taken depends on the clock, so only what came in is compared, exactly as well.
    "continuous": {"steps_per_batch": 4, "schedule": {"train": "continuous", "max_replays": 4}},
}
#: Of state.json; the names of records have a clock in them, and the AUC of a batch that was broken off is not told.
_STATE = ("step", "rate", "optimizer", "passes", "replay", "steps_due", "finished_batches", "columns")
_OF_TRAINING = ("tag.draws", "tag.priority", "known")
#: Variants whose steps follow from the batches alone: all of the checkpoint is compared.
WHOLE = tuple(name for name in VARIANTS if name != "continuous")


@dataclass
class Outcome:
    """What was compared.

    Attributes:
        kills_at: how many found the sidecar in which state.
        compared: arrays that are equal to the last bit.
    """

    batches: int = 0
    steps: int = 0
    checkpoints: int = 0
    kills_at: dict[str, int] = field(default_factory=dict)
    compared: int = 0


def compare_with_unbroken(
    folder: Path,
    sidecars: Sidecars,
    variant: str,
    kills: int,
    seed: int,
    tell: Callable[[str], object] = lambda _: None,
) -> Outcome:
    """Kill, finish, run the same unbroken, compare; AssertionError says what differs."""
    outcome = Outcome()
    killed = _new_run(folder / "killed", variant)
    try:
        outcome.batches = _kill(killed, sidecars, kills, random.Random(seed), outcome, tell)
    finally:
        killed.end()
    tell(f"{outcome.batches} batches; the same unbroken")
    unbroken = _new_run(folder / "unbroken", variant)
    try:
        _take_all(unbroken, sidecars, outcome.batches)
    finally:
        unbroken.end()
    _compare(_newest(killed), _newest(unbroken), outcome, whole=variant in WHOLE)
    assert killed.status().experiences == unbroken.status().experiences == ROWS * outcome.batches
    assert killed.status().duplicates == 0
    return outcome


def rows_of(number: int) -> dict[str, Any]:
    """Batch `number`, always the same."""
    return token_rows(np.random.default_rng(number), ROWS, ROWS * number)


def _new_run(folder: Path, variant: str) -> Run:
    folder.mkdir(parents=True)
    return Run(folder, {**BASE, **VARIANTS[variant]})


class _Sender:
    """An operator that sends batch after batch, with a pause or as fast as the ring takes them, until told to stop."""

    def __init__(self, channel: OperatorChannel, pause_s: float) -> None:
        self.sent = 0
        self._pause_s = pause_s
        self.error: BaseException | None = None
        self._channel = channel
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._send, name="sender")
        self._thread.start()

    def stop(self) -> int:
        """The number of batches sent."""
        self._stop.set()
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive(), "a batch was not taken"
        if self.error is not None:
            raise self.error
        return self.sent

    def _send(self) -> None:
        try:
            while not self._stop.is_set():
                if _send(self._channel, self.sent):
                    self.sent += 1
                    self._stop.wait(self._pause_s)
                else:
                    # Nobody lives to make room: the ring is full until the next sidecar comes.
                    self._stop.wait(0.01)
        except BaseException as error:  # noqa: BLE001  # told by `stop`, in the thread that asks
            self.error = error


def _send(channel: OperatorChannel, number: int) -> bool:
    """Whether the batch is in the ring; True is the promise that it will be trained on."""
    result = channel.send(rows_of(number), request_id=number, want_scores=number % 5 == 0)
    assert result.rows_sent in (0, ROWS), result
    return result.rows_sent == ROWS


def _kill(
    run: Run, sidecars: Sidecars, kills: int, rng: random.Random, outcome: Outcome, tell: Callable[[str], object]
) -> int:
    with run.channel(num_slots=4, slot_bytes=2**16, block_timeout_s=LIMIT_S) as channel:
        # Training between batches needs something between them.
        pause_s = 0.3 if run.settings.schedule.train == "continuous" else 0.0
        sender, before = _Sender(channel, pause_s), 0
        try:
            for kill in range(kills):
                pid = _start(run, sidecars)
                before = max(before, run.status().batches) if kill else 0
                # Every fifth before it is ready: in its dry step, or while it reads a checkpoint. The others after
                # some batches, so that even on a busy machine there is progress.
                ready = kill % 5 != 4 and _wait_until(
                    run, sidecars, pid, _at_work(pid, before + rng.randrange(MOST_BATCHES))
                )
                time.sleep(rng.uniform(0, MOST_S))
                os.kill(pid, signal.SIGKILL)
                assert sidecars.exit_code(pid, wait=True) == -signal.SIGKILL, run.log()[-2000:]
                what = "working" if ready else "starting"
                outcome.kills_at[what] = outcome.kills_at.get(what, 0) + 1
                tell(f"kill {kill + 1} of {kills}, {sender.sent} batches sent, step {run.status().version}")
        finally:
            batches = sender.stop() if kills else 0
        _finish(run, sidecars, _start(run, sidecars), batches)
    return batches


def _take_all(run: Run, sidecars: Sidecars, batches: int) -> None:
    with run.channel(num_slots=4, slot_bytes=2**16, block_timeout_s=LIMIT_S) as channel:
        pid = _start(run, sidecars)
        _wait_until(run, sidecars, pid, _at_work(pid, 0))
        for number in range(batches):
            assert _send(channel, number)
        _finish(run, sidecars, pid, batches)


def _start(run: Run, sidecars: Sidecars) -> int:
    return sidecars.start(run.paths.run_file, run.run_dir / "sidecar.log")


def _finish(run: Run, sidecars: Sidecars, pid: int, batches: int) -> None:
    _wait_until(run, sidecars, pid, lambda status: status.pid == pid and status.batches == batches)
    os.kill(pid, signal.SIGTERM)
    assert sidecars.exit_code(pid, wait=True) == 0, run.log()[-2000:]


def _wait_until(run: Run, sidecars: Sidecars, pid: int, condition: Callable[[Status], bool]) -> bool:
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            if condition(run.status()):
                return True
        except RunError:
            pass  # No status yet.
        code = sidecars.exit_code(pid, wait=False)
        assert code is None, f"the sidecar ended with {code}: {run.log()[-2000:]}"
        assert time.monotonic() < deadline, run.log()[-2000:]
        time.sleep(0.01)


def _at_work(pid: int, batches: int) -> Callable[[Status], bool]:
    return lambda status: status.pid == pid and status.state is State.READY and status.batches >= batches


def _newest(run: Run) -> Path:
    found = (run.run_dir / "checkpoints").glob("step-*")
    return max(found, key=lambda path: int(path.name.removeprefix("step-")))


def _compare(killed: Path, unbroken: Path, outcome: Outcome, *, whole: bool) -> None:
    states = [json.loads((path / "state.json").read_text()) for path in (killed, unbroken)]
    outcome.steps = states[0]["step"]
    names = ["model", "optimizer", "random", "replay"] if whole else ["replay"]
    for name in names:
        ours, theirs = (load_file(path / f"{name}.safetensors") for path in (killed, unbroken))
        assert ours.keys() == theirs.keys()
        for key in ours:
            if whole or not key.startswith(_OF_TRAINING):
                compare_arrays(f"{name}: {key}", ours[key], theirs[key], outcome)
    if whole:
        ours, theirs = ({key: state.get(key) for key in _STATE} for state in states)
        assert ours == theirs
        counts = [[state["counters"][key] for key in ("batches", "experiences", "trained", "loss")] for state in states]
        assert counts[0] == counts[1]


def compare_arrays(what: str, ours: Any, theirs: Any, outcome: Outcome) -> None:
    """AssertionError unless both are the same to the last bit."""
    outcome.compared += 1
    if (ours.dtype, ours.shape, ours.tobytes()) == (theirs.dtype, theirs.shape, theirs.tobytes()):
        return
    # Says by how much.
    np.testing.assert_array_equal(ours, theirs, what, strict=True)
    raise AssertionError(f"{what} differs in the sign of a zero or in the bits of a NaN")
