"""`python -m mps_trainer.bench.engine_main`: the process of an engine; started and driven by `bench.engine`.

Reads a line of JSON for each batch from one descriptor and answers on another; it ends when the first one ends.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any, Protocol


class _Engine(Protocol):
    def facts(self) -> dict[str, Any]: ...

    def run(self, batch: dict[str, Any]) -> dict[str, Any]: ...


def make_engine(spec: dict[str, Any]) -> _Engine:
    """The engine of a spec; `kind` is "tiny" or "vllm"."""
    if spec["kind"] == "vllm":
        from mps_trainer.bench.vllm_engine import VllmEngine

        return VllmEngine(spec)
    from mps_trainer.bench.tiny_engine import TinyEngine

    return TinyEngine(spec)


def main() -> int:
    """Entry of the process."""
    parser = argparse.ArgumentParser(prog="python -m mps_trainer.bench.engine_main")
    parser.add_argument("--spec", type=json.loads, required=True)
    parser.add_argument("--read", type=int, required=True)
    parser.add_argument("--write", type=int, required=True)
    options = parser.parse_args()
    with os.fdopen(options.read) as asked, os.fdopen(options.write, "w", buffering=1) as answers:
        engine = make_engine(options.spec)
        answers.write(json.dumps(engine.facts()) + "\n")
        for line in asked:
            answers.write(json.dumps(engine.run(json.loads(line))) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
