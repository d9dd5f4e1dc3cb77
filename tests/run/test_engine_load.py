"""The file in which an engine says how busy it is."""

import os
import stat
import struct

import pytest

from mps_trainer.run.engine_load import LoadFile, LoadReader


@pytest.fixture
def folder(tmp_path):
    readers = []

    def reader(gpu=""):
        readers.append(LoadReader(tmp_path, gpu))
        readers[-1].find()
        return readers[-1]

    yield tmp_path, reader
    for one in readers:
        one.close()


def test_a_reader_sees_what_an_engine_has_written_and_nothing_before(folder):
    path, reader = folder
    file = LoadFile(path, 0, ("GPU-a",))
    seen = reader("GPU-a")
    assert seen.read() is None
    file.write(running=3, waiting=2, tokens=3, prefill=100)
    file.write(running=4, waiting=1, tokens=4, prefill=0)
    load = seen.read()
    assert (load.running, load.waiting, load.iterations, load.tokens, load.prefill) == (4, 1, 2, 7, 100)
    (name,) = os.listdir(path)
    assert stat.S_IMODE((path / name).stat().st_mode) == 0o600
    file.close()
    file.close()
    assert os.listdir(path) == []


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


def test_a_torn_sample_and_a_damaged_file_are_no_word(folder):
    path, reader = folder
    file = LoadFile(path, 0, ())
    file.write(7, 7, 5, 0)
    (name,) = os.listdir(path)
    with (path / name).open("r+b") as raw:
        raw.seek(512)
        raw.write(struct.pack("<Q", 99))
    (path / "load-1-0").write_bytes(b"short")
    (path / "load-2-0").write_bytes(b"[]" + b" " * 600)
    assert reader().read() is None
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
