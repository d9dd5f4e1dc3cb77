#!/usr/bin/env python3
"""Make a trace for `mps-trainer bench --trace` of the requests that an engine of a real run noted.

    MPS_TRAINER_RECORD_LOAD=/tmp/load mps-trainer run trinity.yaml
    python scripts/make_load_trace.py /tmp/load/requests-*.jsonl --out trace.jsonl [--quiet-s 0.5]

Takes the files of one engine. A batch begins when a request comes after --quiet-s seconds without any in the engine.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median

from mps_trainer.bench.load import write_trace
from mps_trainer.bench.recorded import read_requests, to_load
from mps_trainer.errors import MpsTrainerError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("requests", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quiet-s", type=float, default=0.5)
    args = parser.parse_args()
    try:
        load = to_load(read_requests(args.requests), args.out.name, args.quiet_s)
        write_trace(load, args.out)
    except (MpsTrainerError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    for batch in load.batches:
        lengths = sorted(request.response_tokens for request in batch.requests)
        print(
            f"batch {batch.index}: {len(lengths)} rollouts over {batch.requests[-1].arrival_s:.2f} s, response tokens "
            f"{lengths[0]} to {lengths[-1]}, median {median(lengths):.0f}; then {batch.gap_s:.2f} s of silence"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
