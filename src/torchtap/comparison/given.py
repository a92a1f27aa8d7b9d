"""What a user may hand to a comparison that was recorded before, and how it becomes a recording. Imports no torch.

A path is a run folder or a folder of layer files; a mapping from names to tensors or arrays, a list of layers' outputs
and an opened run are taken as they are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from torchtap.comparison.measure.values import Comparable
from torchtap.comparison.recorded.recordings import (
    FolderRecording,
    MemoryRecording,
    Recording,
    RunRecording,
    is_layer_folder,
)
from torchtap.errors import CompareError, RunNotFoundError
from torchtap.plan.names import site_name

__all__ = ["describe", "is_live", "recording_of"]


def is_live(thing: object) -> bool:
    """Whether this is something to run."""
    return callable(thing) and not isinstance(thing, (Mapping, type))


def describe(thing: Any) -> str:
    """What to call it in a report."""
    if isinstance(thing, (str, os.PathLike)):
        return os.fspath(thing)
    if is_live(thing):
        return type(thing).__name__
    return str(getattr(thing, "label", None) or getattr(thing, "path", None) or type(thing).__name__)


def recording_of(thing: Any) -> Recording:
    """A recording of something that is not to be run."""
    if isinstance(thing, (str, os.PathLike)):
        return _from_path(thing)
    if _has(thing, "tensors", "matrix"):
        return RunRecording(thing)
    if _has(thing, "sites", "value", "problems"):
        return thing  # type: ignore[no-any-return]
    if isinstance(thing, Mapping):
        values, left = _tensors_of(thing)
        if not values:
            raise CompareError("the mapping has no tensors to compare")
        return MemoryRecording(values, "values", left)
    if isinstance(thing, Sequence):
        values, left = _tensors_of(
            {site_name(f"layer_{n}", "output"): value for n, value in enumerate(thing)}
        )
        if values:
            return MemoryRecording(values, "layers", left)
    raise CompareError(
        f"cannot compare a {type(thing).__name__}: give a run, a folder of layer files, a mapping from names to "
        "tensors, or a model together with inputs=..."
    )


def _has(thing: object, *names: str) -> bool:
    return all(hasattr(thing, name) for name in names)


def _tensors_of(thing: Mapping[Any, Any]) -> tuple[dict[str, Comparable], tuple[str, ...]]:
    """The tensors and arrays of a mapping, and what else it holds, which is told and never lost in silence."""
    values: dict[str, Comparable] = {}
    left = []
    for name, value in thing.items():
        if hasattr(value, "untyped_storage") or (
            isinstance(value, np.ndarray) and value.dtype.kind in "fiubc"
        ):
            values[str(name)] = value
        elif isinstance(value, (bool, int, float, complex, np.number, np.bool_)):
            values[str(name)] = np.asarray(value)
        else:
            left.append(f"{name} is a {type(value).__name__}, not a tensor")
    return values, tuple(left)


def _from_path(path: str | os.PathLike[str]) -> Recording:
    from torchtap.store.read.reader import is_run, open_run

    text = os.fspath(path)
    if "://" not in text:
        if not Path(text).exists():
            raise RunNotFoundError(f"there is no run and no folder at {text}")
        if not Path(text).is_dir():
            raise CompareError(
                f"{text} is a file; compare takes folders: a run, or one with layer_N_output.pt files"
            )
        if not is_run(text) and is_layer_folder(Path(text)):
            return FolderRecording(text)
    return RunRecording(open_run(text))
