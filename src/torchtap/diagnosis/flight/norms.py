"""The norm of many gradients together, without waiting for a device and without anyone taking it for clipping."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchtap._torch import foreach_norm

__all__ = ["norm_of"]


def norm_of(tensors: Sequence[Tensor]) -> Tensor | None:
    """The norm of all these; None for no tensors. Half precision is widened, so that it does not overflow."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for each in tensors:
        if each.is_floating_point() and each.layout == torch.strided:
            groups.setdefault((each.device, each.dtype), []).append(each.detach())
    norms = [
        norm
        for (_, dtype), group in groups.items()
        for norm in foreach_norm(group, 2.0, torch.promote_types(dtype, torch.float32))
    ]
    if not norms:
        return None
    first = norms[0].device
    together: Tensor = torch.linalg.vector_norm(
        torch.stack([norm.to(first, torch.float32) for norm in norms])
    )
    return together
