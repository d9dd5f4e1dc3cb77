"""The truth about a `trinity run`, from log lines recorded with trinity-rft 0.6 and ray 2.60."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mps_trainer.launcher.trinity_config import TrinityConfig, read_trinity_config
from mps_trainer.launcher.verdict import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_SIDECAR_FAILED,
    EXIT_TRINITY_FAILED,
    LogMark,
    Verdict,
    find_failures,
    judge,
)
from mps_trainer.run import State, Status

Write = Callable[..., Path]

GOOD_LOG = """\
INFO 11-30 14:31:02 [explorer.py:245] Explorer is ready.
INFO 11-30 14:31:02 [explorer.py:276] Explore step 1 started.
ERROR 11-30 14:31:09 [experience_pipeline.py:228] Failed to release output buffer: closed
INFO 11-30 14:31:10 [explorer.py:290] --------------------
"""

OPERATOR_RAISED = (
    "ERROR 11-30 14:31:09 [explorer.py:287] Error in Explorer: Traceback (most recent call last):\r\n"
    'ERROR 11-30 14:31:09 [explorer.py:287]   File "explorer.py", line 279, in explore\r\n'
    "ERROR 11-30 14:31:09 [explorer.py:287]     explore_contionue = await self.explore_step()\r\n"
    "ERROR 11-30 14:31:09 [explorer.py:287] ray.exceptions.RayTaskError(ValueError): ray::RolloutCoordinator\r\n"
    "ERROR 11-30 14:31:09 [explorer.py:287] ValueError: no column reward\r\n"
    "ERROR 11-30 14:31:09 [explorer.py:287]   What to do: set it\n"
    "INFO 11-30 14:31:10 [explorer.py:290] finished\n"
)

PREPARE_FAILED_CONSOLE = (
    "\x1b[36m(Explorer pid=5012)\x1b[0m ERROR 11-30 14:31:09 [explorer.py:252] Error during explorer preparation: "
    "Traceback (most recent call last):\r\n"
    "\x1b[36m(Explorer pid=5012)\x1b[0m ERROR 11-30 14:31:09 [explorer.py:252] RuntimeError: no sidecar\n"
    "ERROR 11-30 14:31:11 [launcher.py:120] Explorer failed:\r\n"
    "ERROR 11-30 14:31:11 [launcher.py:120] RuntimeError: no sidecar\n"
)


class Run:
    """A finished run's files, and the verdict on them."""

    def __init__(self, config: TrinityConfig, folder: Path) -> None:
        self.config = config
        self.console = folder / "console.log"
        self.console.write_text("")

    def log(self, text: str, name: str = "explorer", job: str = "") -> None:
        folder = (self.config.job_dir.with_name(job) if job else self.config.job_dir) / "log"
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{name}.log").open("a", newline="") as file:
            file.write(text)

    def reach(self, step: int, who: str = "explorer", job: str = "") -> None:
        folder = self.config.job_dir.with_name(job) if job else self.config.job_dir
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{who}_meta.json").write_text(json.dumps({"latest_iteration": step}))

    def verdict(
        self, mark: LogMark, return_code: int = 0, interrupted: bool = False, **rest: Status | int | None
    ) -> Verdict:
        return judge(
            self.config,
            return_code=return_code,
            interrupted=interrupted,
            console=self.console,
            mark=mark,
            status=rest.get("status"),  # type: ignore[arg-type]
            supervisor_code=rest.get("supervisor_code"),  # type: ignore[arg-type]
        )


@pytest.fixture
def run(write_config: Write, tmp_path: Path) -> Run:
    return Run(read_trinity_config(write_config()), tmp_path)


@pytest.fixture
def mark(run: Run) -> LogMark:
    return LogMark.now(run.config)


def test_a_good_run(run: Run, mark: LogMark) -> None:
    run.log(GOOD_LOG)
    run.reach(2)
    verdict = run.verdict(mark, status=Status(run_id="a", state=State.STOPPED, experiences=32))
    assert (verdict.exit_code, verdict.reasons) == (EXIT_OK, ())
    assert "explorer reached step 2 of 2" in verdict.notes


def test_an_operator_that_raised_recorded(run: Run, mark: LogMark) -> None:
    run.log(OPERATOR_RAISED)
    run.reach(2)
    verdict = run.verdict(mark)
    assert verdict.exit_code == EXIT_TRINITY_FAILED
    assert verdict.reasons == ("Error in Explorer: ValueError: no column reward",)


def test_a_preparation_that_failed_is_seen_on_the_console_recorded(run: Run, mark: LogMark) -> None:
    run.console.write_text(PREPARE_FAILED_CONSOLE, newline="")
    run.reach(2)
    verdict = run.verdict(mark)
    assert verdict.exit_code == EXIT_TRINITY_FAILED
    assert verdict.reasons == (
        "Error during explorer preparation: RuntimeError: no sidecar",
        "Explorer failed: RuntimeError: no sidecar",
    )


@pytest.mark.parametrize(
    "line",
    [
        "ERROR 11-30 14:31:09 [trainer.py:191] Error in Trainer:",
        "ERROR 11-30 14:31:09 [launcher.py:262] Explorer or Trainer failed:",
        "ERROR 11-30 14:31:09 [experience_pipeline.py:159] Failed to create experience operators: Traceback",
    ],
)
def test_every_line_by_which_trinity_reports_a_failure(line: str) -> None:
    assert len(list(find_failures([line]))) == 1


def test_too_few_steps_without_any_error_line(run: Run, mark: LogMark) -> None:
    run.log(GOOD_LOG)
    run.reach(1)
    verdict = run.verdict(mark)
    assert verdict.exit_code == EXIT_TRINITY_FAILED
    assert verdict.reasons == ("explorer did not reach step 2; its last checkpoint is of step 1",)


