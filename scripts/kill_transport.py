#!/usr/bin/env python3
"""Kill the writer, the reader or both at every step of the protocol, or at random moments, thousands of times.

    python scripts/kill_transport.py steps                  at every line that runs in the transport
    python scripts/kill_transport.py steps --acting         before every bytecode that another process can tell apart
    python scripts/kill_transport.py steps --opcodes        before every bytecode
    python scripts/kill_transport.py pairs                  with the other side stopped inside a step of its own
    python scripts/kill_transport.py random --trials 5000   at random moments of a running exchange
    python scripts/kill_transport.py pressure --trials 300  the same with a slow reader, for each back-pressure policy

`steps --opcodes` takes about an hour on a quiet core; `--stride 4 --offset 0` to `3` share it among four processes.
After each kill: nothing that was acknowledged or committed is lost, nothing torn is delivered, the peer notices within
a second, a successor goes on, every slot is usable, and at the end nothing is left in /dev/shm. A violation ends the
script with exit status 1. Short versions of both run in tests/transport.
"""

import argparse
import os
import random
import secrets
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "transport"))
from channel_peers import COLUMNS, SMALL, Child, assert_same, take
from exchanges import EXCHANGES, pair_trial
from pressure import POLICIES, pressure_trial
from scenarios import TRIALS, check_usable_and_clean, rows_of, send
from step_killer import ACTING, LINES, OPCODES

from mps_trainer.transport import OperatorChannel, SidecarHub, leftovers, locks
from mps_trainer.transport.semaphores import Doorbell

ORDERS = {"total store order": True, "locks": False}
SAY_EVERY_S = 30.0


class Sweep:
    """A run of its own for many trials: says where it is, and at the end that nothing was left or leaked."""

    def __init__(self, what):
        self.what, self.kills = what, 0
        self.run_id = f"k{secrets.token_hex(4)}"
        self._started = self._said = time.monotonic()
        self._descriptors = len(os.listdir("/proc/self/fd"))
        # A living member of the run: what the dead leave is then nobody else's to sweep.
        self._member = Doorbell(self.run_id)

    def count(self, at):
        self.kills += 1
        if time.monotonic() - self._said > SAY_EVERY_S:
            self._said = time.monotonic()
            print(f"  {self.what}: {self.kills} kills, at step {at}", flush=True)

    def end(self, steps):
        self._member.close(unlink_if_alone=True)
        left = leftovers(self.run_id)
        assert left == [], left
        assert len(os.listdir("/proc/self/fd")) == self._descriptors, "descriptors leaked"
        print(f"{self.what}: {self.kills} kills in {steps}, {time.monotonic() - self._started:.0f} s", flush=True)


def steps(options):
    """Every scenario, every step, with and without the locks that only aarch64 needs."""
    kind = options.steps
    for order in options.order:
        locks.TOTAL_STORE_ORDER = ORDERS[order]
        for name, trial in {**TRIALS, **EXCHANGES}.items():
            if options.only and name not in options.only:
                continue
            sweep = Sweep(f"{name}, {order}")
            stop_at = 1 + options.offset
            while trial(sweep.run_id, stop_at, [], steps=options.steps, repeats=options.repeats):
                sweep.count(stop_at)
                stop_at += options.stride
            sweep.end(f"{stop_at - 1} {kind}")


