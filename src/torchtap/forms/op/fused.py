"""Statistics as a part of a compiled graph: torch ops that the compiler fuses with what made the value.

Only the ten numbers of a state leave the graph, on the device where they are. Used wherever no native kernel
reads the value: on every device but the CPU, where the kernel costs less than fused ops (measured, see
docs/speed.md) and gets the value itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchtap.reduce.moments import measure_masked

__all__ = ["emit_measured", "is_fused", "may_fuse"]

# Set by tests, which have a CPU only.
everywhere = False


def may_fuse(device: str) -> bool:
    """Return True if statistics of values on a kind of device are computed in the graph."""
    return everywhere or device != "cpu"


def is_fused(value: Tensor) -> bool:
    """Return True if those of this value are."""
    return may_fuse(value.device.type) and value.is_floating_point() and value.numel() > 0


def emit_measured(value: Tensor, site: str) -> None:
    """Emit the state of a value in place of the value."""
    wide = torch.float32 if value.device.type == "mps" else torch.float64  # MPS has no float64
    state = measure_masked(value.detach().reshape(-1).to(wide))
    torch.ops.torchtap.emit_state.default(state, site, value.shape)
