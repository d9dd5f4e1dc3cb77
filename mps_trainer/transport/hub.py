"""The sidecar's end of all channels of a run.

wait      sleeps on the doorbell; unblocked by `OperatorChannel.send`, a new or closed channel, `wake`, or its
          time limit
receive   consumes the oldest ready record of all channels, produces a Delivery
reap      removes channels whose operator is dead and whose records are all acknowledged
"""

from __future__ import annotations

import logging
import operator
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType

from mps_trainer.columns import Column
from mps_trainer.errors import CorruptRecordError, TransportError
from mps_trainer.transport import layout, names, schema
from mps_trainer.transport.attached import AttachedChannel, StoppedOperatorError
from mps_trainer.transport.codec import Codec
from mps_trainer.transport.counters import ChannelCounters, HubCounters, load_operator_counters
from mps_trainer.transport.delivery import Delivery
from mps_trainer.transport.segment import Segment, SideTakenError
from mps_trainer.transport.semaphores import SLICE_S, Doorbell
from mps_trainer.transport.shortage import ShortageError, Shortages
from mps_trainer.transport.sweep import remove_run

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Producer:
    """An operator as the sidecar sees it.

    Attributes:
        name: of its channel.
        generation: a number of that channel alone: a name may be used again.
        pid: of its process, for messages only; `alive` is told by its lock.
        alive: whether its process lives.
        backlog: records sent and not yet acknowledged.
        sent: its own counters, as it last stored them.
        taken: the sidecar's counters of this channel.
        waiting_since_ns: when its oldest unread record was sent (CLOCK_MONOTONIC), as a hint; None when there is none.
    """

    name: str
    generation: int
    pid: int
    alive: bool
    backlog: int
    sent: ChannelCounters
    taken: HubCounters
    waiting_since_ns: int | None = None


