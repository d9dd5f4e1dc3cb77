"""Codecs side by side for bench_transport.py: the same 256 experiences, one core, no transport."""

import itertools
import json
import statistics
import time
import zlib

import numpy as np
import pyarrow as pa
import torch
from bench_transport_e2e import COLUMNS, TENSORS, encode_into, make_experiences, rows_of
from bench_transport_machine import spent

from mps_trainer.transport import Codec


def _arrow_encode(experiences):
    rows = rows_of(experiences)
    names = [c.name for c in COLUMNS]
    lists = {k: (v if k != "mask" else [m.view(np.uint8) for m in v]) for k, v in rows.items()}
    batch = pa.RecordBatch.from_arrays([pa.array(lists[name]) for name in names], names)
    return batch.serialize(), batch.schema


def _safetensors_encode(experiences):
    from safetensors.torch import save

    tensors = {f"{i}.{name}": e[name] for i, e in enumerate(experiences) for name in TENSORS}
    rest = [{k: v for k, v in e.items() if k not in TENSORS} for e in experiences]
    return save(tensors), json.dumps(rest).encode()


def _safetensors_decode(raw):
    from safetensors.torch import load

    tensors, rest = load(raw[0]), json.loads(raw[1])
    return [{**r, **{name: tensors[f"{i}.{name}"] for name in TENSORS}} for i, r in enumerate(rest)]


def _json_encode(experiences):
    return json.dumps([{k: v.tolist() if k in TENSORS else v for k, v in e.items()} for e in experiences]).encode()


def _json_decode(raw):
    return [{k: torch.tensor(v) if k in TENSORS else v for k, v in e.items()} for e in json.loads(raw)]


def measure_codecs(rounds):
    """{codec: ([encode s], [decode s], bytes)}; encoding begins at torch tensors and ends in a reused buffer."""
    codec, slots = Codec(COLUMNS), np.ones((2, 11 << 20), np.uint8)
    turn = iter(range(10**9))
    batches = [make_experiences(seed) for seed in range(4)]

    def ours(experiences):
        return encode_into(codec, experiences, slots[next(turn) % 2])

    schema = _arrow_encode(batches[0])[1]
    cases = {
        "ours, straight into the slot, to packed columns": (ours, codec.decode, 1),
        "ours, with the optional CRC-32 of the payload": (
            lambda e: _summed(ours(e)),
            lambda raw: codec.decode(_summed(raw)),
            1,
        ),
        "ours, to one torch view per row": (ours, lambda raw: _row_views(codec.decode(raw)), 1),
        "pyarrow, pa.array of lists": (
            lambda e: _arrow_encode(e)[0],
            lambda raw: pa.ipc.read_record_batch(raw, schema),
            1,
        ),
        "safetensors, a tensor per row and column": (_safetensors_encode, _safetensors_decode, 1),
        "JSON": (_json_encode, _json_decode, 5),
    }
    cases.update(_message_packs())
    rows = {}
    for name, (encode, decode, slower) in cases.items():
        if spent():
            break
        encodes, decodes, size = [], [], 0
        for i in range(max(3, rounds // slower) if slower == 1 else 2):
            start = time.perf_counter()
            raw = encode(batches[i % 4])
            middle = time.perf_counter()
            decode(raw)
            encodes.append(middle - start)
            decodes.append(time.perf_counter() - middle)
            size = sum(map(len, raw)) if isinstance(raw, tuple) else len(raw)
        rows[name] = (encodes, decodes, size)
        print(
            f"  {name}: {statistics.median(encodes) * 1e3:.1f} ms, {statistics.median(decodes) * 1e3:.1f} ms",
            flush=True,
        )
    return rows


def _message_packs():
    """The same objects in MessagePack, bytes copied from the tensors' memory; those that are installed."""
    cases = {}
    for name, of in (("msgspec", _msgspec), ("msgpack", _msgpack)):
        try:
            encode, decode = of()
        except ImportError as error:
            print(f"  {name}: skipped ({error})", flush=True)
            continue
        cases[f"{name} (MessagePack), bytes of tensors"] = (encode, decode, 1)
    return cases


def _with_bytes(experiences):
    return [{k: v.numpy().tobytes() if k in TENSORS else v for k, v in e.items()} for e in experiences]


def _msgspec():
    import msgspec

    return lambda e: msgspec.msgpack.encode(_with_bytes(e)), msgspec.msgpack.decode


def _msgpack():
    import msgpack

    return lambda e: msgpack.packb(_with_bytes(e)), msgpack.unpackb


def _summed(raw):
    zlib.crc32(raw)
    return raw


def _row_views(batch):
    views = []
    for name in TENSORS:
        column = batch[name]
        values, ends = torch.from_numpy(column.values), column.offsets.tolist()
        views.append([values[a:b] for a, b in itertools.pairwise(ends)])
    return views
