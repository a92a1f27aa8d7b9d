"""Tensors on their way from a device to the host, while both go on with their work.

It guarantees:
- the copies see everything that was given to the device's current stream before, and hold up nothing that is given
  to it afterwards: they run on a stream of their own, into pinned memory;
- the host waits in ``wait`` alone;
- the sources live until then. Nobody may change them before: whoever sends them sees to that.

On a device whose streams are not known to work like this, the copies are made at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import final

import torch
from torch import Tensor

__all__ = ["Crossing"]

# Devices on which torch documents streams, events and copies to pinned memory to work as in CUDA. (On MPS, a copy
# that does not block may be read before it is there.)
_STREAMED = frozenset({"cuda", "xpu"})


@final
class Crossing:
    """Copies of some tensors of one device, under way to the host."""

    __slots__ = ("_event", "_hosts", "_sources")

    def __init__(self, sources: Sequence[Tensor]) -> None:
        self._sources = tuple(sources)
        beside = _beside(sources[0].device)
        if beside is None:
            self._event = None
            self._hosts = [source.to("cpu", copy=True) for source in sources]
        else:
            self._hosts, self._event = beside.copy(sources)

    def done(self) -> bool:
        """Whether the copies are there; ``wait`` would not take any time."""
        return self._event is None or self._event.query()

    def wait(self) -> list[Tensor]:
        """The copies."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        self._sources = ()
        return self._hosts


@final
class _SideStream:
    """A stream beside the one that a device computes on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)

    def copy(self, sources: Sequence[Tensor]) -> tuple[list[Tensor], torch.Event]:
        """Copies that are made as soon as the current stream gets here, and what tells when they are."""
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            # torch keeps pinned memory for the next time, so only the first steps have to ask the driver for it.
            hosts = [
                torch.empty_like(source, device="cpu", pin_memory=True).copy_(source, non_blocking=True)
                for source in sources
            ]
        return hosts, self._stream.record_event()


@cache
def _beside(device: torch.device) -> _SideStream | None:
    return _SideStream(device) if device.type in _STREAMED else None
