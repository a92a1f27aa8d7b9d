"""A copy of a model: its modules are new, its parameters and buffers are those of the original."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import chain
from typing import Any, TypeVar

from torch import Tensor, nn

__all__ = ["copy_with_shared_tensors"]

Model = TypeVar("Model", bound=nn.Module)


def copy_with_shared_tensors(model: Model) -> Model:
    """Modules, hooks and attributes are copied; no tensor is."""
    held = chain(model.parameters(), model.buffers(), _kept_aside(model))
    memo: dict[int, object] = {id(tensor): tensor for tensor in held}
    return copy.deepcopy(model, memo)


def _kept_aside(model: nn.Module) -> Iterator[Tensor]:
    """Tensors that forwards have left on their modules: torch copies none that is a part of an autograd graph."""
    waiting: list[Any] = [
        value
        for module in model.modules()
        for name, value in module.__dict__.items()
        if name not in ("_parameters", "_buffers", "_modules")
    ]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple, set)):
            waiting.extend(value)
        elif isinstance(value, dict):
            waiting.extend(value.values())
