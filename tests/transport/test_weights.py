"""The snapshot of weights: whole or not there, whoever dies when, and nothing believed that does not add up."""

import contextlib
import os
import signal
import struct
import unittest.mock
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from channel_peers import Child
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_shm import in_small_shm, leave_free
from step_killer import ACTING, LINES, Stepper

from mps_trainer.errors import CorruptRecordError, TransportError
from mps_trainer.transport import WeightsEntry, WeightsReader, WeightsWriter, sweep, weights_file
from mps_trainer.transport.weights_layout import HEAD_BYTES, HEADS, MANIFEST, head_offset, unpack_weights_header

ENTRIES = (
    WeightsEntry("linear.weight", "float32", (5, 7)),
    WeightsEntry("count", "int64", ()),
    WeightsEntry("empty", "float16", (0, 3)),
    WeightsEntry("half", "bfloat16", (3,)),
)


def tensors(number):
    """Bytes that tell which snapshot they are of."""
    return [memoryview(bytes([number % 256]) * entry.nbytes) for entry in ENTRIES]


def publish(writer, number):
    writer.publish(tensors(number), version=10 * number, trained_ns=1000 * number)


def assert_is(snapshot, number):
    assert snapshot.head.version == 10 * number
    assert snapshot.head.trained_ns == 1000 * number
    assert [entry for entry, _ in snapshot.tensors] == list(ENTRIES)
    assert [bytes(raw) for _, raw in snapshot.tensors] == [bytes(raw) for raw in tensors(number)]


@pytest.fixture
def ends(run_id):
    writer, reader = WeightsWriter(run_id, ENTRIES), WeightsReader(run_id)
    yield writer, reader
    reader.close()
    writer.close()
    sweep.remove_run(run_id)


def file_of(run_id):
    return Path(weights_file.path_of(run_id))


def test_each_snapshot_is_seen_once_and_the_newest_counts(ends, run_id):
    writer, reader = ends
    assert reader.look() is None
    for number in (1, 2, 5):
        publish(writer, number)
        assert_is(reader.look(), number)
        assert reader.look() is None
    for number in (6, 7, 8):
        publish(writer, number)
    assert_is(reader.look(), 8)
    reader.forget()
    assert_is(reader.look(), 8)
    assert file_of(run_id).stat().st_mode & 0o777 == 0o600


def test_no_file_is_no_snapshot(run_id):
    assert WeightsReader(run_id).look() is None


def test_a_successor_goes_on_in_the_same_file(ends, run_id):
    writer, reader = ends
    publish(writer, 1)
    publish(writer, 2)
    with pytest.raises(TransportError, match="another process writes"):
        WeightsWriter(run_id, ENTRIES)
    writer.close()
    inode = file_of(run_id).stat().st_ino
    assert_is(reader.look(), 2)
    successor = WeightsWriter(run_id, ENTRIES)
    assert reader.look() is None, "what the predecessor published is still the newest"
    publish(successor, 3)
    assert_is(reader.look(), 3)
    assert file_of(run_id).stat().st_ino == inode
    successor.close()


def test_another_model_gets_another_file_which_readers_find(ends, run_id):
    writer, reader = ends
    publish(writer, 1)
    assert_is(reader.look(), 1)
    writer.close()
    other = WeightsWriter(run_id, ENTRIES[:1])
    assert reader.look() is None
    other.publish(tensors(9)[:1], version=90, trained_ns=9000)
    assert reader.look().head.version == 90
    other.close()


def test_a_removed_file_is_made_again(ends, run_id):
    writer, reader = ends
    publish(writer, 1)
    assert_is(reader.look(), 1)
    file_of(run_id).unlink()
    publish(writer, 2)
    assert_is(reader.look(), 2)


@pytest.mark.parametrize("size", [0, 100, None])
def test_a_file_that_was_cut_or_overwritten_is_made_again(ends, run_id, size):
    writer, reader = ends
    publish(writer, 1)
    assert_is(reader.look(), 1)
    if size is None:
        with file_of(run_id).open("r+b") as file:
            file.write(b"garbage " * 16)
    else:
        os.truncate(file_of(run_id), size)
    publish(writer, 2)
    assert_is(reader.look(), 2)
    late = WeightsReader(run_id)
    assert_is(late.look(), 2)
    late.close()


