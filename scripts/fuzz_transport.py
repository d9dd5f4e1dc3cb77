#!/usr/bin/env python3
"""Coverage-guided fuzzing of everything that reads shared memory.

    python scripts/fuzz_transport.py [--cases 1000000] [--seed 1] [--seconds 0]

Four targets: a batch (codec), a record header, a segment header, and a whole segment with both readers on it. Mutants
that reach a new edge between two lines of the transport join the corpus. Checksums are repaired in most mutants, or
nothing behind them would ever be reached. Allowed outcomes are this package's own errors and a well-formed record. The
cases run in a child process: a crash, a hang of more than ten seconds or any other exception stops the script with exit
status 1 and writes the guilty bytes to a file.
"""

import argparse
import os
import random
import secrets
import signal
import struct
import sys
import tempfile
import time
import zlib
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "transport"))
from channel_peers import COLUMNS, make_rows
from hostile import SETTINGS, assert_well_formed, attack

import mps_trainer.transport
from mps_trainer.errors import ConfigError, TransportError
from mps_trainer.transport import Codec, encode_batch, layout, record, schema
from mps_trainer.transport.segment import new_header

PACKAGE = str(Path(mps_trainer.transport.__file__).parent)
INTERESTING = [
    0,
    1,
    2,
    3,
    4,
    7,
    8,
    63,
    64,
    127,
    255,
    2**15,
    2**16 - 1,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**63 - 1,
    2**63,
    2**64 - 1,
]
CODEC = Codec(COLUMNS)
ROWS = make_rows(3, 1)
GENERATION = 11


class Batch:
    """Bytes that claim to be a batch."""

    weight = 60
    seeds = tuple(encode_batch(make_rows(n, n), COLUMNS) for n in (0, 1, 3))

    def run(self, raw):
        assert_well_formed(CODEC.decode(raw))

    def repair(self, raw):
        return raw


class Record:
    """128 bytes that claim to be a record header."""

    weight = 15
    seeds = (record.RecordHeader(record.KIND_BATCH, 5, 1000, 7, 0, 1, 0, 3).pack(GENERATION),)

    def run(self, raw):
        raw = bytes(raw[:128]).ljust(128, b"\0")
        header = record.unpack_record(raw, generation=GENERATION, seq=5, capacity=2000, kind=record.KIND_BATCH)
        assert header.payload_bytes <= 2000
        assert header.part < header.parts

    def repair(self, raw):
        return raw[:124] + struct.pack("<I", zlib.crc32(raw[:124])) if len(raw) >= 128 else raw


class Header:
    """A page that claims to be the head of a segment."""

    weight = 24
    made = new_header("fuzz", SETTINGS, "block", schema.describe(COLUMNS), schema.digest(schema.describe(COLUMNS)))
    seeds = ((made.pack().ljust(layout.SCHEMA, b"\0") + made.schema).ljust(made.header_bytes, b"\0"),)

    def run(self, raw):
        header = layout.unpack_header(bytes(raw), self.made.segment_bytes)
        assert header.segment_bytes == self.made.segment_bytes
        assert schema.difference(header.schema, self.made.schema) or header.schema == self.made.schema

    def repair(self, raw):
        if len(raw) < layout.SCHEMA:
            return raw
        size = int.from_bytes(raw[84:88], "little")
        crc = zlib.crc32(raw[layout.SCHEMA : layout.SCHEMA + size], zlib.crc32(raw[8:156]))
        return raw[:156] + struct.pack("<I", crc) + raw[160:]


class Whole:
    """A segment in use whose first pages, words and slots are overwritten by the mutant's bytes."""

    weight = 4
    seeds = tuple(struct.pack("<IQ", at, 1) for at in (0, 48, 192, 512, 1024, 1536, 2048, 4096, 4224, 4320))

    def run(self, raw):
        stores = [raw[i : i + 12] for i in range(0, min(len(raw), 48) - 11, 12)]

        def mutate(memory):
            for store in stores:
                at, value = struct.unpack("<IQ", store)
                at %= len(memory) - 8
                memory[at : at + 8] = struct.pack("<Q", value)
            if raw and raw[0] & 1:
                memory[4096:4224] = Record().repair(bytes(memory[4096:4224]))

        attack(f"f{os.getpid()}", ROWS, mutate, attached=bool(raw) and bool(raw[-1] & 1))

    def repair(self, raw):
        return raw


