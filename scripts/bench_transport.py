#!/usr/bin/env python3
"""Compare this project's shared-memory ring with what people use today, all in one run on one machine.

    python scripts/bench_transport.py [--quick] [--pin A,B] [--only ring,unix] [--budget-s N] [--json F]
                                      [--out docs/results/transport]

Throughput: the reader reads every byte and its sum is checked. A copy of the same bytes into pre-faulted shared memory
is timed right before each round ("of memcpy"), since the memory bandwidth of a shared machine drifts. Latency: 1 KiB
messages, replies over a link of the same kind. "ring" is what an operator and a sidecar call, with the codec, leases
and counters, and its round trip is that of scores; "ring (bare link, no API)" is the transport without its codec, for
raw bytes as the other links carry them (bench_transport_ring.py says what it leaves out). End to end: torch tensors
in, torch tensors out, the same Arrow bytes for everybody. Medians over rounds, spread in brackets. At the end every
target is printed beside what was measured, met or missed, and which row it is judged on. Results are written after
every section, so that a run that is cut, by `--budget-s` or by a signal, keeps what it has measured. Peers that are not
installed are skipped by name: pip install iceoryx2 pyzmq fastapi uvicorn requests ray msgspec msgpack
"""

import argparse
import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from bench_transport_links import LINKS, new_address
from bench_transport_machine import (
    BUDGET,
    DEPTH,
    PINS,
    Memcpy,
    choose_cores,
    cpu_s,
    machine,
    spent,
    spread,
    writer_on_its_core,
)  # fmt: skip
from bench_transport_peers import SMALL, LinkPeer, ServicePeer
from bench_transport_report import BATCH, BIG, report, target_lines, verdicts, write_json
from bench_transport_services import SERVICES

from mps_trainer.transport import SidecarHub

#: No new round of latency for a peer that has taken so long.
PATIENCE_S = 12.0
MIB16 = 16 * 2**20


def percentile(values, q):
    return float(np.percentile(values, q))


@contextlib.contextmanager
def opened(kinds, nbytes):
    """The peers of {name: kind} that are installed; closed afterwards, also when a signal ends the run."""
    present = []
    cut = True
    try:
        for name, kind in kinds.items():
            try:
                present.append(kind(name, nbytes))
            except ImportError as error:  # noqa: PERF203  # each peer may be missing
                print(f"  {name}: skipped ({error})", flush=True)
        yield present
        cut = False
    finally:
        for peer in present:
            peer.close(cut=cut)


def throughput_rows(peers, arrays, rounds, per_round):
    """Links take turns, so that a drift of the machine hits all of them; the services follow, with their daemons."""
    memcpy, rows = Memcpy(arrays[0].nbytes), {}
    gigabytes = per_round * arrays[0].nbytes / 1e9
    for group in (LinkPeer, ServicePeer):
        if spent():
            break
        with opened({name: kind for name, kind in peers.items() if kind is group}, arrays[0].nbytes) as present:
            samples = {peer.name: [] for peer in present}
            for i in range(rounds + 1):
                if i > 1 and spent():
                    break
                for peer in present:
                    with writer_on_its_core():
                        copy_s = memcpy.seconds(arrays, per_round)
                    took, mine, theirs = peer.throughput(arrays, per_round)
                    if i:
                        samples[peer.name].append(
                            (gigabytes / took, copy_s / took, mine / gigabytes, theirs / gigabytes)
                        )
        for name, of_rounds in samples.items():
            rows[name] = row = [list(column) for column in zip(*of_rounds, strict=True)]
            print(f"  {name}: {spread(row[0])} GB/s, {spread(row[1])} of memcpy", flush=True)
    return rows


