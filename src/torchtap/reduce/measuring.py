"""The state of any one tensor, however it is stored, by the fastest way there is for it.

Sparse tensors are measured by the values they store; the zeros they leave out are counted, not made.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchtap.reduce import device_kernel, kernel
from torchtap.reduce.memory import PLAIN_TYPES
from torchtap.reduce.moments import WIDTH, measure_with_torch, merge_states
from torchtap.reduce.readable import holds_values, readable_real
from torchtap.reduce.transforms import outside_transforms

__all__ = ["measure"]


@outside_transforms
def measure(value: Tensor, room: Callable[[torch.device], Tensor] | None = None) -> Tensor:
    """The state of ``value``, as a tensor where the value is.

    ``room`` has memory for a state on a device. The answer may be there or not.
    """
    if (
        type(value) in PLAIN_TYPES
        and not value.is_mkldnn
        and value.layout is not torch.strided
        and holds_values(value)
    ):
        return _measure_sparse(value.detach())
    plain = readable_real(value)
    if kernel.native is not None:
        state = torch.empty(WIDTH, dtype=torch.float64)
        if kernel.measure(kernel.native, state.data_ptr(), plain):
            return state
    if device_kernel.reads(plain):
        device = plain.device
        state = torch.empty(WIDTH, dtype=torch.float64, device=device) if room is None else room(device)
        if device_kernel.measure(state, plain):
            return state
    return measure_with_torch(plain)


def _measure_sparse(value: Tensor) -> Tensor:
    stored = value.coalesce().values() if value.layout is torch.sparse_coo else value.values()
    state = measure(stored)
    missing = value.numel() - stored.numel()
    if missing <= 0:
        return state
    zeros = torch.tensor([missing, 0, 0, missing, 0, 0, 0, 0, 0, 0], dtype=state.dtype, device=state.device)
    return merge_states(state, zeros)
