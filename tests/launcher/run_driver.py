"""`run_driver.py CONFIG SIDECAR_BEHAVIOUR TRINITY_BEHAVIOUR`: run_trinity in a process of its own, with stand-ins.

A process of its own, because it takes signals and gets killed. The stand-in for `trinity` is fake_trinity.py, the
stand-in for the sidecar fake_sidecar.py, and the Ray is none.
"""

from __future__ import annotations

import contextlib
import json
import stat
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from mps_trainer.launcher import run_trinity as module
from mps_trainer.launcher.ray_cluster import Ray
from mps_trainer.launcher.up import prepare

HERE = Path(__file__).parent


@contextlib.contextmanager
def no_ray(*_: object) -> Iterator[Ray]:
    yield Ray("none")


def trinity_command(folder: Path) -> str:
    command = folder / "trinity"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{HERE / "fake_trinity.py"}" "$@"\n')
    command.chmod(stat.S_IRWXU)
    return str(command)


def write_out(chunk: bytes) -> None:
    sys.stderr.buffer.write(chunk)
    sys.stderr.buffer.flush()


def main() -> None:
    config, sidecar, trinity = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    command = trinity_command(config.parent)
    module.use_ray = no_ray  # type: ignore[assignment]
    module.find_executable = lambda _: command  # type: ignore[assignment]
    options = module.TrinityOptions(
        sink=write_out,
        progress=lambda line: print(line, file=sys.stderr, flush=True),
        extra_args=[trinity],
        sidecar_command=[sys.executable, str(HERE / "fake_sidecar.py"), sidecar],
    )
    print(json.dumps(asdict(module.run_trinity(prepare(config), options))))


if __name__ == "__main__":
    main()
