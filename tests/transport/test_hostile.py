"""Mutated headers, words, lengths and payloads: an error or a well-formed record, never anything else."""

import struct

import pytest
from channel_peers import COLUMNS, make_rows
from hostile import SETTINGS, attack
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mps_trainer.errors import CorruptRecordError, TransportError
from mps_trainer.transport import OperatorChannel, layout, record
from mps_trainer.transport.layout import unpack_header
from mps_trainer.transport.segment import new_header

ROWS = make_rows(3, 1)
FIRST_SLOT = 4096
INTERESTING = st.one_of(
    st.integers(0, 2**64 - 1),
    st.sampled_from([0, 1, 2, 3, 5, 127, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1]),
)
PLACES = st.one_of(
    st.integers(0, 320),  # static header, words of the sidecar
    st.integers(layout.OPERATOR_COUNTERS, layout.OPERATOR_COUNTERS + 104),
    st.integers(layout.FEED_STATES, layout.FEED_STATES + 16),
    st.integers(layout.REPLY_STATES, layout.REPLY_STATES + 16),
    st.integers(layout.SCHEMA, layout.SCHEMA + 400),
    st.integers(FIRST_SLOT, FIRST_SLOT + 1400),
    st.integers(FIRST_SLOT + 8192, FIRST_SLOT + 8192 + 300),
)


@given(st.lists(st.tuples(PLACES, INTERESTING), min_size=1, max_size=4), st.booleans())
@settings(max_examples=250, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_mutation_of_a_segment_does_harm(run_id, mutations, attached):
    def mutate(memory):
        for at, value in mutations:
            memory[at : at + 8] = value.to_bytes(8, "little")

    attack(run_id, ROWS, mutate, attached=attached)


def at(offset, form, *values):
    return lambda memory: struct.pack_into(form, memory, offset, *values)


@pytest.mark.parametrize(
    ("mutate", "outcome"),
    [
        (lambda memory: None, ["record", "record"]),
        (at(FIRST_SLOT + 24, "<Q", 2**40), ["corrupt", "record"]),  # payload length
        (at(FIRST_SLOT + 8, "<Q", 7), ["corrupt", "record"]),  # generation
        (at(FIRST_SLOT + 128 + 96, "<q", 2**40), ["corrupt", "record"]),  # an Arrow length
        (
            at(layout.FEED_STATES, "<Q", 99 << 2 | 1),
            ["record", "corrupt"],
        ),  # a sequence number that is not the record's
        (at(layout.FEED_STATES, "<Q", 0), ["record"]),
        (at(layout.FEED_STATES, "<Q", 3), ["record"]),  # a state that does not exist
    ],
)
def test_what_is_wrong_is_skipped_and_the_rest_is_read(run_id, mutate, outcome):
    assert attack(run_id, ROWS, mutate, attached=True) == outcome


@pytest.mark.parametrize(
    ("offset", "form", "value"),
    [
        (0, "<Q", 0),
        (12, "<I", 2**31),
        (24, "<I", 65),
        (32, "<Q", 2**63),
        (48, "<Q", 1),
        (84, "<I", 10**6),
        (156, "<I", 0),
    ],
)
def test_a_header_that_does_not_add_up_is_not_attached(run_id, offset, form, value):
    assert attack(run_id, ROWS, at(offset, form, value), attached=False) == []


def test_another_version_is_refused_with_both_versions_named(run_id):
    outcome = attack(run_id, ROWS, at(8, "<I", 1), attached=False)
    assert "version 1, this program version 2" in outcome[0]
    with pytest.raises(TransportError, match="version 9"):
        unpack_header(b"MPSTCHAN" + (9).to_bytes(4, "little") + bytes(4084), 4096)


@pytest.mark.parametrize("word", [2**64 - 8, 2**64 - 7, 2**64 - 6, 2**64 - 5])
@pytest.mark.parametrize("states", [layout.FEED_STATES, layout.REPLY_STATES])
@pytest.mark.parametrize("attached", [False, True])
def test_a_sequence_number_at_the_end_of_the_range_overflows_nothing(run_id, word, states, attached):
    attack(run_id, ROWS, at(states, "<Q", word), attached=attached)


def test_words_that_mean_nothing_give_no_slot_away_for_ever(run_id):
    def mutate(memory):
        struct.pack_into("<2Q", memory, layout.FEED_STATES, 3, 2**64 - 1)

    assert attack(run_id, ROWS, mutate, attached=False) == []


@given(st.integers(0, 127), st.integers(1, 255))
def test_every_flipped_byte_of_a_record_header_is_noticed(at_byte, flip):
    raw = bytearray(record.RecordHeader(record.KIND_BATCH, 5, 1000, 7, 0, 1, 0, 3).pack(11))
    raw[at_byte] ^= flip
    with pytest.raises(CorruptRecordError):
        record.unpack_record(bytes(raw), generation=11, seq=5, capacity=2000, kind=record.KIND_BATCH)


@given(st.integers(0, 159), st.integers(1, 255))
def test_every_flipped_byte_of_a_segment_header_is_noticed(at_byte, flip):
    header = new_header("r", SETTINGS, "block", b"[]", bytes(32))
    raw = bytearray(header.pack().ljust(layout.SCHEMA, b"\0") + b"[]").ljust(4096, b"\0")
    assert unpack_header(bytes(raw), header.segment_bytes) == header
    raw[at_byte] ^= flip
    with pytest.raises(TransportError):
        unpack_header(bytes(raw), header.segment_bytes)


def test_a_checksum_notices_a_flipped_bit_of_the_payload(run_id):
    from mps_trainer.transport import RingSettings, SidecarHub

    guarded = RingSettings(num_slots=2, slot_bytes=8192, reply_slot_bytes=4096, checksum=True)
    with OperatorChannel.create(run_id, COLUMNS, guarded) as channel, SidecarHub(run_id, COLUMNS) as hub:
        channel.send(ROWS, request_id=1, want_scores=False)
        channel.send(ROWS, request_id=2, want_scores=False)
        last = FIRST_SLOT + 128 + 700
        channel.segment.memory[last] ^= 1
        hub.find_new()
        with pytest.raises(CorruptRecordError, match="checksum"):
            hub.receive()
        with hub.receive() as delivery:
            assert delivery.header.request_id == 2
        hub.close(unlink=False)
