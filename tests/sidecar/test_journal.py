from __future__ import annotations

import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from mps_trainer.errors import RunError
from mps_trainer.sidecar.journal import Journal


def records(journal: Journal) -> list[tuple[dict[str, Any], bytes]]:
    found = []
    while (record := journal.read()) is not None:
        found.append((record[0], bytes(record[1])))
    return found


def payloads(journal: Journal) -> list[bytes]:
    return [payload for _, payload in records(journal)]


def test_records_come_back_in_order(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for i in range(5):
        journal.append({"seq": i}, memoryview(bytes([i]) * i))
    journal.close()
    found = records(Journal(tmp_path))
    assert [header["seq"] for header, _ in found] == [0, 1, 2, 3, 4]
    assert [payload for _, payload in found] == [bytes([i]) * i for i in range(5)]


def test_a_successor_reads_on_at_the_position_and_what_it_appends_comes_after_a_torn_tail(tmp_path: Path) -> None:
    first = Journal(tmp_path)
    first.append({}, b"had")
    first.skip()
    position = first.position
    first.append({}, b"next")
    first.append({}, b"torn")
    first.close()
    os.truncate(tmp_path / "0.log", first.nbytes - 1)
    second = Journal(tmp_path, *position)
    second.append({}, b"new")
    assert second.read() == ({}, b"next")
    position = second.position
    assert payloads(second) == [b"new"]
    assert second.unread == 0
    assert payloads(Journal(tmp_path, *position)) == [b"new"]


def test_what_was_had_without_reading_is_skipped(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append({}, b"live")
    assert journal.unread > 0
    journal.skip()
    assert (journal.unread, journal.read()) == (0, None)
    journal.append({}, b"later")
    assert payloads(journal) == [b"later"]


@pytest.mark.parametrize("lost", [1, 10, 99, 100, 105, 120])
def test_a_torn_tail_is_cut_and_the_journal_goes_on(
    tmp_path: Path, lost: int, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(tmp_path)
    journal.append({}, b"a" * 100)
    journal.append({}, b"b" * 100)
    journal.close()
    path = tmp_path / "0.log"
    os.truncate(path, path.stat().st_size - lost)
    journal = Journal(tmp_path)
    assert payloads(journal) == [b"a" * 100]
    assert "torn tail" in caplog.text
    journal.append({}, b"c")
    assert payloads(Journal(tmp_path)) == [b"a" * 100, b"c"]


def test_a_flipped_bit_is_no_record(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append({"seq": 1}, b"a" * 100)
    path = tmp_path / "0.log"
    content = bytearray(path.read_bytes())
    for place in (0, 5, 10, 17, 25, 60, len(content) - 1):
        damaged = bytearray(content)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        assert payloads(Journal(tmp_path)) == []


def test_a_checkpoint_cuts_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append({}, b"before")
    number = journal.begin_next()
    assert journal.position == (number, 0)
    journal.append({}, b"after")
    # Killed before the checkpoint was in place: both files count.
    assert payloads(Journal(tmp_path)) == [b"before", b"after"]
    journal.drop_before(number)
    resumed = Journal(tmp_path, number)
    assert not (tmp_path / "0.log").exists()
    assert payloads(resumed) == [b"after"]
    assert resumed.nbytes == (tmp_path / f"{number}.log").stat().st_size


def test_a_full_disk_is_told_and_leaves_no_half_record(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append({}, b"whole")
    size = journal.nbytes
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50, old[1]))
    try:
        with pytest.raises(RunError, match="free space"):
            journal.append({}, b"x" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert (tmp_path / "0.log").stat().st_size == size
    journal.append({}, b"more")
    assert payloads(Journal(tmp_path)) == [b"whole", b"more"]
