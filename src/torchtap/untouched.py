"""Use a model without leaving a trace: its state, its modes and the random generators are put back."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self, final

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["RandomState", "untouched"]

_TORCHS = ("_parameters", "_buffers", "_modules")
_CONTAINERS = (list, dict, set)


@contextmanager
def untouched(*models: object, in_place: bool = False) -> Iterator[None]:
    """Whatever is run inside, the models go on as if it had not been. What is no module has random numbers only.

    ``in_place`` is for forms other than eager, which are not in the middle of a training.
    """
    random = RandomState.now()
    found = [each for model in models if isinstance(model, nn.Module) for each in model.modules()]
    undo: list[Callable[[], None]] = []
    for module in {id(module): module for module in found}.values():
        undo += [_written_back(module)] if in_place else [_attributes(module), _buffers(module)]
        undo.append(_gradients(module))
    try:
        yield
    finally:
        for each in reversed(undo):
            each()
        random.put_back()


def _attributes(module: nn.Module) -> Callable[[], None]:
    """Modes, counters, lists of what came by: whatever a forward may change, one level deep."""
    held = {name: value for name, value in module.__dict__.items() if name not in _TORCHS}
    contents: list[tuple[Any, Any]] = [
        (value, value.copy()) for value in held.values() if type(value) in _CONTAINERS
    ]

    def put_back() -> None:
        for name in [name for name in module.__dict__ if name not in held and name not in _TORCHS]:
            del module.__dict__[name]
        module.__dict__.update(held)
        for value, before in contents:
            if isinstance(value, list):
                value[:] = before
            else:
                value.clear()
                value.update(before)

    return put_back


def _buffers(module: nn.Module) -> Callable[[], None]:
    held = dict(module._buffers)
    for name, buffer in held.items():
        if buffer is not None:
            module._buffers[name] = buffer.detach().clone()
    return lambda: module._buffers.update(held)


def _written_back(module: nn.Module) -> Callable[[], None]:
    held = [(buffer, buffer.detach().clone()) for buffer in module.buffers(recurse=False)]

    def put_back() -> None:
        with torch.no_grad():
            for buffer, before in held:
                if buffer.shape == before.shape and not torch.equal(buffer, before):
                    buffer.copy_(before)

    return put_back


def _gradients(module: nn.Module) -> Callable[[], None]:
    held = [(each, each.grad) for each in module.parameters(recurse=False)]
    for parameter, _ in held:
        parameter.grad = None

    def put_back() -> None:
        for parameter, gradient in held:
            parameter.grad = gradient

    return put_back


@final
@dataclass(frozen=True, slots=True)
class RandomState:
    """Where the generators stood."""

    python: Any
    numpy: Any
    host: Tensor
    devices: tuple[Tensor, ...]

    @classmethod
    def now(cls) -> Self:
        """Where they stand."""
        in_use = torch.cuda.is_available() and torch.cuda.is_initialized()
        devices = tuple(torch.cuda.get_rng_state_all()) if in_use else ()
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), devices)

    def put_back(self) -> None:
        """Go on from there."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.host)
        if self.devices and torch.cuda.device_count() == len(self.devices):
            torch.cuda.set_rng_state_all(list(self.devices))

    def plain(self) -> dict[str, Any]:
        """As numbers and tensors, for a file."""
        name, key, position, has_gauss, gauss = self.numpy
        version, numbers, following = self.python
        return {
            "python": [version, list(numbers), following],
            "numpy": [name, key.tolist(), int(position), int(has_gauss), float(gauss)],
            "host": self.host,
            "devices": list(self.devices),
        }

    @classmethod
    def from_plain(cls, data: dict[str, Any]) -> Self:
        """The opposite of `plain`."""
        version, numbers, following = data["python"]
        name, key, *rest = data["numpy"]
        generator = (name, np.array(key, dtype=np.uint32), *rest)
        return cls((version, tuple(numbers), following), generator, data["host"], tuple(data["devices"]))
