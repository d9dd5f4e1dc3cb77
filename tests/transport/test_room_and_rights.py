"""/dev/shm too small, objects that are not ours, planted names, leftovers of the dead."""

import os
import resource
import time
from dataclasses import replace

import posix_ipc
import pytest
from channel_peers import COLUMNS, SMALL, Child, forever, pair
from scenarios import drain, send

from mps_trainer.errors import TransportError
from mps_trainer.transport import OperatorChannel, RingSettings, SidecarHub, leftovers, standing, sweep, sweep_stale
from mps_trainer.transport.names import segment_name
from mps_trainer.transport.segment import Segment
from mps_trainer.transport.semaphores import remove_semaphore

SHM = "/dev/shm"


def refused_for_room(create):
    with pytest.raises(TransportError) as caught:
        create()
    text = str(caught.value)
    for word in ("MiB free", "needs", "ring_slots=", "ring_slot=", "--shm-size"):
        assert word in text
    return text


def test_a_ring_larger_than_the_memory_is_an_error_with_the_numbers(run_id):
    absurd = RingSettings(num_slots=64, slot_bytes=2**36)
    text = refused_for_room(lambda: OperatorChannel.create(run_id, COLUMNS, absurd))
    assert "No space left" in text or "Cannot allocate" in text
    assert leftovers(run_id) == []


def test_a_limit_on_file_size_is_an_error_with_the_numbers(run_id):
    def operator(report):
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
        text = refused_for_room(lambda: OperatorChannel.create(run_id, COLUMNS, RingSettings()))
        report("File too large" in text)

    child = Child(operator)
    assert child.line() == "True"
    assert child.wait() == 0


def test_the_pages_are_there_before_the_first_write(run_id):
    with OperatorChannel.create(run_id, COLUMNS, SMALL) as channel:
        info = os.stat(f"{SHM}{channel.name}")
        assert info.st_blocks * 512 >= channel.segment.nbytes


def test_everything_is_private(run_id):
    with pair(run_id):
        for entry in leftovers(run_id):
            assert os.stat(f"{SHM}/{entry}").st_mode & 0o777 == 0o600


@pytest.mark.parametrize("kind", ["segment", "space", "bell"])
def test_planted_symlinks_are_not_followed(run_id, kind, tmp_path):
    target = tmp_path / "victim"
    target.write_bytes(b"x" * 4096)
    planted = {"segment": f"mpst.{run_id}.0", "space": f"sem.mpst.{run_id}.0.s", "bell": f"sem.mpst.{run_id}.bell"}[
        kind
    ]
    os.symlink(target, f"{SHM}/{planted}")
    try:
        if kind == "bell":
            with pytest.raises(TransportError, match="regular file"):
                OperatorChannel.create(run_id, COLUMNS, SMALL)
        else:
            with OperatorChannel.create(run_id, COLUMNS, SMALL) as channel, SidecarHub(run_id, COLUMNS) as hub:
                send(channel, 1)
                assert drain(hub) == [1]
                hub.close(unlink=False)
        assert target.read_bytes() == b"x" * 4096
    finally:
        if os.path.lexists(f"{SHM}/{planted}"):
            os.unlink(f"{SHM}/{planted}")


@pytest.mark.parametrize("size", [0, 8, 4096])
def test_a_planted_semaphore_file_is_refused_and_not_mapped(run_id, size):
    path = f"{SHM}/sem.mpst.{run_id}.bell"
    with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600), "wb") as file:
        file.truncate(size)
    with pytest.raises(TransportError, match=f"{size} bytes"):
        SidecarHub(run_id, COLUMNS)
    os.unlink(path)


def test_a_segment_that_others_can_read_is_refused(run_id):
    with OperatorChannel.create(run_id, COLUMNS, SMALL) as channel:
        os.chmod(f"{SHM}{channel.name}", 0o644)
        with SidecarHub(run_id, COLUMNS) as hub:
            assert "0644" in hub.refused[channel.name]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_segment_of_another_user_is_refused_and_not_swept(run_id):
    with OperatorChannel.create(run_id, COLUMNS, SMALL) as channel:
        os.chown(f"{SHM}{channel.name}", 12345, 12345)
        with SidecarHub(run_id, COLUMNS) as hub:
            assert "12345" in hub.refused[channel.name]
        assert not any(run_id in entry for entry in sweep_stale(lambda run: run != run_id))
        os.chown(f"{SHM}{channel.name}", os.geteuid(), os.getegid())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_dead_segment_of_another_user_is_not_swept(run_id):
    killed_operator(run_id, 1)
    path = f"{SHM}/mpst.{run_id}.0"
    os.chown(path, 12345, 12345)
    sweep.remove_run(run_id)
    assert os.path.exists(path)
    os.chown(path, os.geteuid(), os.getegid())
    sweep.remove_run(run_id)


def killed_operator(run_id, records):
    def operator(report):
        channel = OperatorChannel.create(run_id, COLUMNS, SMALL)
        for i in range(records):
            send(channel, i)
        report("sent")
        forever()

    child = Child(operator)
    child.line()
    child.kill()


def test_the_sweep_removes_dead_runs_only(run_id):
    other = f"{run_id}b"
    killed_operator(other, 2)
    with OperatorChannel.create(run_id, COLUMNS, SMALL):
        mine, dead = leftovers(run_id), leftovers(other)
        assert len(dead) == 4
        asked = []
        removed = sweep_stale(lambda run: asked.append(run) or run not in (run_id, other))
        assert asked.count(run_id) == asked.count(other) == 1
        assert sorted(removed) == dead
        assert leftovers(run_id) == mine


