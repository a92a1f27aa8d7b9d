"""A copy of a model with modules of its own and the very parameters and buffers of the original."""

from __future__ import annotations

import copy
from itertools import chain
from typing import Any, TypeVar

from torch import nn

__all__ = ["copy_with_shared_tensors"]

Model = TypeVar("Model", bound=nn.Module)


def copy_with_shared_tensors(model: Model) -> Model:
    """Modules, hooks and attributes are copied; no tensor is."""
    memo: dict[int, Any] = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    return copy.deepcopy(model, memo)
