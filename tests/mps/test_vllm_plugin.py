"""The plugin in a process of its own, with a stand-in for vLLM and a real socket to a supervisor."""

import inspect
import json
import sys

import pytest
from mps_helpers import HERE, recorded, start_engine, wait_for

from mps_trainer.mps.folder import mps_folder
from mps_trainer.mps.summons import EngineAnswer, SummonsServer
from mps_trainer.run import run_paths, try_hold
from mps_trainer.vllm_plugin import engine

RUN = "abcd1234"


@pytest.fixture
def run(state):
    folder = mps_folder(RUN)
    folder.make()
    with try_hold(run_paths(RUN).supervisor_lock):
        yield folder


@pytest.fixture
def supervisor(run):
    answers = [EngineAnswer(True, "joins", "/our/pipe", 0.5)]
    server = SummonsServer(run.summons_socket, lambda request: answers[0])
    server.answers = answers
    yield server
    server.close()


def test_fake_engine_joins_lowers_its_share_once_and_reports_that_it_is_up(supervisor):
    found, _ = start_engine(MPS_TRAINER_RUN=RUN)
    assert found["used"] == 0.5
    assert found["again"] == {"gpu_memory_utilization": 0.5}
    assert found["env"] == {"CUDA_MPS_PIPE_DIRECTORY": "/our/pipe"}
    # Its children inherit the environment and change nothing: a number is lowered once.
    assert found["child"] == "{'gpu_memory_utilization': 0.9}\n"
    (engine,) = supervisor.engines
    assert (engine.state, engine.wished, engine.utilization) == ("ready", 0.9, 0.5)
    assert engine.request.gpus == ("GPU-a",)
    assert not found["ray"]
    assert not found["torch"]


def test_fake_engine_that_asks_for_less_keeps_its_share(supervisor):
    assert start_engine(0.3, MPS_TRAINER_RUN=RUN)[0]["used"] == 0.3


def test_fake_engine_is_not_bound_by_a_limit_meant_for_the_sidecar(supervisor):
    env = {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "GPU-a=2G"}
    assert set(start_engine(MPS_TRAINER_RUN=RUN, **env)[0]["env"]) == {"CUDA_MPS_PIPE_DIRECTORY"}


def test_fake_engine_that_fails_to_start_says_why(supervisor):
    found, _ = start_engine(0.05, MPS_TRAINER_RUN=RUN)
    assert "No available memory" in found["used"]
    wait_for(lambda: supervisor.engines[0].state == "failed")
    assert "No available memory" in supervisor.engines[0].error


def test_fake_engine_that_is_told_to_stay_alone_is_untouched(supervisor):
    supervisor.answers[0] = EngineAnswer(False, "on another GPU")
    found, _ = start_engine(MPS_TRAINER_RUN=RUN)
    assert found["used"] == 0.9
    assert found["env"] == {}
    assert [engine.state for engine in supervisor.engines] == ["alone"]


@pytest.mark.parametrize("env", [{}, {"MPS_TRAINER_RUN": "99999999"}])
def test_fake_engine_of_no_run_or_of_a_dead_one_is_untouched(supervisor, env):
    found, said = start_engine(**env)
    assert found["used"] == 0.9
    assert found["env"] == {}
    assert supervisor.engines == []
    assert said == ""


def test_fake_engine_of_a_run_without_mps_is_untouched(run):
    found, _ = start_engine(MPS_TRAINER_RUN=RUN)
    assert found["used"] == 0.9
    assert found["env"] == {}


def test_fake_engine_starts_even_when_the_plugin_breaks(run, monkeypatch):
    run.summons_socket.write_text("no socket")
    found, said = start_engine(MPS_TRAINER_RUN=RUN, CUDA_VISIBLE_DEVICES="0", MPS_TRAINER_JOIN_TIMEOUT="soon")
    assert found["used"] == 0.9
    assert "the engine starts without the sidecar" in said


# Taken from the real packages; scripts/check_vllm_versions.py runs the plugin in them.
@pytest.mark.parametrize(("version", "facts"), json.loads(recorded("vllm_engine_args.json")).items())
def test_what_the_plugin_wraps_is_there_in_the_recorded_vllm(version, facts, monkeypatch):
    assert [list(name) for name in engine._ENGINES] == facts["engines"]
    monkeypatch.syspath_prepend(str(HERE / "fake_vllm"))
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.create_engine_config
    parameters = inspect.signature(original).parameters.values()
    defaults = [[p.name, None if p.default is p.empty else str(p.default)] for p in parameters]
    assert defaults == facts["create_engine_config"], f"the stand-in differs from vLLM {version}"
    told = []

    class Session:
        def tell(self, event, **fields):
            told.append((event, fields))

    engine.follow_engine(Session(), 0.5)
    assert inspect.signature(EngineArgs.create_engine_config) == inspect.signature(original)
    args = EngineArgs(0.9)
    assert getattr(args, facts["field"]) == 0.9
    for arguments in ((), (None,), (None, True)):
        assert args.create_engine_config(*arguments) == {"gpu_memory_utilization": 0.5}
    assert args.create_engine_config(usage_context=None, headless=True) == {"gpu_memory_utilization": 0.5}
    assert set(map(str, told)) == {str(("config", {"wished": 0.9, "utilization": 0.5}))}
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        del sys.modules[name]
