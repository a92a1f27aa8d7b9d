"""Hand every record to a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from torchtap.store.record import StepRecord

__all__ = ["CallbackSink"]


@final
class CallbackSink:
    """``function(record)`` at the end of each live step, in the training's thread; ``on_close()`` at the end."""

    def __init__(
        self, function: Callable[[StepRecord], object], on_close: Callable[[], object] | None = None
    ) -> None:
        self._function = function
        self._on_close = on_close

    def write(self, record: StepRecord) -> None:
        self._function(record)

    def close(self) -> None:
        if self._on_close is not None:
            self._on_close()
