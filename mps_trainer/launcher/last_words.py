"""What becomes of a run whose supervisor meets an error that it has no answer to."""

from __future__ import annotations

import logging
from collections.abc import Callable

from mps_trainer.errors import MpsTrainerError
from mps_trainer.launcher.reports import Reporter
from mps_trainer.run import exit_codes

log = logging.getLogger("mps_trainer.supervisor")

_REPORT_IT = "see supervisor.log in the run folder; start the run again, and report the traceback there as a bug"


def last_words(error: Exception, reporter: Reporter, give_up: Callable[[str, str], int] | None) -> int:
    """Log the error, tell `up` if it still listens, and give the exit code.

    Args:
        give_up: ends the sidecar and writes FAILED with (what happened, what to do); None before there can be one.
    """
    what, todo = f"the supervisor failed: {type(error).__name__}: {error}", _REPORT_IT
    if known := isinstance(error, MpsTrainerError):
        what, todo = error.message, error.todo
    # Before there is a sidecar an error of ours is an answer to `up`, and needs no traceback.
    log.error("the supervisor cannot go on: %s", what, exc_info=None if known and give_up is None else error)
    if give_up is not None:
        return give_up(what, todo)
    reporter.failed(what, todo)
    return exit_codes.BAD_CONFIG if known else exit_codes.CRASHED