def test_who_may_remove_it(ends, run_id):
    writer, reader = ends
    publish(writer, 1)
    assert sweep.remove_run(run_id) == [], "it is written to"
    writer.close()
    reader.look()
    assert sweep.remove_run(run_id) == [], "it is read"
    reader.close()
    assert sweep.remove_run(run_id) == [file_of(run_id).name]


def test_an_unfinished_one_is_left_alone_for_a_minute(run_id):
    weights_file.create_weights(run_id).close()
    assert sweep.remove_run(run_id) == []
    with unittest.mock.patch.object(sweep, "UNFINISHED_S", 0.0):
        assert sweep.remove_run(run_id) == [file_of(run_id).name]


def test_a_file_of_others_is_not_read_and_not_removed(run_id):
    file_of(run_id).write_bytes(b"x" * 8192)
    file_of(run_id).chmod(0o644)
    with pytest.raises(TransportError, match="mode 0644"):
        WeightsReader(run_id).look()
    with pytest.raises(TransportError, match="mode 0644"):
        WeightsWriter(run_id, ENTRIES)
    os.utime(file_of(run_id), (0, 0))
    assert sweep.remove_run(run_id) == []
    file_of(run_id).unlink()


@pytest.mark.parametrize("steps", [LINES, ACTING])
def test_a_writer_killed_at_any_step_leaves_the_previous_snapshot(run_id, steps):
    """Every line of the second and third publish in a process of its own; bytecodes are sampled."""
    writer = WeightsWriter(run_id, ENTRIES)
    publish(writer, 1)
    writer.close()

    def act(stop_at, report):
        own = WeightsWriter(run_id, ENTRIES)
        # Imports and the first call of each function are over: every step is one of publishing.
        with Stepper(stop_at, steps=steps):
            for number in (2, 3):
                publish(own, number)
                report(str(number))

    reader = WeightsReader(run_id)
    stop_at, killed, before = 1, 0, 1
    while True:
        child = Child(lambda report, stop_at=stop_at: act(stop_at, report))
        status = child.wait()
        reported = [int(line) for line in child.said]
        reader.forget()
        snapshot = reader.look()
        number = snapshot.head.version // 10
        # The one that was published last or, killed just before it could say so, the next; whole in any case.
        assert_is(snapshot, number)
        assert number in {(): (before, 2), (2,): (2, 3), (2, 3): (3,)}[tuple(reported)]
        before = number
        if status == 0:
            break
        assert status == -signal.SIGKILL
        killed += 1
        stop_at += 1 if steps == LINES else 3
    assert killed > 40
    reader.close()
    sweep.remove_run(run_id)


def test_a_writer_killed_while_it_makes_the_file_is_followed_by_another(run_id):
    def act(stop_at, report):
        with Stepper(stop_at):
            WeightsWriter(run_id, ENTRIES)

    stop_at = 1
    while Child(lambda report, stop_at=stop_at: act(stop_at, report)).wait() != 0:
        reader = WeightsReader(run_id)
        with contextlib.suppress(CorruptRecordError):
            assert reader.look() is None
        successor = WeightsWriter(run_id, ENTRIES)
        publish(successor, 4)
        assert_is(reader.look(), 4)
        reader.close()
        successor.close()
        assert sweep.remove_run(run_id) == [file_of(run_id).name]
        stop_at += 2
    assert stop_at > 60
    sweep.remove_run(run_id)


def test_a_reader_that_is_overtaken_gets_the_newer_one(ends, monkeypatch):
    writer, reader = ends
    publish(writer, 1)
    real: Any = os.preadv
    overtaken: list[int] = []

    def slow(*args):
        count = real(*args)
        if len(overtaken) < 2:
            overtaken.append(1)
            publish(writer, 2 * len(overtaken))
            publish(writer, 2 * len(overtaken) + 1)
        return count

    monkeypatch.setattr(os, "preadv", slow)
    assert_is(reader.look(), 5)


