"""Runs `trinity run` in a private Ray cluster and reads what came out, because it exits 0 on failure.

A test asks the fixture `trinity_run` (a TrinityRun) for a config, an engine and an outcome:

    def test_something(trinity_run):
        config = trinity_run.write_config("explore", operators=[], steps=2)
        with trinity_run.engine(config):
            outcome = trinity_run.run(config)
        assert not outcome.error_lines()
        assert len(outcome.rows()) == 128
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf

BIN_DIR = Path(sys.executable).parent
EXAMPLE_DIR = Path(__file__).resolve().parents[2] / "examples" / "cpu_rollout"
ENGINE_TIMEOUT_S = 300.0
_ERROR_LINE = re.compile(r"^(ERROR|CRITICAL)\b|Traceback \(most recent call last\)")


class Row(NamedTuple):
    """One experience as it reached the trainer's buffer; `blob` is Trinity's serialisation of all of it."""

    task: str
    run: int
    reward: float
    model_version: int
    blob: bytes


@dataclass(frozen=True)
class RunOutcome:
    """What a finished run left behind.

    Attributes:
        returncode: of the command; negative for a signal, None while it runs. Trinity's own says little.
        seconds: wall time of the command.
        output: stdout and stderr of the command, with what Ray forwards of its workers.
        job_dir: Trinity's folder of this run: logs, TensorBoard, checkpoints.
        database: the SQLite file behind the trainer's experience buffer.
    """

    returncode: int | None
    seconds: float
    output: str
    job_dir: Path
    database: Path

    def error_lines(self) -> list[str]:
        """Every line that Trinity's own logs mark as an error, with the file's name before it."""
        return [
            f"{path.name}: {line}"
            for path in sorted((self.job_dir / "log").glob("*.log"))
            for line in path.read_text(errors="replace").splitlines()
            if _ERROR_LINE.search(line)
        ]

    def rows(self) -> list[Row]:
        """The experiences that the pipeline wrote for the trainer, in the order of writing."""
        query = (
            "select task_id, run_id, reward, model_version, experience_bytes"
            " from experiences join experiences_blob using (id) order by id"
        )
        with contextlib.closing(sqlite3.connect(self.database)) as connection:
            return [Row(*values) for values in connection.execute(query)]

    def experiences(self) -> list[Any]:
        """The same as Trinity's Experience objects. Imports trinity, which takes seconds."""
        from trinity.common.experience import Experience

        return [Experience.deserialize(row.blob) for row in self.rows()]

    def scalars(self, role: str) -> dict[str, list[tuple[int, float]]]:
        """TensorBoard's (step, value) pairs by key, of "explorer" or "trainer"."""
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(self.job_dir / "monitor" / "tensorboard" / role))
        events.Reload()
        return {key: [(event.step, event.value) for event in events.Scalars(key)] for key in events.Tags()["scalars"]}

    def report(self) -> str:
        """The tail of the output and the first errors: the message of a failed assertion."""
        return "\n".join([*self.error_lines()[:10], "--- output", self.output[-2000:]])


