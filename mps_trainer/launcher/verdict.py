"""Did `trinity run` succeed? Its exit status does not say: it is 0 after most failures.

Looked at: the exit status (it means something when it is not 0), the lines by which Trinity reports a failure in the
console and in the logs of this run, the steps that were reached, and what became of the sidecar.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mps_trainer.launcher.process import describe_exit
from mps_trainer.launcher.trinity_config import TrinityConfig
from mps_trainer.run import State, Status

EXIT_OK = 0
EXIT_TRINITY_FAILED = 1
EXIT_BAD_CONFIG = 2
EXIT_SIDECAR_FAILED = 3
EXIT_INTERRUPTED = 130

_FAILURE = re.compile(
    r"Error in Explorer|Error in Trainer|Error during explorer preparation"
    r"|(?:Explorer or Trainer|Explorer|Trainer|Benchmark) failed:"
    r"|Failed to create experience operators"
)
# "(Explorer pid=123) " of Ray, then "ERROR 11-30 15:00:00 [explorer.py:12] " of Trinity on every line of a message.
_RAY_PREFIX = re.compile(r"^(?:\x1b\[[0-9;]*m)*\([^)]*pid=\d+[^)]*\)(?:\x1b\[[0-9;]*m)* ?")
_LOG_PREFIX = re.compile(r"^[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ")
_RENAMED = re.compile(r"Experiment \[(?P<old>.*)\] already exists, renamed as (?P<new>\S+)\.")
_MOST_FINDINGS = 5
# How the operator's warnings begin, behind what Trinity's log puts before them.
_OURS = "] mps_trainer: "


@dataclass(frozen=True)
class Verdict:
    """What became of a run.

    Attributes:
        exit_code: 0, or one of the EXIT constants of this module.
        reasons: why it is not 0; empty when it is.
        notes: what else is worth a line.
    """

    exit_code: int
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class LogMark:
    """Where Trinity's logs ended before a run, because a continued experiment appends to them."""

    sizes: dict[Path, int]
    folders: frozenset[Path]
    time: float = field(default_factory=time.time)

    @classmethod
    def now(cls, config: TrinityConfig) -> LogMark:
        """Mark the present end of all logs that the run could write to."""
        folders = frozenset(_job_dirs(config))
        sizes = {log: log.stat().st_size for folder in folders for log in _logs(folder)}
        return cls(sizes, folders)


def judge(
    config: TrinityConfig,
    *,
    return_code: int,
    interrupted: bool,
    console: Path,
    mark: LogMark,
    status: Status | None,
    supervisor_code: int | None = None,
) -> Verdict:
    """The truth about a `trinity run`.

    Args:
        return_code: of `trinity run`, negative for a signal.
        interrupted: whether we were asked to end it.
        console: what it printed.
        mark: taken before it started.
        status: the sidecar's last word; None for a run without one.
        supervisor_code: the supervisor's exit code when it ended before the run did.
    """
    console_lines = _lines_of(console)
    job_dir = _job_dir(config, console_lines, mark)
    # Whoever pressed Ctrl-C knows why it did not exit with 0, nor reached its last step.
    reasons = [f"trinity run ended with {describe_exit(return_code)}"] if return_code and not interrupted else []
    findings = list(find_failures(console_lines))
    for log in _logs(job_dir):
        with log.open(errors="replace") as file:
            file.seek(mark.sizes.get(log, 0))
            findings += find_failures(file)
    reasons += list(dict.fromkeys(findings))[:_MOST_FINDINGS]
    steps, enough = _steps(config, job_dir)
    if not enough and not interrupted:
        reasons.append(steps)
    notes = [f"Trinity's job folder: {job_dir}", *([steps] if steps and (enough or interrupted) else [])]
    if status is not None and status.trouble:
        notes.append(f"the sidecar said: {status.trouble}")
    if interrupted:
        return Verdict(EXIT_INTERRUPTED, ("interrupted", *reasons), tuple(notes))
    sidecar = _sidecar_failure(status, supervisor_code)
    if reasons:
        return Verdict(EXIT_TRINITY_FAILED, (*reasons, *sidecar), tuple(notes))
    if sidecar:
        return Verdict(EXIT_SIDECAR_FAILED, sidecar, tuple(notes))
    if status is not None and status.experiences == 0 and enough and steps:
        # Whoever started a sidecar wants it to learn: hours of a run that fed it nothing are a failure.
        return Verdict(EXIT_SIDECAR_FAILED, _nothing_seen(job_dir, mark), tuple(notes))
    return Verdict(EXIT_OK, (), tuple(notes))


