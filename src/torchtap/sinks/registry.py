"""Sinks by name, for the command line and for configuration files: ``tensorboard:logs/``, ``jsonl:steps.jsonl``.

A package adds its own by an entry point in the group ``torchtap.sinks`` whose value is called with the text
after the colon and with keyword options; nothing of it is imported before it is asked for.
"""

from __future__ import annotations

import difflib
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from torchtap.errors import PlanError
from torchtap.store.record import Consumer

__all__ = ["GROUP", "make_sink", "sink_names"]

GROUP = "torchtap.sinks"

_BUILT_IN = {
    "jsonl": "torchtap.sinks.json_lines:JsonLinesSink",
    "memory": "torchtap.sinks.memory:MemorySink",
    "tensorboard": "torchtap.sinks.tensorboard:TensorBoardSink",
    "wandb": "torchtap.sinks.wandb:WandbSink",
}


def sink_names() -> list[str]:
    """The names of all sinks there are, without importing them."""
    return sorted({*_BUILT_IN, *(entry.name for entry in entry_points(group=GROUP))})


def make_sink(spec: str, **options: Any) -> Consumer:
    """The sink that a text such as ``tensorboard:logs/`` stands for."""
    name, _, target = spec.partition(":")
    if name in _BUILT_IN:
        module, _, attribute = _BUILT_IN[name].partition(":")
        make = getattr(import_module(module), attribute)
    else:
        entries = list(entry_points(group=GROUP, name=name))
        if not entries:
            known = sink_names()
            near = difflib.get_close_matches(name, known, n=1) or known
            raise PlanError(
                f"there is no sink {name!r}; known are {', '.join(near)}, as in 'tensorboard:logs/'"
            )
        make = entries[0].load()
    if not target:
        if name in ("jsonl", "tensorboard"):
            raise PlanError(f"the sink {name!r} needs a place to write to, as in '{name}:some/path'")
        made: Consumer = make(**options)
    else:
        made = make(int(target) if name == "memory" else target, **options)
    return made
