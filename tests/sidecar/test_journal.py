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


NAMED = {"channel": "/mpst.x.0", "seq": 1, "request_id": 7}


@pytest.mark.parametrize("place", [0, 4, 8, 15, 16, 25, 60, 140])
def test_a_damaged_record_in_the_middle_costs_only_itself(
    tmp_path: Path, place: int, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(tmp_path)
    journal.append({}, b"a" * 100)
    begin = journal.nbytes
    journal.append(NAMED, b"b" * 100)
    end = journal.nbytes
    journal.append({}, b"c" * 100)
    path = tmp_path / "0.log"
    content = bytearray(path.read_bytes())
    content[begin + place] ^= 0x80
    path.write_bytes(content)
    for _ in range(2):
        # The second is that of a successor, which passes there again.
        successor = Journal(tmp_path)
        assert payloads(successor) == [b"a" * 100, b"c" * 100]
        assert successor.damaged == 1
        successor.append({}, b"d")
        assert payloads(successor) == [b"d"]
        (tmp_path / f"{successor.number}.log").unlink()
    assert (tmp_path / f"damaged-0-at-{begin}.bin").read_bytes() == content[begin:end]
    assert ("record 1 of request 7 of /mpst.x.0" in caplog.text) == (place in (0, 8, 15, 16, 140))


def test_a_damaged_record_at_the_end_is_kept_and_only_a_torn_one_is_cut(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append(NAMED, b"b" * 100)
    size = journal.nbytes
    path = tmp_path / "0.log"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    journal = Journal(tmp_path)
    assert payloads(journal) == []
    assert journal.damaged == 1
    assert path.stat().st_size == size


def test_what_older_checkpoints_need_stays_up_to_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(tmp_path)
    for i in range(4):
        journal.append({}, bytes([i]) * 100)
        journal.begin_next()
        journal.checkpointed(journal.position, max(0, i - 1))
        assert journal.growth == 0
    assert payloads(Journal(tmp_path, 3)) == [b"\3" * 100]
    # The oldest checkpoint goes on in file 2.
    assert payloads(Journal(tmp_path, 2)) == [b"\2" * 100, b"\3" * 100]
    assert not (tmp_path / "1.log").exists()
    assert caplog.text == ""
    monkeypatch.setattr("mps_trainer.sidecar.journal._MAX_OLDER_BYTES", 150)
    journal.checkpointed(journal.position, 2)
    assert payloads(Journal(tmp_path, 2)) == [b"\3" * 100]
    assert "what lay between is lost" in caplog.text


def test_a_disk_that_refuses_the_next_file_leaves_the_old_one_in_use(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    (tmp_path / "1.log").mkdir()
    with pytest.raises(OSError, match="Is a directory"):
        journal.begin_next()
    (tmp_path / "1.log").rmdir()
    journal.append({}, b"x")
    assert payloads(Journal(tmp_path)) == [b"x"]
