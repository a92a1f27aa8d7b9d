"""Sinks by name, for the command line and for configuration files: ``tensorboard:logs/``, ``jsonl:steps.jsonl``.

A package adds its own by an entry point in the group ``torchtap.sinks`` whose value is called with the text
after the colon and with keyword options.
"""

from __future__ import annotations

from typing import Any

from torchtap.errors import PlanError
from torchtap.registry import Registry
from torchtap.store.record import Consumer

__all__ = ["SINKS", "make_sink", "sink_names"]

SINKS = Registry(
    what="sink",
    group="torchtap.sinks",
    built_in={
        "jsonl": "torchtap.sinks.json_lines:JsonLinesSink",
        "memory": "torchtap.sinks.memory:MemorySink",
        "mlflow": "torchtap.sinks.mlflow:MlflowSink",
        "tensorboard": "torchtap.sinks.tensorboard:TensorBoardSink",
        "trackio": "torchtap.sinks.trackio:TrackioSink",
        "wandb": "torchtap.sinks.wandb:WandbSink",
    },
    error=PlanError,
)


def sink_names() -> list[str]:
    """The names of all sinks there are, without importing them."""
    return SINKS.names()


def make_sink(spec: str, **options: Any) -> Consumer:
    """The sink that a text such as ``tensorboard:logs/`` stands for."""
    name, _, target = spec.partition(":")
    make = SINKS.load(name)
    if not target:
        if name in ("jsonl", "tensorboard"):
            raise PlanError(f"the sink {name!r} needs a place to write to, as in '{name}:some/path'")
        made: Consumer = make(**options)
    elif name == "memory":
        if not target.isdecimal():
            raise PlanError(f"the sink {spec!r}: say how many records to hold, as in 'memory:100'")
        made = make(int(target), **options)
    else:
        made = make(target, **options)
    return made