def pairs(options):
    """Every step of one side, with `partners` steps of the other for each, and each way to kill."""
    for order in options.order:
        locks.TOTAL_STORE_ORDER = ORDERS[order]
        for reader_first in (True, False):
            sweep = Sweep(f"{'writer inside the reader' if reader_first else 'reader inside the writer'}, {order}")
            at, more = 1 + options.offset, True
            while more:
                for partner in range(options.partners):
                    other = 1 + (37 * at + 97 * partner) % options.partner_steps
                    dies = ("writer", "reader", "both")[(at // options.stride + partner) % 3]
                    more, _ = pair_trial(
                        sweep.run_id, at, other, dies, reader_first=reader_first, steps=options.steps, repeats=1
                    )
                    sweep.count(at)
                at += options.stride
            sweep.end(f"{at - 1} {options.steps} of the writer")


def pressure(options):
    """Kills under back-pressure, each policy in turn."""
    rng = random.Random(options.seed)
    for policy in POLICIES:
        started, totals = time.monotonic(), {}
        for _ in range(options.trials):
            run_id = f"k{secrets.token_hex(4)}"
            for what, value in pressure_trial(run_id, policy, rng).items():
                totals[what] = totals.get(what, 0) + value
            left = leftovers(run_id)
            assert left == [], left
        said = ", ".join(f"{value} {what}" for what, value in totals.items())
        print(f"{policy}: {options.trials} trials, {time.monotonic() - started:.0f} s: {said}", flush=True)


def forever_sending(run_id, first):
    """An operator that sends numbered records under `block` and reports each that is in the ring."""

    def body(report):
        channel = OperatorChannel.create(run_id, COLUMNS, SMALL, backpressure="block", block_timeout_s=10.0)
        report("ready")
        request_id = first
        while True:
            if send(channel, request_id).rows_sent:
                report(request_id)
                request_id += 1

    return Child(body)


def forever_reading(run_id):
    """A sidecar that checks what it reads and reports each record before it releases it, as the journal does."""

    def body(report):
        with SidecarHub(run_id, COLUMNS) as hub:
            report("ready")
            while True:
                with take(hub, 10.0) as delivery:
                    request_id = delivery.header.request_id
                    assert_same(delivery.batch, rows_of(request_id))
                    report(request_id)

    return Child(body)


def numbers(child):
    child.wait()
    return [int(line) for line in child.said if line.isdigit()]


def random_trial(run_id, rng):
    """One exchange in which writer, reader, or both are killed after a random time; then a survivor takes over."""
    reader = forever_reading(run_id)
    writer = forever_sending(run_id, 1)
    assert reader.line() == writer.line() == "ready"
    victims = rng.choice([[writer], [reader], [writer, reader], [reader, writer]])
    pause(rng.uniform(0, 0.02))
    for victim in victims:
        victim.kill(reap=False)
        pause(rng.choice([0, 0, rng.uniform(0, 0.003)]))
    if reader in victims and writer not in victims:
        # The writer must find out by itself and go on with a successor.
        second = forever_reading(run_id)
        assert second.line() == "ready"
        pause(0.005)
        writer.kill(reap=False)
        pause(0.002)
        second.kill(reap=False)
        read = numbers(reader) + numbers(second)
    else:
        writer.kill(reap=False) if writer not in victims else None
        reader.kill(reap=False) if reader not in victims else None
        read = numbers(reader)
    sent = numbers(writer)
    with SidecarHub(run_id, COLUMNS) as hub:
        rest = []
        while hub.wait(0.0):
            with hub.receive() as delivery:
                assert_same(delivery.batch, rows_of(delivery.header.request_id))
                rest.append(delivery.header.request_id)
        committed = set(range(1, max(sent, default=0) + 1))
        lost = committed - set(read) - set(rest)
        assert not lost, f"lost {sorted(lost)}: sent {sent[-3:]}, read {read[-3:]}, rest {rest}"
        assert max(rest + read, default=0) <= max(sent, default=0) + 1, "a record that was never sent"
        assert rest == sorted(rest)
        again = set(read) & set(rest)
        check_usable_and_clean(run_id, hub)
    return len(sent), len(again)


def pause(seconds):
    if seconds:
        time.sleep(seconds)


def at_random(options):
    rng = random.Random(options.seed)
    totals, started = [0, 0], time.monotonic()
    for trial in range(1, options.trials + 1):
        run_id = f"k{secrets.token_hex(4)}"
        locks.TOTAL_STORE_ORDER = rng.random() < 0.5 and os.uname().machine == "x86_64"
        for i, value in enumerate(random_trial(run_id, rng)):
            totals[i] += value
        left = leftovers(run_id)
        assert left == [], left
        if trial % 500 == 0 or trial == options.trials:
            print(
                f"{trial} trials, {time.monotonic() - started:.0f} s: {totals[0]} records sent, {totals[1]} read again "
                f"by a successor, 0 lost, 0 torn, 0 left behind",
                flush=True,
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    every = commands.add_parser("steps")
    every.add_argument("--repeats", type=int, default=2, help="how often a line in a loop counts")
    every.add_argument("--only", action="append", choices=[*TRIALS, *EXCHANGES])
    every.set_defaults(run=steps)
    two = commands.add_parser("pairs")
    two.add_argument("--partners", type=int, default=3, help="steps of the other side for each step of one")
    two.add_argument("--partner-steps", type=int, default=500, help="so many steps of the other side take part")
    two.set_defaults(run=pairs)
    for sweeping in (every, two):
        sweeping.add_argument(
            "--opcodes", dest="steps", action="store_const", const=OPCODES, help="every bytecode instead of every line"
        )
        sweeping.add_argument(
            "--acting", dest="steps", action="store_const", const=ACTING, help="bytecodes that others can tell apart"
        )
        sweeping.set_defaults(steps=LINES)
        sweeping.add_argument("--stride", type=int, default=1)
        sweeping.add_argument("--offset", type=int, default=0)
        sweeping.add_argument("--order", action="append", choices=ORDERS)
    slow = commands.add_parser("pressure")
    slow.add_argument("--trials", type=int, default=300, help="for each policy")
    slow.add_argument("--seed", type=int, default=1)
    slow.set_defaults(run=pressure)
    some = commands.add_parser("random")
    some.add_argument("--trials", type=int, default=5000)
    some.add_argument("--seed", type=int, default=1)
    some.set_defaults(run=at_random)
    options = parser.parse_args()
    if "order" in options and not options.order:
        options.order = list(ORDERS)
    if options.run is not pairs:
        # A process that the machine holds up inside a mutex is no process that is stopped there.
        locks.MUTEX_S = 30.0
    options.run(options)


if __name__ == "__main__":
    main()
