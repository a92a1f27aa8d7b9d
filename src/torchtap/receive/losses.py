"""The losses of a process: what each ``backward()`` is called on, unscaled where a gradient scaler has scaled it."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from torch import Tensor

from torchtap.receive import backward

__all__ = ["LossCatcher"]


@final
class LossCatcher:
    """Calls ``tell`` with the loss whenever a backward pass of a single number begins."""

    def __init__(self, tell: Callable[[Tensor], None]) -> None:
        self.tell = tell

    def start(self) -> None:
        """Hear from now on."""
        backward.listen(self)

    def stop(self) -> None:
        """Hear no more; a second time does nothing."""
        backward.stop_listening(self)

    def backward_begins(self, loss: Tensor | None, root: Tensor | None) -> None:
        if loss is not None:
            self.tell(loss)

    def backward_ends(self) -> None:
        pass
