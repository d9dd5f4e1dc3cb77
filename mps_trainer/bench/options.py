"""The flags of `scripts/benchmark.py` and `mps-trainer bench`."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from mps_trainer.bench.arms import BY_NAME
from mps_trainer.bench.sense import check
from mps_trainer.bench.vllm_engine import SHAPES
from mps_trainer.bench.work import WORKS
from mps_trainer.errors import ConfigError

_TINY = {
    "tasks": "A", "gap": "0.3", "rounds": 2, "batches": 2, "sequences": 4, "prompt_tokens": 4, "median_tokens": 12,
    "longest_tokens": 100, "tiny_width": 128, "tiny_layers": 1, "closing": 1, "dedicated_s": 0.3, "warmup": 1,
}  # fmt: skip
#: For a CPU that is not in a hurry; 256 sequences are for a GPU.
_CPU = {"sequences": 16, "prompt_tokens": 32, "median_tokens": 48, "longest_tokens": 256}
_GPU = {"sequences": 256, "prompt_tokens": 128, "median_tokens": 256, "longest_tokens": 768, "batches": 1,
        "closing": 5}  # fmt: skip


class _Parser(argparse.ArgumentParser):
    """Says what is wrong as every command does; two screens of usage would hide it."""

    def error(self, message: str) -> NoReturn:
        """As ConfigError."""
        raise ConfigError(message, "`mps-trainer bench -- --help` lists the flags")


def _cores(text: str) -> tuple[int, ...]:
    cores: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})(?:-(\d{1,6}))?\s*", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise argparse.ArgumentTypeError(f"{part!r} are no cores; write numbers and ranges, such as 0-3,8")
        cores += range(int(match[1]), int(match[2] or match[1]) + 1)
    return tuple(cores)


def _shares(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(word) for word in _names(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} are no shares; write numbers, such as 0,0.1,0.3") from None


def _names(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _task_args(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}") from None


def _add_pace(p: argparse.ArgumentParser) -> None:
    p.add_argument("--slowdown", type=float, default=0.03, help="max_rollout_slowdown of the arm mps-pace")
    p.add_argument(
        "--pace-set", action="append", default=[], metavar="KEY=VALUE",
        help="a setting of the paced arms, or one of pace_tuning (docs/pace.md); may be given again",
    )  # fmt: skip
    p.add_argument(
        "--pace-variant", action="append", default=[], metavar="NAME:KEY=VALUE,...",
        help="one more paced arm, mps-pace@NAME, with these settings beside --pace-set; may be given again",
    )  # fmt: skip
    p.add_argument(
        "--low-variant", action="append", default=[], metavar="NAME:KEY=VALUE,...",
        help="one more arm, mps-low@NAME, with share=PERCENT of the SMs or blocking=false (a step may be in flight "
        "instead of a kernel); both are keys of --pace-variant too; may be given again",
    )  # fmt: skip


def parser(prog: str = "scripts/benchmark.py") -> argparse.ArgumentParser:
    """All flags; those of sizes have no default here, since it depends on the engine."""
    p = _Parser(prog=prog, description="Rollout throughput against auxiliary training, one arm beside the other.")
    p.add_argument("--engine", choices=("auto", "vllm", "tiny"), default="auto", help="auto: vLLM on a GPU, else tiny")
    p.add_argument("--tiny", action="store_true", help="the smallest CPU run there is, to see that the script works")
    p.add_argument("--gpu", type=int, default=0, help="NVML's index of the engines' GPU")
    p.add_argument("--arms", type=_names, help=f"some of {', '.join(BY_NAME)}; all that can run by default")
    p.add_argument("--tasks", type=_names, help=f"some of {', '.join(WORKS)} (default A)")
    p.add_argument("--separate", action="store_true", help="a session, with its own engines, for each of --tasks")
    p.add_argument("--overlap", action="store_true", help="start engines while trainers still start: sooner ready")
    p.add_argument("--task-args", type=_task_args, default={}, help='JSON by task: {"B": {"layers": 2, "width": 128}}')
    p.add_argument(
        "--train-steps", type=int, help="for each record that reaches the trainer (A: 64 on a GPU, 16 on a CPU)"
    )
    p.add_argument("--rounds", type=int, help="windows of each arm, interleaved (default 5)")
    p.add_argument("--batches", type=int, help="rollout batches in a window (1 on a GPU, 2 on a CPU)")
    p.add_argument("--gap", type=_shares, help="silent shares of the cycle (default 0,0.1,0.3)")
    p.add_argument("--trace", type=Path, help="a recorded load, measured beside the gaps (docs/benchmark.md)")
    p.add_argument("--sequences", type=int, help="rollouts in a batch (256 on a GPU, 16 on a CPU)")
    p.add_argument("--prompt-tokens", type=int, help="of each rollout (128, 32)")
    p.add_argument("--median-tokens", type=int, help="of the responses (256, 48)")
    p.add_argument("--longest-tokens", type=int, help="of the longest response of each batch (768, 256)")
    p.add_argument("--spread", type=float, default=0.6, help="standard deviation of the log of a response's length")
    p.add_argument(
        "--shape", choices=tuple(SHAPES), default="7B", help="of the vLLM model, Qwen2.5 with random weights"
    )
    p.add_argument("--utilization", type=float, default=0.9, help="gpu_memory_utilization of all engines together")
    p.add_argument("--statistics", action="store_true", help="vLLM's own statistics on, in every arm")
    p.add_argument("--tiny-width", type=int, help="of the tiny engine (512)")
    p.add_argument("--tiny-layers", type=int, help="of the tiny engine (2)")
    p.add_argument("--engines", type=int, choices=(1, 2), default=1, help="tiny: a second, idle one, to see its cost")
    _add_pace(p)
    p.add_argument("--operator-cores", type=int, default=1, help="threads of a trainer on the CPU")
    p.add_argument("--pin-engine", type=_cores, default=(), help="cores of the engines, such as 0-3")
    p.add_argument("--pin-trainer", type=_cores, default=(), help="cores of the trainers, such as 4-7")
    p.add_argument("--warmup", type=int, help="batches before the first round (default 2)")
    p.add_argument(
        "--closing", type=int, help="solo batches of each block that shows what idle processes cost (5, 3; 0: none)"
    )
    p.add_argument("--dedicated-s", type=float, help="seconds of the trainer alone in each round (default 5)")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--budget-s", type=float, default=3600.0, help="ends with fewer rounds rather than later")
    p.add_argument("--plan", action="store_true", help="print the plan and its time, start nothing")
    p.add_argument("--work-dir", type=Path, help="for logs and run folders; a temporary folder by default")
    p.add_argument("--out", type=Path, help="writes OUT.json, OUT.md and OUT.png")
    return p


def parse(argv: Sequence[str], prog: str = "scripts/benchmark.py") -> argparse.Namespace:
    """The flags; what depends on the engine is filled in by `complete`. ConfigError for what cannot be read."""
    options = parser(prog).parse_args(list(argv))
    if options.tiny and options.engine == "vllm":
        raise ConfigError("--tiny and --engine vllm", "leave one of them out")
    if options.tiny:
        options.engine = "tiny"
    options.argv = list(argv)
    return options


def complete(options: argparse.Namespace, *, vllm: bool) -> None:
    """Fill in the defaults of an engine; `--tiny` makes all of it small. ConfigError for what makes no sense."""
    options.engine = "vllm" if vllm else "tiny"
    defaults: dict[str, Any] = {
        "tasks": "A", "gap": "0,0.1,0.3", "rounds": 5, "batches": 2, "tiny_width": 512, "tiny_layers": 2, "warmup": 2,
        "closing": 3, "dedicated_s": 5.0, **(_GPU if vllm else _CPU),
    }  # fmt: skip
    if options.tiny:
        defaults |= _TINY
    readers = {"tasks": _names, "gap": _shares}
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, readers[name](value) if name in readers else value)
    check(options)
