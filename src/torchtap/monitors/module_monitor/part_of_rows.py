"""A part of a batch: the first rows of it, and the same rows of whatever the model makes of the whole batch.

The reference runs on the part alone. A value of the model is cut to the shape that the reference's value has there: the
first rows of a batch are the first rows of each value, whether samples come first, second, or flattened with their
positions. What mixes samples, such as a batch norm that trains, gives other values for a part: it is refused.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any, final

import torch
from torch import Tensor, nn

from torchtap._torch import RunningNorm
from torchtap.errors import MonitorError

__all__ = ["Cutter", "check_share", "first_rows", "refuse_mixing"]

_REMEMBERED = 64  # as many values as come between a container's first child and its own end


def check_share(share: float) -> None:
    """A share is more than nothing and at most all."""
    if not 0 < share <= 1:
        raise MonitorError(f"share={share!r}: give the part of a batch to check, e.g. share=1/8")


def first_rows(value: Any, share: float) -> Any:
    """The first rows of each tensor in a batch, at least one."""
    if isinstance(value, Tensor):
        return value[: max(1, math.ceil(len(value) * share))] if value.dim() else value
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return type(value)([first_rows(each, share) for each in value])
    if isinstance(value, dict):
        return type(value)({key: first_rows(each, share) for key, each in value.items()})
    return value


@final
class Cutter:
    """Cuts values of the model to the shapes that the reference's have. One value is cut once, so that it stays one."""

    def __init__(self) -> None:
        self._cut: OrderedDict[tuple[int, torch.Size], tuple[Tensor, Tensor]] = OrderedDict()

    def like(self, value: Any, like: Any) -> Any:
        """The part of a value, or of all tensors in a structure, that has the shape of the reference's."""
        if isinstance(value, Tensor):
            return self._tensor(value, like) if isinstance(like, Tensor) else value
        if (
            isinstance(value, (tuple, list))
            and not hasattr(value, "_fields")
            and isinstance(like, (tuple, list))
        ):
            return type(value)([self.like(*both) for both in zip(value, like, strict=False)])
        if type(value) is dict and isinstance(like, dict):
            return {key: self.like(each, like.get(key)) for key, each in value.items()}
        return value

    def _tensor(self, value: Tensor, like: Tensor) -> Tensor:
        if value.shape == like.shape or value.dim() != like.dim():
            return value
        known = self._cut.get((id(value), like.shape))
        if known is not None and known[0] is value:
            return known[1]
        part = _cut(value, like.shape)
        self._cut[id(value), like.shape] = value, part
        if len(self._cut) > _REMEMBERED:
            self._cut.popitem(last=False)
        return part

    def forget(self) -> None:
        """Let go of the values."""
        self._cut.clear()


def _cut(value: Tensor, shape: torch.Size) -> Tensor:
    others = [at for at in range(value.dim()) if value.shape[at] != shape[at]]
    if len(others) > 1 or value.shape[others[0]] < shape[others[0]]:
        raise MonitorError(
            f"a value of shape {tuple(value.shape)} has no part of shape {tuple(shape)}: run the reference on "
            "check.part(inputs), and the model on all of them"
        )
    return value.detach().narrow(others[0], 0, shape[others[0]])


def refuse_mixing(model: nn.Module) -> None:
    """A part of a batch tells of the whole only where samples do not meet."""
    for name, module in model.named_modules():
        if isinstance(module, RunningNorm) and module.training:
            raise MonitorError(
                f"{name} ({type(module).__name__}) trains on the statistics of its batch, so a part of a batch has "
                "other values: check whole batches, or freeze it with eval()"
            )
