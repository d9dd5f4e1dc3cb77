"""How a vLLM engine and the supervisor of its run talk while the engine starts.

Ray decides which GPU an engine gets, after the launcher has run. So the engine says where it is, over a Unix socket in
the run's folder, before CUDA starts; the supervisor answers whether it joins, once the sidecar has its memory:

    engine      {"gpus": [UUID, ...], "actor": "...", "pid": ...}
    supervisor  {"join": true, "pipe_dir": "...", "utilization": 0.62, "reason": "..."}
    engine      {"event": "config", "wished": 0.9, "utilization": 0.62}       the number that it starts with
    engine      {"event": "ready"}  or  {"event": "failed", "error": "..."}   then it hangs up

One JSON object a line. As long as the connection is open and not "ready", the engine is measuring memory, and the
sidecar is neither ended nor restarted. A dead engine hangs up by itself: the kernel closes its end.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from mps_trainer.errors import MpsTrainerError

log = logging.getLogger(__name__)

_MAX_LINE = 64 * 1024
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True)
class EngineRequest:
    """An engine that starts.

    Attributes:
        gpus: UUIDs of the GPUs that it sees, in its order; several for a tensor-parallel engine.
        actor: the name of its Ray actor; "" outside of Ray.
        pid: its process; the CUDA context comes up there or in a descendant.
        versions: of vLLM and CUDA, for the log.
    """

    gpus: tuple[str, ...]
    actor: str = ""
    pid: int = field(default_factory=os.getpid)
    versions: str = ""


@dataclass(frozen=True)
class EngineAnswer:
    """What the engine shall do.

    Attributes:
        join: become a client of the daemon in `pipe_dir`.
        pipe_dir: "" when it does not join.
        utilization: the highest gpu_memory_utilization it may use; None leaves the user's.
        reason: a sentence for both logs.
    """

    join: bool
    reason: str
    pipe_dir: str = ""
    utilization: float | None = None


@dataclass(frozen=True)
class EngineRecord:
    """What the supervisor knows of an engine. `state`: asking, alone, starting, ready, failed or gone."""

    request: EngineRequest
    state: str = "asking"
    wished: float | None = None
    utilization: float | None = None
    error: str = ""


class SummonsServer:
    """The supervisor's end. `decide` may take its time: the engine waits, up to a limit of its own."""

    def __init__(self, path: Path, decide: Callable[[EngineRequest], EngineAnswer]) -> None:
        self._path = path
        self._decide = decide
        self._engines: dict[int, EngineRecord] = {}
        self._guard = threading.Lock()
        self._next = 0
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(path))
        path.chmod(0o600)
        self._socket.listen()
        self._thread = threading.Thread(target=self._accept, name="summons", daemon=True)
        self._thread.start()

    @property
    def engines(self) -> list[EngineRecord]:
        """Every engine that has announced itself, in that order."""
        with self._guard:
            return list(self._engines.values())

    def close(self) -> None:
        """Stop listening. Engines that have their answer go on."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._path.unlink(missing_ok=True)
        self._thread.join(5.0)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), name="engine", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("r") as stream:
            pid, uid = _peer(connection)
            if uid != os.getuid():
                return
            first = _read(stream)
            if first is None or not isinstance(first.get("gpus"), list):
                return
            request = EngineRequest(
                tuple(map(str, first["gpus"])), str(first.get("actor", "")), pid, str(first.get("versions", ""))
            )
            with self._guard:
                key, self._next = self._next, self._next + 1
                self._engines[key] = EngineRecord(request)
            answer = self._decided(request)
            self._update(key, state="starting" if answer.join else "alone")
            with contextlib.suppress(OSError):
                connection.sendall((json.dumps(asdict(answer)) + "\n").encode())
                self._follow(key, stream)
            if self._engines[key].state in ("starting", "asking"):
                self._update(key, state="gone")

    def _decided(self, request: EngineRequest) -> EngineAnswer:
        try:
            answer = self._decide(request)
        except MpsTrainerError as error:
            answer = EngineAnswer(False, str(error))
        log.info("engine %s (pid %d, %s): %s", request.actor, request.pid, ", ".join(request.gpus), answer.reason)
        return answer

    def _follow(self, key: int, stream: Any) -> None:
        while (message := _read(stream)) is not None:
            event = message.get("event")
            if event == "config":
                self._update(key, wished=message.get("wished"), utilization=message.get("utilization"))
            elif event == "ready" and self._engines[key].state == "starting":
                self._update(key, state="ready")
            elif event == "failed":
                self._update(key, state="failed", error=str(message.get("error", "")))

    def _update(self, key: int, **changes: Any) -> None:
        with self._guard:
            self._engines[key] = replace(self._engines[key], **changes)


class EngineSession:
    """The engine's end: asks once, then tells how the start goes. It never raises: an engine starts without us."""

    def __init__(self, path: Path, request: EngineRequest, timeout_s: float) -> None:
        self.answer = EngineAnswer(False, "the run's supervisor cannot be reached")
        self._socket: socket.socket | None = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(timeout_s)
            self._socket.connect(str(path))
            self._send(asdict(request))
            reply = _read(self._socket.makefile("r"))
            if reply is not None:
                self.answer = EngineAnswer(**reply)
        except TimeoutError:
            self.answer = EngineAnswer(False, f"the run's supervisor did not answer within {timeout_s:.0f} s")
            self.close()
        except (OSError, TypeError) as error:
            self.answer = EngineAnswer(False, f"the run's supervisor cannot be reached: {error}")
            self.close()

    def tell(self, event: str, **fields: Any) -> None:
        """Report an event; without effect when the supervisor is gone."""
        with contextlib.suppress(OSError):
            self._send({"event": event, **fields})

    def close(self) -> None:
        """Hang up."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, message: dict[str, Any]) -> None:
        if self._socket is not None:
            self._socket.sendall((json.dumps(message) + "\n").encode())


def _read(stream: Any) -> dict[str, Any] | None:
    try:
        line = stream.readline(_MAX_LINE)
        message = json.loads(line) if line else None
    except (ValueError, ConnectionError):
        return None
    return message if isinstance(message, dict) else None


def _peer(connection: socket.socket) -> tuple[int, int]:
    pid, uid, _gid = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return int(pid), int(uid)
