"""Copy tensors from any accelerator to the host while both go on with their work.

Nothing here depends on the name of a device. What a device can do is tried once (`line_to`), and decides how it copies:

=================================  ==================================================================
streams, events, pinned memory     whole tensors on a stream of their own, statistics on the current one
events and pinned memory           all on the current stream
neither                            at once: the host waits for each copy
=================================  ==================================================================

It guarantees:
- a copy sees everything that was launched before on the current stream, and on the streams that `Line.note` was told;
- the host waits in ``wait`` alone, and only if the copy has not been made;
- the sources are held until the host has seen that the copy was made. Callers must not change them before, unless the
  copy runs on the stream that changes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from typing import final

import torch
from torch import Tensor

__all__ = ["Crossing", "Line", "line_to"]

_LACKING = (RuntimeError, NotImplementedError, TypeError, AttributeError, ValueError)


@final
class Line:
    """What one device can do to copy to the host, found by trying it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.wide = torch.float64  # in which statistics are summed
        self.asynchronous = False
        self._side: torch.Stream | None = None
        self._noted: set[torch.Stream] = set()
        try:
            torch.empty(1, dtype=torch.float64, device=device)
        except _LACKING:  # MPS
            self.wide = torch.float32
        try:
            self.current().record_event().query()
            torch.empty(1, pin_memory=True)
            self.asynchronous = True
            self._side = torch.Stream(device)
        except _LACKING:
            pass

    def current(self) -> torch.Stream:
        """Return the stream that the device computes on."""
        return torch.accelerator.current_stream(self.device)

    def note(self) -> None:
        """Have later copies wait for what was launched on the current stream until then."""
        if self._side is not None:
            self._noted.add(self.current())

    def copy(self, sources: Sequence[Tensor], *, beside: bool) -> tuple[list[Tensor], torch.Event | None]:
        """Start copies; return them, and the event that tells when they are made (None: now)."""
        if not self.asynchronous:
            return [source.to("cpu", copy=True) for source in sources], None
        stream = self.current()
        side = self._side if beside else None
        if side is not None:
            for other in {stream, *self._noted}:
                side.wait_stream(other)
            self._noted.clear()
        with nullcontext() if side is None else side:
            # torch keeps pinned memory for the next time, so only the first steps allocate it.
            hosts = [
                torch.empty_like(source, device="cpu", pin_memory=True).copy_(source, non_blocking=True)
                for source in sources
            ]
        return hosts, (side or stream).record_event()


@cache
def line_to(device: torch.device) -> Line:
    """Return what a device can do."""
    return Line(device)


@final
class Crossing:
    """Copies of tensors of one device, on their way to the host."""

    __slots__ = ("_event", "_hosts", "_sources")

    def __init__(self, sources: Sequence[Tensor], *, beside: bool = True) -> None:
        self._sources = tuple(sources)
        self._hosts, self._event = line_to(sources[0].device).copy(sources, beside=beside)

    @property
    def hosts(self) -> list[Tensor]:
        """The copies; what they hold is not defined before `done`."""
        return self._hosts

    def done(self) -> bool:
        """Return True if the copies are made; ``wait`` would take no time."""
        if self._event is not None and self._event.query():
            self._event, self._sources = None, ()
        return self._event is None

    def wait(self) -> list[Tensor]:
        """Return the copies when they are made."""
        if not self.done():
            assert self._event is not None
            self._event.synchronize()
            self._event, self._sources = None, ()
        return self._hosts
