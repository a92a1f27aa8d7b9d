"""Passes over the model that belong to no epoch or batch, because nobody said which.

A pass in training mode is warned of at once. One in evaluation mode may be a look at the model before the training
begins, so it is told only when data is asked for and the clock still stands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from torchtap.forms.attach import form_of
from torchtap.hooks.ways import HookWay

__all__ = ["ForgottenClock"]


@final
class ForgottenClock:
    """Listens from ``wait_for`` to ``arrived``; the model carries a hook only in between."""

    def __init__(self, model: Any, warn: Callable[[str], None]) -> None:
        self._model, self._warn = model, warn
        self._hookable = form_of(model) == "eager"  # a hook on a compiled model would become part of it
        self._handle: Any = None
        self._missing = ""
        self._passes = 0

    def wait_for(self, missing: str) -> None:
        """From now on a pass is one too early. ``missing`` says what was not called."""
        self._missing, self._passes = missing, 0
        if self._hookable and self._handle is None:
            self._handle = HookWay().before(self._model, self._on_pass)

    def arrived(self) -> None:
        """The call came, or nobody listens any more."""
        self._missing = ""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def tell(self) -> None:
        """Warn if passes came and the call did not."""
        if self._missing and self._passes:
            self._warn(
                f"the model ran and nothing was recorded: {self._missing}. Call monitor.set_epoch(epoch) at the start "
                "of each epoch and monitor.set_batch_idx(index) at the start of each batch"
            )

    def _on_pass(self, *_: object) -> None:
        self._passes += 1
        if self._model.training:
            self.tell()
