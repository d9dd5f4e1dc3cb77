#!/usr/bin/env python3
"""Rollout throughput against auxiliary training, arm by arm: the door to `mps_trainer.bench` (docs/benchmark.md).

python scripts/benchmark.py --rounds 5 --budget-s 1200 --out docs/results/benchmark_h200     # a GPU with vLLM
python scripts/benchmark.py --out docs/results/benchmark_cpu                                 # no GPU: a tiny engine
python scripts/benchmark.py --tiny                                                           # does it work at all?
"""

from __future__ import annotations

import sys

from mps_trainer.cli import show
from mps_trainer.cli.bench import run
from mps_trainer.errors import MpsTrainerError

if __name__ == "__main__":
    try:
        sys.exit(run(sys.argv[1:], "python scripts/benchmark.py"))
    except MpsTrainerError as error:
        show.error(error)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
