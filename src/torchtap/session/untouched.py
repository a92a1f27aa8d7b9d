"""Run models forwards and backwards, and leave no trace in them.

Inside the block the models have no gradients, and copies of their buffers. At its end they have the same tensors that
they had: nothing was written into them, so that a graph which waits for its backward is not disturbed. Modes, plain
attributes of modules and random numbers are put back too. What hooks of the training's own do elsewhere is not undone.

Compiled and scripted code holds on to its buffers: those are written back in place, and attributes are left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from torchtap.session.random_state import RandomState

__all__ = ["untouched"]

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
