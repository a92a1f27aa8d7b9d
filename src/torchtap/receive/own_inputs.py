"""What one call alone sends back: the gradients of inputs that no other module has.

The module runs on a view of each value that it is given. The view's gradient is this call's part of the value's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchtap.hooks.arguments import Args, Kwargs
from torchtap.hooks.leaves import input_leaves
from torchtap.hooks.structure import map_leaves
from torchtap.receive.asking import Asking
from torchtap.receive.entries import PortState
from torchtap.receive.gradients import ask_at_its_node

__all__ = ["awaiting_own_inputs"]


def awaiting_own_inputs(
    asking: Asking,
) -> Callable[[PortState, Args, Kwargs, bool], tuple[Args, Kwargs]]:
    """A function that asks for these gradients, and gives the module its views."""

    def wait(port: PortState, args: Args, kwargs: Kwargs, repeated: bool) -> tuple[Args, Kwargs]:
        args, kwargs = map_leaves(args, _its_own), map_leaves(kwargs, _its_own)
        found = input_leaves(port.input_names, args, kwargs)
        asking.of_each(port, found, repeated, ask_at_its_node)
        return args, kwargs

    return wait


def _its_own(_: str, value: Tensor) -> Tensor:
    return value.view_as(value) if value.requires_grad and torch.is_grad_enabled() else value