class TrinityRun:
    """One test's door to the session's Ray cluster: configs, engines and runs under a namespace of its own."""

    def __init__(self, name: str, work_dir: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self.work_dir = work_dir
        self.environment = {**environment, "CPU_ROLLOUT_WORK": str(work_dir)}
        self._num_configs = 0

    def write_config(
        self,
        mode: str,
        *,
        operators: Sequence[Mapping[str, Any]] | None = None,
        steps: int | None = None,
        tasks: int | None = None,
        repeats: int | None = None,
        rule: Mapping[str, Any] | None = None,
        set_keys: Mapping[str, Any] | None = None,
    ) -> Path:
        """A copy of the example's explore.yaml or both.yaml under names of its own; interpolations stay.

        operators replaces the list of operators (None keeps the example's); steps, tasks a step and repeats a task
        set the number of experiences; rule is merged into the reward's rule; set_keys sets dotted keys.
        """
        self._num_configs += 1
        name = f"{self.name}_{self._num_configs}"
        config = OmegaConf.load(EXAMPLE_DIR / f"{mode}.yaml")
        config.name, config.ray_namespace = name, f"tests/{name}"
        config.buffer.trainer_input.experience_buffer.path = f"sqlite:///{self.work_dir / name}.db"
        if operators is not None:
            config.data_processor.experience_pipeline.operators = [dict(block) for block in operators]
        if steps is not None:
            config.buffer.total_steps = steps
            if mode == "both":
                config.trainer.total_steps = steps
        if tasks is not None:
            config.buffer.batch_size = tasks
        if repeats is not None:
            config.algorithm.repeat_times = repeats
            config.buffer.explorer_input.taskset.repeat_times = repeats
        config.buffer.explorer_input.taskset.workflow_args.rule.update(rule or {})
        for key, value in (set_keys or {}).items():
            OmegaConf.update(config, key, value)
        path = self.work_dir / f"{name}.yaml"
        OmegaConf.save(config, path)
        return path

    @contextlib.contextmanager
    def engine(self, config: Path) -> Iterator[None]:
        """The rollout engine that a config of mode explore needs, up inside the block."""
        self._engine("up", config)
        try:
            yield
        finally:
            self._engine("down", config)

    def _engine(self, action: str, config: Path) -> None:
        answer = subprocess.run(
            [sys.executable, "-m", "cpu_rollout.start_engine", action, str(config)],
            env=self.environment,
            cwd=self.work_dir,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ENGINE_TIMEOUT_S,
        )
        assert answer.returncode == 0, f"engine {action}: {answer.stdout}\n{answer.stderr}"

    def start(
        self, config: Path, command: Sequence[str] | None = None, extra_env: Mapping[str, str] | None = None
    ) -> RunningTrinity:
        """Start a run and return at once, for tests that interfere. `command` replaces `trinity run --config`."""
        command = [*(command or [str(BIN_DIR / "trinity"), "run", "--config"]), str(config)]
        return RunningTrinity(command, config, {**self.environment, **(extra_env or {})})

    def run(
        self,
        config: Path,
        *,
        command: Sequence[str] | None = None,
        extra_env: Mapping[str, str] | None = None,
        timeout_s: float = 600.0,
    ) -> RunOutcome:
        """Run to the end. `command` and `extra_env` as in `start`."""
        with self.start(config, command, extra_env) as running:
            return running.wait(timeout_s)


class RunningTrinity:
    """A run that goes on, in a process group of its own; leaving the `with` block ends what is left of the group.

    Attributes:
        process: the driver. Workers are Ray's children, not its.
    """

    def __init__(self, command: Sequence[str], config: Path, environment: Mapping[str, str]) -> None:
        self.config = config
        self.output_path = config.with_suffix(".log")
        self._started = time.monotonic()
        with self.output_path.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                env=dict(environment),
                cwd=config.parent,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> RunningTrinity:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(15)

    def outcome(self) -> RunOutcome:
        """What there is so far: for a run that the test has killed."""
        config = OmegaConf.load(self.config)
        work_dir = self.config.parent
        return RunOutcome(
            returncode=self.process.poll(),
            seconds=time.monotonic() - self._started,
            output=self.output_path.read_text(errors="replace"),
            job_dir=work_dir / "checkpoints" / config.project / config.name,
            database=work_dir / f"{config.name}.db",
        )

    def wait(self, timeout_s: float) -> RunOutcome:
        """Wait for the driver's end; on a timeout the test fails with the end of the output."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end after {timeout_s} s\n{self.outcome().report()}") from None
        return self.outcome()

    def wait_for_rows(self, count: int, timeout_s: float) -> None:
        """Wait until at least `count` experiences are in the trainer's buffer: the run is in full swing."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(sqlite3.OperationalError):  # no database or no table yet
                if len(self.outcome().rows()) >= count:
                    return
            time.sleep(0.2)
        raise AssertionError(f"fewer than {count} experiences after {timeout_s} s\n{self.outcome().report()}")
