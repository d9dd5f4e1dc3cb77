"""Whether a channel may still be sent through: not closed, not refused by the sidecar, its name not removed."""

from __future__ import annotations

import logging
import time

from mps_trainer.errors import TransportError
from mps_trainer.transport import layout
from mps_trainer.transport.layout import LOCK_SIDECAR_LIFE
from mps_trainer.transport.segment import Segment

log = logging.getLogger(__name__)

#: How often to look for the name while a sidecar says that it is attached.
_LOOK_S = 0.25


class Standing:
    """Looked at before every send."""

    def __init__(self, segment: Segment, status: memoryview) -> None:
        self._segment = segment
        self._status = status
        self._next_look = 0.0
        self._said_removed = False

    def check(self) -> None:
        """Raise TransportError when nothing that is sent now could arrive, with the reason."""
        self._segment.locks.check_open()
        status = self._status[0]
        if status == layout.STATUS_REFUSED:
            raise TransportError(
                f"the sidecar refused {self._segment.name}: {self._refusal()}", "start both from one config"
            )
        # The sidecar that is attached keeps its mapping, with or without the name: asking the kernel at every record
        # would cost more than the record. Where none is attached it must be asked, since nobody else may ever come.
        now = time.monotonic()
        if status != layout.STATUS_ATTACHED or now >= self._next_look:
            self._next_look = now + _LOOK_S
            error = self._segment.unlinked_error()
            if error is not None:
                self._tell_removed(error)

    def _tell_removed(self, error: TransportError) -> None:
        if not self._segment.alive(LOCK_SIDECAR_LIFE):
            # Again at the next send, whatever the dead sidecar's word of being attached says.
            self._next_look = 0.0
            raise error
        if not self._said_removed:
            # Records go on to arrive until the sidecar ends.
            self._said_removed = True
            log.warning("%s", error)

    def _refusal(self) -> str:
        raw = bytes(self._segment.memory[layout.REFUSAL : layout.REFUSAL + layout.REFUSAL_BYTES])
        return raw.rstrip(b"\0").decode("utf-8", "replace")
