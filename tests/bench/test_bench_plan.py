"""What is planned for a machine: arms, order, processes, memory. The GPUs here are mocked."""

from __future__ import annotations

import dataclasses
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bench_helpers import EVERYTHING, GIB, gpu, mocked_surroundings

from mps_trainer.bench import options as flags
from mps_trainer.bench.arms import ARMS, BY_NAME, PACE, Here, choose, find_arm
from mps_trainer.bench.run import Benchmark, prepare
from mps_trainer.bench.setting import Setting
from mps_trainer.bench.trainers import SidecarTrainer
from mps_trainer.bench.vllm_engine import kv_bytes, needed_bytes
from mps_trainer.bench.work import Work
from mps_trainer.config import load_settings
from mps_trainer.errors import ConfigError, PlacementError
from mps_trainer.launcher.memory_plan import CONTEXT, SLACK
from mps_trainer.mps.checks import read_surroundings
from mps_trainer.mps.environment import NO_PIPE_DIR, PIPE_VARIABLE, PRIORITY_VARIABLE, SHARE_VARIABLE
from mps_trainer.mps.folder import mps_folder
from mps_trainer.mps.nvml import GpuProcess, NvmlFacts
from mps_trainer.mps.placement import GpuPlacement
from mps_trainer.run.engine_load import LoadFile, LoadReader
from mps_trainer.vllm_plugin.plugin import RUN_VARIABLE


def planned(*argv: str, gpus: int = 2, here: Here = EVERYTHING) -> Benchmark:
    return prepare(flags.parse(argv), mocked_surroundings(read_surroundings(), gpus), here)


def test_the_order_of_steps_with_a_mocked_gpu() -> None:
    [plan] = planned("--rounds", "5").plans
    words = [step.what.split(" (")[0] for step in plan.steps]
    assert words[0] == "the MPS daemon of the benchmark"
    trainers = [i for i, what in enumerate(words) if what.startswith("trainer of")]
    engines = [i for i, what in enumerate(words) if what.startswith("engine ")]
    # vLLM measures a GPU whose memory must not change, so everybody else is there before.
    assert max(trainers) < min(engines)
    assert [words[i] for i in engines] == ["engine plain", "engine client"]
    assert len(trainers) == 9
    assert words[-3:] == [
        f"5 rounds of {11 * 3 + 1} windows, interleaved", "3 closing blocks of 5 solo batches", "the end"
    ]  # fmt: skip
    assert plan.alone.name == "time-slices"


def test_rounds_are_interleaved_and_begin_with_another_arm_each() -> None:
    [plan] = planned().plans
    counts = Counter((arm.name, load.name) for number in range(5) for arm, _, load in plan.order(number))
    assert set(counts.values()) == {5}
    assert len({plan.order(number)[0][0].name for number in range(5)}) == 5


def test_the_memory_of_two_engines_and_of_all_sidecars_with_a_mocked_gpu() -> None:
    [plan] = planned("--tasks", "B").plans
    assert plan.memory is not None
    assert sum(size for _, size in plan.memory.rows) == 140 * GIB
    shares = plan.share_of_gpu
    assert set(shares) == {"plain", "client"}
    assert shares["plain"] == shares["client"] > 0.2
    sidecars = 5 * (plan.works[0].pool + CONTEXT + SLACK)
    assert sum(shares.values()) * 140 * GIB + sidecars + 2 * 3 * GIB < 140 * GIB


def test_two_tasks_on_one_pair_of_engines_with_a_mocked_gpu() -> None:
    arms = ("--tasks", "A,B", "--arms", "none,none-client,time-slices,mps-low,mps-pace", "--gap", "0.3")
    [plan] = planned(*arms).plans
    assert [work.name for work in plan.works] == ["A", "B"]
    assert plan.windows == 2 + 2 * 3 + 2
    assert plan.engines == ("plain", "client")
    sidecars = sum(3 * (work.pool + CONTEXT + SLACK) for work in plan.works)
    shares = plan.share_of_gpu
    assert sum(shares.values()) * 140 * GIB + sidecars + 2 * 3 * GIB < 140 * GIB
    # What an engine takes is in its share: weights, the KV cache that it is given, activations.
    assert needed_bytes("7B", 0) + kv_bytes("7B", 256, 128 + 768) + 4 * GIB < shares["client"] * 140 * GIB
    assert len(planned(*arms, "--separate").plans) == 2


def test_engines_that_do_not_fit_are_refused_before_anything_starts() -> None:
    with pytest.raises(PlacementError, match="do not fit"):
        planned("--longest-tokens", "16000", "--sequences", "512")


def test_a_gpu_that_somebody_uses_is_refused() -> None:
    busy = dataclasses.replace(gpu(0), processes=(GpuProcess(4711, GIB, "python"),))
    around = dataclasses.replace(read_surroundings(), nvml=NvmlFacts((busy,), "580"))
    with pytest.raises(PlacementError, match="4711"):
        prepare(flags.parse([]), around, EVERYTHING)


