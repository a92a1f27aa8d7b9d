"""Compiled code and hooks: on monitored steps, what torch.compile has compiled runs eagerly.

A compiled graph never sees a hook that came later. So in monitored steps the compiler steps aside, which costs no
recompilation; in all others the compiled code runs untouched, since it was compiled with no hook on the model.
"""

from __future__ import annotations

import sys
from typing import Any, final

import torch

__all__ = ["EagerStance"]


def _compiler_is_used() -> bool:
    """Whether anything in this process was given to torch.compile. Optimizers load the compiler in any case."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    backends: dict[Any, Any] = getattr(frames, "cached_backends", {})
    return any(backend is not None for backend in backends.values())


@final
class EagerStance:
    """Switches torch.compile off and on again. Nothing happens in a process that has never used it."""

    def __init__(self) -> None:
        self._held: Any = None

    def set(self, eager: bool) -> None:
        """Have compiled code run eagerly, or not."""
        if eager and self._held is None:
            if _compiler_is_used():
                self._held = torch.compiler.set_stance("force_eager")
        elif not eager and self._held is not None:
            held, self._held = self._held, None
            held.__exit__(None, None, None)
