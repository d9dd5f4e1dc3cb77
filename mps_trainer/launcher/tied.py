"""`python -m mps_trainer.launcher.tied PARENT_PID -- COMMAND ...`: become COMMAND, and end when the parent dies.

The kernel keeps the wish over `exec`. It is asked for here and not between fork and exec of the parent, where
Python code is not safe.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> int:
    """Never returns when the command can be started; 127 when it is not found, 143 when the parent is gone."""
    parent, separator, *command = argv
    if separator != "--" or not command:
        return 2
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    # The parent may have died before the wish was made.
    if os.getppid() != int(parent):
        return 128 + signal.SIGTERM
    try:
        os.execvp(command[0], command)
    except FileNotFoundError:
        sys.stderr.write(f"{command[0]}: not found\n")
    return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
