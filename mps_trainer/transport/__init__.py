"""Shared memory between operators and the sidecar: channels, leases on their records, scores on the way back.

OperatorChannel   the operator's end of one segment        SidecarHub   the sidecar's end of all segments of a run
send ------------ feed slots ----------------------------> receive -> Delivery (a lease: views of the slot)
receive_scores <- reply slots <--------------------------- Delivery.reply
"""

from mps_trainer.transport.channel import Backpressure, OperatorChannel, SendResult
from mps_trainer.transport.codec import Codec, decode_batch, encode_batch
from mps_trainer.transport.counters import ChannelCounters, HubCounters
from mps_trainer.transport.delivery import Delivery
from mps_trainer.transport.hub import Producer, SidecarHub
from mps_trainer.transport.layout import RingSettings
from mps_trainer.transport.names import leftovers
from mps_trainer.transport.record import RecordHeader
from mps_trainer.transport.replies import Scores
from mps_trainer.transport.segment import Segment
from mps_trainer.transport.sweep import sweep_stale

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
    "decode_batch",
    "encode_batch",
    "leftovers",
    "sweep_stale",
]
