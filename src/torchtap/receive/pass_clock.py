"""The interface between a receiver and the steps of a training."""

from __future__ import annotations

from typing import Protocol

__all__ = ["PassClock"]


class PassClock(Protocol):
    """Decide where the values of a pass are folded. A key names a tally; which step it belongs to is known later."""

    def begin_pass(self, training: bool, grad: bool) -> tuple[str, frozenset[int]] | None:
        """Return the key and the active taps of a pass that begins now; None for one that is not recorded.

        ``training`` is the module's mode; ``grad`` is True if autograd records.
        """

    def state_key(self) -> tuple[str, frozenset[int]]:
        """Return the same for parameters, gradients and buffers that are read now."""