class SidecarHub:
    """Attaches to every channel of a run, now and later. One process per run can do so at a time."""

    def __init__(
        self,
        run_id: str,
        columns: Sequence[Column],
        *,
        attach_timeout_s: float = 5.0,
        on_attach: Callable[[Segment], None] | None = None,
    ) -> None:
        """Open the doorbell and attach to the channels that are there.

        `on_attach` gets the mapped segment of each channel, before its first record is lent; what it sets up there it
        takes down in a call that it leaves with `Segment.before_unmap`.

        A channel whose columns or version differ is refused, not fatal: its operator's next `send` raises,
        `refused` says why.
        Raises TransportError when the run still has another sidecar after `attach_timeout_s`.
        """
        self._run_id = names.check_run_id(run_id)
        self._schema = schema.describe(columns)
        self._codec = Codec(columns)
        self._channels: dict[str, AttachedChannel] = {}
        self._on_attach = on_attach
        self.refused: dict[str, str] = {}
        self._refused_inodes: dict[str, int] = {}
        self.shortages = Shortages()
        self._bell = Doorbell(run_id)
        self._woken = False
        self._closed = False
        self._next_look = 0.0
        try:
            self._claim(attach_timeout_s)
            self.find_new()
        except BaseException:
            self.close(unlink=False)
            raise

    def __enter__(self) -> SidecarHub:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(unlink=False)

    def wait(self, timeout_s: float) -> bool:
        """Sleep until a record is ready, at most `timeout_s`. False when none is, also after `wake`.

        Before it sleeps it looks for a post for `semaphores.LOOK_NS`, and spins no longer than that.
        """
        deadline = time.monotonic() + timeout_s
        rung = late = False
        while not self._woken:
            self._tidy()
            if self.any_ready():
                return True
            if rung or time.monotonic() >= self._next_look:
                # Rung without a record: by a new operator, or for a record that was evicted meanwhile.
                self.find_new()
                if self.any_ready():
                    return True
            if late:
                # Rung or not: a count of the bell that is wrong, however large, must not keep us here.
                break
            now = time.monotonic()
            late = now >= deadline
            until = min([deadline, *(c.stuck_until for c in self._channels.values() if c.stuck_until > now)])
            rung = self._bell.wait(max(0.0, until - now))
            if late and not rung:
                break
        self._woken = False
        return False

    def wake(self) -> None:
        """Make a running or the next `wait` return; may be called from a signal handler or another thread."""
        self._woken = True
        self._bell.post()

    def receive(self) -> Delivery | None:
        """Lease the oldest ready record of all channels, None when there is none.

        Raises CorruptRecordError for a record that does not add up; it is skipped and counted, the next call goes on.
        Raises TransportError when views that were kept hold every slot of a channel, since nothing could ever
        arrive again.
        """
        self._tidy()
        if time.monotonic() >= self._next_look:
            self.find_new()
        for channel in self._oldest_first():
            # None: its record was evicted meanwhile, or its operator is stopped in the mutex; others must not starve.
            try:
                delivery = channel.receive()
            except CorruptRecordError:
                self._bell.consume()
                raise
            if delivery is not None:
                # After the claim: a post that comes between them is of a record that the next look will see.
                self._bell.consume()
                return delivery
        for channel in self._channels.values():
            if channel.counters.lingering == channel.reader.ring.num_slots:
                raise TransportError(
                    f"views of released records hold all {channel.counters.lingering} slots of {channel.name}",
                    "copy what you keep of a batch before its delivery is released",
                )
        return None

    def find_new(self) -> None:
        """Attach to channels that appeared since the last look; `wait` and `receive` do so by themselves."""
        self._next_look = time.monotonic() + SLICE_S
        with self.shortages.watched():
            self._look()

    def _look(self) -> None:
        if self._bell.removed:
            bell = Doorbell(self._run_id)
            self._bell.close()
            self._bell = bell
            self._claim(SLICE_S)
            for channel in self._channels.values():
                channel.set_bell(self._bell.inode)
        present = dict(names.segments(self._run_id))
        # By name and inode: a name whose segment was removed may be in use again.
        for name in [name for name, inode in self._refused_inodes.items() if present.get(name) != inode]:
            self.refused.pop(name, None)
            del self._refused_inodes[name]
        for name, inode in present.items():
            attached = self._channels.get(name)
            if attached is not None and attached.segment.inode != inode:
                # Somebody removed the file under a channel in use, and the name now means another one.
                self._channels.pop(name).close(remove=False)
            if name not in self._channels and name not in self.refused:
                self._attach(name, inode)

    def producers(self) -> list[Producer]:
        """All attached channels, by name."""
        return [
            Producer(
                name,
                c.segment.header.generation,
                c.segment.header.pid,
                c.operator_alive,
                c.backlog,
                load_operator_counters(c.segment, layout.OPERATOR_COUNTERS),
                c.counters,
                c.ready_since(),
            )
            for name, c in sorted(self._channels.items())
        ]

    def segments(self) -> list[Segment]:
        """The mapped segments; `address` and `nbytes` of each is what `cudaHostRegister` needs."""
        return [channel.segment for channel in self._channels.values()]

    def reap(self) -> int:
        """Remove the channels whose operator is dead and that hold no record; returns how many."""
        self._tidy()
        done = [n for n, c in self._channels.items() if not c.operator_alive and c.backlog == 0]
        for name in done:
            self._channels.pop(name).close(remove=True)
        return len(done)

    def close(self, *, unlink: bool) -> None:
        """Detach from all channels. Idempotent.

        With `unlink` the run is over: channels without a living operator are removed, drained or not, and the doorbell
        if nobody else has it. Without it everything stays for a successor, to which records that were not released are
        delivered again. Open deliveries raise from now on; arrays taken out of them keep what they show.
        """
        if self._closed:
            return
        self._tidy()
        self._closed = True
        for channel in self._channels.values():
            channel.close(remove=unlink)
        self._channels.clear()
        self._bell.close(unlink_if_alone=unlink)
        if unlink:
            remove_run(self._run_id)

    def any_ready(self) -> bool:
        """Whether a record is ready on a channel that we are attached to, as a hint. Microseconds."""
        for channel in self._channels.values():  # noqa: SIM110  # on the way of every record: a generator costs more
            if channel.has_ready():
                return True
        return False

    def _oldest_first(self) -> Iterable[AttachedChannel]:
        if len(self._channels) < 2:
            return self._channels.values()
        ready = [(since, c) for c in self._channels.values() if (since := c.ready_since()) is not None]
        ready.sort(key=operator.itemgetter(0))
        return [channel for _, channel in ready]

    def _tidy(self) -> None:
        if self._closed:
            raise TransportError(f"the hub of run {self._run_id} is closed", "make a new one")
        for channel in self._channels.values():
            channel.tidy()

    def _claim(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not self._bell.claim():
            if time.monotonic() >= deadline:
                raise TransportError(
                    f"run {self._run_id} already has a sidecar", "stop it first: one sidecar serves a run"
                )
            # A predecessor on its way out drops its locks when the kernel has torn it down; nobody can post that.
            self._bell.wait(0.02)

    def _attach(self, name: str, inode: int) -> None:
        try:
            channel = AttachedChannel(name, self._codec, self._bell.inode, os.getpid())
        except FileNotFoundError:
            return
        except (CorruptRecordError, SideTakenError, StoppedOperatorError) as error:
            # Perhaps its maker has not finished, a sweep tries its locks, or its operator is stopped: we look again.
            log.debug("not attached to %s: %s", name, error)
            return
        except ShortageError as error:
            self.shortages.note(error)
            return
        except TransportError as error:
            self._refuse(name, inode, str(error))
            return
        difference = schema.difference(channel.segment.header.schema, self._schema)
        if difference:
            channel.refuse(difference)
            self._refuse(name, inode, difference)
            return
        self._channels[name] = channel
        if self._on_attach is not None:
            self._on_attach(channel.segment)

    def _refuse(self, name: str, inode: int, reason: str) -> None:
        self.refused[name], self._refused_inodes[name] = reason, inode
        log.warning("refused %s: %s", name, reason)
