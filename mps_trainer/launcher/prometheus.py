"""A run's figures for Prometheus at `http://127.0.0.1:<prometheus_port>/metrics`; off unless the port is set.

consumes   what `status` reads: the run folder's files, at each scrape
produces   the metrics of docs/watching.md, every one with the label `run_id`
serves     in daemon threads of the supervisor, which lives through the sidecar's restarts and is small

It binds to this machine alone. A port that is taken, or whatever else is wrong with the metrics, costs them and nothing
else.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mps_trainer.config import Settings
from mps_trainer.errors import ConfigError
from mps_trainer.run import RunPaths, RunRecord, State, Status, is_held
from mps_trainer.run.figures import Figures, Watcher

if TYPE_CHECKING:
    from prometheus_client import Metric

log = logging.getLogger("mps_trainer.supervisor")

ADDRESS = "127.0.0.1"
_PREFIX = "mps_trainer_"
# Before it `start_http_server` returned nothing that could be ended.
_OLDEST = (0, 19)

# Name, what it is, and the number; "_total" is added to a counter's name.
_Number = Callable[[Status], "float | None"]
_COUNTERS: tuple[tuple[str, str, _Number], ...] = (
    ("sidecar_restarts", "Sidecars that the supervisor started after the first", lambda s: s.restarts),
    ("batches", "Batches of the explorer that the sidecar has taken", lambda s: s.batches),
    ("experiences_received", "Experiences that the sidecar has received", lambda s: s.experiences),
    ("experiences_duplicate", "Received experiences that were known already", lambda s: s.duplicates),
    ("experiences_trained", "Draws from the replay buffer for training", lambda s: s.trained),
    ("steps_skipped", "Training steps given up because the pace let too many wait", lambda s: s.steps_skipped),
    ("experiences_scored", "Experiences that were given a score", lambda s: s.scored),
    (
        "experiences_set_aside",
        "Experiences that ended a sidecar, kept from its successors",
        lambda s: s.set_aside,
    ),
)
_GAUGES: tuple[tuple[str, str, _Number], ...] = (
    ("model_version", "Training steps that the model has taken", lambda s: s.version),
    ("loss", "Loss of the last training step", lambda s: s.loss),
    ("auc", "AUC on the last 1,024 experiences or so, before training on them", lambda s: s.auc),
    ("replay_experiences", "Experiences in the replay buffer", lambda s: s.replay_size),
    ("steps_owed", "Training steps that are due", lambda s: s.steps_owed),
    ("pace_share", "Share of the rollout's time that was spent training", lambda s: s.pace_share),
    ("pace_slowdown", "Share by which the engine is slower while the sidecar trains", lambda s: s.pace_slowdown),
    ("backlog_records", "Records sent and not yet taken", lambda s: s.backlog),
    ("backlog_age_seconds", "How long ago the oldest unread record was sent", lambda s: s.backlog_age_s),
    ("memory_resident_bytes", "Resident memory of the sidecar", lambda s: s.memory_bytes),
    (
        "memory_gpu_peak_bytes",
        "The most that tensors have taken on the GPU",
        lambda s: s.gpu_memory_bytes,
    ),
    ("memory_cap_bytes", "The sidecar's reservation; on the CPU a wish", lambda s: s.memory_cap_bytes),
    ("status_timestamp_seconds", "When the sidecar last spoke, since the epoch", lambda s: s.updated),
)


def check_prometheus(settings: Settings) -> None:
    """ConfigError when `prometheus_port` is set and prometheus-client is not installed, or too old."""
    if settings.prometheus_port and (found := _unusable()):
        raise ConfigError(
            f"prometheus_port is {settings.prometheus_port}, and {found}",
            "pip install -e '.[prometheus]' in the clone of mps-trainer, or leave prometheus_port out",
        )


def _unusable() -> str:
    """What is wrong with the installed prometheus-client; "" when nothing is known to be."""
    if importlib.util.find_spec("prometheus_client") is None:
        return "prometheus-client is not installed"
    try:
        version = importlib.metadata.version("prometheus-client")
    except importlib.metadata.PackageNotFoundError:
        # A copy without its metadata: it is tried.
        return ""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is not None and (int(match[1]), int(match[2])) < _OLDEST:
        return f"prometheus-client {version} is installed, which is older than {_OLDEST[0]}.{_OLDEST[1]}"
    return ""


@contextmanager
def serving(record: RunRecord, paths: RunPaths, tell: Callable[[str], object]) -> Iterator[None]:
    """Serve inside the block, if the run's settings say so. `tell` hears where, or why not."""
    port = record.settings.get("prometheus_port")
    server = _start(record, paths, int(port), tell) if port else None
    try:
        yield
    finally:
        if server is not None:
            with suppress(OSError):
                server.shutdown()
                server.server_close()


