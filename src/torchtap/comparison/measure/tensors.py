"""From a tensor to a value: dense, opened, on the CPU, detached. The one file of this room that knows torch.

Nothing is copied that lies on the CPU in a type that numpy has. Not here: what is computed of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchtap.comparison.measure.dtypes import name_of
from torchtap.comparison.measure.values import Value
from torchtap.errors import CompareError, ReductionError
from torchtap.reduce.readable import readable
from torchtap.store.format.dtypes import widen

__all__ = ["value_of_tensor"]

# Types that numpy lacks and torch widens exactly, and what to.
_WIDER = {torch.bfloat16: torch.float32, torch.complex32: torch.complex64}


def value_of_tensor(tensor: Tensor) -> Value:
    """The numbers of a tensor; raises `CompareError` when there are none."""
    tensor = tensor.detach()
    if tensor.is_meta:
        raise CompareError(
            f"a tensor on the meta device has no values to compare (shape {tuple(tensor.shape)})"
        )
    if tensor.is_nested:
        raise CompareError(
            "a nested tensor has no single shape to compare; compare its components, or pad it with "
            "torch.nested.to_padded_tensor first"
        )
    try:
        plain = readable(tensor)  # dense, opened, and with all of its memory
    except ReductionError as error:
        raise CompareError(f"a tensor of shape {tuple(tensor.shape)} cannot be compared: {error}") from error
    dtype = name_of(plain.dtype)
    plain = plain.to("cpu")
    if plain.dtype in _WIDER:
        return Value(plain.to(_WIDER[plain.dtype]).numpy(), dtype)
    if dtype.startswith(("float8", "float4")):
        raw = plain.contiguous().view(torch.uint8).numpy()
        return Value(widen(raw.data, dtype, tuple(plain.shape)), dtype)
    try:
        return Value(plain.numpy(), dtype)
    except (TypeError, RuntimeError) as error:  # a type of packed bits
        raise CompareError(f"values of type {dtype} cannot be compared: {error}") from error
