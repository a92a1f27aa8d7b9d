"""The account of what could not be kept: counted by reason, told in sentences, warned about once."""

from __future__ import annotations

import threading
import warnings
from contextlib import suppress
from typing import final

from torchtap.store.write.tensors import Loss

__all__ = ["Losses"]

_MAX_REASONS = 64


@final
class Losses:
    """Losses by reason. Safe to read from any thread."""

    def __init__(self) -> None:
        self._by_reason: dict[str, Loss] = {}
        self._lock = threading.Lock()
        self._warned = False

    def __bool__(self) -> bool:
        return bool(self._by_reason)

    def add(self, loss: Loss) -> None:
        """Count a loss, and warn if it is the first."""
        with self._lock:
            reason = loss.reason
            if reason not in self._by_reason and len(self._by_reason) >= _MAX_REASONS:
                reason = "other reasons"
            known = self._by_reason.get(reason, Loss(reason))
            self._by_reason[reason] = Loss(
                reason, known.tensors + loss.tensors, known.rows + loss.rows, known.nbytes + loss.nbytes
            )
            first, self._warned = not self._warned, True
        if first:
            # where warnings are errors, this one must still not end a training
            with suppress(RuntimeWarning):
                warnings.warn(
                    f"torchtap could not record everything ({loss.reason}); the training goes on, "
                    "and the run says what is missing",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def sentences(self) -> list[str]:
        """Each reason once, with how much it has cost."""
        with self._lock:
            losses = list(self._by_reason.values())
        return [_sentence(loss) for loss in losses]

    def facts(self) -> list[dict[str, int | str]]:
        """The same as JSON."""
        with self._lock:
            return [
                {"reason": loss.reason, "tensors": loss.tensors, "rows": loss.rows, "bytes": loss.nbytes}
                for loss in self._by_reason.values()
            ]


def _sentence(loss: Loss) -> str:
    amounts = []
    if loss.tensors:
        amounts.append(f"{loss.tensors} tensor{'s' if loss.tensors != 1 else ''}")
    if loss.rows:
        amounts.append(f"{loss.rows} record{'s' if loss.rows != 1 else ''} of numbers")
    if not amounts:
        return loss.reason
    return f"{' and '.join(amounts)} lost: {loss.reason}"