def test_the_sweep_believes_its_caller_that_a_run_lives(run_id):
    killed_operator(run_id, 1)
    before = leftovers(run_id)
    sweep_stale(lambda run: True)
    assert leftovers(run_id) == before
    sweep.remove_run(run_id)


def test_the_sweep_spares_a_run_of_another_state_folder(run_id):
    # Its supervisor is unknown here and its operator dead, but somebody has its doorbell open.
    with SidecarHub(run_id, COLUMNS) as hub:
        killed_operator(run_id, 1)
        assert not any(run_id in entry for entry in sweep_stale(lambda run: run != run_id))
        hub.find_new()
        assert drain(hub) == [0]
        hub.close(unlink=True)


def test_an_unfinished_segment_is_left_alone_for_a_minute(run_id, monkeypatch):
    shared = posix_ipc.SharedMemory(segment_name(run_id, 0), posix_ipc.O_CREX, mode=0o600)
    shared.close_fd()
    assert sweep.remove_run(run_id) == []
    later = time.time() + 61
    monkeypatch.setattr(time, "time", lambda: later)
    assert sweep.remove_run(run_id) == [f"mpst.{run_id}.0"]


def test_foreign_names_are_never_touched(run_id):
    name = f"/mpst.{run_id}.notes"
    shared = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, size=4096, mode=0o600)
    shared.close_fd()
    assert not any(run_id in entry for entry in sweep_stale(lambda run: run != run_id))
    posix_ipc.unlink_shared_memory(name)


def test_a_crash_loop_of_operators_does_not_fill_shared_memory(run_id):
    for _ in range(8):
        killed_operator(run_id, 1)
    assert sum("sem." not in entry for entry in leftovers(run_id)) <= sweep.KEEP_ORPHANS + 1
    for _ in range(3):
        killed_operator(run_id, 0)
    assert sum("sem." not in entry for entry in leftovers(run_id)) <= sweep.KEEP_ORPHANS + 2
    sweep.remove_run(run_id)


def test_a_living_operator_gets_the_room_of_dead_ones(run_id, monkeypatch):
    """The full /dev/shm is played: the first attempt to make the segment fails as a full one does."""
    killed_operator(run_id, 1)
    attempts = []

    def create(header, real=Segment.create.__func__):
        attempts.append(len(leftovers(run_id)))
        if len(attempts) == 1:
            raise TransportError("full")
        return real(Segment, header)

    monkeypatch.setattr(Segment, "create", create)
    with OperatorChannel.create(run_id, COLUMNS, SMALL) as channel:
        assert attempts == [4, 1]
        assert channel.name == segment_name(run_id, 0)


def unlink_channel(channel):
    """As systemd's RemoveIPC does when a user's last session ends."""
    for entry in leftovers(channel.segment.header.run_id):
        os.unlink(f"{SHM}/{entry}")


def test_a_segment_removed_under_its_operator_is_an_error_with_the_advice(run_id):
    with OperatorChannel.create(run_id, COLUMNS, SMALL) as channel:
        unlink_channel(channel)
        with pytest.raises(TransportError, match=r"was removed(.|\n)*enable-linger"):
            send(channel, 1)


def test_a_segment_removed_under_both_sides_goes_on_with_a_warning(run_id, monkeypatch):
    said = []
    monkeypatch.setattr(standing.log, "warning", lambda *args: said.append(str(args)))
    with pair(run_id) as (channel, hub):
        unlink_channel(channel)
        for i in (1, 2):
            send(channel, i)
        assert drain(hub) == [1, 2]
        assert len(said) == 1
        assert "enable-linger" in said[0]


@pytest.mark.parametrize("other", ["another run", "a path"])
def test_a_header_that_names_another_channel_is_not_believed(run_id, other):
    victim_run = f"{run_id}v"
    with (
        OperatorChannel.create(victim_run, COLUMNS, SMALL) as victim,
        OperatorChannel.create(run_id, COLUMNS, SMALL) as channel,
    ):
        before = leftovers(victim_run)
        raw = replace(channel.segment.header, run_id=victim_run if other == "another run" else "a/../../x").pack()
        sane = bytes(channel.segment.memory[: len(raw)])
        channel.segment.memory[: len(raw)] = raw
        with SidecarHub(run_id, COLUMNS) as hub:
            assert hub.producers() == []
            hub.reap()
        assert leftovers(victim_run) == before
        channel.segment.memory[: len(raw)] = sane
        assert send(victim, 1).rows_sent == 2
    sweep.remove_run(victim_run)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_semaphore_name_that_another_user_took_costs_an_index_and_not_the_channel(run_id):
    taken = f"{SHM}/sem.mpst.{run_id}.0.s"
    os.close(os.open(taken, os.O_CREAT | os.O_RDWR, 0o600))

    def operator(report):
        os.setgid(65534)
        os.setuid(65534)
        with pytest.raises(TransportError, match=rf"sem\.mpst\.{run_id}\.0\.s"):
            remove_semaphore(f"/mpst.{run_id}.0.s")
        with OperatorChannel.create(run_id, COLUMNS, SMALL) as channel:
            report(channel.name)
        report(leftovers(run_id))

    child = Child(operator)
    assert child.line() == segment_name(run_id, 1)
    assert child.line() == str([f"sem.mpst.{run_id}.0.s"])
    assert child.wait() == 0
    os.unlink(taken)
