"""Hears every value that a form emits in one run, and keeps its print."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, final

import torch
from torch import Tensor, nn

from torchtap._torch import version_of
from torchtap.forms.match.prints import Print, print_of
from torchtap.forms.op.channel import Channel
from torchtap.spi import ask_for_gradient

__all__ = ["PrintRecorder", "as_it_was"]


@final
class PrintRecorder:
    """Stands where a receiver stands. Values come under keys that a form's own files make and read."""

    def __init__(self, channel: Channel | None = None) -> None:
        self.prints: dict[str, Print] = {}
        self.gradients: dict[str, Print] = {}
        self.channel = channel or Channel()
        self._thread = threading.get_ident()

    def hears_this_thread(self) -> bool:
        """Return True if values of the running thread are recorded."""
        return self._thread == threading.get_ident()

    def take_from_inside(self, kind: str, owner: str | None, leaf: str, tensor: Tensor) -> None:
        """A value, under its key. A loop brings several: the first counts."""
        if leaf not in self.prints:
            self.prints[leaf] = print_of(tensor)

    def await_value(self, key: str, tensor: Tensor) -> None:
        """Take the gradient of a value when autograd has it."""
        if tensor.requires_grad and torch.is_grad_enabled():
            ask_for_gradient(tensor, self._take_gradient, key)

    def _take_gradient(self, key: str, gradient: Tensor | None) -> None:
        if gradient is not None and key not in self.gradients:
            self.gradients[key] = print_of(gradient)

    def address(self, key: str) -> str:
        """What the op is called with for a key."""
        return f"{self.channel.prefix}:value.{key}"

    def record(self, run: Callable[[], Any]) -> None:
        """Hear what is emitted while ``run`` runs."""
        listening: Any = self
        self.channel.open(listening)
        try:
            run()
        finally:
            self.channel.close()


@contextmanager
def as_it_was(model: object) -> Iterator[None]:
    """Leave buffers and random state as they were found: a run in training mode moves them."""
    held = [] if not isinstance(model, nn.Module) else list(chain(model.buffers(), model.parameters()))
    versions = [
        (tensor, version_of(tensor), tensor.detach().clone()) for tensor in held if tensor.numel() < 1 << 24
    ]
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, version, before in versions:
                    # Batch normalisation moves its averages without counting it as a change.
                    if version_of(tensor) != version or not torch.equal(tensor, before):
                        tensor.copy_(before)