def without_pace(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key != PACE}


@pytest.fixture(autouse=True)
def state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # pytest's tmp_path is longer than a Unix socket's path may be.
    with tempfile.TemporaryDirectory(prefix="mt-", dir="/tmp") as folder:
        monkeypatch.setenv("MPS_TRAINER_STATE_DIR", f"{folder}/s")
        yield


def made(tmp_path: Path) -> tuple[Setting, Benchmark]:
    benchmark = planned()
    setting = Setting(benchmark.plans[0], benchmark.options, tmp_path, benchmark.gpus)
    setting._mps = mps_folder("bench")
    return setting, benchmark


def test_who_is_a_client_with_a_mocked_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting, benchmark = made(tmp_path)
    original = Work.settings
    # Whether this version has the pace or not.
    monkeypatch.setattr(Work, "settings", lambda work, **more: original(work, **without_pace(more)))
    assert setting.engine_environment("plain")[PIPE_VARIABLE] == NO_PIPE_DIR
    trainers = {arm.name: setting.trainer(arm, benchmark.plans[0].works[0]) for arm in benchmark.plans[0].trainers}
    client = setting.engine_environment("client")
    assert client[PIPE_VARIABLE] == str(mps_folder("bench").pipe_dir)
    assert client[RUN_VARIABLE] == trainers["mps-pace"].run_id  # type: ignore[attr-defined]
    assert client["CUDA_VISIBLE_DEVICES"] == "0"
    records: dict[str, Any] = {
        name: trainers[name]._record
        for name in ("sidecar-cpu", "own-gpu", "time-slices", "mps-low")  # type: ignore[attr-defined]
    }
    assert {name: (record.device, record.mps) for name, record in records.items()} == {
        "sidecar-cpu": ("cpu", "off"), "own-gpu": ("cuda:1", "off"), "time-slices": ("cuda:0", "off"),
        "mps-low": ("cuda:0", "on"),
    }  # fmt: skip


def test_the_variables_of_an_mps_sidecar_by_arm(tmp_path: Path) -> None:
    setting, benchmark = made(tmp_path)
    found = {}
    for arm in ARMS:
        placement = setting.placement(arm, benchmark.plans[0].works[0])
        if placement is not None:
            env = placement.environment({}, mps_folder("bench"))
            found[arm.name] = (env[PRIORITY_VARIABLE], env.get("CUDA_LAUNCH_BLOCKING"))
    assert found == {"mps-plain": ("0", None), "mps-low": ("1", "1"), "mps-pace": ("1", "1")}


def test_every_paced_sidecar_hears_the_one_engine(tmp_path: Path) -> None:
    setting, benchmark = made(tmp_path)
    first, second = (setting.trainer(BY_NAME["mps-pace"], benchmark.plans[0].works[0]) for _ in range(2))
    assert isinstance(first, SidecarTrainer)
    assert isinstance(second, SidecarTrainer)
    for trainer in (first, second):
        trainer.run_dir.mkdir()
    assert setting.engine_environment("client")[RUN_VARIABLE] == first.run_id
    said = LoadFile(first.run_dir, 0, ())
    setting.engines_are_up()
    said.write(7, 0, 1, 0)
    reader = LoadReader(second.run_dir)
    reader.find()
    found = reader.read()
    assert found is not None
    assert found.running == 7
    reader.close()
    said.close()


def test_sidecars_of_one_daemon_have_folders_of_their_own(tmp_path: Path) -> None:
    setting, benchmark = made(tmp_path)
    daemon = mps_folder("bench")
    daemon.make()
    (daemon.pipe_dir / "control").touch()
    work = benchmark.plans[0].works[0]
    first, second = (setting.trainer(BY_NAME["mps-low"], work) for _ in range(2))
    for trainer in (first, second):
        trainer._place()  # type: ignore[attr-defined]
        folder = mps_folder(trainer.run_id)  # type: ignore[attr-defined]
        assert GpuPlacement.load(folder).limit == work.pool + CONTEXT + SLACK
        assert folder.pipe_dir.resolve() == daemon.pipe_dir.resolve()
        trainer.close()
        assert not folder.path.exists()
    assert (daemon.pipe_dir / "control").exists()


def test_the_spec_of_a_vllm_engine_holds_the_longest_rollout(tmp_path: Path) -> None:
    setting, _ = made(tmp_path)
    spec = setting.engine_spec("client")
    assert (spec["kind"], spec["shape"], spec["sequences"], spec["longest"]) == ("vllm", "7B", 256, 128 + 768)


def test_without_a_gpu_the_other_arms_are_left_out_with_the_reason() -> None:
    chosen, left_out = choose(None, Here(), tiny=True)
    assert [arm.name for arm in chosen] == ["none", "cpu-in-operator", "sidecar-cpu"]
    assert "FastAPI" in left_out["rest-cpu"]
    assert set(left_out) == {arm.name for arm in ARMS} - {arm.name for arm in chosen}