def _start(record: RunRecord, paths: RunPaths, port: int, tell: Callable[[str], object]) -> Any:
    where = f"http://{ADDRESS}:{port}/metrics"
    try:
        if found := _unusable():
            raise ImportError(found)
        from prometheus_client import CollectorRegistry, start_http_server

        # A registry of our own: the default one tells of this process, which is not what people want to see.
        registry = CollectorRegistry()
        registry.register(RunCollector(record, paths))
        server, _ = start_http_server(port, ADDRESS, registry)
    except Exception as error:  # noqa: BLE001  # a run is worth more than its metrics
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        log.warning("no Prometheus metrics at %s: %s; the run goes on without them", where, why)
        tell(f"no Prometheus metrics at {where}: {why}; the run goes on (choose another prometheus_port next time)")
        return None
    log.info("Prometheus metrics at %s", where)
    tell(f"Prometheus metrics at {where}")
    return server


class RunCollector:
    """Makes the metrics at each scrape.

    A counter never falls: a sidecar that goes on from its checkpoint begins below where its predecessor was, and
    Prometheus would take that for a counter that began at zero.
    """

    def __init__(self, record: RunRecord, paths: RunPaths) -> None:
        self._record = record
        self._paths = paths
        self._watcher = Watcher(Path(record.run_dir), paths.spare_status)
        self._guard = threading.Lock()
        self._highest: dict[tuple[str, ...], float] = {}

    def describe(self) -> list[Metric]:
        """Nothing: the names need not be known before the first scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All metrics that have a number now."""
        # Each scrape has a thread, and two may come at once.
        with self._guard:
            metrics = list(self._metrics(self._watcher.look()))
        yield from metrics

    def _metrics(self, figures: Figures) -> Iterator[Metric]:
        record = self._record
        info = {"device": record.device, "mps": record.mps, "task": str(record.settings.get("task", ""))}
        yield self._gauge("run_info", "The run", [(info, 1.0)])
        up = float(is_held(self._paths.sidecar_lock))
        yield self._gauge("sidecar_up", "Whether a sidecar process lives", [({}, up)])
        status = figures.status
        if status is None:
            return
        states = [({"state": state.value}, float(state is status.state)) for state in State]
        yield self._gauge("sidecar_state", "1 for the state that the sidecar is in", states)
        for name, text, number in _COUNTERS:
            yield self._counter(name, text, [({}, float(number(status) or 0))])
        lost = [({"policy": "oldest"}, float(status.lost_oldest)), ({"policy": "newest"}, float(status.lost_newest))]
        yield self._counter("experiences_lost", "Experiences that found no room in the ring", lost)
        for name, text, number in _GAUGES:
            if (value := number(status)) is not None:
                yield self._gauge(name, text, [({}, float(value))])
        yield from self._of_the_operator(figures)

    def _of_the_operator(self, figures: Figures) -> Iterator[Metric]:
        for name, text, total in (
            ("experiences_seen", "Experiences that came by the operators", figures.seen),
            ("experiences_removed", "Experiences that operators took out: filter, on_late: drop", figures.removed),
            ("experiences_late", "Experiences whose scores were late", figures.late),
        ):
            if total is not None:
                yield self._counter(name, text, [({}, float(total))])
        waits = (("0.5", figures.score_wait_ms_p50), ("0.99", figures.score_wait_ms_p99))
        known = [({"quantile": share}, ms / 1e3) for share, ms in waits if ms is not None]
        if known:
            yield self._gauge("score_latency_seconds", "From a request for scores to the scores, lately", known)
        if figures.score_age_s is not None:
            text = "Age of the model that gave the last scores"
            yield self._gauge("score_age_seconds", text, [({}, figures.score_age_s)])

    def _gauge(self, name: str, text: str, samples: list[tuple[dict[str, str], float]]) -> Metric:
        from prometheus_client.core import GaugeMetricFamily

        family = GaugeMetricFamily(_PREFIX + name, text, labels=["run_id", *samples[0][0]])
        for labels, value in samples:
            family.add_metric([self._record.run_id, *labels.values()], value)
        return family

    def _counter(self, name: str, text: str, samples: list[tuple[dict[str, str], float]]) -> Metric:
        from prometheus_client.core import CounterMetricFamily

        family = CounterMetricFamily(_PREFIX + name, text, labels=["run_id", *samples[0][0]])
        for labels, value in samples:
            key = (name, *labels.values())
            self._highest[key] = max(value, self._highest.get(key, 0.0))
            family.add_metric([self._record.run_id, *labels.values()], self._highest[key])
        return family
