"""A stand-in for a device whose copies to the host take their time, on the CPU.

A copy holds nothing but NaN until it is waited for, or until ``catch_up``; it is made only then, of what the source
holds then. So a reader that does not wait, and a writer that does not leave the source alone, both get caught.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from torchtap.reduce import crossing, kernel

__all__ = ["LateDevice"]


class LateDevice:
    """Takes the place of the side stream of every device; without the native kernel, the CPU has slots, too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[LateEvent] = []
        self.waits = 0
        monkeypatch.setattr(kernel, "native", None)
        monkeypatch.setattr(crossing, "_beside", lambda device: self)

    def copy(self, sources: Sequence[Tensor]) -> tuple[list[Tensor], LateEvent]:
        hosts = [torch.full_like(source, torch.nan) for source in sources]
        event = LateEvent(self, sources, hosts)
        self.events.append(event)
        return hosts, event

    def catch_up(self) -> None:
        """Everything that was sent arrives."""
        for event in self.events:
            event.arrive()


class LateEvent:
    def __init__(self, device: LateDevice, sources: Sequence[Tensor], hosts: Sequence[Tensor]) -> None:
        self._device = device
        self._pairs = list(zip(hosts, sources, strict=True))
        self._arrived = False

    def arrive(self) -> None:
        if not self._arrived:
            for host, source in self._pairs:
                host.copy_(source)
        self._arrived = True

    def query(self) -> bool:
        return self._arrived

    def synchronize(self) -> None:
        self._device.waits += not self._arrived
        self.arrive()
