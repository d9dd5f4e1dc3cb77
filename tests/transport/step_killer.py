"""Stops a process at an exact step of the protocol: SIGKILL at the n-th line, or bytecode, executed in the transport.

A bytecode that only moves values inside the interpreter changes nothing that another process can see. A kill after it
is the same as a kill before it. So with `ACTING` a step is a bytecode whose predecessor may have acted: a
call, a store into a buffer, the ends of `with` blocks, iteration, and whatever is not known to be of the other kind.

A line that runs many times counts `repeats` times: the first and the second pass through a loop differ, later ones
do not.
"""

import collections
import dis
import os
import signal
import sys
from pathlib import Path

import mps_trainer.transport

PACKAGE = str(Path(mps_trainer.transport.__file__).parent)
#: They compute and touch nothing outside their process: a kill in them is a kill at the caller's line.
PURE = ("arrow.py", "schema.py", "record.py", "names.py", "layout.py")


#: Bytecodes that read and move values; attribute and operator methods that are ours are traced in their own frames.
QUIET = (
    "BINARY_OP", "BINARY_SUBSCR", "BUILD_", "CACHE", "COMPARE_OP", "CONTAINS_OP", "COPY", "DICT_", "DUP_",
    "EXTENDED_ARG", "FORMAT_", "IS_OP", "JUMP", "KW_NAMES", "LIST_", "LOAD_", "MAKE_", "NOP", "POP_JUMP", "PRECALL",
    "PUSH_", "RESUME", "ROT_", "STORE_ATTR", "STORE_FAST", "STORE_DEREF", "STORE_GLOBAL", "STORE_NAME", "SWAP",
    "UNARY_", "UNPACK_",
)  # fmt: skip
LINES, OPCODES, ACTING = "lines", "opcodes", "acting opcodes"


def _is_quiet(code, at):
    return dis.opname[code.co_code[at]].startswith(QUIET)


def die():
    """SIGKILL to oneself."""
    os.kill(os.getpid(), signal.SIGKILL)


class Stepper:
    """Counts steps inside the transport; at step `stop_at` kills its own process, or does what `at_stop` says."""

    def __init__(self, stop_at=None, *, steps=LINES, repeats=2, at_stop=die):
        self.count = 0
        self._passes = collections.Counter()
        self._repeats = repeats
        self._stop_at = stop_at
        self._at_stop = at_stop
        self._event = "line" if steps == LINES else "opcode"
        self._acting = steps == ACTING
        self._quiet = False

    def __enter__(self):
        sys.settrace(self._enter_frame)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def _enter_frame(self, frame, event, argument):
        file = frame.f_code.co_filename
        if not file.startswith(PACKAGE) or (self._event == "line" and file.endswith(PURE)):
            return None
        frame.f_trace_opcodes = self._event == "opcode"
        return self._step

    def _step(self, frame, event, argument):
        if event == self._event:
            if self._acting:
                quiet, self._quiet = self._quiet, _is_quiet(frame.f_code, frame.f_lasti)
                if quiet:
                    return self._step
            place = (frame.f_code, frame.f_lasti)
            self._passes[place] += 1
            if self._passes[place] > self._repeats:
                return self._step
            self.count += 1
            if self.count == self._stop_at:
                self._at_stop()
        return self._step
