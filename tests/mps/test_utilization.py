"""What the supervisor writes of a GPU's utilization, with a mocked driver."""

import itertools
import logging
import time
from types import SimpleNamespace

import pynvml
import pytest

from mps_trainer.config import load_settings
from mps_trainer.launcher import gpu_share
from mps_trainer.launcher.gpu_share import GpuShare
from mps_trainer.mps.folder import mps_folder
from mps_trainer.mps.utilization import Utilization, read_utilization
from mps_trainer.run import RunRecord
from mps_trainer.run.engine_load import LoadFile
from mps_trainer.sidecar.pace import source
from mps_trainer.sidecar.pace.source import Source


@pytest.fixture
def folder(state, monkeypatch):
    found = mps_folder("abcd1234")
    found.make()
    for name in ("nvmlInit", "nvmlShutdown"):
        monkeypatch.setattr(pynvml, name, lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: uuid)
    return found


def test_utilization_with_a_mocked_driver_is_read_back_and_not_sampled_at_every_look(folder, monkeypatch):
    asked = []
    monkeypatch.setattr(
        pynvml, "nvmlDeviceGetUtilizationRates", lambda gpu: asked.append(gpu) or SimpleNamespace(gpu=97)
    )
    assert read_utilization(folder) is None
    monkeypatch.setattr("mps_trainer.mps.utilization._EVERY_S", 600.0)
    sampler = Utilization(folder)
    sampler.sample("GPU-a")
    sampler.sample("GPU-a")
    assert asked == ["GPU-a"]
    at, percent = read_utilization(folder)
    assert percent == 97
    assert abs(time.monotonic() - at) < 60


def test_a_mocked_driver_that_does_not_tell_is_asked_ever_less_often_and_believed_again(folder, monkeypatch, caplog):
    clock, asked, works = [100.0], [], []

    def ask(gpu):
        asked.append(clock[0])
        if not works:
            raise pynvml.NVMLError(3)
        return SimpleNamespace(gpu=42)

    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", ask)
    caplog.set_level(logging.INFO, "mps_trainer.supervisor")
    sampler = Utilization(folder)
    for _ in range(600):
        sampler.sample("GPU-a")
        clock[0] += 0.5
    gaps = [later - earlier for earlier, later in itertools.pairwise(asked)]
    assert gaps[:7] == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0]
    assert max(gaps) == 60.0
    assert len(caplog.records) == 1
    assert "nvidia-smi" in caplog.text
    assert read_utilization(folder) is None
    works.append(True)
    clock[0] += 60
    sampler.sample("GPU-a")
    clock[0] += 0.5
    sampler.sample("GPU-a")
    assert asked[-1] - asked[-2] == 0.5
    assert read_utilization(folder) == (clock[0], 42.0)
    assert "tells again" in caplog.text


@pytest.mark.parametrize(("pace", "asked"), [("auto", 1), ("off", 0)])
def test_a_mocked_driver_is_asked_only_where_the_run_is_paced(folder, tmp_path, monkeypatch, pace, asked):
    count = []
    monkeypatch.setattr(
        pynvml, "nvmlDeviceGetUtilizationRates", lambda gpu: count.append(gpu) or SimpleNamespace(gpu=1)
    )
    record = RunRecord(
        run_id="abcd1234", config="", derived_config="", run_dir=str(tmp_path), ray_namespace="", mps="on",
        device="cuda:0", settings={"join": "auto", "pace": pace},
    )  # fmt: skip
    share = GpuShare.of_run(record)
    share._utilization.sample("GPU-a")
    assert len(count) == asked


def test_the_pace_tells_idle_from_busy_by_utilization_but_not_by_its_own_kernels(folder, tmp_path, monkeypatch):
    samples = []
    monkeypatch.setattr(source, "read_utilization", lambda folder: samples[-1] if samples else None)
    record = RunRecord(
        run_id="abcd1234", config="", derived_config="", run_dir=str(tmp_path), ray_namespace="", settings={}, mps="on"
    )
    looks = Source(record)
    assert looks.look(10.0, 0.0).source == "arrivals"
    samples.append((20.0, 99.0))
    seen = looks.look(20.1, last_step=10.0)
    assert (seen.source, seen.busy) == ("nvml", True)
    samples.append((21.0, 3.0))
    assert looks.look(21.1, last_step=10.0).busy is False
    samples.append((22.0, 99.0))
    assert looks.look(22.1, last_step=22.0).busy is False, "those may be our own kernels"
    assert looks.look(23.5, last_step=23.4).busy is None
    assert looks.look(40.0, last_step=23.4).source == "arrivals", "the sample is old"
    samples.append((50.0, 3.0))
    assert looks.look(50.1, last_step=50.0).busy is False
    for second in range(51, 70):
        samples.append((float(second), 99.0))
        found = looks.look(second + 0.1, last_step=second)
    assert found.busy is None, "our own kernels hide an engine that has begun meanwhile"
    looks.close()


def test_nothing_waits_where_nothing_is_shared_and_a_lost_engine_is_not_believed(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(source, "read_utilization", lambda folder: None)
    record = RunRecord(
        run_id="abcd1234", config="", derived_config="", run_dir=str(tmp_path), ray_namespace="", settings={}
    )
    looks = Source(record)
    assert looks.look(10.0, 0.0) == source.Sight("none", busy=False)
    file = LoadFile(tmp_path, 0, ())
    file.write(5, 0, 5, 0)
    assert looks.look(20.0, 0.0).source == "engine"
    monkeypatch.setattr(source, "_LOST_S", 0.0)
    assert looks.look(21.0, 0.0).source == "arrivals", "its last word was of requests"
    file.write(0, 0, 5, 0)
    assert looks.look(22.0, 0.0).source == "engine", "it said that it is idle"
    looks.close()
    file.close()


@pytest.mark.parametrize(("pace", "sampled"), [("off", False), ("auto", True), ("on", True)])
def test_nobody_samples_the_utilization_without_a_pace(folder, tmp_path, monkeypatch, pace, sampled):
    made = []
    monkeypatch.setattr(gpu_share, "Utilization", lambda folder, *, wanted: made.append(wanted))
    record = RunRecord(
        run_id="abcd1234", config="", derived_config="", run_dir=str(tmp_path), ray_namespace="",
        settings=load_settings({"pace": pace}).dump(), mps="on",
    )  # fmt: skip
    GpuShare.of_run(record)
    assert made == [sampled]
