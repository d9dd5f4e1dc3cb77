"""A run folder that somebody removes while its run lives (`rm -r checkpoints`, a clean-up) is made again, and says so.

Whoever of supervisor and sidecar notices first makes it; each then opens its own files in it anew, because what is
written to a removed file is seen by nobody. The word of it is the file `removed` in the new folder, for all who follow
them.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from mps_trainer.run.private_files import write_private

_WORD = "removed"


def make_again(run_dir: Path) -> str:
    """Make the folder if it is not there, with the word of it; what happened, a sentence.

    Raises:
        OSError: the disk refuses.
    """
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    if said := was_removed(run_dir):
        return said
    text = (
        f"the run folder or files in it were removed at {time.strftime('%H:%M:%S')} while the run lived, and made "
        "again: earlier logs, metrics and checkpoints are gone; a sidecar that lived has saved all it knew in a new one"
    )
    write_private(run_dir / _WORD, text + "\n")
    return text


def was_removed(run_dir: Path) -> str:
    """What `make_again` said of this folder; "" when it was never removed."""
    with contextlib.suppress(OSError):
        return (run_dir / _WORD).read_text(errors="replace").strip()
    return ""


def is_gone(descriptor: int, path: Path) -> bool:
    """Whether an open file is no more the one at `path`; False where nobody can tell (a stale file server)."""
    try:
        return not os.path.samestat(os.fstat(descriptor), path.lstat())
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False


class OwnLog:
    """What this process prints, if that goes into a file of the run folder. Not so in a test or in a shell."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_ours = path.exists() and not is_gone(2, path)

    @property
    def is_gone(self) -> bool:
        """Whether what is printed goes into a file that is not there any more."""
        return self._is_ours and is_gone(2, self._path)

    def begin_again(self) -> None:
        """Print into a new file from now on, if the old one is gone."""
        if self.is_gone:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            for number in (1, 2):
                os.dup2(descriptor, number)
            os.close(descriptor)
