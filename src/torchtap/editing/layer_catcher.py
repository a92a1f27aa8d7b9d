"""A catcher as a module: it replaces a layer, keeps its inputs, and continues or stops.

model[0] = Catcher(model[0])
model(x)
args, kwargs = model[0].calls[0]
model[0] = model[0].layer
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, final

from torch import Tensor, nn

from torchtap.errors import ForwardStoppedError
from torchtap.hooks.leaves import Args, Kwargs
from torchtap.spi import map_leaves

__all__ = ["CallArguments", "LayerCatcher"]


class CallArguments(NamedTuple):
    """The arguments of one call."""

    args: Args
    kwargs: Kwargs


@final
class LayerCatcher(nn.Module):
    """A layer that keeps its calls in ``calls`` and its results in ``outputs``; made by ``Catcher(layer)``.

    stop: raise `ForwardStoppedError`, a ValueError, instead of running the layer. limit: keep so many calls, then
    behave as the layer alone. keep: what is done to each tensor, by default ``tensor.detach().clone()``. Attributes
    that the catcher does not have are the layer's.
    """

    layer: nn.Module

    def __init__(
        self,
        layer: nn.Module,
        *,
        stop: bool = False,
        limit: int | None = None,
        keep: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.train(layer.training)
        self.calls: list[CallArguments] = []
        self.outputs: list[Any] = []
        self._stop, self._limit = stop, limit
        self._keep_tensor = keep or _copied

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._limit is not None and len(self.calls) >= self._limit:
            return self.layer(*args, **kwargs)
        self.calls.append(CallArguments(self._kept(args), self._kept(kwargs)))
        if self._stop:
            raise ForwardStoppedError(
                "a torchtap.Catcher has what it wants and stops the model here: catch ForwardStoppedError, a "
                "ValueError, around the call, or let it go on with stop=False"
            )
        output = self.layer(*args, **kwargs)
        self.outputs.append(self._kept(output))
        return output

    def _kept(self, tree: object) -> Any:
        return map_leaves(tree, lambda _, tensor: self._keep_tensor(tensor))

    def __len__(self) -> int:
        return len(self.calls)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "layer":
                raise
            return getattr(self.layer, name)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()
