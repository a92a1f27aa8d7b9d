"""What a receiver asks of the clock: whose a pass is, and which taps are live in it."""

from __future__ import annotations

from typing import Protocol

__all__ = ["PassClock"]


class PassClock(Protocol):
    """Whoever knows what the passes of a training serve."""

    def pass_begins(self, phase: str, learning: bool) -> frozenset[int] | None:
        """The taps that are live in a pass that begins now; None for one that is not to be heard.

        ``learning`` says that gradients are on.
        """

    def state_phase(self) -> tuple[str, frozenset[int]]:
        """The phase that parameters, gradients and buffers belong to when they are read now, and its live taps."""
