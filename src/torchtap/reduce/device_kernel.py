"""The Triton kernel where it can run, and the way in: the counterpart of `kernel` for values on a GPU.

Triton is imported when the first such value comes, never before. Without it, and where it fails (it needs a C
compiler and a GPU that is not too old), torch ops do the work, with the same results.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from torchtap.reduce.kernel import DTYPE_CODES
from torchtap.sanitize import shown

__all__ = ["measure", "reads"]

# Only what its Triton backend is released for; ROCm calls itself cuda, too.
_DEVICES = frozenset({"cuda"})
_launch: Callable[[Tensor, Tensor], None] | None = None
_possible = True


def reads(value: Tensor) -> bool:
    """Whether ``measure`` is worth a try."""
    return _possible and value.device.type in _DEVICES and value.dtype in DTYPE_CODES


def measure(state: Tensor, value: Tensor) -> bool:
    """Write the state of a value that `reads` accepts to ``state``; False where Triton turns out not to work."""
    try:
        launch = _launch or _load()
        with torch.cuda.device_of(value):
            launch(state, value)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        _give_up(error)
        return False
    return True


def _load() -> Callable[[Tensor, Tensor], None]:
    global _launch
    from torchtap.reduce.triton_kernel import measure

    _launch = measure
    return measure


def _give_up(error: Exception) -> None:
    global _possible
    _possible = False
    if isinstance(error, ImportError):
        return
    with suppress(RuntimeWarning):  # where warnings are errors, this one must still not cost a value
        warnings.warn(
            shown(
                f"Triton cannot run the statistics' kernel ({type(error).__name__}: {error}): torch ops compute "
                "them from now on, with the same results and more slowly",
                5000,
                lines=True,
            ),
            RuntimeWarning,
            stacklevel=4,
        )
