"""What a process is, by its title and its ancestors': Ray and vLLM set them (ray::Actor.method, VLLM::Worker)."""

from __future__ import annotations

from pathlib import Path

from mps_trainer.run.process import ancestors


def command_line(pid: int) -> str:
    """The command line, or the title that the process has given itself; "" when it is gone or somebody else's."""
    return _read(pid, "cmdline").replace("\0", " ").strip()


def engine_title(pid: int) -> str:
    """The title that makes it part of a vLLM engine, its own or the nearest ancestor's; "" when there is none."""
    return next((title for title in _titles(pid) if "vllm" in title.split(" ")[0].lower()), "")


def ray_title(pid: int) -> str:
    """The title of the Ray process that it is or descends from; "" when there is none."""
    return next((title for title in _titles(pid) if title.startswith("ray::")), "")


def variable(pid: int, name: str) -> str | None:
    """A variable that the process was started with."""
    for item in _read(pid, "environ").split("\0"):
        key, equals, value = item.partition("=")
        if equals and key == name:
            return value
    return None


def _titles(pid: int) -> list[str]:
    return [command_line(one) for one in (pid, *ancestors(pid))]


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""
