"""Send records to other tools than the run folder. Each sink is imported when it is first used.

Every sink is a `torchtap.store.record.Consumer`; `torchtap.testing.SinkContract` is what it is held to.
"""

from __future__ import annotations

from torchtap.sinks.local import CallbackSink, JsonLinesSink, MemorySink
from torchtap.sinks.selection import make_sink, sink_names
from torchtap.sinks.trackers import MlflowSink, TensorBoardSink, TrackioSink, WandbSink

__all__ = [
    "CallbackSink",
    "JsonLinesSink",
    "MemorySink",
    "MlflowSink",
    "TensorBoardSink",
    "TrackioSink",
    "WandbSink",
    "make_sink",
    "sink_names",
]
