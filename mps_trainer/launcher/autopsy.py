"""After a sidecar's death: what was it doing, and are the experiences in work to blame?

    how it died                                                       the experiences in work are
    a crash of its own (SIGSEGV, SIGABRT, ...), a fault of the GPU    set aside
    a hang (`watchdog.py`), an exit code that is none of ours         set aside
    SIGKILL or SIGTERM from outside, the OOM killer, an error of ours set aside the second time
    seemed to hang, and went on when it was asked to end              not to blame: it was slow

Only one record, or the experiences of one training step, are ever in work.
"""

from __future__ import annotations

import logging
import signal
from pathlib import Path

from mps_trainer.errors import RunError
from mps_trainer.launcher.process import describe_exit
from mps_trainer.run import Status, exit_codes
from mps_trainer.run.doing import WITH_EXPERIENCES, Doing, Subject, forget_doing, read_doing
from mps_trainer.run.verdicts import Verdict, load_verdicts, save_verdicts

log = logging.getLogger("mps_trainer.supervisor")

_OWN_CRASHES = frozenset(
    -number for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSYS)
)
_DEATHS_FROM_OUTSIDE = 2


class Autopsy:
    """Looks at each death of a run's sidecars, and writes the verdicts that a successor obeys."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._unsaved: list[Verdict] = []

    def doing(self) -> str:
        """What the dead sidecar was doing, in words; "" when it said nothing."""
        found = read_doing(self._run_dir)
        return "" if found is None else str(found)

    def judge(self, code: int, *, hung: Doing | None = None, only_slow: bool = False) -> str:
        """Decide on the experiences that were in work; what to add to the message about the death.

        Args:
            code: as subprocess gives it.
            hung: what it was doing when the supervisor began to end it, because it had hung.
            only_slow: it went on after that.
        """
        found = hung or read_doing(self._run_dir)
        forget_doing(self._run_dir)
        if hung is not None and only_slow:
            slow = "went on when it was asked to end: too slow for hang_timeout, nothing set aside"
            return f"; it was {hung}, and {slow}"
        if found is None or code in exit_codes.FINAL:
            return ""
        if found.subject is None or found.stage not in WITH_EXPERIENCES:
            return f"; it was {found}"
        at_once = hung is not None or code in _OWN_CRASHES or (code > 0 and code != exit_codes.CRASHED)
        cause = self._cause(code) if hung is None else "it hung"
        verdict = self._count(found, found.subject, cause, at_once)
        why = f" ({cause.splitlines()[0].partition(' (experiences')[0]})" if code == exit_codes.GPU_FAULT else ""
        if not verdict.condemned:
            return f"; it was {found}: set aside if that happens again"
        log.error("set aside after %d death%s: %s", verdict.deaths, "s" if verdict.deaths > 1 else "", found)
        return f"{why}; it was {found}: set aside"

    def _count(self, found: Doing, subject: Subject, cause: str, at_once: bool) -> Verdict:
        verdicts = self._unsaved or load_verdicts(self._run_dir)
        known = next((i for i, verdict in enumerate(verdicts) if _same(verdict.subject, subject)), len(verdicts))
        deaths = verdicts[known].deaths + 1 if known < len(verdicts) else 1
        condemned = at_once or deaths >= _DEATHS_FROM_OUTSIDE
        verdicts[known : known + 1] = [Verdict(found.stage, subject, deaths, cause, condemned)]
        self._unsaved = []
        try:
            save_verdicts(self._run_dir, verdicts)
        except OSError as problem:
            # The next death tries again; until then a successor may die of the same experiences.
            self._unsaved = verdicts
            log.error("the next sidecar will not know that %s is to be set aside: %s", subject, problem)
        return verdicts[known]

    def _cause(self, code: int) -> str:
        if code == exit_codes.GPU_FAULT:
            try:
                return Status.load(self._run_dir).error or describe_exit(code)
            except RunError:
                pass
        return describe_exit(code)


def _same(one: Subject, other: Subject) -> bool:
    if one.record is not None and other.record is not None:
        return one.record == other.record
    # The steps of a batch whose rows were set aside are drawn anew, under the same number.
    return one == other
