"""Gradients as one rank computed them, before a wrapper averages them over ranks.

A hook keeps a copy of each gradient when autograd has accumulated it, which is before DDP reduces it. The newest copy
counts: with several passes in a step it is that of all of them. Hooks are on parameters only while somebody asks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

from torch import Tensor
from torch.utils.hooks import RemovableHandle

__all__ = ["LocalGradients"]


@final
class LocalGradients:
    """The newest local gradient of each parameter, by the parameter's id."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._kept: dict[int, Tensor] = {}

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Keep the gradients of these from now on."""
        for parameter in parameters:
            if parameter.requires_grad and parameter.is_leaf:
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._keep))

    def _keep(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._kept[id(parameter)] = parameter.grad.detach().clone()

    def of(self, parameter: Tensor) -> Tensor | None:
        """What was kept for a parameter in this step."""
        return self._kept.get(id(parameter))

    def clear(self) -> None:
        """A new step begins."""
        self._kept.clear()

    def stop(self) -> None:
        """Leave the parameters as they were."""
        while self._handles:
            self._handles.pop().remove()
        self._kept.clear()