TARGETS = [Batch(), Record(), Header(), Whole()]


def mutant(rng, raw):
    """One to six random changes."""
    raw = bytearray(raw)
    for _ in range(rng.choice([1, 1, 1, 2, 3, 6])):
        if not raw:
            return bytes(raw)
        at, kind = rng.randrange(len(raw)), rng.randrange(6)
        if kind == 0:
            raw[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            raw[at] = rng.randrange(256)
        elif kind in (2, 3):
            size = rng.choice([2, 4, 8])
            at = at // size * size
            value = (
                rng.choice(INTERESTING)
                if kind == 2
                else int.from_bytes(raw[at : at + size], "little") + rng.randint(-9, 9)
            )
            raw[at : at + size] = (value % 2 ** (8 * size)).to_bytes(size, "little")
        elif kind == 4:
            other = rng.randrange(len(raw))
            size = rng.randrange(1, 65)
            raw[at : at + size] = raw[other : other + size]
        elif rng.random() < 0.2:
            raw = raw[:at]
    return bytes(raw)


class Edges:
    """Pairs of lines of the transport that ran one after the other."""

    def __init__(self):
        self.seen, self.new, self._last = set(), False, None

    def trace(self, frame, event, argument):
        return self._line if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _line(self, frame, event, argument):
        if event == "line":
            edge = (self._last, frame.f_code, frame.f_lineno)
            if edge not in self.seen:
                self.seen.add(edge)
                self.new = True
            self._last = frame.f_lineno
        return self._line


def child(seed, cases, deadline, journal, report):
    """Run `cases` cases; the journal file always holds the one that is running."""
    rng, edges = random.Random(seed), Edges()
    corpora = [list(target.seeds) for target in TARGETS]
    weights, refused = [target.weight for target in TARGETS], 0
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    done = 0
    while done < cases and time.monotonic() < deadline:
        done += 1
        which = rng.choices(range(len(TARGETS)), weights)[0]
        target = TARGETS[which]
        raw = mutant(rng, rng.choice(corpora[which]))
        if rng.random() < 0.8:
            raw = target.repair(raw)
        os.pwrite(journal, struct.pack("<II", which, len(raw)) + raw, 0)
        signal.alarm(10)
        edges.new = False
        sys.settrace(edges.trace)
        try:
            target.run(raw)
        except (TransportError, ConfigError):
            refused += 1
        finally:
            sys.settrace(None)
        if edges.new:
            corpora[which].append(raw)
    signal.alarm(0)
    report(f"{done} {refused} {len(edges.seen)} {sum(map(len, corpora))}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--seconds", type=float, default=0.0, help="stop after this time, 0: when the cases are done")
    options = parser.parse_args()
    started = time.monotonic()
    deadline = started + (options.seconds or 1e9)
    read_end, write_end = os.pipe()
    with tempfile.TemporaryFile() as journal:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                child(
                    options.seed, options.cases, deadline, journal.fileno(), lambda t: os.write(write_end, t.encode())
                )
                code = 0
            finally:
                os._exit(code)
        os.close(write_end)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status:
            which, size = struct.unpack("<II", os.pread(journal.fileno(), 8, 0))
            guilty = Path(tempfile.gettempdir()) / f"fuzz-{type(TARGETS[which]).__name__}-{options.seed}.bin"
            guilty.write_bytes(os.pread(journal.fileno(), size, 8))
            sys.exit(
                f"seed {options.seed}: the reader of {type(TARGETS[which]).__name__} ended with {status}; see {guilty}"
            )
    done, refused, edges, corpus = map(int, os.read(read_end, 100).split())
    print(
        f"seed {options.seed}: {done} cases in {time.monotonic() - started:.0f} s, {refused} refused, {done - refused} "
        f"well-formed, {edges} edges, corpus {corpus}; no crash, no hang, no other exception (numpy {np.__version__})"
    )


if __name__ == "__main__":
    main()
