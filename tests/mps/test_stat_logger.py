"""The entry point in vLLM's group of stat loggers, with a stand-in for vLLM's base class and its loader."""

import importlib.metadata
import logging
import re
import sys
import time
from abc import ABC, abstractmethod
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from mps_trainer.config import load_settings
from mps_trainer.run import RunRecord, run_paths, try_hold
from mps_trainer.run.engine_load import LoadReader, load_folder
from mps_trainer.vllm_plugin import stat_logger
from mps_trainer.vllm_plugin.engine import own_gpus

RUN = "abcd1234"
GROUP = "vllm.stat_logger_plugins"


class Base(ABC):
    """As vLLM 0.23: what a logger has to have."""

    @abstractmethod
    def __init__(self, vllm_config, engine_index=0): ...

    @abstractmethod
    def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0): ...

    @abstractmethod
    def log_engine_initialized(self): ...


@pytest.fixture
def fake_vllm(monkeypatch):
    for name in ("vllm", "vllm.v1", "vllm.v1.metrics", "vllm.v1.metrics.loggers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["vllm.v1.metrics.loggers"].StatLoggerBase = Base


@pytest.fixture
def run(state, tmp_path, monkeypatch, fake_vllm):
    def make(mps="on", **settings):
        record = RunRecord(
            run_id=RUN, config="", derived_config="", run_dir=str(tmp_path / "run"), ray_namespace="ns",
            settings=load_settings({"pace": "auto", **settings}).dump(), mps=mps,
        )  # fmt: skip
        (tmp_path / "run").mkdir()
        record.save(run_paths(RUN).run_file)
        monkeypatch.setenv("MPS_TRAINER_RUN", RUN)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a")
        return record

    with try_hold(run_paths(RUN).supervisor_lock):
        yield make


def entry_point():
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    found = re.search(rf'^\[project.entry-points."{GROUP}"\]\n(\w+) = "(.+)"$', project, re.MULTILINE)
    return importlib.metadata.EntryPoint(found[1], found[2], GROUP)


def load_as_vllm_does(log):
    try:
        return entry_point().load()
    except Exception:
        log.exception("Failed to load plugin mps_trainer")
        return None


def stats(running=3, waiting=2, skipped=1, tokens=3, prefill=0):
    iteration = SimpleNamespace(
        num_generation_tokens=tokens, prompt_token_stats=SimpleNamespace(computed=prefill, total=prefill + 50)
    )
    scheduler = SimpleNamespace(num_running_reqs=running, num_waiting_reqs=waiting, num_skipped_waiting_reqs=skipped)
    return scheduler, iteration


def seen(record):
    reader = LoadReader(Path(record.run_dir), "GPU-a")
    reader.find()
    load = reader.read()
    reader.close()
    return load


def test_fake_engine_of_a_paced_run_says_once_an_iteration_how_busy_it_is(run):
    record = run()
    kind = load_as_vllm_does(logging.getLogger("vllm.plugins"))
    assert isinstance(kind, type)
    assert issubclass(kind, Base)
    logger = kind(SimpleNamespace(), 0)
    logger.log_engine_initialized()
    scheduler, iteration = stats(prefill=100)
    logger.record(scheduler, iteration, mm_cache_stats=None, engine_idx=0)
    logger.record(scheduler, None, mm_cache_stats=None, engine_idx=0)
    logger.record(None, iteration)
    load = seen(record)
    assert (load.running, load.waiting, load.iterations, load.tokens, load.prefill) == (3, 3, 2, 3, 100)
    assert abs(time.monotonic() - load.at) < 60


@pytest.mark.parametrize("settings", [{"mps": "off"}, {"pace": "off"}, {"pace": False}])
def test_fake_engine_of_a_run_without_a_pace_has_no_logger(run, settings):
    run(**settings)
    assert load_as_vllm_does(logging.getLogger("vllm.plugins")) is None


def test_fake_engine_of_no_run_has_no_logger_and_vllm_does_not_complain(state, monkeypatch, fake_vllm, caplog):
    monkeypatch.delenv("MPS_TRAINER_RUN", raising=False)
    log = logging.getLogger("vllm.plugins")
    assert load_as_vllm_does(log) is None
    assert caplog.records == []
    try:
        raise AttributeError("of another plugin")
    except AttributeError:
        log.exception("Failed to load plugin other")
    assert len(caplog.records) == 1


def test_fake_engine_goes_on_when_the_folder_or_the_statistics_are_not_as_expected(run, caplog):
    record = run()
    kind = stat_logger.logger_class(record)
    logger = kind(SimpleNamespace(), 0)
    logger.record(*stats())
    assert seen(record) is not None
    for _ in range(3):
        logger.record(SimpleNamespace(), None)
    assert seen(record) is None, "what it said last would not become old"
    load_folder(Path(record.run_dir)).rmdir()
    load_folder(Path(record.run_dir)).touch()
    nowhere = kind(SimpleNamespace(), 0)
    nowhere.record(*stats())
    assert len([r for r in caplog.records if "cannot tell how busy" in r.message]) == 2


def test_a_synchronous_fake_engine_is_given_the_logger(run):
    record = run()
    engine = SimpleNamespace(logger_manager=SimpleNamespace(stat_loggers=[]), vllm_config=None)
    assert stat_logger.attach(engine)
    engine.logger_manager.stat_loggers[0].record(scheduler_stats=stats()[0], iteration_stats=None, engine_idx=0)
    assert seen(record).running == 3
    assert not stat_logger.attach(SimpleNamespace(logger_manager=None))


def parallel(**changes):
    """As vLLM 0.23 with one engine; `world_size` is the workers of each."""
    known = {
        "world_size": 1, "data_parallel_size": 1, "data_parallel_size_local": 1, "data_parallel_rank": 0,
        "data_parallel_index": 0, "data_parallel_rank_local": None, "data_parallel_backend": "mp",
        "distributed_executor_backend": "mp",
    }  # fmt: skip
    return SimpleNamespace(parallel_config=SimpleNamespace(**{**known, **changes}))


@pytest.mark.parametrize(
    ("config", "index", "visible", "found"),
    [
        (parallel(), 0, "a", ("a", True)),
        (parallel(), 0, "abcd", ("a", True)),
        (parallel(world_size=2), 0, "abcd", ("ab", True)),
        # One front end of four ranks that all see every GPU, as in `--data-parallel-size 4`.
        (parallel(data_parallel_size=4, data_parallel_size_local=4), 2, "abcd", ("c", True)),
        (parallel(world_size=2, data_parallel_size=2, data_parallel_size_local=2), 1, "abcd", ("cd", True)),
        # The second of two machines, ranks 2 and 3.
        (parallel(data_parallel_size=4, data_parallel_size_local=2, data_parallel_index=2), 3, "ab", ("b", True)),
        # A rank on the other machine.
        (parallel(data_parallel_size=4, data_parallel_size_local=2), 3, "ab", ("ab", False)),
        # One engine a process, which sees every GPU, or its own alone.
        (parallel(data_parallel_size=2, data_parallel_rank=1, data_parallel_rank_local=1), 1, "ab", ("b", True)),
        (parallel(data_parallel_size=2, data_parallel_rank=1, data_parallel_rank_local=1), 1, "b", ("b", True)),
        (parallel(distributed_executor_backend="ray"), 0, "ab", ("ab", False)),
        (parallel(data_parallel_size=2, data_parallel_backend="ray"), 1, "ab", ("ab", False)),
        (SimpleNamespace(), 0, "ab", ("ab", False)),
        (None, 0, "a", ("a", True)),
        (parallel(), 0, "", ("", False)),
    ],
)
def test_a_fake_engine_names_its_own_gpus_where_it_knows_them(config, index, visible, found):
    gpus, sure = own_gpus(tuple(visible), config, index)
    assert ("".join(gpus), sure) == found


def test_fake_data_parallel_ranks_are_heard_on_their_own_gpu_alone(run, monkeypatch):
    record = run()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b,GPU-a")
    kind = stat_logger.logger_class(record)
    config = parallel(data_parallel_size=2, data_parallel_size_local=2)
    loggers = [kind(config, index) for index in range(2)]
    for logger, running in zip(loggers, (100, 3), strict=True):
        logger.record(*stats(running=running))
    load = seen(record)
    assert (load.running, load.engines, load.located) == (3, 1, True)


def test_the_logger_fits_the_real_vllm(run, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    loggers = pytest.importorskip("vllm.v1.metrics.loggers", exc_type=ImportError)
    from vllm.v1.metrics.stats import IterationStats, SchedulerStats

    record = run()
    kind = stat_logger.logger_class(record)
    assert issubclass(kind, loggers.StatLoggerBase)
    # As its manager makes and calls a logger of the group.
    adapter = loggers.PerEngineStatLoggerAdapter(parallel(), [0], kind)
    adapter.log_engine_initialized()
    scheduler, iteration = SchedulerStats(num_running_reqs=3, num_waiting_reqs=2), IterationStats()
    iteration.num_generation_tokens = 3
    adapter.record(scheduler, iteration, mm_cache_stats=None, engine_idx=0)
    adapter.record(scheduler, None, engine_idx=0)
    adapter.log()
    load = seen(record)
    assert (load.running, load.waiting, load.iterations, load.tokens, load.prefill) == (3, 2, 2, 3, 0)
