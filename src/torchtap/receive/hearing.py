"""The way of most values past all Python: from a module's hook into a row, and from autograd's node into another.

An ear (`reduce/_native_hearing.h`) does for a call that is like most what `Receiver.take` and
`Asking.of_output` do for every one: a plain tensor, the first call of its module in a pass that is heard, and
nothing wanted of the site but its row. It says how far it came, and has changed nothing of what is left: the hook goes
on from there. It asks for a gradient as `gradients` does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from torchtap._torch import gradient_bearer
from torchtap.receive.gradients import nothing, of_the_view
from torchtap.reduce import kernel

if TYPE_CHECKING:
    from torchtap.receive.entries import PortState
    from torchtap.receive.receiver import Receiver

__all__ = ["Hear", "make_ear"]

# Given what a module returned: 0 nothing was done, 1 the output was taken, 2 its gradient was asked for too.
Hear = Callable[[object], int]
# In the order of `kernel.DTYPE_CODES`: those that have gradients come first.
_LEARNING = [dtype for dtype in kernel.DTYPE_CODES if dtype.is_floating_point]


def make_ear(receiver: Receiver, output: PortState | None, gradient: PortState | None) -> Hear | None:
    """An ear for these ports of a module; None without native code, or where torch has no such way."""
    native = _native()
    if native is None:
        return None
    hear: Hear = native.Ear(receiver, output, gradient).hear
    return hear


@cache
def _native() -> ModuleType | None:
    """The native part, which knows by now how to ask for gradients. The first to ask may be a model that serves."""
    with torch.inference_mode(False), torch.enable_grad():
        native, bearer = kernel.hearing, gradient_bearer()
        if native is None or bearer is None:
            return None
        empties = tuple(nothing(dtype, torch.device("cpu")) for dtype in _LEARNING)
        native.use_autograd(bearer, empties, of_the_view)
        return native
