"""What a training tells when it computes gradients: each call of ``backward()`` and its loss, as it begins and ends.

Listened to only while there is a listener; nothing of torch stays changed after it. The loss is the one that the user
computed, also where a gradient scaler has multiplied it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from torchtap.hooks.leaves import Function

__all__ = ["BackwardListener", "listen", "stop_listening"]


class BackwardListener(Protocol):
    """Who is told. Each method is called in the thread that trains."""

    def backward_begins(self, loss: Tensor | None, root: Tensor | None) -> None:
        """``backward()`` was called on ``root``; ``loss`` is it without a scale. None where there are several."""

    def backward_ends(self) -> None:
        """Gradients are where they belong."""


_UNSCALED = "_torchtap_unscaled"  # an attribute of a scaled loss
_lock = threading.Lock()
_listeners: tuple[BackwardListener, ...] = ()
_originals: list[tuple[object, str, Function]] = []


def listen(listener: BackwardListener) -> None:
    """Tell this listener from now on."""
    global _listeners
    with _lock:
        _listeners = (*_listeners, listener)
        if not _originals:
            _replace(torch.autograd, "backward", _telling)
            _replace(torch.amp.GradScaler, "scale", _remembering)


def stop_listening(listener: BackwardListener) -> None:
    """The opposite of `listen`; harmless for a stranger."""
    global _listeners
    with _lock:
        _listeners = tuple(each for each in _listeners if each is not listener)
        if not _listeners:
            while _originals:
                setattr(*_originals.pop())


def _replace(owner: object, name: str, wrapped: Callable[[Function], Function]) -> None:
    original: Function = getattr(owner, name)
    _originals.append((owner, name, original))
    setattr(owner, name, wrapped(original))


def _telling(original: Function) -> Function:
    @functools.wraps(original)
    def backward(tensors: Tensor | Sequence[Tensor], *args: object, **kwargs: object) -> object:
        if torch.compiler.is_compiling():
            return original(tensors, *args, **kwargs)
        root = tensors if isinstance(tensors, Tensor) else (tensors[0] if len(tensors) == 1 else None)
        loss = None
        if root is not None and root.numel() == 1:
            loss = getattr(root, _UNSCALED, root).detach()
        for listener in _listeners:
            listener.backward_begins(loss, root)
        result = original(tensors, *args, **kwargs)
        for listener in _listeners:
            listener.backward_ends()
        return result

    return backward


def _remembering(original: Function) -> Function:
    @functools.wraps(original)
    def scale(scaler: object, outputs: object) -> object:
        scaled = original(scaler, outputs)
        if isinstance(outputs, Tensor) and scaled is not outputs:
            setattr(scaled, _UNSCALED, outputs.detach())
        return scaled

    return scale
