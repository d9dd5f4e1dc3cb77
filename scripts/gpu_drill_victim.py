"""A lane of the fault drill: an MPS daemon, a victim that checks its results, and a warm parent for what ends.

Lanes run side by side on one GPU, each behind a server of its own, so a death belongs to the lane in which it is
seen: the control runs before our ways, and each row names what the lane's own server says of the fault.
"""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

import torch
from gpu_drill_ways import ALL, LIMIT, OURS, beats
from gpu_jobs import Counter, Job, PopenLike, WarmParent, kill_drained
from gpu_lab import DEVICE

from mps_trainer.errors import PlacementError
from mps_trainer.launcher.process import GPU_DRAIN_SECONDS, stop
from mps_trainer.mps.control import MpsDaemon
from mps_trainer.mps.environment import sidecar_env
from mps_trainer.mps.folder import MpsFolder
from mps_trainer.mps.placement import GpuPlacement
from mps_trainer.run import is_held

GRACE_S = 10.0
HANG_GRACE_S = 0.5


def victim(path: str) -> None:
    """Multiplies matrices without a pause and checks every product."""
    counter = Counter(Path(path))
    device = torch.device(DEVICE)
    generator = torch.Generator(device=device).manual_seed(1)
    a = torch.randn(1024, 1024, device=device, generator=generator)
    expected = a @ a
    while not counter.stopping:
        out = torch.full_like(expected, float("nan"))
        torch.matmul(a, a, out=out)
        counter.tick(int(not torch.equal(out, expected)))


class Lane:
    """One daemon with one victim; `trial` puts a process beside it and ends that."""

    def __init__(self, folder: Path, uuid: str, index: int) -> None:
        folder.mkdir()
        self.index = index
        self.folder = folder
        self.notes: list[str] = []
        self._parent = WarmParent(folder / "children.log", preload=["gpu_drill_ways", "gpu_drill_victim"])
        self._daemon = MpsDaemon(MpsFolder(folder / "m"))
        try:
            self._daemon.start()
        except BaseException:
            self._parent.__exit__(None, None, None)
            raise
        self._env = sidecar_env(self._daemon.folder.pipe_dir, uuid, LIMIT)
        # What a real sidecar gets.
        self._our_env = GpuPlacement(gpu_uuid=uuid, pool=LIMIT, limit=LIMIT).environment({}, self._daemon.folder)
        self._counter, self._ready = Counter(folder / "victim"), Counter(folder / "ready")
        self._victim: Job | None = None
        self._trials = 0

    def speed(self, kind: str) -> list[float]:
        """Milliseconds of a step: launches free, and as a sidecar launches."""
        return [
            self._parent.start("gpu_drill_ways:speed", kind, env=env).result(60) for env in (self._env, self._our_env)
        ]

    def trial(self, way: str) -> dict[str, Any]:
        """One life and end beside the victim."""
        started = time.monotonic()
        self._trials += 1
        watched = self._living_victim()
        faults = len(self._daemon.faults())
        wrong = self._counter.errors
        lock = self.folder / f"lock-{self._trials}"
        guard = self._start_guardian(lock) if ALL[way].guarded else None
        self._ready.reset()
        env = self._our_env if way in OURS or way.endswith("blocking") else self._env
        offender = self._parent.start(
            f"gpu_drill_ways:{ALL[way].function}", way, str(self._ready.path), str(lock), env=env
        )
        up = self._ready.wait_for(beats(way), 40, offender)
        alive_before = watched.process.is_running
        how = self._end(way, offender, guard, lock) if up else ""
        status = offender.wait(30)
        if status is None:
            offender.process.send(signal.SIGKILL)
            status, how = offender.wait(30), "did not end within 30 s"
        alive = self._counter.wait_for(self._counter.value + 30, 30, watched)
        # A fault may reach the victim a moment later than the end of its cause.
        alive = alive and not watched.process.wait(0.2)
        said = offender.said()
        if not up:
            self.notes.append(f"{way} did not get to work (status {status}): {said[:300]}")
        named = [(fault.pid, *fault.torn_down) for fault in self._daemon.faults()[faults:]]
        row = {
            "way": way, "lane": self.index, "up": up, "status": status, "how": how, "victim died": not alive,
            "victim lived when the end was due": alive_before,
            "wrong results": self._counter.errors - wrong, "faults in this lane's log": named,
            "pids": [offender.process.pid, watched.process.pid], "at": started, "seconds": time.monotonic() - started,
        }  # fmt: skip
        if not alive:
            self._bury(watched)
        return row

    def close(self) -> None:
        """End everything of this lane."""
        self._counter.stop()
        try:
            if self._victim is not None and self._victim.wait(10) is not None:
                self._victim.said()
        finally:
            # It kills what is left of its children, so that the daemon has no client when it is asked to end.
            self._parent.__exit__(None, None, None)
            try:
                self._daemon.quit(force_after_s=5)
            except PlacementError as error:
                self.notes.append(f"the daemon did not end: {error}")

    def _start_guardian(self, lock: Path) -> Job:
        guard = self._parent.start("gpu_drill_ways:guardian", str(lock))
        deadline = time.monotonic() + 10
        while not is_held(lock):
            if time.monotonic() > deadline:
                raise RuntimeError("no guardian within 10 s")
            time.sleep(0.005)
        return guard

    def _end(self, way: str, offender: Job, guard: Job | None, lock: Path) -> str:
        offender.process.wait(random.random() * 0.05)  # anywhere in a step
        if guard is not None:
            guard.process.send(signal.SIGKILL)
            guard.wait(5)
            guard.said()
            assert not is_held(lock)
        if way.startswith("sigkill") or way == "naive-sigkill" or ALL[way].function == "bounded":
            offender.process.send(signal.SIGKILL)
        elif way in ("sigterm", "naive-sigterm"):
            offender.process.send(signal.SIGTERM)
        elif way == "sigint":
            offender.process.send(signal.SIGINT)
        elif way in ("down", "driver-killed"):
            return self._stop(offender, GRACE_S)
        elif way.startswith("hang"):
            offender.process.wait(1.5)  # long enough for a launch queue to fill
            if way == "hang-stop":
                return self._stop(offender, HANG_GRACE_S)
            kill_drained(offender.process)
        return ""

    @staticmethod
    def _stop(offender: Job, grace_s: float) -> str:
        ended = stop(PopenLike(offender), grace_s=grace_s, gpu_drain_s=GPU_DRAIN_SECONDS)  # type: ignore[arg-type]
        return str(ended.value)

    def _living_victim(self) -> Job:
        for _ in range(3):
            if self._victim is None:
                self._counter.reset()
                self._victim = self._parent.start("gpu_drill_victim:victim", str(self._counter.path), env=self._env)
            if self._counter.wait_for(self._counter.value + 5, 30, self._victim):
                return self._victim
            self._bury(self._victim)
        raise RuntimeError(f"no victim: {self.notes[-1:]}\n{self._daemon.log_tail('server')}")

    def _bury(self, dead: Job) -> None:
        if dead.wait(5) is None:
            dead.process.send(signal.SIGKILL)
            dead.wait(10)
        self.notes.append(f"victim (status {dead.status}): {dead.said()[:200]}")
        self._victim = None
        # New clients are refused until the server has cleaned up after the fault.
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and not self._is_clean():
            time.sleep(0.1)

    def _is_clean(self) -> bool:
        try:
            return all(self._daemon.server_status(server).startswith("ACTIVE") for server in self._daemon.servers())
        except PlacementError:
            return False
