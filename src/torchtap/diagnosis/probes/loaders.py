"""Whether a data loader of several batches is in use."""

from __future__ import annotations

import functools
from typing import Any, final

from torch.utils.data import DataLoader

from torchtap.diagnosis.probes.base import Telling

__all__ = ["LoaderProbe"]


@final
class LoaderProbe:
    """Hears when a loader is opened."""

    def __init__(self, tell: Telling) -> None:
        self._tell = tell
        self._original: Any = None

    def start(self) -> None:
        original = self._original = DataLoader.__iter__

        @functools.wraps(original)
        def opened(loader: Any) -> Any:
            self._note(loader)
            return original(loader)

        DataLoader.__iter__ = opened  # type: ignore[method-assign]

    def stop(self) -> None:
        if self._original is not None:
            DataLoader.__iter__ = self._original  # type: ignore[method-assign]
            self._original = None

    def _note(self, loader: Any) -> None:
        try:
            batches = len(loader)
        except TypeError:
            return  # a stream has no length
        if batches > 1:
            self._tell.fact(
                "several-batches", ":input", float(batches), f"a DataLoader with {batches} batches is in use"
            )
