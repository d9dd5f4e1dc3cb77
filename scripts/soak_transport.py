#!/usr/bin/env python3
"""Run mixed traffic for an hour while a peer is killed every few seconds; what it uses must stay flat.

    nice -n 10 python scripts/soak_transport.py --minutes 60 --json soak.json

Two runs side by side. In the first, one sidecar lives for the whole soak and serves three operators, of which one is
killed every few seconds (`--kill-every`) and replaced. In the second, the sidecar is killed too. Batches of 1 to 300
rows, some larger than a slot, some with scores, all three policies. The work is paced (a quarter of a core), so that
the machine can do other things meanwhile.

Sampled every few seconds: the long-lived sidecar's own memory, descriptors, threads, mapped segments and semaphores,
the counts of its semaphores, and what both runs hold in /dev/shm. After a warm-up each must be flat: a line is fitted
through the samples, and what it rises over the whole soak may not exceed an allowance. Exit status 1 if it does, if a
byte was wrong, or if anything is left behind at the end.
"""

import argparse
import contextlib
import json
import os
import random
import secrets
import struct
import sys
import threading
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "transport"))
from channel_peers import COLUMNS, Child, make_rows

from mps_trainer.transport import OperatorChannel, RingSettings, SidecarHub, leftovers
from mps_trainer.transport.semaphores import Doorbell
from mps_trainer.transport.sweep import KEEP_ORPHANS, UNFINISHED_S, remove_run

RING = RingSettings(num_slots=4, slot_bytes=256 * 1024, reply_slot_bytes=16384)
OPERATORS = 3
WARM_UP = 0.2
SAY_EVERY_S = 30.0
#: How much the fitted line may rise from the end of the warm-up to the end of the soak.
ALLOWANCES = {
    "own memory, KiB": 4096.0,
    "descriptors": 3.0,
    "threads": 0.5,
    "mapped segments": 2.0,
    "mapped semaphores": 4.0,
    "highest semaphore": 64.0,
    "names in /dev/shm": 8.0,
    "KiB in /dev/shm": 4096.0,
}
POLICIES = ("drop_oldest", "drop_newest", "block")


def operator(run_id, seed):
    """Sends, and checks the scores that come back."""

    def body(report):
        rng, request_id = random.Random(seed), seed << 20
        with OperatorChannel.create(run_id, COLUMNS, RING, backpressure=rng.choice(POLICIES)) as channel:
            report("ready")
            while True:
                # A pace that leaves the machine to others; the traffic matters less than the kills.
                threading.Event().wait(0.05)
                request_id += 1
                rows = make_rows(rng.choice([1, 3, 30, 300]), request_id % 1000, rng.choice([5, 50, 400]))
                wanted = rng.random() < 0.5
                channel.send(rows, request_id=request_id, want_scores=wanted)
                scores = channel.receive_scores(request_id, 0.2) if wanted else None
                if scores is not None:
                    assert np.array_equal(scores.values, rows["reward"])

    return Child(body)


def sidecar(run_id):
    """Reads, checks a row of each record, replies, reaps; reports every 1000 records."""

    def body(report):
        taken = 0
        with SidecarHub(run_id, COLUMNS) as hub:
            report("ready")
            while True:
                if not hub.wait(0.5):
                    hub.reap()
                    continue
                delivery = hub.receive()
                if delivery is None:
                    continue
                with delivery:
                    assert delivery.batch["eid"].text(0).endswith(f"/{delivery.header.first_row}")
                    if delivery.header.want_scores:
                        delivery.reply(delivery.batch["reward"].values.copy(), 1)
                taken += 1
                if taken % 50 == 0:
                    hub.reap()
                if taken % 1000 == 0:
                    report(f"{taken} records")

    return Child(body)


def highest_semaphore(entries):
    """The largest count of the semaphores among `entries`: a kill may leave one too many, which must not add up."""
    highest = 0
    for entry in entries:
        if entry.startswith("sem."):
            with contextlib.suppress(FileNotFoundError):
                highest = max(highest, struct.unpack_from("<I", Path(f"/dev/shm/{entry}").read_bytes())[0])
    return highest


