"""A stand-in for the `trinity` command: `fake_trinity.py run --config YAML BEHAVIOUR`. No Ray, no model."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from omegaconf import OmegaConf


def main() -> int:
    _, run, flag, path, behaviour = sys.argv
    assert (run, flag) == ("run", "--config")
    config = OmegaConf.load(path)
    job = Path(config.checkpoint_root_dir) / config.project / config.name
    (job / "log").mkdir(parents=True, exist_ok=True)
    print(f"fake trinity {os.getpid()} with {Path(path).name}", flush=True)

    def interrupted(number: int, _frame: object) -> None:
        print(f"got {signal.Signals(number).name}", flush=True)
        sys.exit(0)

    if behaviour == "talks":
        for _ in range(100):
            print("x" * 9_999, flush=True)
    signal.signal(signal.SIGINT, interrupted)
    signal.signal(signal.SIGTERM, interrupted)
    reached = config.buffer.total_steps
    if behaviour == "fails-with-0":
        text = "ERROR 11-30 14:31:09 [explorer.py:287] Error in Explorer: Traceback\nValueError: no column\n"
        (job / "log" / "explorer.log").write_text(text)
        reached = 1
    if behaviour == "hangs":
        time.sleep(300)
    if behaviour == "takes-a-while":
        # Until the test says so.
        end = time.monotonic() + 120
        while not (job / "finish").exists() and time.monotonic() < end:
            time.sleep(0.02)
    (job / "explorer_meta.json").write_text(json.dumps({"latest_iteration": reached}))
    return 1 if behaviour == "fails-with-1" else 0


if __name__ == "__main__":
    sys.exit(main())