def _lines_of(console: Path) -> list[str]:
    try:
        return console.read_text(errors="replace").splitlines()
    except OSError:
        # Somebody has removed the run folder; Trinity's own logs are looked at all the same.
        return []


def _nothing_seen(job_dir: Path, mark: LogMark) -> tuple[str, ...]:
    """That no experience came, and why, in the words of the operator in Trinity's logs."""
    words: list[str] = []
    for log in _logs(job_dir):
        with log.open(errors="replace") as file:
            file.seek(mark.sizes.get(log, 0))
            words += [line.partition(_OURS)[2].strip() for line in file if line.startswith("WARN") and _OURS in line]
    reasons = list(dict.fromkeys(words))[:_MOST_FINDINGS] or [
        "either they lack a column that the task asks for (missing_column in operator.jsonl of the run folder), or the "
        "derived config was not used"
    ]
    return ("the sidecar saw no experience: " + reasons[0], *reasons[1:])


def find_failures(lines: Iterable[str]) -> Iterator[str]:
    """Failure lines of Trinity, each with the last line of its traceback."""
    block: list[str] = []
    prefix = ""
    for raw in lines:
        line = _RAY_PREFIX.sub("", raw.rstrip())
        match = _LOG_PREFIX.match(line)
        own, text = (match[0], line[match.end() :]) if match else ("", line)
        # Trinity repeats the prefix on every line of one message.
        if block and prefix and own == prefix and not _FAILURE.search(text):
            block.append(text)
            continue
        if block:
            yield _summary(block)
            block = []
        if _FAILURE.search(text):
            block, prefix = [text], own
    if block:
        yield _summary(block)


def _summary(block: list[str]) -> str:
    first = block[0].replace("Traceback (most recent call last):", "").strip().rstrip(":")
    rest = [line.strip() for line in block[1:] if line.strip()]
    # Our own errors go on with what to do, so the last line is not always the one that names the error.
    named = [line for line in rest if re.match(r"[\w.]+(?:Error|Exception|Interrupt)\b", line)]
    last = (named or rest or [""])[-1]
    return f"{first}: {last}" if last and last not in first else first


def _steps(config: TrinityConfig, job_dir: Path) -> tuple[str, bool]:
    """How far the run came against what was wanted, and whether that is enough."""
    if config.mode in ("both", "colocate") and config.trainer_steps:
        who, wanted = config.trainer_name, config.trainer_steps
    elif config.mode in ("explore", "both", "colocate") and config.total_steps:
        who, wanted = config.explorer_name, config.total_steps
    else:
        return "", True
    try:
        saved = int(json.loads((job_dir / f"{who}_meta.json").read_text())["latest_iteration"])
    except (FileNotFoundError, json.JSONDecodeError, KeyError):
        saved = 0
    if saved >= wanted:
        return f"{who} reached step {saved} of {wanted}", True
    # Trinity writes it down with checkpoints only: whoever was cut off may have gone further.
    known = f"its last checkpoint is of step {saved}" if saved else "it has no checkpoint"
    return f"{who} did not reach step {wanted}; {known}", False


def _sidecar_failure(status: Status | None, supervisor_code: int | None) -> tuple[str, ...]:
    if status is not None and status.state is State.FAILED:
        return (f"the sidecar failed: {status.error}",)
    if supervisor_code:
        return (f"the supervisor ended before the run did, with {describe_exit(supervisor_code)}",)
    return ()


def _job_dir(config: TrinityConfig, console: list[str], mark: LogMark) -> Path:
    for line in console:
        match = _RENAMED.search(line)
        if match and match["old"] == config.name:
            return config.job_dir.with_name(match["new"])
    # A log level above warning hides that line; then the folder is the one that was not there before.
    new = [folder for folder in _job_dirs(config) if folder not in mark.folders]
    return max(new, key=lambda folder: folder.name) if new else config.job_dir


def _job_dirs(config: TrinityConfig) -> list[Path]:
    base = config.job_dir
    renamed = re.compile(re.escape(base.name) + r"_\d{14}")
    if not base.parent.is_dir():
        return []
    return [path for path in base.parent.iterdir() if path.name == base.name or renamed.fullmatch(path.name)]


def _logs(folder: Path) -> list[Path]:
    return sorted((folder / "log").rglob("*.log"))