def usage(pid, runs):
    """What the process and the runs use now, by the names of `ALLOWANCES`."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    entries, nbytes = [entry for run_id in runs for entry in leftovers(run_id)], 0
    for entry in entries:
        with contextlib.suppress(FileNotFoundError):
            nbytes += os.stat(f"/dev/shm/{entry}").st_blocks * 512
    values = (
        int(status["RssAnon"].split()[0]),
        len(os.listdir(f"/proc/{pid}/fd")),
        int(status["Threads"]),
        sum("/dev/shm/mpst." in line for line in maps),
        sum("/dev/shm/sem." in line for line in maps),
        highest_semaphore(entries),
        len(entries),
        nbytes // 1024,
    )
    return dict(zip(ALLOWANCES, map(float, values), strict=True))


class Cast:
    """The processes of one run, each replaced when it was killed. `lasting`: the sidecar is never killed."""

    def __init__(self, rng, *, lasting):
        self.run_id = f"s{secrets.token_hex(4)}"
        self._rng, self._lasting = rng, lasting
        self._member = Doorbell(self.run_id)
        self._makers = [lambda: sidecar(self.run_id)]
        self._makers += [lambda: operator(self.run_id, rng.randrange(1000)) for _ in range(OPERATORS)]
        self._children = [make() for make in self._makers]
        self.kills = 0

    @property
    def sidecar_pid(self):
        return self._children[0].pid

    def kill_one(self):
        victim = self._rng.randrange(int(self._lasting), len(self._children))
        self._children[victim].kill()
        self._children[victim] = self._makers[victim]()
        self.kills += 1

    def check(self):
        for i, child in enumerate(self._children):
            if child.ended:
                sys.exit(f"process {i} of {self.run_id} ended by itself: see above")

    def end(self):
        """Kill all, remove the run; what the sidecar said last."""
        for child in self._children:
            child.kill()
        self._member.close()
        # What a kill left half made stays for a minute by rule: its maker could be about to finish it.
        deadline = time.monotonic() + UNFINISHED_S + 10
        remove_run(self.run_id)
        while leftovers(self.run_id) and time.monotonic() < deadline:
            time.sleep(1)
            remove_run(self.run_id)
        if leftovers(self.run_id):
            sys.exit(f"left behind: {leftovers(self.run_id)}")
        return self._children[0].said[-1] if self._children[0].said else "nothing said"


def soak(options):
    """Run it; (samples with the time of each in seconds, kills, what the lasting sidecar said last)."""
    rng, pause = random.Random(options.seed), threading.Event()
    casts = [Cast(rng, lasting=True), Cast(rng, lasting=False)]
    started = said = time.monotonic()
    ends, samples = started + 60 * options.minutes, []
    while time.monotonic() < ends:
        pause.wait(rng.uniform(0.2, max(0.3, options.kill_every - 0.2)))
        for cast in casts:
            cast.check()
        rng.choice(casts).kill_one()
        now = time.monotonic() - started
        samples.append({"s": now, **usage(casts[0].sidecar_pid, [cast.run_id for cast in casts])})
        if time.monotonic() - said > min(SAY_EVERY_S, 6 * options.minutes):
            said = time.monotonic()
            numbers = ", ".join(f"{what} {samples[-1][what]:.0f}" for what in ALLOWANCES)
            print(f"{now:.0f} s, {sum(cast.kills for cast in casts)} kills: {numbers}", flush=True)
    said = [cast.end() for cast in casts]
    return samples, [cast.kills for cast in casts], said[0]


def fit(samples, minutes):
    """For each quantity its first and last mean, its rise over the soak by a fitted line, and the allowance."""
    after = [sample for sample in samples if sample["s"] >= 60 * minutes * WARM_UP]
    when = np.array([sample["s"] for sample in after])
    fifth = max(1, len(after) // 5)
    lines = {}
    for what, allowance in ALLOWANCES.items():
        values = np.array([sample[what] for sample in after])
        slope, _ = np.polyfit(when - when[0], values, 1)
        lines[what] = {
            "first": float(values[:fifth].mean()),
            "last": float(values[-fifth:].mean()),
            "highest": float(values.max()),
            "rise": float(slope * (when[-1] - when[0])),
            "allowed": allowance,
        }
    return lines


def check(lines):
    """Exit 1 when something rose by more than it may."""
    for what, line in lines.items():
        print(
            f"{what}: {line['first']:.1f} at first, {line['last']:.1f} at last, {line['highest']:.0f} at most, "
            f"the fitted line rises by {line['rise']:+.1f} (allowed {line['allowed']:g})"
        )
    grown = [what for what, line in lines.items() if line["rise"] > line["allowed"]]
    # Three operators a run, orphans that wait for a sidecar, one whose successor is just being made; a bell.
    most = 2 * (3 * (OPERATORS + KEEP_ORPHANS + 1) + 1)
    if lines["names in /dev/shm"]["highest"] > most:
        grown.append(f"names in /dev/shm beyond {most}")
    if grown:
        sys.exit(f"not flat: {', '.join(grown)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--kill-every", type=float, default=3.0, help="seconds, at most; half of it on average")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write all samples and the fitted lines to this file")
    options = parser.parse_args()
    samples, kills, said = soak(options)
    lines = fit(samples, options.minutes)
    if options.json is not None:
        whole = {"minutes": options.minutes, "kills": kills, "lines": lines, "samples": samples}
        options.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    check(lines)
    print(
        f"{options.minutes:g} min, {kills[0]} kills beside the lasting sidecar ({said}), {kills[1]} in the other run: "
        "flat"
    )


if __name__ == "__main__":
    main()
