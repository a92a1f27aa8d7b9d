"""What a user may hand to a comparison, and how it becomes a recording.

A path is a run folder or a folder of layer files; a mapping from names to tensors, a list of layers' outputs and an
opened run are taken as they are; anything that can be called is run on the inputs and recorded as far as its form
allows, in the worst case by its results alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from torchtap._torch import runs_compiled
from torchtap.comparison.live.tracing import Feed, feed_of, jitter
from torchtap.comparison.live.untouched import untouched
from torchtap.comparison.recorded.recordings import (
    FolderRecording,
    MemoryRecording,
    Recording,
    RunRecording,
    is_layer_folder,
)
from torchtap.errors import CompareError, RunNotFoundError
from torchtap.matching import has_names, match
from torchtap.names import in_passing_order, site_name
from torchtap.taps.alike.site_map import SiteMap
from torchtap.taps.walk.leaves import leaves
from torchtap.taps.walk.structure import map_leaves

__all__ = ["captured", "describe", "is_eager", "is_live", "perturbed", "recording_of"]


def is_live(thing: Any) -> bool:
    """Whether this is something to run."""
    return callable(thing) and not isinstance(thing, (Tensor, Mapping, type))


def is_eager(thing: Any) -> bool:
    """Whether every module of this runs as plain Python, so that its hooks see all and may replace all."""
    if not isinstance(thing, nn.Module) or isinstance(thing, (torch.jit.ScriptModule, fx.GraphModule)):
        return False
    return not any(
        isinstance(module, torch.jit.ScriptModule) or runs_compiled(module) for module in thing.modules()
    )


def describe(thing: Any) -> str:
    """What to call it in a report."""
    if isinstance(thing, (str, os.PathLike)):
        return os.fspath(thing)
    if isinstance(thing, nn.Module):
        return type(thing).__name__
    return str(getattr(thing, "label", None) or getattr(thing, "path", None) or type(thing).__name__)


def recording_of(thing: Any) -> Recording:
    """A recording of something that is not to be run."""
    if isinstance(thing, (str, os.PathLike)):
        return _from_path(thing)
    if hasattr(thing, "tensors") and hasattr(thing, "matrix"):
        return RunRecording(thing)
    if hasattr(thing, "sites") and hasattr(thing, "tensor") and hasattr(thing, "problems"):
        return thing  # type: ignore[no-any-return]
    if isinstance(thing, Mapping):
        values, left = _tensors_of(thing)
        if not values:
            raise CompareError("the mapping has no tensors to compare")
        return MemoryRecording(values, "values", left)
    if isinstance(thing, Sequence) and not isinstance(thing, str) and thing:
        values, left = _tensors_of(
            {site_name(f"layer_{n}", "output"): value for n, value in enumerate(thing)}
        )
        if values:
            return MemoryRecording(values, "layers", left)
    raise CompareError(
        f"cannot compare a {type(thing).__name__}: give a run, a folder of layer files, a mapping from names to "
        "tensors, or a model together with inputs=..."
    )


def _tensors_of(thing: Mapping[Any, Any]) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The tensors and arrays of a mapping, and what else it holds, which is told and never lost in silence."""
    values: dict[str, Tensor] = {}
    left = []
    for name, value in thing.items():
        if isinstance(value, Tensor):
            values[str(name)] = value
        elif isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "fiubc":
            values[str(name)] = torch.from_numpy(np.ascontiguousarray(value))
        elif isinstance(value, (bool, int, float, complex)):
            values[str(name)] = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
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


def captured(
    thing: Any,
    feed: Feed,
    label: str,
    *,
    selectors: tuple[str, ...] = ("*:output",),
    loss: Callable[[Any], Tensor] | None = None,
    like: nn.Module | None = None,
    inputs: Any = None,
) -> MemoryRecording:
    """Run something once and keep what its form lets out; with ``loss`` a backward pass is run as well.

    A graph that does not tell its names gets those of ``like``, an eager model, which runs once on ``inputs``.
    """
    from torchtap.session import capture

    with untouched(thing):
        torch.manual_seed(0)
        try:
            with (
                torch.set_grad_enabled(loss is not None),
                capture(thing, *selectors, any_thread=True, like=_names_of(thing, like, inputs)) as seen,
            ):
                output = feed(thing)
                if loss is not None:
                    loss(output).backward()
            values = {
                name: value for name in in_passing_order(seen) if isinstance(value := seen[name], Tensor)
            }
            if values:
                return MemoryRecording(values, label)
            hidden = "its form lets no value out"
        except CompareError:
            raise
        except Exception as error:
            hidden = _brief(error)
        return _results_alone(thing, feed, label, hidden)


def _names_of(thing: Any, like: nn.Module | None, inputs: Any) -> SiteMap | None:
    """The map of a form's values to the sites of the eager model; None where it has none, or needs none."""
    if like is None or callable(inputs) or has_names(thing):
        return None
    with suppress(Exception), untouched(like):
        return match(thing, like, inputs)
    return None


def _results_alone(thing: Any, feed: Feed, label: str, hidden: str) -> MemoryRecording:
    """What something returns, when nothing inside it can be seen; ``hidden`` says why."""
    torch.manual_seed(0)
    try:
        with torch.no_grad():
            output = feed(thing)
    except Exception as error:
        raise CompareError(f"{label} does not run on these inputs: {_brief(error)}") from error
    named = {site_name("", "output", leaf): value.detach() for leaf, value in leaves(output)}
    if not named:
        raise CompareError(f"{label} returned no tensor, and nothing inside it can be seen: {hidden}")
    return MemoryRecording(named, label, (f"{label}: only its results can be seen: {hidden}",))


def _brief(error: BaseException) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def perturbed(inputs: Any, seed: int = 1) -> Feed | None:
    """The same inputs moved by about one ULP; ``None`` when they are not numbers that can be moved a little."""
    if callable(inputs) and not isinstance(inputs, (Tensor, nn.Module)):
        return None
    generator = torch.Generator().manual_seed(seed)
    moved = False

    def move(_: str, value: Tensor) -> Tensor:
        nonlocal moved
        moved = moved or value.is_floating_point()
        return jitter(value.detach(), generator) if value.is_floating_point() else value

    changed = map_leaves(inputs, move)
    return feed_of(changed) if moved else None
