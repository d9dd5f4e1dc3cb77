"""`AuxTrainer`: the experience operator. The only file that imports Trinity.

What Trinity does around it (trinity-rft 0.6, measured): the operator lives in the RolloutCoordinator actor, which has
no GPU; `process` is called on the actor's event loop, which also schedules rollouts; an exception in `process`
loses the batch and ends the run with exit status 0; `close` is not called when the driver is killed; metrics that
are neither int nor float vanish. Hence: everything that blocks is in a thread, errors pass the experiences on
unless the user asked otherwise, and nothing relies on `close`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import ray
from trinity.buffer.operators import ExperienceOperatorV1
from trinity.common.experience import Experience
from trinity.utils.log import get_logger

from mps_trainer.columns import Array
from mps_trainer.config import load_settings
from mps_trainer.errors import MpsTrainerError
from mps_trainer.operator.feeder import LOOK_IDLE_S, Exchange, Feeder
from mps_trainer.operator.policy import Metrics, Outcome, ScorePolicy
from mps_trainer.operator.recording import Recorder
from mps_trainer.operator.rewards import RewardChange, rewards_of

logger = logging.getLogger(__name__)


class AuxTrainer(ExperienceOperatorV1):
    """Feeds experiences to the sidecar trainer and uses its scores.

    The keyword arguments are `mps_trainer.config.Settings`; an unknown one is refused with the nearest valid key.
    With `enabled: false` the experiences pass untouched and nothing is opened. With `record` each is appended to a file
    as it comes; with `record_only` that is all.
    """

    def __init__(self, **args: Any) -> None:
        _log_where_trinity_logs()
        self._settings = load_settings(args)
        self._policy = ScorePolicy(self._settings)
        # Several may append to one operator.jsonl, and one that Ray starts anew counts from zero.
        self._identity = secrets.token_hex(8)
        self._feeder: Feeder | None = None
        self._feeds = self._settings.enabled and not self._settings.record_only
        self._recorder: Recorder | None = None
        if self._settings.record is not None and (self._settings.enabled or self._settings.record_only):
            self._recorder = Recorder(Path(self._settings.record), self._settings.record_max)
        self._thread: ThreadPoolExecutor | None = None
        self._idle_looks: asyncio.Task[None] | None = None
        self._num_batches = 0
        self._num_errors = 0
        self._num_log_errors = 0
        self._lost_told = 0

    async def prepare(self) -> None:
        """Join the run. A run that is not there is no error yet: it is looked for again with every batch."""
        if self._feeds or self._recorder is not None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="aux_trainer")
        if not self._feeds:
            return
        try:
            self._feeder = await self._in_thread(Feeder, self._settings, _ray_namespace())
            await self._in_thread(self._feeder.connect)
        except Exception as error:  # whatever is wrong here must not end the run before its first step
            if self._settings.on_error == "raise":
                raise
            self._num_errors += 1
            logger.warning("mps_trainer: %s", error, exc_info=not isinstance(error, MpsTrainerError))
        if self._feeder is not None:
            self._idle_looks = asyncio.create_task(self._look_while_idle(self._feeder))

    async def process(self, exps: list[Experience]) -> tuple[list[Experience], Metrics]:
        """Feed the batch; with `use: filter` or `use: reward` wait for its scores and apply them.

        Returns the experiences to go on with, and metrics under `aux_trainer/`. When something fails and
        `on_error` is `pass`, all experiences go on as they came.
        """
        begin = time.monotonic()
        # Before scores correct any reward: a recording holds what came.
        recorded = {} if self._recorder is None else await self._in_thread(self._recorder.add, exps)
        if self._feeder is None:
            metrics = {"enabled": int(self._feeds), "errors_total": self._num_errors, **recorded}
            return exps, {f"aux_trainer/{key}": value for key, value in metrics.items()}
        try:
            exchange, rewards = await self._in_thread(self._exchange, self._feeder, exps)
            outcome = self._policy.apply(exps, exchange)
            kept, metrics = outcome.kept, outcome.metrics
        except Exception as error:  # the rollout comes first: no fault of ours may lose a batch
            if self._settings.on_error == "raise":
                raise
            self._num_errors += 1
            logger.warning("mps_trainer: a batch passes on unused: %s", error, exc_info=self._num_errors == 1)
            kept, metrics = exps, {}
        else:
            await self._in_thread(self._tell, self._feeder, exps, outcome, rewards)
        metrics |= {
            "enabled": 1,
            "seen": len(exps),
            "kept": len(kept),
            "errors_total": self._num_errors,
            "log_errors_total": self._num_log_errors,
            "process_ms": (time.monotonic() - begin) * 1e3,
            **recorded,
        }
        return kept, {f"aux_trainer/{key}": value for key, value in metrics.items()}

    async def close(self) -> None:
        """Leave the run, bounded in time."""
        if self._idle_looks is not None:
            self._idle_looks.cancel()
        if self._thread is None:
            return
        for part in (self._feeder, self._recorder):
            if part is not None:
                await self._in_thread(part.close)
        if self._feeder is not None:
            await self._in_thread(self._tell_what_was_lost, self._feeder)
        self._thread.shutdown(wait=False)
        self._feeder = self._recorder = self._thread = None

    async def _look_while_idle(self, feeder: Feeder) -> None:
        """A rollout may take longer than what is left of the run: what we hold of it is given back meanwhile."""
        while True:
            await asyncio.sleep(LOOK_IDLE_S)
            try:
                await self._in_thread(feeder.look)
            except (MpsTrainerError, OSError) as error:
                # The next batch meets it too, and says so.
                logger.debug("mps_trainer: %s", error)

    def _exchange(self, feeder: Feeder, exps: list[Experience]) -> tuple[Exchange, Array]:
        """The scores, and the rewards as they came, which `use: reward` changes in place."""
        self._num_batches += 1
        return feeder.exchange(exps, want_scores=self._settings.use != "feed"), rewards_of(exps)

    def _tell(self, feeder: Feeder, exps: list[Experience], outcome: Outcome, rewards: Array) -> None:
        """Complete the metrics, and append them to `operator.jsonl` in the run folder, with what was dropped.

        A log that cannot be written (a full disk, an info that is no dict) is counted and changes nothing else.
        """
        change = RewardChange.between(rewards, rewards_of(outcome.kept))
        outcome.metrics.update(change.metrics)
        self._log(feeder, lambda: self._log_line(exps, outcome) | change.quantiles)
        self._lost_told = feeder.lost

    def _tell_what_was_lost(self, feeder: Feeder) -> None:
        """After the last batch's line: what the end of the run has left unread."""
        if feeder.lost > self._lost_told:
            self._log(feeder, lambda: {**self._line_head(), "lost_here_total": feeder.lost})

    def _log(self, feeder: Feeder, make_line: Callable[[], dict[str, Any]]) -> None:
        if feeder.run_dir is None:
            return
        try:
            line = json.dumps(make_line())
            with (feeder.run_dir / "operator.jsonl").open("a") as file:
                file.write(line + "\n")
        except Exception as error:  # noqa: BLE001  # the rollout comes first: a log is no reason to lose a batch
            self._num_log_errors += 1
            if self._num_log_errors == 1:
                logger.warning("mps_trainer: operator.jsonl cannot be written: %s", error)

    def _line_head(self) -> dict[str, Any]:
        # The identity first: `run.operator_totals` looks for it there.
        return {"operator": self._identity, "t": time.time(), "batch": self._num_batches}

    def _log_line(self, exps: list[Experience], outcome: Outcome) -> dict[str, Any]:
        dropped = [
            {
                "eid": exps[index].eid.uid,
                "score": None if np.isnan(score) else score,
                "why": why,
                "reward": None if exps[index].reward is None else float(exps[index].reward),
                "info": {str(k): v for k, v in (exps[index].info or {}).items() if isinstance(v, (int, float))},
            }
            for index, score, why in outcome.dropped
        ]
        return {**self._line_head(), "seen": len(exps), "dropped": dropped, **outcome.metrics}

    async def _in_thread(self, function: Any, *args: Any) -> Any:
        assert self._thread is not None
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)


def _ray_namespace() -> str:
    # Asking Ray's context outside a cluster would start one.
    return str(ray.get_runtime_context().namespace) if ray.is_initialized() else ""


def _log_where_trinity_logs() -> None:
    """Send this package's messages to the actor's Trinity log, where the user looks when a run went wrong."""
    ours, theirs = logging.getLogger("mps_trainer"), get_logger()
    ours.handlers, ours.propagate = list(theirs.handlers), False
    ours.setLevel(theirs.level)