def test_no_step_at_all(run: Run, mark: LogMark) -> None:
    assert run.verdict(mark).reasons == ("explorer did not reach step 2; it has no checkpoint",)


def test_mode_both_looks_at_the_trainer(write_config: Write, tmp_path: Path) -> None:
    path = write_config(("mode: explore", "mode: both\ntrainer: {total_steps: 3}"))
    run = Run(read_trinity_config(path), tmp_path)
    mark = LogMark.now(run.config)
    run.reach(1)
    run.reach(3, who="trainer")
    assert run.verdict(mark).exit_code == EXIT_OK


def test_errors_of_an_earlier_run_in_the_same_log_do_not_count(run: Run) -> None:
    run.log(OPERATOR_RAISED)
    mark = LogMark.now(run.config)
    run.log(GOOD_LOG)
    run.reach(2)
    assert run.verdict(mark).exit_code == EXIT_OK


def test_a_renamed_experiment_is_followed_recorded(run: Run) -> None:
    run.reach(2)
    mark = LogMark.now(run.config)
    run.console.write_text(
        "WARNING 11-30 14:30:55 [config_validator.py:108] Experiment [run] already exists, renamed as "
        "run_20261130143055.\n"
    )
    run.log(OPERATOR_RAISED, job="run_20261130143055")
    run.reach(2, job="run_20261130143055")
    assert run.verdict(mark).exit_code == EXIT_TRINITY_FAILED


def test_a_renamed_experiment_is_found_when_the_log_level_hides_it(run: Run) -> None:
    run.reach(2)
    mark = LogMark.now(run.config)
    run.reach(1, job="run_20261130143055")
    assert run.verdict(mark).reasons == ("explorer did not reach step 2; its last checkpoint is of step 1",)


def test_an_exit_status_that_is_not_zero_counts(run: Run, mark: LogMark) -> None:
    run.reach(2)
    assert run.verdict(mark, return_code=1).reasons == ("trinity run ended with exit code 1",)
    assert run.verdict(mark, return_code=-9).reasons == ("trinity run ended with signal SIGKILL",)


def test_a_failed_sidecar_has_its_own_exit_code(run: Run, mark: LogMark) -> None:
    run.reach(2)
    verdict = run.verdict(mark, status=Status(run_id="a", state=State.FAILED, error="the loss is nan in step 7"))
    assert verdict.exit_code == EXIT_SIDECAR_FAILED
    assert "the loss is nan in step 7" in verdict.reasons[0]


def test_a_run_that_fed_nothing_is_no_success_and_the_operator_says_why_recorded(run: Run, mark: LogMark) -> None:
    run.log(
        "INFO 11-30 21:52:40 [feeder.py:123] mps_trainer: feeding run a (/runs/a)\n"
        "WARNING 11-30 21:52:46 [aux_trainer.py:70] mps_trainer: task 'after:Filter' does not import: No after\n"
        "WARNING 11-30 21:52:46 [aux_trainer.py:70]   What to do: install 'after'\n",
        name="experience_pipeline",
    )
    run.reach(2)
    verdict = run.verdict(mark, status=Status(run_id="a", state=State.STOPPED))
    assert verdict.exit_code == EXIT_SIDECAR_FAILED
    assert verdict.reasons == ("the sidecar saw no experience: task 'after:Filter' does not import: No after",)


def test_a_run_that_fed_nothing_and_says_nothing_names_what_it_can_be(run: Run, mark: LogMark) -> None:
    run.reach(2)
    verdict = run.verdict(mark, status=Status(run_id="a", state=State.STOPPED))
    assert verdict.exit_code == EXIT_SIDECAR_FAILED
    assert "missing_column" in verdict.reasons[0]


def test_a_killed_supervisor_is_told(run: Run, mark: LogMark) -> None:
    run.reach(2)
    verdict = run.verdict(mark, status=Status(run_id="a", state=State.STOPPED), supervisor_code=-9)
    assert verdict.exit_code == EXIT_SIDECAR_FAILED
    assert "SIGKILL" in verdict.reasons[0]


def test_an_interrupted_run_has_130(run: Run, mark: LogMark) -> None:
    assert run.verdict(mark, return_code=-2, interrupted=True).exit_code == EXIT_INTERRUPTED


def test_a_removed_run_folder_costs_the_console_and_is_told(run: Run, mark: LogMark) -> None:
    run.log(GOOD_LOG)
    run.reach(2)
    run.console.unlink(missing_ok=True)
    status = Status(run_id="a", state=State.STOPPED, experiences=32, trouble="the run folder was removed")
    verdict = run.verdict(mark, status=status)
    assert (verdict.exit_code, verdict.reasons) == (EXIT_OK, ())
    assert "the sidecar said: the run folder was removed" in verdict.notes


def test_an_interrupted_run_is_not_blamed_for_what_it_did_not_reach(run: Run, mark: LogMark) -> None:
    # Trinity's trainer writes its step down with checkpoints only, so after Ctrl-C the file may not be there.
    verdict = run.verdict(mark, return_code=130, interrupted=True)
    assert verdict.reasons == ("interrupted",)
    assert "explorer did not reach step 2; it has no checkpoint" in verdict.notes


def test_what_trinity_reported_before_it_was_interrupted_is_told(run: Run, mark: LogMark) -> None:
    run.log(OPERATOR_RAISED)
    verdict = run.verdict(mark, return_code=130, interrupted=True)
    assert verdict.reasons == ("interrupted", "Error in Explorer: ValueError: no column reward")
