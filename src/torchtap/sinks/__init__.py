"""Send records to other tools than the run folder. Each sink is imported when it is first used.

Every sink is a `torchtap.store.record.Consumer`; `torchtap.testing.SinkContract` is what it is held to.
"""

from __future__ import annotations

from torchtap.sinks.callback import CallbackSink
from torchtap.sinks.json_lines import JsonLinesSink
from torchtap.sinks.memory import MemorySink
from torchtap.sinks.mlflow import MlflowSink
from torchtap.sinks.registry import make_sink, sink_names
from torchtap.sinks.tensorboard import TensorBoardSink
from torchtap.sinks.trackio import TrackioSink
from torchtap.sinks.wandb import WandbSink

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