def test_a_version_without_a_pace_says_so() -> None:
    _, left_out = choose(None, dataclasses.replace(EVERYTHING, pace=False), tiny=False)
    assert left_out == {"mps-pace": "this version of mps-trainer has no setting max_rollout_slowdown"}


def test_one_gpu_has_no_second_one() -> None:
    _, left_out = choose(None, dataclasses.replace(EVERYTHING, gpus=1), tiny=False)
    assert left_out == {"own-gpu": "it needs a second GPU"}


def test_the_pace_is_tuned_by_flags_and_variants_are_arms_beside_it(tmp_path: Path) -> None:
    argv = ("--pace-set", "min_steps_per_batch=0", "--pace-variant", "gentle:margin=0.7,max_rollout_slowdown=0.02")
    benchmark = planned("--arms", "mps-low,mps-pace", *argv)
    [plan] = benchmark.plans
    assert [arm.name for arm in plan.arms] == ["none", "mps-low", "mps-pace", "mps-pace@gentle"]
    setting = Setting(plan, benchmark.options, tmp_path, benchmark.gpus)
    trainers = {arm.name: setting.trainer(arm, plan.works[0]) for arm in plan.trainers}
    found = {name: load_settings(trainer._record.settings) for name, trainer in trainers.items()}  # type: ignore[attr-defined]
    assert [found[name].pace for name in found] == ["off", "on", "on"]
    plain, gentle = found["mps-pace"], found["mps-pace@gentle"]
    assert (plain.max_rollout_slowdown, plain.min_steps_per_batch, plain.pace_tuning.margin) == (0.03, 0, 0.9)
    assert (gentle.max_rollout_slowdown, gentle.min_steps_per_batch, gentle.pace_tuning.margin) == (0.02, 0, 0.7)
    assert find_arm("mps-pace@gentle") is BY_NAME["mps-pace"]
    with pytest.raises(ConfigError, match="no setting of the pace 'margn=1'"):
        planned("--pace-set", "margn=1")
    with pytest.raises(ConfigError, match=r"share is no setting of the pace\n.*--pace-variant NAME:share="):
        planned("--pace-set", "share=25")


def test_shares_of_the_sms_and_a_step_in_flight_are_arms_with_a_mocked_gpu(tmp_path: Path) -> None:
    argv = ("--low-variant", "quarter:share=25", "--low-variant", "step:blocking=false")
    benchmark = planned("--arms", "mps-low,mps-pace", *argv, "--pace-variant", "half:share=50,margin=0.8")
    [plan] = benchmark.plans
    names = ["none", "mps-low", "mps-low@quarter", "mps-low@step", "mps-pace", "mps-pace@half"]
    assert [arm.name for arm in plan.arms] == names
    setting = Setting(plan, benchmark.options, tmp_path, benchmark.gpus)
    found = {}
    for arm in plan.trainers:
        placement = setting.placement(arm, plan.works[0])
        assert placement is not None
        env = placement.environment({}, mps_folder("bench"))
        found[arm.name] = [env.get(name) for name in (SHARE_VARIABLE, PRIORITY_VARIABLE, "CUDA_LAUNCH_BLOCKING")]
    assert found == {
        "mps-low": [None, "1", "1"], "mps-low@quarter": ["25", "1", "1"], "mps-low@step": [None, "1", None],
        "mps-pace": [None, "1", "1"], "mps-pace@half": ["50", "1", "1"],
    }  # fmt: skip
    assert plan.arms[-1].settings(0.03)["pace_tuning"] == {"margin": 0.8}
    assert "pace_tuning" not in plan.arms[2].settings(0.03)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("x:share=0", "whole number from 1 to 100"), ("x:share=true", "whole number"), ("x:share=2.5", "whole number"),
        ("x:blocking=no", "write true or false"), ("x:margin=0.5", "mps-low has no pace"), ("x:sms=3", "'sms=3'"),
    ],
)  # fmt: skip
def test_variants_of_a_client_that_make_no_sense_are_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        planned("--arms", "mps-low", "--low-variant", text)
    with pytest.raises(ConfigError, match="two of --low-variant have one name"):
        planned("--arms", "mps-low", "--low-variant", "a:share=25", "--low-variant", "a:share=50")
    with pytest.raises(ConfigError, match="--low-variant varies mps-low, which --arms does not name"):
        planned("--arms", "mps-pace", "--low-variant", "a:share=25")


def test_arms_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="there is no arm 'mps'"):
        choose(["mps"], EVERYTHING, tiny=False)
    with pytest.raises(ConfigError, match="no arm with a trainer"):
        choose(["mps-low"], Here(), tiny=True)


def test_the_plan_says_its_time_first_and_whether_the_budget_holds_it() -> None:
    lines = planned("--budget-s", "60").lines
    assert lines[0].startswith("time: about ")
    assert lines[0].endswith("it will end with fewer rounds")
    assert any("engine client" in line and "%" in line for line in lines)
