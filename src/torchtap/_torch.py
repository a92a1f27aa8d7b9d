"""What torchtap needs of torch and torch does not promise: private names, each with what happens where it is gone.

No other file should ask torch for a private name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = [
    "graph_task",
    "in_backward",
    "is_traced_by_script",
    "node_that_runs",
    "norm_of",
    "sequence_number",
    "version_of",
]

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


def node_that_runs() -> tuple[str, int] | None:
    """The name and the number of autograd's node that runs in this thread. Where torch cannot say, none does."""
    asked = getattr(torch._C, "_current_autograd_node", None)
    node = None if asked is None else asked()
    number = getattr(node, "_sequence_nr", None)
    return None if node is None or number is None else (node.name(), number())


def sequence_number() -> int:
    """The number that autograd's next node will have; -1 where torch does not tell, so that no node is known by it."""
    asked = getattr(torch.autograd, "_get_sequence_nr", None)
    return -1 if asked is None else asked()


def norm_of(tensors: Sequence[Tensor]) -> Tensor | None:
    """The norm of all these together, without waiting for a device; None for no tensors. Half precision is widened.

    torch's own function for it tells those who listen for clipping.
    """
    floats = [each.detach() for each in tensors if each.is_floating_point() and each.layout == torch.strided]
    if not floats:
        return None
    norms = [
        norm
        for group in _alike(floats)
        for norm in torch._foreach_norm(group, 2.0, dtype=torch.promote_types(group[0].dtype, torch.float32))
    ]
    first = norms[0].device
    together: Tensor = torch.linalg.vector_norm(
        torch.stack([norm.to(first, torch.float32) for norm in norms])
    )
    return together


def _alike(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for each in tensors:
        groups.setdefault((each.device, each.dtype), []).append(each)
    return list(groups.values())
