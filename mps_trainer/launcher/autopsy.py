"""After a sidecar's death: what was it doing, and are the experiences in work to blame?

    how it died                                                       the experiences in work are
    a crash of its own (SIGSEGV, SIGABRT, ...), a fault of the GPU    set aside
    a hang (`watchdog.py`), an exit code that is none of ours         set aside
    SIGKILL or SIGTERM from outside, the OOM killer, an error of ours set aside the second time
    seemed to hang, and went on when it was asked to end              not to blame: it was slow

Only one record, or the experiences of one training step, are ever in work. Where a successor takes the same steps again
(no pace, no `train: continuous`), the second time is the same step with the same experiences. Elsewhere steps are
drawn anew: there it is a step that shares experiences with one before, and only what they share is set aside.
"""

from __future__ import annotations

import logging
import signal
from dataclasses import replace
from pathlib import Path

from mps_trainer.config.pace import is_paced
from mps_trainer.launcher.process import describe_exit
from mps_trainer.run import RunRecord, State, Status, exit_codes, run_paths
from mps_trainer.run.doing import WITH_EXPERIENCES, Doing, Subject, forget_doing, read_doing
from mps_trainer.run.verdicts import Verdict, load_verdicts, save_verdicts

log = logging.getLogger("mps_trainer.supervisor")

_OWN_CRASHES = frozenset(
    -number for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSYS)
)
_DEATHS_FROM_OUTSIDE = 2


class Autopsy:
    """Looks at each death of a run's sidecars, and writes the verdicts that a successor obeys.

    Args:
        steps_recur: a successor takes the same training steps again, with the same experiences.
        spare: where the sidecar's status stands while the run folder refuses it.
    """

    def __init__(self, run_dir: Path, *, steps_recur: bool = True, spare: Path | None = None) -> None:
        self._run_dir = run_dir
        self._spare = spare
        self._steps_recur = steps_recur
        self._unsaved: list[Verdict] = []

    @classmethod
    def of_run(cls, record: RunRecord) -> Autopsy:
        """The autopsies of the run's sidecars."""
        settings = record.settings
        continuous = settings.get("schedule", {}).get("train") == "continuous"
        paced = is_paced(str(settings.get("pace", "off")), record.mps)
        spare = run_paths(record.run_id).spare_status
        return cls(Path(record.run_dir), steps_recur=not (paced or continuous), spare=spare)

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
        if code in exit_codes.FINAL:
            return ""
        # An error of ours (the journal of a full disk, say) is in the log, and where people look too.
        error = self._told() if code == exit_codes.CRASHED else ""
        said = f" ({error.splitlines()[0]})" if error else ""
        if found is None:
            return said
        if found.subject is None or found.stage not in WITH_EXPERIENCES:
            return f"{said}; it was {found}"
        at_once = hung is not None or code in _OWN_CRASHES or (code > 0 and code != exit_codes.CRASHED)
        cause = self._cause(code) if hung is None else "it hung"
        verdict = self._count(found, found.subject, cause, at_once)
        why = f" ({cause.splitlines()[0].partition(' (experiences')[0]})" if code == exit_codes.GPU_FAULT else ""
        why = why or said
        if not verdict.condemned:
            return f"{why}; it was {found}: set aside if that happens again"
        found = replace(found, subject=verdict.subject)
        log.error("set aside after %d death%s: %s", verdict.deaths, "s" if verdict.deaths > 1 else "", found)
        return f"{why}; it was {found}: set aside"

    def _count(self, found: Doing, subject: Subject, cause: str, at_once: bool) -> Verdict:
        verdicts = self._unsaved or load_verdicts(self._run_dir)
        before = self._before(verdicts, subject)
        deaths = 1 + max((verdicts[i].deaths for i in before), default=0)
        condemned = at_once or deaths >= _DEATHS_FROM_OUTSIDE
        if condemned and not at_once and not self._same_every_time(subject):
            # What killed both is in both.
            suspects = {eid for i in before for eid in verdicts[i].subject.eids}
            subject = replace(subject, eids=tuple(eid for eid in subject.eids if eid in suspects))
        verdict = Verdict(found.stage, subject, deaths, cause, condemned)
        place = before[0] if before else len(verdicts)
        verdicts = [other for i, other in enumerate(verdicts) if i not in before]
        verdicts.insert(place, verdict)
        self._unsaved = []
        try:
            save_verdicts(self._run_dir, verdicts)
        except OSError as problem:
            # The next death tries again; until then a successor may die of the same experiences.
            self._unsaved = verdicts
            log.error("the next sidecar will not know that %s is to be set aside: %s", subject, problem)
        return verdict

    def _before(self, verdicts: list[Verdict], subject: Subject) -> list[int]:
        """The verdicts that speak of the same: places, ascending."""
        if self._same_every_time(subject):
            return [i for i, verdict in enumerate(verdicts) if _same(verdict.subject, subject)][:1]
        eids = set(subject.eids)
        return [
            i
            for i, verdict in enumerate(verdicts)
            # What is condemned is in no step any more.
            if verdict.subject.record is None and not verdict.condemned and not eids.isdisjoint(verdict.subject.eids)
        ]

    def _same_every_time(self, subject: Subject) -> bool:
        return self._steps_recur or subject.record is not None

    def _cause(self, code: int) -> str:
        if code == exit_codes.GPU_FAULT:
            return self._told() or describe_exit(code)
        return describe_exit(code)

    def _told(self) -> str:
        """The error that the dead sidecar could still tell."""
        status = Status.peek(self._run_dir, self._spare)
        # The supervisor's own word of the death before, where this one has died before it could say anything.
        return "" if status is None or status.state is State.RESTARTING else status.error


def _same(one: Subject, other: Subject) -> bool:
    if one.record is not None and other.record is not None:
        return one.record == other.record
    # The steps of a batch whose rows were set aside are drawn anew, under the same number.
    return one == other
