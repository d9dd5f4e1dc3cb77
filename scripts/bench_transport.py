#!/usr/bin/env python3
"""Compare this project's shared-memory ring with what people use today, all in one run on one machine.

    python scripts/bench_transport.py [--quick] [--pin A,B] [--only ring,unix] [--json F] [--out docs/results/transport]

Throughput: the reader reads every byte and its sum is checked. A copy of the same bytes into pre-faulted shared memory
is timed right before each round ("of memcpy"), since the memory bandwidth of a shared machine drifts. Latency: 1 KiB
messages, replies over a link of the same kind. "ring" is what an operator and a sidecar call, with the codec, leases
and counters, and its round trip is that of scores; "ring (bare link, no API)" its protocol alone, as bare as the other
links. End to end: torch tensors in, torch tensors out, the same Arrow bytes for everybody. Medians over rounds, spread
in brackets. At the end every target is printed beside what was measured, met or missed. Peers that are not installed
are skipped by name: pip install iceoryx2 pyzmq fastapi uvicorn requests ray msgspec msgpack
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from bench_transport_links import LINKS, new_address
from bench_transport_machine import DEPTH, PINS, Memcpy, choose_cores, cpu_s, machine, spread, writer_on_its_core
from bench_transport_peers import SMALL, LinkPeer, ServicePeer
from bench_transport_report import report, verdicts
from bench_transport_services import SERVICES

from mps_trainer.transport import SidecarHub

#: No new round of latency for a peer that has taken so long.
PATIENCE_S = 12.0
MIB16 = 16 * 2**20


def percentile(values, q):
    return float(np.percentile(values, q))


def open_peer(kind, name, nbytes):
    try:
        return kind(name, nbytes)
    except ImportError as error:
        print(f"  {name}: skipped ({error})", flush=True)
        return None


def throughput_rows(peers, arrays, rounds, per_round):
    """Links take turns, so that a drift of the machine hits all of them; the services follow, with their daemons."""
    memcpy, rows = Memcpy(arrays[0].nbytes), {}
    gigabytes = per_round * arrays[0].nbytes / 1e9
    for group in (LinkPeer, ServicePeer):
        opened = [open_peer(kind, name, arrays[0].nbytes) for name, kind in peers.items() if kind is group]
        present = [peer for peer in opened if peer is not None]
        samples = {peer.name: [] for peer in present}
        for i in range(rounds + 1):
            for peer in present:
                with writer_on_its_core():
                    copy_s = memcpy.seconds(arrays, per_round)
                took, mine, theirs = peer.throughput(arrays, per_round)
                if i:
                    samples[peer.name].append((gigabytes / took, copy_s / took, mine / gigabytes, theirs / gigabytes))
        for peer in present:
            peer.close()
            rows[peer.name] = row = [list(column) for column in zip(*samples[peer.name], strict=True)]
            print(f"  {peer.name}: {spread(row[0])} GB/s, {spread(row[1])} of memcpy", flush=True)
    return rows


def latency_rows(peers, pings, rounds):
    rows = {}
    small = [np.full(SMALL, i, np.uint8) for i in range(4)]
    for name, kind in peers.items():
        peer = open_peer(kind, name, SMALL)
        if peer is None:
            continue
        n = pings if kind is LinkPeer else pings // 5
        peer.latency(n // 5, 0)
        row = {"hot": [], "hot_rtt": [], "idle": [], "idle_rtt": []}
        began = time.monotonic()
        for _ in range(rounds):
            if row["hot"] and time.monotonic() - began > PATIENCE_S:
                print(f"  {name}: slow, {len(row['hot'])} rounds only", flush=True)
                break
            for key, pause_s, count in (("hot", 0, n), ("idle", 0.002, n // 5)):
                late, trips = peer.latency(count, pause_s)
                for label, values in ((key, late), (f"{key}_rtt", trips)):
                    row[label].append((percentile(values, 50) / 1e3, percentile(values, 99) / 1e3))
        count = 20000 if kind is LinkPeer else 300
        row["rate"] = [count / peer.throughput(small, count)[0] for _ in range(rounds)]
        if name == "ring":
            # No two in a row alike: nothing that is kept of one message helps with the next.
            mixed = [np.zeros(length, np.uint8) for length in np.random.default_rng(2).permutation(2 * SMALL)]
            row["rate, lengths vary"] = [count / peer.throughput(mixed, count)[0] for _ in range(rounds)]
        peer.close()
        rows[name] = row
        hot, rtt = [v[0] for v in row["hot"]], [v[0] for v in row["hot_rtt"]]
        print(
            f"  {name}: {spread(hot, digits=0)} us one way, {spread(rtt, digits=0)} us round trip, "
            f"{spread(row['rate'], digits=0)} messages/s",
            flush=True,
        )
    return rows


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


def end_to_end_and_codecs(peers, rounds, options):
    """Both need torch; without it there are no rows."""
    try:
        from bench_transport_codecs import measure_codecs
        from bench_transport_e2e import CASES, measure_end_to_end
    except ImportError as error:
        print(f"end to end and codecs: skipped ({error})", flush=True)
        return {}, {}
    print("end to end, torch to torch, the same Arrow bytes for all", flush=True)
    wanted = {name: case for name, case in CASES.items() if name in peers}
    end_to_end = measure_end_to_end(wanted, rounds, 4 if options.quick else 20)
    print("codecs", flush=True)
    return end_to_end, measure_codecs(3 if options.quick else 12)


def batch_bytes():
    """Four batches of 256 experiences as Arrow bytes, cut to one length; random bytes of their size without torch."""
    try:
        from bench_transport_e2e import encoded_batches
    except ImportError:
        rng = np.random.default_rng(3)
        return [rng.integers(0, 256, 8_700_032, dtype=np.uint8) for _ in range(4)]
    return encoded_batches()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rounds: about a minute")
    parser.add_argument("--only", default="", help="comma-separated peers, or how their names begin")
    parser.add_argument(
        "--pin", default="", metavar="A,B", help="writer on core A, reader on B, or auto; not the services"
    )
    parser.add_argument("--json", type=Path, default=None, help="write all samples and verdicts to this file")
    parser.add_argument("--out", type=Path, default=None, help="write OUT.md and OUT.json")
    options = parser.parse_args()
    if options.pin:
        PINS[:] = choose_cores(options.pin)
    rounds, pings = (2, 300) if options.quick else (5, 1500)
    peers = {**dict.fromkeys(LINKS, LinkPeer), **dict.fromkeys(SERVICES, ServicePeer)}
    if options.only:
        peers = {name: kind for name, kind in peers.items() if name.startswith(tuple(options.only.split(",")))}
    rng, began = np.random.default_rng(1), time.monotonic()
    raw = [rng.integers(0, 256, MIB16, dtype=np.uint8) for _ in range(4)]
    pinned = f", writer and reader pinned to cores {PINS[0]} and {PINS[1]}" if options.pin else ""
    results = {"machine": machine() + pinned, "command": " ".join(["python", *sys.argv])}
    for title, arrays in (("16 MiB of random bytes", raw), ("the batch, Arrow bytes", batch_bytes())):
        print(f"{title}: {arrays[0].nbytes / 1e6:.2f} MB", flush=True)
        results[title] = throughput_rows(peers, arrays, rounds, 4 if options.quick else 24)
    print("latency and rate of 1 KiB", flush=True)
    results["latency"] = latency_rows(peers, pings, rounds)
    print("an idle reader", flush=True)
    results["idle reader"] = idle_reader(1.5 if options.quick else 3.0)
    results["end to end"], results["codecs"] = end_to_end_and_codecs(peers, rounds, options)
    results["verdicts"] = verdicts(results)
    results["seconds"] = round(time.monotonic() - began)
    print(f"targets ({results['seconds']} s, load {os.getloadavg()[0]:.1f} at the end)", flush=True)
    for verdict in results["verdicts"]:
        print(f"  {verdict['what']}: {verdict['found']}, wanted {verdict['wanted']}: {verdict['verdict']}", flush=True)
    if options.out:
        report(results, options.out)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
