"""Things that can be called become recordings: run on the inputs and recorded as far as their form allows, in the worst
case by their results alone. Not here: what was recorded before (`given`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, fx, nn

from torchtap._torch import runs_compiled
from torchtap.comparison.live.tracing import Feed, feed_of, jitter
from torchtap.comparison.recorded.recordings import MemoryRecording
from torchtap.errors import CompareError
from torchtap.forms.match.site_map import SiteMap
from torchtap.hooks.leaves import leaves
from torchtap.hooks.structure import map_leaves
from torchtap.plan.names import in_passing_order, site_name
from torchtap.session.matching import has_names, match
from torchtap.session.untouched import untouched

__all__ = ["captured", "is_eager", "perturbed"]


def is_eager(thing: object) -> bool:
    """Whether every module of this runs as plain Python, so that its hooks see all and may replace all."""
    if not isinstance(thing, nn.Module) or isinstance(thing, (torch.jit.ScriptModule, fx.GraphModule)):
        return False
    return not any(
        isinstance(module, torch.jit.ScriptModule) or runs_compiled(module) for module in thing.modules()
    )


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
    from torchtap.session.front import capture

    with untouched(thing, in_place=True):
        torch.manual_seed(0)
        try:
            with (
                torch.set_grad_enabled(loss is not None),
                capture(thing, *selectors, all_threads=True, like=_names_of(thing, like, inputs)) as seen,
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


def _names_of(thing: object, like: nn.Module | None, inputs: object) -> SiteMap | None:
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


def perturbed(inputs: object, seed: int = 1) -> Feed | None:
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
