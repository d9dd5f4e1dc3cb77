#!/usr/bin/env python3
"""Kill a sidecar at random moments, again and again, and compare what it learnt with a run that was never broken.

    python scripts/kill_sidecar.py --kills 100 --seed 1
    python scripts/kill_sidecar.py --kills 100 --seed 1 --variants priority epochs

A real sidecar process over a real ring gets a SIGKILL at a random moment after 0 to 7 more batches (each fifth while it
starts), while an operator goes on sending. At the end its last checkpoint is compared with that of a sidecar that got
the same batches in peace: weights, optimizer, schedule, random states, and each experience in the replay buffer with
how often it was drawn. A difference of one bit, or an experience that is lost, ends the script with exit status 1.
With `continuous` only what came in is compared, for the clock says when its steps are taken. Sidecars are forked from a
process that has done their imports, or with --cold each begins with its own. A short version runs in
tests/sidecar/test_random_kills.py.
"""

import argparse
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from sidecar_kills import VARIANTS, WHOLE, Sidecars, compare_with_unbroken
from warm_sidecar import ColdSidecars, WarmSidecars


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="for each variant")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--cold", action="store_true", help="start `python -m mps_trainer.sidecar` each time")
    options = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        sidecars = ColdSidecars() if options.cold else stack.enter_context(WarmSidecars())
        os.environ["MPS_TRAINER_STATE_DIR"] = f"{folder}/state"
        for variant in options.variants:
            failed += not run(Path(folder) / variant, sidecars, variant, options)
    print("FAILED" if failed else "passed", flush=True)
    return int(failed > 0)


def run(folder: Path, sidecars: Sidecars, variant: str, options: argparse.Namespace) -> bool:
    def tell(what: str) -> None:
        print(f"\r{variant}: {what}\033[K" if sys.stdout.isatty() else f"{variant}: {what}", end=end, flush=True)

    end = "" if sys.stdout.isatty() else "\n"
    begin = time.monotonic()
    try:
        found = compare_with_unbroken(folder, sidecars, variant, options.kills, options.seed, tell)
    except AssertionError as error:
        print(f"\n{variant}: FAILED: {error}", flush=True)
        return False
    kills = " and ".join(f"{count} {what}" for what, count in found.kills_at.items())
    what = "arrays" if variant in WHOLE else "arrays of what came in (none of training)"
    print(
        f"\n{variant}: {options.kills} kills ({kills}), {found.batches} batches, {found.steps} steps: "
        f"{found.compared} {what} equal to the last bit; "
        f"{time.monotonic() - begin:.0f} s",
        flush=True,
    )
    return True


if __name__ == "__main__":
    raise SystemExit(main())
