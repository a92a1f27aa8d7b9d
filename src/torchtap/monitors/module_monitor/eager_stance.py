"""Compiled code and hooks: on monitored steps, what torch.compile has compiled runs eagerly.

A compiled graph never sees a hook that came later. So in monitored steps the compiler steps aside, which costs no
recompilation; in all others the compiled code runs untouched, since it was compiled with no hook on the model.
"""

from __future__ import annotations

from typing import Any, final

import torch

from torchtap._torch import compiler_was_used

__all__ = ["EagerStance"]


@final
class EagerStance:
    """Switches torch.compile off and on again. Nothing happens in a process that has never used it."""

    def __init__(self) -> None:
        self._held: Any = None

    def set(self, eager: bool) -> None:
        """Have compiled code run eagerly, or not."""
        if eager and self._held is None:
            if compiler_was_used():
                self._held = torch.compiler.set_stance("force_eager")
        elif not eager and self._held is not None:
            held, self._held = self._held, None
            held.__exit__(None, None, None)
