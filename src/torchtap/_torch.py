"""What torchtap needs of torch and torch does not promise: private names, each with what happens where it is gone.

No other file should ask torch for a private name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["graph_task", "in_backward", "is_traced_by_script", "saved_by", "version_of"]

# The number of the backward pass that runs in this thread, -1 if none does. It tells a checkpoint's repetition from
# a call of the model. Without it the import fails: every repetition would be recorded as a call.
graph_task: Callable[[], int] = torch._C._current_graph_task_id


def in_backward() -> bool:
    """Whether autograd is at work in this thread: a forward that runs now is a checkpoint's repetition."""
    return graph_task() != -1


def is_traced_by_script() -> bool:
    """Whether ``torch.jit.trace`` runs this code. Where torch cannot say, it does not."""
    asked = getattr(torch._C, "_get_tracing_state", None)
    return asked is not None and asked() is not None


def version_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place; -1 where nothing tells, so nothing proves it unchanged.

    Inference tensors keep no version.
    """
    return -1 if tensor.is_inference() else tensor._version


def saved_by(node: Any, name: str) -> Any:
    """What a node of autograd's graph has kept for its backward under a name; None where it has no such thing."""
    return getattr(node, f"_saved_{name}", None)
