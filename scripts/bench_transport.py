#!/usr/bin/env python3
"""Compare this project's shared-memory ring with what people use today, all in one run on one machine.

    python scripts/bench_transport.py [--quick] [--only ring,unix] [--out docs/results/transport]

Throughput: the reader reads every byte and its sum is checked. A copy of the same bytes into pre-faulted shared memory
is timed right before each round ("of memcpy"), since the memory bandwidth of a shared machine drifts. Latency: 1 KiB
messages, 1 KiB replies over a link of the same kind. "ring" is what an operator and a sidecar call, with the codec,
leases and counters; "ring (bare link, no API)" its protocol alone, as bare as the other links. End to end: torch
tensors in, torch tensors out, the same Arrow bytes for everybody. Medians over rounds, spread in brackets. Peers that
are not installed are skipped by name:
pip install iceoryx2 pyzmq fastapi uvicorn requests ray
"""

import argparse
import json
import mmap
import multiprocessing
import os
import platform
import statistics
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from bench_transport_e2e import CASES, COLUMNS, make_experiences, measure_codecs, measure_end_to_end, rows_of
from bench_transport_peers import DEPTH, LINKS, SERVICES, checksum, cpu_s, new_address

from mps_trainer.transport import Codec

MIB16 = 16 * 2**20


def spread(values, scale=1.0, digits=2):
    """median (min..max)"""
    scaled = [v * scale for v in values]
    return f"{statistics.median(scaled):.{digits}f} ({min(scaled):.{digits}f}..{max(scaled):.{digits}f})"


def percentile(values, q):
    return float(np.percentile(values, q))


def consume(name, address, reply_address, control):
    """The other process: takes commands from `control`, reads the link, answers with sums, latencies and its time."""
    reader_class, writer_class = LINKS[name][1], LINKS[name][0]
    reader = reader_class(address)
    back = writer_class(reply_address, 1024, DEPTH)
    control.send("ready")
    reply = np.zeros(1024, np.uint8)
    while True:
        command, n = control.recv()
        if command == "stop":
            break
        if command == "take":
            total, before = 0, cpu_s()
            for _ in range(n):
                total += checksum(reader.receive())
                reader.done()
            control.send((total % 2**64, cpu_s() - before))
        elif command == "ping":
            late = []
            for _ in range(n):
                array = reader.receive()
                late.append(time.monotonic_ns() - int(array[:8].view(np.int64)[0]))
                del array
                reader.done()
                back.send(reply)
            control.send(late)
    reader.close()
    back.close()


class LinkPeer:
    """Two links of one kind and a consumer process."""

    def __init__(self, name, nbytes):
        self.name = name
        address, self.reply_address = new_address(name), new_address(name)
        self.writer = LINKS[name][0](address, nbytes, DEPTH if nbytes > 65536 else 32)
        self.control, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        args = (name, address, self.reply_address, theirs)
        self.process = context.Process(target=consume, args=args, daemon=True)
        self.process.start()
        self._hear()
        self.reader = None

    def _hear(self):
        if not self.control.poll(120):
            raise TimeoutError(f"the consumer of {self.name} says nothing")
        return self.control.recv()

    def throughput(self, arrays, n):
        self.control.send(("take", n))
        before, start = cpu_s(), time.perf_counter()
        for i in range(n):
            self.writer.send(arrays[i % len(arrays)])
        total, consumer_cpu = self._hear()
        took = time.perf_counter() - start
        expected = sum(checksum(arrays[i % len(arrays)]) for i in range(n)) % 2**64
        if total != expected:
            raise RuntimeError(f"{self.name} delivered wrong bytes")
        return took, cpu_s() - before, consumer_cpu

    def latency(self, n, pause_s):
        if self.reader is None:
            self.reader = LINKS[self.name][1](self.reply_address)
        message, trips = np.zeros(1024, np.uint8), []
        self.control.send(("ping", n))
        for _ in range(n):
            if pause_s:
                time.sleep(pause_s)
            message[:8] = np.frombuffer(time.monotonic_ns().to_bytes(8, "little"), np.uint8)
            start = time.perf_counter_ns()
            self.writer.send(message)
            self.reader.receive()
            self.reader.done()
            trips.append(time.perf_counter_ns() - start)
        return self._hear(), trips

    def close(self):
        self.control.send(("stop", 0))
        self.process.join(20)
        if self.reader is not None:
            self.reader.close()
        self.writer.close()