@given(
    st.lists(
        st.tuples(
            st.one_of(
                st.integers(0, HEADS + 2 * HEAD_BYTES), st.integers(MANIFEST, MANIFEST + 250), st.integers(0, 12300)
            ),
            st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([0, 1, 2**31, 2**63, 2**64 - 1])),
        ),
        min_size=1,
        max_size=3,
    ),
    st.booleans(),
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_mutation_does_harm(ends, run_id, mutations, attached):
    writer, reader = ends
    publish(writer, 3)
    publish(writer, 4)
    if attached:
        assert_is(reader.look(), 4)
        reader.forget()
    else:
        reader.close()
    sane = file_of(run_id).read_bytes()
    with file_of(run_id).open("r+b") as file:
        for at, value in mutations:
            file.seek(min(at, len(sane) - 8))
            file.write(value.to_bytes(8, "little"))
        file.flush()
        try:
            snapshot = reader.look()
            # A word that names the other buffer is a snapshot too: the one before, and whole.
            assert snapshot is None or assert_is(snapshot, snapshot.head.version // 10) is None
        except TransportError:
            pass
        file.seek(0)
        file.write(sane)
    reader.close()
    assert_is(reader.look(), 4)
    reader.forget()


@pytest.mark.parametrize("size", [0, 100, MANIFEST, 5000])
def test_a_file_that_was_cut_short_is_an_error(ends, run_id, size):
    writer, reader = ends
    publish(writer, 1)
    publish(writer, 2)
    assert_is(reader.look(), 2)
    reader.forget()
    os.truncate(file_of(run_id), size)
    for _ in range(2):
        with pytest.raises(CorruptRecordError):
            reader.look()
        reader.close()
    file_of(run_id).unlink()


@given(st.integers(0, 127), st.integers(1, 255))
@settings(max_examples=60)
def test_every_flipped_byte_of_the_header_is_noticed(at, flip):
    from test_weights_golden import HEADER

    raw = bytearray(HEADER.pack().ljust(MANIFEST, b"\0") + HEADER.manifest)
    assert unpack_weights_header(bytes(raw), HEADER.file_bytes) == HEADER
    raw[at] ^= flip
    with pytest.raises(TransportError):
        unpack_weights_header(bytes(raw), HEADER.file_bytes)


@pytest.mark.parametrize(
    "manifest",
    [
        b"{}", b"[1]", b"[[]]", b"[" * 5000, b'[{"dtype":"object","name":"a","shape":[]}]', b"\xff",
        b'[{"dtype":"float32","name":"a","shape":[-1]}]', b'[{"dtype":"float32","name":1,"shape":[]}]',
        b'[{"dtype":"float32","name":"a","shape":[281474976710655,281474976710655]}]',
        b'[{"dtype":"float32","name":"a","shape":[' + b"9" * 5000 + b"]}]",
    ],
)  # fmt: skip
def test_a_manifest_that_means_nothing_is_corrupt(manifest):
    from test_weights_golden import HEADER

    static = bytearray(HEADER.pack())
    static[96:100] = struct.pack("<I", len(manifest))
    static[-4:] = struct.pack("<I", zlib.crc32(manifest, zlib.crc32(bytes(static[8:-4]))))
    with pytest.raises(CorruptRecordError):
        unpack_weights_header(bytes(static).ljust(MANIFEST, b"\0") + manifest, HEADER.file_bytes)


def test_no_room_is_an_error_with_the_bytes_and_what_to_raise():
    def body():
        leave_free(3)
        with pytest.raises(TransportError) as caught:
            WeightsWriter("small", [WeightsEntry("w", "float32", (100, 100))])
        need = 4096 + 2 * 40960
        for word in (f"needs {need} bytes", "12288 bytes free", "--shm-size", "score_where: sidecar"):
            assert word in str(caught.value)
        assert os.listdir("/dev/shm") == ["fill"]
        writer = WeightsWriter("small", [WeightsEntry("w", "float32", (10, 10))])
        # It has its pages: no publish can fail for want of room.
        leave_free(0)
        for number in range(3):
            writer.publish([memoryview(np.full(400, number, np.uint8))], version=number, trained_ns=1)
        assert WeightsReader("small").look().head.version == 2

    in_small_shm("size=1m", body)


def test_the_head_of_each_snapshot_stands_where_it_belongs():
    assert [head_offset(number) for number in (1, 2, 3)] == [HEADS + HEAD_BYTES, HEADS, HEADS + HEAD_BYTES]