def latency_rows(peers, pings, rounds):
    rows = {}
    for name, kind in peers.items():
        if spent():
            break
        with opened({name: kind}, SMALL) as present:
            for peer in present:
                rows[name] = row = latency_row(peer, pings if kind is LinkPeer else pings // 5, rounds)
                hot, rtt = [v[0] for v in row["hot"]], [v[0] for v in row["hot_rtt"]]
                print(
                    f"  {name}: {spread(hot, digits=0)} us one way, {spread(rtt, digits=0)} us round trip, "
                    f"{spread(row['rate'], digits=0)} messages/s",
                    flush=True,
                )
    return rows


def latency_row(peer, n, rounds):
    small = [np.full(SMALL, i, np.uint8) for i in range(4)]
    peer.latency(n // 5, 0)
    row = {"hot": [], "hot_rtt": [], "idle": [], "idle_rtt": []}
    began = time.monotonic()
    for _ in range(rounds):
        if row["hot"] and (time.monotonic() - began > PATIENCE_S or spent()):
            print(f"  {peer.name}: slow, {len(row['hot'])} rounds only", flush=True)
            break
        for key, pause_s, count in (("hot", 0, n), ("idle", 0.002, n // 5)):
            late, trips = peer.latency(count, pause_s)
            for label, values in ((key, late), (f"{key}_rtt", trips)):
                row[label].append((percentile(values, 50) / 1e3, percentile(values, 99) / 1e3))
    count = 20000 if isinstance(peer, LinkPeer) else 300
    row["rate"] = [count / peer.throughput(small, count)[0] for _ in range(rounds)]
    if peer.name.startswith("ring"):
        # No two in a row alike: nothing that is kept of one message helps with the next.
        mixed = [np.zeros(length, np.uint8) for length in np.random.default_rng(2).permutation(2 * SMALL)]
        row["rate, lengths vary"] = [count / peer.throughput(mixed, count)[0] for _ in range(rounds)]
    return row


def idle_reader(seconds):
    """Share of a core that a sidecar uses while its one operator sends nothing."""
    from bench_transport_ring import COLUMNS, RingOut

    address = new_address("ring")
    writer = RingOut(address, SMALL, DEPTH)
    with SidecarHub(address, COLUMNS) as hub:
        before = cpu_s()
        hub.wait(seconds)
        used = (cpu_s() - before) / seconds
        hub.close(unlink=True)
    writer.close()
    print(f"  {100 * used:.2f} % of a core", flush=True)
    return used


def end_to_end(peers, rounds, n):
    """Torch to torch, the same Arrow bytes for all; without torch there are no rows."""
    try:
        from bench_transport_e2e import CASES, measure_end_to_end
    except ImportError as error:
        print(f"  skipped ({error})", flush=True)
        return {}
    return measure_end_to_end({name: case for name, case in CASES.items() if name in peers}, rounds, n)


def codecs(rounds):
    """Ours and others; without torch there are no rows."""
    try:
        from bench_transport_codecs import measure_codecs
    except ImportError as error:
        print(f"  skipped ({error})", flush=True)
        return {}
    return measure_codecs(rounds)


def batch_bytes():
    """Four batches of 256 experiences as Arrow bytes, cut to one length; random bytes of their size without torch."""
    try:
        from bench_transport_e2e import encoded_batches
    except ImportError:
        rng = np.random.default_rng(3)
        return [rng.integers(0, 256, 8_700_032, dtype=np.uint8) for _ in range(4)]
    return encoded_batches()


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rounds: about a minute")
    parser.add_argument("--only", default="", help="comma-separated peers, or how their names begin")
    parser.add_argument(
        "--pin", default="", metavar="A,B", help="writer on core A, reader on B, or auto; not the services"
    )
    parser.add_argument(
        "--budget-s", type=float, default=float("inf"), metavar="N",
        help="begin nothing more after N seconds: what is under way ends, and what was measured is reported",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, default=None, help="write all samples and verdicts to this file")
    parser.add_argument("--out", type=Path, default=None, help="write OUT.md and OUT.json")
    return parser.parse_args()


def sections(options, peers):
    """(title, what measures it), in order."""
    rounds, pings, quick = (2, 300, True) if options.quick else (5, 1500, False)
    rng = np.random.default_rng(1)
    raw = [rng.integers(0, 256, MIB16, dtype=np.uint8) for _ in range(4)]
    batch = batch_bytes()
    per_round = 4 if quick else 24
    return (
        (BIG, lambda: throughput_rows(peers, raw, rounds, per_round)),
        (BATCH, lambda: throughput_rows(peers, batch, rounds, per_round)),
        ("latency", lambda: latency_rows(peers, pings, rounds)),
        ("idle reader", lambda: idle_reader(1.5 if quick else 3.0)),
        ("end to end", lambda: end_to_end(peers, rounds, 4 if quick else 20)),
        ("codecs", lambda: codecs(3 if quick else 12)),
    )


def save(results, began, options):
    """After every section, so that a run that is cut keeps what it measured."""
    results["verdicts"], results["seconds"] = verdicts(results), round(time.monotonic() - began)
    if options.out:
        report(results, options.out)
    if options.json:
        write_json(results, options.json)


def main():
    options = arguments()
    # As an exception, or what the peers hold (segments, daemons, the semaphores of mp.Queue) would be left behind.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    began = time.monotonic()
    BUDGET[0] = began + options.budget_s
    if options.pin:
        PINS[:] = choose_cores(options.pin)
    peers = {**dict.fromkeys(LINKS, LinkPeer), **dict.fromkeys(SERVICES, ServicePeer)}
    if options.only:
        peers = {name: kind for name, kind in peers.items() if name.startswith(tuple(options.only.split(",")))}
    pinned = f", writer and reader pinned to cores {PINS[0]} and {PINS[1]}" if options.pin else ""
    results = {"machine": machine() + pinned, "command": " ".join(["python", *sys.argv]), "load": {}}
    todo = sections(options, peers)
    results["cut"] = [title for title, _ in todo]
    for title, measure in todo:
        if spent():
            break
        print(title, flush=True)
        before = os.getloadavg()[0]
        results[title] = measure()
        results["load"][title] = (before, os.getloadavg()[0])
        if not spent():
            results["cut"].remove(title)
        save(results, began, options)
    print(f"targets ({results.get('seconds')} s, load {os.getloadavg()[0]:.1f} at the end)", flush=True)
    print("\n".join(target_lines(results.get("verdicts", []))), flush=True)
    if results["cut"]:
        print(f"cut by the budget, whole or in part: {', '.join(results['cut'])}", flush=True)


if __name__ == "__main__":
    main()
