"""Rows, columns, and child processes that play one end of a channel."""

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
import traceback

import numpy as np

from mps_trainer.columns import Column
from mps_trainer.transport import OperatorChannel, RingSettings, SidecarHub

COLUMNS = (
    Column(name="eid", source="eid.uid", dtype="text", maximum=200),
    Column(name="reward", source="reward"),
    Column(name="tokens", source="response_tokens", dtype="int32", shape=(None,), maximum=4096),
    Column(name="mask", source="action_mask", dtype="bool", shape=(None,), maximum=4096),
    Column(name="feature", source="info.feature", shape=(8,)),
)
SMALL = RingSettings(num_slots=4, slot_bytes=16384, reply_slot_bytes=4096)


def make_rows(n, seed=0, mean_tokens=20):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 2 * mean_tokens + 1, n)
    return {
        "eid": [f"{seed}/{i}" for i in range(n)],
        "reward": rng.random(n, dtype=np.float32),
        "tokens": [rng.integers(0, 32000, k, dtype=np.int32) for k in lengths],
        "mask": [rng.random(k) > 0.5 for k in lengths],
        "feature": [rng.random(8, dtype=np.float32) for _ in range(n)],
    }


def assert_same(batch, rows, start=0):
    """The batch holds rows start.. of `rows`, value for value and type for type."""
    for name in rows:
        for i in range(batch.num_rows):
            want = rows[name][start + i]
            if name == "eid":
                assert batch[name].text(i) == want
            else:
                got = batch[name].row(i)
                assert got.dtype == np.asarray(want).dtype
                assert np.array_equal(got, want), f"{name}[{i}]: {got} is not {want}"


def take(hub, timeout_s=90.0):
    """The next delivery; fails the test when none comes."""
    while hub.wait(timeout_s):
        # None: what was ready has been evicted meanwhile.
        if (delivery := hub.receive()) is not None:
            return delivery
    raise AssertionError("no record came")


@contextlib.contextmanager
def pair(run_id, settings=SMALL, **options):
    """A channel and a hub in this process."""
    with OperatorChannel.create(run_id, COLUMNS, settings, **options) as channel:
        hub = SidecarHub(run_id, COLUMNS)
        try:
            yield channel, hub
        finally:
            channel.close()
            hub.close(unlink=True)


def die_with_parent():
    """A test that is killed leaves no child behind."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class Child:
    """A forked process that runs `body(report)`; `report(text)` sends a line to its parent."""

    def __init__(self, body):
        read_end, write_end = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            die_with_parent()
            code = 1
            try:
                os.close(read_end)
                body(lambda text: os.write(write_end, f"{text}\n".encode()))
                code = 0
            except BaseException:  # noqa: BLE001  # the top of a process
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        os.close(write_end)
        self._read_end = read_end
        self._lines = b""
        self._status = None
        self.said = []

    def line(self, timeout_s=90.0):
        """The next line that the child reports; "" when it ended."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._lines:
            ready, _, _ = select.select([self._read_end], [], [], max(0, deadline - time.monotonic()))
            assert ready, "the child says nothing"
            chunk = os.read(self._read_end, 4096)
            if not chunk:
                return ""
            self._lines += chunk
        line, _, self._lines = self._lines.partition(b"\n")
        self.said.append(line.decode())
        return line.decode()

    @property
    def ended(self):
        """Whether it is dead, by itself or not; it stays a zombie until `wait`."""
        return self._status is not None or bool(os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT))

    def kill(self, *, reap=True):
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)
        if reap:
            self.wait()

    def wait(self, timeout_s=90.0):
        """Exit status, negative for a signal."""
        if self._status is None:
            while self.line(timeout_s):
                pass
            _, status = os.waitpid(self.pid, 0)
            self._status = os.waitstatus_to_exitcode(status)
            os.close(self._read_end)
        return self._status


def forever():
    """Hold still until killed."""
    while True:
        signal.pause()
