"""Gradients of two live models: where they stop flowing in one alone, and the reference's own noise in them.

A gradient that is missing is the earliest kind of wrong gradient, and it has its cause in the forward: a value that
needs a gradient in the reference and none in the target. The first such value, in order of execution, names the
module whose code cut the graph.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor, nn

from torchtap.comparison.judge.result import FirstDifference
from torchtap.comparison.live.hooked import visiting
from torchtap.comparison.live.tracing import Feed, golden_copy, jitter
from torchtap.hooks.arguments import Args, Kwargs
from torchtap.hooks.leaves import input_leaves, leaves
from torchtap.hooks.visit import Call
from torchtap.plan.names import last_part, parent_path, site_name
from torchtap.session.untouched import untouched

__all__ = ["broken_flow", "harmless_copies"]


@final
class _Flow:
    """Notes of each value that passes whether a gradient will flow back through it."""

    def __init__(self) -> None:
        self.needs: dict[str, tuple[str | None, bool]] = {}

    def before(self, call: Call, args: Args, kwargs: Kwargs) -> None:
        for leaf, value in input_leaves(call.input_names, args, kwargs, through_objects=False):
            self.needs[site_name(call.path, "input", leaf, call.number)] = (call.parent, value.requires_grad)

    def after(self, call: Call, output: object) -> None:
        for leaf, value in leaves(output, through_objects=False):
            self.needs[site_name(call.path, "output", leaf, call.number)] = (call.path, value.requires_grad)


def broken_flow(
    reference: nn.Module, target: nn.Module, feed: Feed, target_feed: Feed
) -> FirstDifference | None:
    """The first value that needs a gradient in one model alone, with the module that made it so."""
    mine, theirs = _flow(reference, feed), _flow(target, target_feed)
    for at, (site, (author, needed)) in enumerate(mine.items()):
        there = theirs.get(site)
        if there is None or there[1] == needed:
            continue
        what = (
            "no gradient flows back, in the reference it does (a detach, no_grad, or a frozen parameter)"
            if needed
            else "a gradient flows back, in the reference none does"
        )
        return FirstDifference(
            site=site,
            module=author or "",
            index=at,
            error=float("nan"),
            floor=float("nan"),
            origin="structure",
            sure="likely",
            what=what,
        )
    return _frozen(reference, target)


def _frozen(reference: nn.Module, target: nn.Module) -> FirstDifference | None:
    """A parameter that learns in one model alone, though the values around it flow in both."""
    theirs = dict(target.named_parameters())
    for at, (name, parameter) in enumerate(reference.named_parameters()):
        there = theirs.get(name)
        if there is not None and there.requires_grad != parameter.requires_grad:
            module, leaf = parent_path(name), last_part(name)
            return FirstDifference(
                site=site_name(module, "param_grad", leaf),
                module=module,
                index=at,
                error=float("nan"),
                floor=float("nan"),
                origin="structure",
                sure="likely",
                what=f"{leaf} has requires_grad={there.requires_grad}, in the reference {parameter.requires_grad}",
            )
    return None


def _flow(model: nn.Module, feed: Feed) -> dict[str, tuple[str | None, bool]]:
    visitor = _Flow()
    with untouched(model), torch.enable_grad():
        torch.manual_seed(0)
        with visiting(model, visitor):
            feed(model)
    return visitor.needs


def harmless_copies(reference: nn.Module) -> list[tuple[str, Callable[[], nn.Module], torch.dtype | None]]:
    """Copies of the reference whose gradients may differ only harmlessly, each with the dtype that it runs in."""

    def moved() -> nn.Module:
        copied = copy.deepcopy(reference)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in copied.parameters():
                if parameter.is_floating_point():
                    parameter.copy_(_jittered(parameter, generator))
        return copied

    def golden() -> nn.Module:
        copied, why = golden_copy(reference)
        if copied is None:
            raise ValueError(why)
        return copied

    return [("one ULP", moved, None), ("float64", golden, torch.float64)]


def _jittered(parameter: Tensor, generator: torch.Generator) -> Tensor:
    return jitter(parameter.detach(), generator)
