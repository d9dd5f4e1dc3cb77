"""The file in which an engine says how busy it is."""

import contextlib
import errno
import os
import signal
import stat
import struct
import time
from pathlib import Path

import pytest

from mps_trainer.launcher.leftovers import remove_leftovers
from mps_trainer.run import run_paths
from mps_trainer.run.engine_load import LoadFile, LoadReader, load_folder, share_load
from mps_trainer.run.locks import hold_descriptor


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MPS_TRAINER_STATE_DIR", str(tmp_path / "state"))
    readers, run_dir = [], tmp_path / "abcd1234"
    run_dir.mkdir()

    def reader(gpu=""):
        readers.append(LoadReader(run_dir, gpu))
        readers[-1].find()
        return readers[-1]

    yield run_dir, reader
    for one in readers:
        one.close()
    assert os.listdir(run_dir) == [], "a run folder may be on a file server that stalls"


def said(run_dir):
    return sorted(os.listdir(load_folder(run_dir)))


def opened(run_dir):
    """Descriptors of this process in the folder."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return [target for target in found if target.startswith(str(load_folder(run_dir)))]


def test_a_reader_sees_what_an_engine_has_written_and_nothing_before(folder):
    path, reader = folder
    file = LoadFile(path, 0, ("GPU-a",))
    seen = reader("GPU-a")
    assert seen.read() is None
    file.write(running=3, waiting=2, tokens=3, prefill=100)
    file.write(running=4, waiting=1, tokens=4, prefill=0)
    load = seen.read()
    assert (load.running, load.waiting, load.iterations, load.tokens, load.prefill) == (4, 1, 2, 7, 100)
    (name,) = said(path)
    assert stat.S_IMODE((load_folder(path) / name).stat().st_mode) == 0o600
    assert stat.S_IMODE(load_folder(path).stat().st_mode) == 0o700
    file.close()
    file.close()
    assert said(path) == []


def test_engines_on_one_gpu_are_summed_and_others_are_not_heard(folder):
    path, reader = folder
    files = [LoadFile(path, i, gpus) for i, gpus in enumerate((("GPU-a",), ("GPU-a", "GPU-b"), ("GPU-c",), ()))]
    for i, file in enumerate(files):
        file.write(10**i, 0, 1, 0)
    assert reader("GPU-a").read().running == 1011
    assert reader("").read().running == 1111
    assert reader("GPU-d").read().running == 1000, "one that does not name its GPU is taken for everybody's"
    for file in files:
        file.close()


def test_an_engine_that_is_silent_has_no_requests_but_keeps_its_totals(folder):
    path, reader = folder
    file = LoadFile(path, 0, ())
    file.write(7, 7, 5, 0)
    load = reader().read(silent_s=0.0)
    assert (load.running, load.waiting, load.tokens) == (0, 0, 5)


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(folder):
    path, reader = folder
    one = reader()
    load_folder(path).mkdir()
    os.mkfifo(load_folder(path) / "load-1-0-aa")

    def hangs(*_):
        raise AssertionError("it waits for somebody who writes")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(20)
    try:
        one.find()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert not one.knows_any
    assert said(path) == []


@pytest.mark.parametrize("header", [b"", b"[]", b'"x"', b'{"gpus": 5}', b'{"gpus": {"a": 1}}', b"\xff", b"["])
def test_a_header_that_is_none_is_not_believed_and_costs_no_descriptor(folder, header):
    path, reader = folder
    one = reader("GPU-a")
    load_folder(path).mkdir()
    descriptor = os.open(load_folder(path) / "load-1-0-aa", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        hold_descriptor(descriptor)
        os.write(descriptor, header.ljust(576))
        one.find()
        one.find()
        assert len(opened(path)) == 1, "ours"
        assert not one.knows_any
    finally:
        os.close(descriptor)


def test_sharing_what_engines_say_passes_over_one_that_has_just_ended(folder, monkeypatch):
    path, _ = folder
    other = path.with_name("dcba4321")
    share_load(path, other)
    assert list(load_folder(other).iterdir()) == [], "no engine has said anything yet"
    gone, stays = LoadFile(path, 0, ()), LoadFile(path, 1, ())
    links = Path.hardlink_to

    def link(name, target):
        gone.close()
        links(name, target)

    monkeypatch.setattr(Path, "hardlink_to", link)
    share_load(path, other)
    assert len(list(load_folder(other).iterdir())) == 1
    stays.close()


def test_a_torn_sample_is_no_word(folder):
    path, reader = folder
    file = LoadFile(path, 0, ())
    file.write(7, 7, 5, 0)
    (name,) = said(path)
    with (load_folder(path) / name).open("r+b") as raw:
        raw.seek(512)
        raw.write(struct.pack("<Q", 99))
    assert reader().read() is None
    file.close()


def test_damaged_files_that_nobody_holds_are_removed(folder):
    path, reader = folder
    load_folder(path).mkdir()
    (load_folder(path) / "load-1-0").write_bytes(b"short")
    (load_folder(path) / "load-2-0").write_bytes(b"[]" + b" " * 600)
    assert reader().read() is None
    assert said(path) == []


@pytest.mark.parametrize("running", [0, 5])
def test_a_dead_engines_last_word_is_not_believed_and_its_file_goes(folder, running):
    path, reader = folder
    to_parent, from_child = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            engine = LoadFile(path, 0, ())
            engine.write(running, 0, 5, 0)
            os.write(from_child, b"!")
            signal.alarm(30)
            signal.pause()
        finally:
            os._exit(1)
    try:
        os.close(from_child)
        os.read(to_parent, 1)
        seen = reader()
        assert seen.read().running == running
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    seen.find()
    assert seen.read() is None
    assert not seen.knows_any
    assert said(path) == []
    os.close(to_parent)


def test_a_forked_child_keeps_no_dead_engines_word_alive(folder):
    path, reader = folder
    file = LoadFile(path, 0, ())
    file.write(1, 0, 1, 0)
    (to_child, from_parent), (to_parent, from_child) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(from_parent)
        os.write(from_child, b"!")
        os.read(to_child, 1)
        os._exit(0)
    try:
        os.read(to_parent, 1)
        # As the kernel does when its process dies.
        os.close(file._descriptor)
        file._descriptor = -1
        assert reader().read() is None
    finally:
        os.close(from_parent)
        os.waitpid(pid, 0)
        for descriptor in (to_child, to_parent, from_child):
            os.close(descriptor)


def test_two_engines_of_one_process_with_one_index_are_both_heard(folder):
    path, reader = folder
    files = [LoadFile(path, 0, ()) for _ in range(2)]
    for running, file in zip((100, 3), files, strict=True):
        file.write(running, 0, running, 0)
    load = reader().read()
    assert (load.running, load.engines) == (103, 2)
    files[0].close()
    seen = reader()
    assert seen.read().running == 3
    # An engine that is made anew leaves its logger to the garbage collector.
    del file
    files.clear()
    assert said(path) == []


def test_what_is_said_during_a_look_is_heard(folder, monkeypatch):
    path, reader = folder
    file, clock = LoadFile(path, 0, ()), [10.0]
    seen = reader()
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "monotonic_ns", lambda: int(clock[0] * 1e9))
    pread = os.pread

    def slow_pread(*args):
        clock[0] += 0.5
        file.write(1, 0, 1, 0)
        return pread(*args)

    monkeypatch.setattr(os, "pread", slow_pread)
    assert seen.read(1.0, 30.0).running == 1
    monkeypatch.undo()
    file.close()


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "rename"])
def test_a_full_disk_leaves_no_descriptor_and_no_file(folder, monkeypatch, call):
    path, _ = folder
    LoadFile(path, 0, ()).close()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    before = os.listdir("/proc/self/fd")
    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        patch.setattr("pathlib.Path.rename", full) if call == "rename" else None
        with pytest.raises(OSError, match="No space left"):
            LoadFile(path, 0, ())
    assert len(os.listdir("/proc/self/fd")) == len(before)
    assert said(path) == []


def test_a_sum_says_of_how_many_engines_it_is_and_whether_all_are_here(folder):
    path, reader = folder
    known = LoadFile(path, 0, ("GPU-a",))
    known.write(1, 0, 1, 0)
    assert (reader("GPU-a").read().engines, reader("GPU-a").read().located) == (1, True)
    perhaps = LoadFile(path, 1, ("GPU-a", "GPU-b"), sure=False)
    perhaps.write(1, 0, 1, 0)
    assert (reader("GPU-a").read().engines, reader("GPU-a").read().located) == (2, False)
    perhaps.close()
    nameless = LoadFile(path, 1, ())
    nameless.write(1, 0, 1, 0)
    assert reader("GPU-a").read().located is False
    assert reader("").read().located is True
    for file in (known, nameless):
        file.close()


def test_what_engines_have_said_goes_with_the_run(folder):
    path, _ = folder
    for remove in (run_paths(path.name).remove, remove_leftovers):
        file = LoadFile(path, 0, ())
        remove()
        assert not load_folder(path).exists()
        file.write(1, 0, 1, 0)
        file.close()


def test_engines_that_come_and_go_are_found_again(folder):
    path, reader = folder
    seen = reader()
    file = LoadFile(path, 0, ())
    file.write(1, 0, 1, 0)
    assert seen.read() is None
    seen.find()
    assert seen.read().running == 1
    file.close()
    seen.find()
    assert seen.read() is None
