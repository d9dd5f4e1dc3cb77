"""Files of a run hold experiences, weights and the user's settings: they are for this user alone."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


def write_private(path: Path, content: str | bytes) -> None:
    """Write `path` (0600) by rename, so that a reader sees the old content or the new one.

    The temporary name is nobody's guess and never an existing file, so no link that somebody has laid out is followed.
    A writer that is killed leaves `.<name>.<random>.tmp`.

    Raises:
        OSError: a full disk, no such folder, no right to write; the old content stands.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def make_private(folder: Path) -> None:
    """Make a folder that only this user can enter, parents with their usual rights; one that is there is closed too."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