class ServicePeer:
    """Ray or FastAPI."""

    def __init__(self, name, nbytes):
        self.name, self.service = name, SERVICES[name]()

    def throughput(self, arrays, n):
        consumer, before, start = self.service.consumer_cpu_s(), cpu_s(), time.perf_counter()
        total = self.service.send_all(arrays, n) % 2**64
        took, mine = time.perf_counter() - start, cpu_s() - before
        if total != sum(checksum(arrays[i % len(arrays)]) for i in range(n)) % 2**64:
            raise RuntimeError(f"{self.name} delivered wrong bytes")
        return took, mine, self.service.consumer_cpu_s() - consumer

    def latency(self, n, pause_s):
        late, trips, message = [], [], np.zeros(1024, np.uint8)
        for _ in range(n):
            if pause_s:
                time.sleep(pause_s)
            message[:8] = np.frombuffer(time.monotonic_ns().to_bytes(8, "little"), np.uint8)
            start = time.perf_counter_ns()
            late.append(self.service.ping(message))
            trips.append(time.perf_counter_ns() - start)
        return late, trips

    def close(self):
        self.service.close()


class Memcpy:
    """The reference: numpy copies of the same bytes into pre-faulted shared memory of this process."""

    def __init__(self, nbytes):
        self.map = mmap.mmap(-1, DEPTH * nbytes)
        self.slots = np.frombuffer(self.map, np.uint8).reshape(DEPTH, nbytes)
        self.slots[:] = 1

    def seconds(self, arrays, n):
        start = time.perf_counter()
        for i in range(n):
            np.copyto(self.slots[i % DEPTH, : arrays[0].nbytes], arrays[i % len(arrays)])
        return time.perf_counter() - start


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
    for name, kind in peers.items():
        peer = open_peer(kind, name, 1024)
        if peer is None:
            continue
        n = pings if kind is LinkPeer else pings // 5
        peer.latency(n // 5, 0)
        row = {"hot": [], "hot_rtt": [], "idle": [], "idle_rtt": []}
        for _ in range(rounds):
            for key, pause_s, count in (("hot", 0, n), ("idle", 0.002, n // 5)):
                late, trips = peer.latency(count, pause_s)
                for label, values in ((key, late), (f"{key}_rtt", trips)):
                    row[label].append((percentile(values, 50) / 1e3, percentile(values, 99) / 1e3))
        small, count = [np.full(1024, i, np.uint8) for i in range(4)], 20000 if kind is LinkPeer else 500
        row["rate"] = [count / peer.throughput(small, count)[0] for _ in range(rounds)]
        peer.close()
        rows[name] = row
        hot, rtt = [v[0] for v in row["hot"]], [v[0] for v in row["hot_rtt"]]
        print(f"  {name}: {spread(hot, digits=0)} us one way, {spread(rtt, digits=0)} us round trip", flush=True)
    return rows


def open_peer(kind, name, nbytes):
    try:
        return kind(name, nbytes)
    except ImportError as error:
        print(f"  {name}: skipped ({error})", flush=True)
        return None


def report(results, where):
    lines = [
        "# Transport benchmark", "", f"`python scripts/bench_transport.py`, {results['machine']}.",
        "Medians over rounds (min..max). See the script for what each column means.", "",
    ]  # fmt: skip
    for title in ("16 MiB of random bytes", "the batch, Arrow bytes"):
        lines += [f"## Throughput: {title}", "", "| peer | GB/s | of memcpy | writer CPU s/GB | reader CPU s/GB |"]
        lines += ["|---|---|---|---|---|"]
        lines += [f"| {n} | {' | '.join(spread(column) for column in row)} |" for n, row in results[title].items()]
        lines.append("")
    lines += ["## Latency of 1 KiB, microseconds (p50 / p99 of each round)", ""]
    lines += [
        "| peer | hot one way | hot round trip | idle one way | idle round trip | messages/s |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in results["latency"].items():
        cells = [
            f"{spread([v[0] for v in row[k]], digits=0)} / {spread([v[1] for v in row[k]], digits=0)}"
            for k in ("hot", "hot_rtt", "idle", "idle_rtt")
        ]
        lines.append(f"| {name} | {' | '.join(cells)} | {spread(row['rate'], digits=0)} |")
    lines += [
        "",
        "## End to end: torch to torch, the same Arrow bytes",
        "",
        "| peer | experiences/s | writer CPU ms/batch |",
        "|---|---|---|",
    ]
    lines += [f"| {n} | {spread(r[0], digits=0)} | {spread(r[1], 1e3, 1)} |" for n, r in results["end to end"].items()]
    lines += [
        "",
        "## Codecs: one batch, one core, milliseconds",
        "",
        "| codec | encode | decode | MB |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {n} | {spread(e, 1e3)} | {spread(d, 1e3)} | {size / 1e6:.2f} |"
        for n, (e, d, size) in results["codecs"].items()
    ]
    where.parent.mkdir(parents=True, exist_ok=True)
    where.with_suffix(".md").write_text("\n".join(lines) + "\n")
    where.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rounds, to see that it works")
    parser.add_argument("--only", default="", help="comma-separated peers, or how their names begin")
    parser.add_argument("--out", type=Path, default=None, help="write OUT.md and OUT.json")
    options = parser.parse_args()
    rounds, pings = (2, 300) if options.quick else (7, 2000)
    peers = {**dict.fromkeys(LINKS, LinkPeer), **dict.fromkeys(SERVICES, ServicePeer)}
    if options.only:
        peers = {name: kind for name, kind in peers.items() if name.startswith(tuple(options.only.split(",")))}
    rng = np.random.default_rng(1)
    raw = [rng.integers(0, 256, MIB16, dtype=np.uint8) for _ in range(4)]
    codec = Codec(COLUMNS)
    batches = [encode(codec, make_experiences(seed)) for seed in range(4)]
    shortest = min(batch.nbytes for batch in batches) // 64 * 64
    results = {"machine": machine()}
    for title, arrays in (("16 MiB of random bytes", raw), ("the batch, Arrow bytes", [b[:shortest] for b in batches])):
        print(f"{title}: {arrays[0].nbytes / 1e6:.2f} MB", flush=True)
        results[title] = throughput_rows(peers, arrays, rounds, 4 if options.quick else 40)
    print("latency", flush=True)
    results["latency"] = latency_rows(peers, pings, rounds)
    print("end to end", flush=True)
    wanted = {name: case for name, case in CASES.items() if name in peers}
    results["end to end"] = measure_end_to_end(wanted, rounds, 4 if options.quick else 30)
    print("codecs", flush=True)
    results["codecs"] = measure_codecs(rounds if options.quick else 15)
    if options.out:
        report(results, options.out)


def machine():
    model = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "")
    return (
        f"{model.partition(':')[2].strip() or platform.machine()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}, numpy {np.__version__}, load {os.getloadavg()[0]:.1f} at the start"
    )


def encode(codec, experiences):
    measured = codec.measure(rows_of(experiences))
    message = codec.message(measured, 0, measured.num_rows)
    out = np.empty(message.nbytes, np.uint8)
    codec.write(measured, 0, measured.num_rows, message, out)
    return out


if __name__ == "__main__":
    main()
