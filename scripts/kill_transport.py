#!/usr/bin/env python3
"""Kill the writer, the reader or both at every step of the protocol, or at random moments, thousands of times.

    python scripts/kill_transport.py steps [--opcodes]      at every line (or bytecode) that runs in the transport
    python scripts/kill_transport.py random --trials 5000   at random moments of a running exchange

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
from scenarios import TRIALS, check_usable_and_clean, rows_of, send

from mps_trainer.transport import OperatorChannel, SidecarHub, leftovers, locks
from mps_trainer.transport.semaphores import Doorbell


def steps(options):
    """Every scenario, every step, with and without the locks that only aarch64 needs."""
    for ordered in (True, False):
        locks.TOTAL_STORE_ORDER = ordered
        for name, trial in TRIALS.items():
            run_id, started = f"k{secrets.token_hex(4)}", time.monotonic()
            member = Doorbell(run_id)
            stop_at = 1
            while trial(run_id, stop_at, [], opcodes=options.opcodes, repeats=options.repeats):
                stop_at += 1
            member.close(unlink_if_alone=True)
            kind = "bytecodes" if options.opcodes else "lines"
            took_s = time.monotonic() - started
            order = "total store order" if ordered else "locks"
            print(f"{name}, {order}: killed at each of {stop_at - 1} {kind}, {took_s:.0f} s", flush=True)


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
    every.add_argument("--opcodes", action="store_true", help="every bytecode instead of every line")
    every.add_argument("--repeats", type=int, default=2, help="how often a line in a loop counts")
    every.set_defaults(run=steps)
    some = commands.add_parser("random")
    some.add_argument("--trials", type=int, default=5000)
    some.add_argument("--seed", type=int, default=1)
    some.set_defaults(run=at_random)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
