"""A part of a batch: the first rows of it, and the same rows of whatever the model makes of the whole batch.

The reference runs on the part alone. A value of the model is cut to the shape that the reference's value has there: the
first rows of a batch are the first rows of each value, whether samples come first, second, or flattened with their
positions. What mixes samples, such as a batch norm that trains, gives other values for a part: it is refused.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any, final

from torch import Tensor, nn

from torchtap._torch import RunningNorm
from torchtap.errors import MonitorError
from torchtap.hooks.arguments import Args, Kwargs
from torchtap.hooks.leaves import leaves
from torchtap.hooks.structure import map_leaves
from torchtap.monitors.module_monitor.reference import Call, opened
from torchtap.reduce.kernel import Copied

__all__ = ["Cutter", "check_share", "first_rows", "mixing", "refuse_mixing"]

_OF_A_SHAPE = frozenset({Tensor, Copied})
_REMEMBERED = 64  # as many values as come between a container's first child and its own end


def check_share(share: float) -> None:
    """A share is more than nothing and at most all."""
    if not 0 < share <= 1:
        raise MonitorError(f"share={share!r}: give the part of a batch to check, e.g. share=1/8")


def first_rows(batch: object, share: float) -> Any:
    """The first rows of each tensor in a batch, at least one."""

    def part(_: str, value: Tensor) -> Tensor:
        return value[: max(1, math.ceil(len(value) * share))] if value.dim() else value

    return map_leaves(batch, part)


@final
class Cutter:
    """Cuts values of the model to the shapes that the reference's have. One value is cut once, so that it stays one."""

    def __init__(self) -> None:
        # By id: a value, the shape that it was cut to, and the part.
        self._cut: OrderedDict[int, tuple[Tensor, tuple[int, ...], Tensor]] = OrderedDict()

    def like(self, value: Any, like: Any) -> Any:
        """The part of a value, or of all tensors in a structure, that has the shape of the reference's."""
        if type(value) is Tensor and type(like) in _OF_A_SHAPE:
            return self._tensor(value, like.shape)
        likes = dict(leaves(opened(like)))
        return map_leaves(
            value, lambda name, each: self._tensor(each, likes[name].shape) if name in likes else each
        )

    def call_like(self, args: Args, kwargs: Kwargs, like: Call) -> tuple[Args, Kwargs]:
        """The same for a call's arguments, most of which are one tensor."""
        others, named, _ = like
        if len(args) == 1 == len(others) and type(args[0]) is Tensor and type(others[0]) in _OF_A_SHAPE:
            args = (self._tensor(args[0], others[0].shape),)
        else:
            args = self.like(args, others)
        return args, self.like(kwargs, named) if kwargs else kwargs

    def _tensor(self, value: Tensor, shape: tuple[int, ...]) -> Tensor:
        known = self._cut.get(id(value))
        if known is not None and known[0] is value and known[1] == shape:
            return known[2]
        sizes = value.shape
        if sizes == shape or len(sizes) != len(shape):
            return value
        part = _cut(value, sizes, shape)
        self._cut[id(value)] = value, shape, part
        if len(self._cut) > _REMEMBERED:
            self._cut.popitem(last=False)
        return part

    def forget(self) -> None:
        """Let go of the values."""
        self._cut.clear()


def _cut(value: Tensor, sizes: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    if sizes[1:] == shape[1:] and sizes[0] > shape[0]:
        return value[: shape[0]]
    others = [at for at in range(len(shape)) if sizes[at] != shape[at]]
    at = others[0]
    if len(others) > 1 or sizes[at] < shape[at]:
        raise MonitorError(
            f"a value of shape {tuple(sizes)} has no part of shape {tuple(shape)}: run the reference on "
            "check.part(inputs), and the model on all of them"
        )
    return value.narrow(at, 0, shape[at])


def mixing(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules in which samples of a batch meet as long as they train."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, RunningNorm)]


def refuse_mixing(modules: list[tuple[str, nn.Module]]) -> None:
    """A part of a batch tells of the whole only where samples do not meet."""
    for name, module in modules:
        if module.training:
            raise MonitorError(
                f"{name} ({type(module).__name__}) trains on the statistics of its batch, so a part of a batch has "
                "other values: check whole batches, or freeze it with eval()"
            )
