#!/usr/bin/env python3
"""Run mixed traffic for an hour while a peer is killed every few seconds; what it uses must stay flat.

    python scripts/soak_transport.py [--minutes 60] [--kill-every 3]

Two operators and one sidecar, each restarted when killed. Batches of 1 to 300 rows, some larger than the ring, some
with scores. Twenty times in the run the parent notes what all processes use: memory, descriptors, semaphores and bytes
in /dev/shm. At the end the last third may not exceed the first by more than an allowance, nor the names in /dev/shm
ever what living and kept channels need. Exit status 1 if they do, if bytes were wrong, or if anything is left behind.
"""

import argparse
import contextlib
import os
import random
import secrets
import sys
import threading
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "transport"))
from channel_peers import COLUMNS, Child, make_rows

from mps_trainer.transport import OperatorChannel, RingSettings, SidecarHub, leftovers
from mps_trainer.transport.semaphores import Doorbell
from mps_trainer.transport.sweep import KEEP_ORPHANS, remove_run

RING = RingSettings(num_slots=4, slot_bytes=256 * 1024, reply_slot_bytes=16384)


def operator(run_id, seed):
    """Sends, and checks the scores that come back."""

    def body(report):
        rng, request_id = random.Random(seed), seed << 20
        with OperatorChannel.create(
            run_id, COLUMNS, RING, backpressure=rng.choice(["drop_oldest", "block"])
        ) as channel:
            report("ready")
            while True:
                # A pace that leaves the machine to others; the traffic matters less than the kills.
                threading.Event().wait(0.01)
                request_id += 1
                rows = make_rows(rng.choice([1, 3, 30, 300]), request_id % 1000, rng.choice([5, 50, 400]))
                wanted = rng.random() < 0.5
                channel.send(rows, request_id=request_id, want_scores=wanted)
                scores = channel.receive_scores(request_id, 0.2) if wanted else None
                if scores is not None:
                    assert np.array_equal(scores.values, rows["reward"])

    return Child(body)


def sidecar(run_id):
    """Reads, checks a row of each record, replies, reaps."""

    def body(report):
        with SidecarHub(run_id, COLUMNS) as hub:
            report("ready")
            while True:
                if not hub.wait(0.5):
                    hub.reap()
                    continue
                with hub.receive() as delivery:
                    assert delivery.batch["eid"].text(0).endswith(f"/{delivery.header.first_row}")
                    if delivery.header.want_scores:
                        delivery.reply(delivery.batch["reward"].values.copy(), 1)
                if delivery.header.seq % 50 == 0:
                    hub.reap()

    return Child(body)


def usage(children, run_id):
    """What the processes and the run use now: (resident KiB of the sidecar, most descriptors, entries, shm bytes)."""
    descriptors, resident, size = [], [], 0
    for child in children:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            descriptors.append(len(os.listdir(f"/proc/{child.pid}/fd")))
            resident.append(int(Path(f"/proc/{child.pid}/statm").read_text().split()[1]) * 4)
    entries = leftovers(run_id)
    for entry in entries:
        with contextlib.suppress(FileNotFoundError):
            size += os.stat(f"/dev/shm/{entry}").st_blocks * 512
    return max(resident, default=0), max(descriptors, default=0), len(entries), size


def soak(options):
    run_id, rng = f"s{secrets.token_hex(4)}", random.Random(options.seed)
    makers = [
        lambda: operator(run_id, rng.randrange(1000)),
        lambda: operator(run_id, rng.randrange(1000)),
        lambda: sidecar(run_id),
    ]
    member = Doorbell(run_id)
    children, samples, kills = [make() for make in makers], [], 0
    started = time.monotonic()
    ends, next_sample = started + 60 * options.minutes, started
    pause = threading.Event()
    while time.monotonic() < ends:
        pause.wait(rng.uniform(0.2, 2 * options.kill_every - 0.2))
        for i, child in enumerate(children):
            if os.waitpid(child.pid, os.WNOHANG)[0]:
                sys.exit(f"process {i} ended by itself: see above")
        victim = rng.randrange(3)
        children[victim].kill()
        children[victim] = makers[victim]()
        kills += 1
        if time.monotonic() >= next_sample:
            next_sample += 60 * options.minutes / 20
            samples.append(usage(children, run_id))
            print(f"{time.monotonic() - started:.0f} s, {kills} kills: {samples[-1]}", flush=True)
    for child in children:
        child.kill()
    member.close()
    remove_run(run_id)
    return run_id, samples, kills


def check(run_id, samples):
    """Memory and descriptors: the last third against the first. /dev/shm: never more than living and kept channels."""
    third = max(1, len(samples) // 3)
    for name, column, allowance in (("resident KiB", 0, 1.25), ("descriptors", 1, 1.5)):
        first = max(sample[column] for sample in samples[:third])
        last = max(sample[column] for sample in samples[-third:])
        if last > allowance * first + 4:
            sys.exit(f"{name} grew from {first} to {last}")
    # Two operators, the orphans that wait for a sidecar, and one whose successor is just being made; three names each.
    most = 3 * (2 + KEEP_ORPHANS + 1) + 1
    if max(sample[2] for sample in samples) > most:
        sys.exit(f"more than {most} names in /dev/shm: {samples}")
    if leftovers(run_id):
        sys.exit(f"left behind: {leftovers(run_id)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--kill-every", type=float, default=3.0, help="seconds, on average")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    run_id, samples, kills = soak(options)
    check(run_id, samples)
    print(f"{options.minutes} min, {kills} kills: flat; last {samples[-1]} (KiB, descriptors, entries, shm bytes)")


if __name__ == "__main__":
    main()
