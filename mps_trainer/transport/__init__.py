"""Shared memory between operators and the sidecar: channels, leases on their records, scores on the way back.

OperatorChannel   the operator's end of one segment        SidecarHub   the sidecar's end of all segments of a run
send ------------ feed slots ----------------------------> receive -> Delivery (a lease: views of the slot)
receive_scores <- reply slots <--------------------------- Delivery.reply
WeightsReader.look <- two buffers <----------------------- WeightsWriter.publish   (score_where: operator)

The names load their modules at first use: the launcher takes `names`, `layout` and `locks` alone and stays free of
pyarrow.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mps_trainer.transport.channel import OperatorChannel
    from mps_trainer.transport.codec import Codec, decode_batch, encode_batch
    from mps_trainer.transport.counters import ChannelCounters, HubCounters, SendResult
    from mps_trainer.transport.delivery import Delivery
    from mps_trainer.transport.hub import Producer, SidecarHub
    from mps_trainer.transport.layout import RingSettings
    from mps_trainer.transport.names import leftovers
    from mps_trainer.transport.record import RecordHeader
    from mps_trainer.transport.replies import Scores
    from mps_trainer.transport.room import Backpressure
    from mps_trainer.transport.segment import Segment
    from mps_trainer.transport.sweep import sweep_stale
    from mps_trainer.transport.weights import WeightsReader, WeightsWriter
    from mps_trainer.transport.weights_layout import WeightsEntry

_HOMES = {
    "Backpressure": "room",
    "ChannelCounters": "counters",
    "Codec": "codec",
    "Delivery": "delivery",
    "HubCounters": "counters",
    "OperatorChannel": "channel",
    "Producer": "hub",
    "RecordHeader": "record",
    "RingSettings": "layout",
    "Scores": "replies",
    "Segment": "segment",
    "SendResult": "counters",
    "SidecarHub": "hub",
    "WeightsEntry": "weights_layout",
    "WeightsReader": "weights",
    "WeightsWriter": "weights",
    "decode_batch": "codec",
    "encode_batch": "codec",
    "leftovers": "names",
    "sweep_stale": "sweep",
}

__all__ = [
    "Backpressure",
    "ChannelCounters",
    "Codec",
    "Delivery",
    "HubCounters",
    "OperatorChannel",
    "Producer",
    "RecordHeader",
    "RingSettings",
    "Scores",
    "Segment",
    "SendResult",
    "SidecarHub",
    "WeightsEntry",
    "WeightsReader",
    "WeightsWriter",
    "decode_batch",
    "encode_batch",
    "leftovers",
    "sweep_stale",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
