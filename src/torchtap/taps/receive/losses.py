"""The losses of a process: what each ``backward()`` is called on, unscaled where a gradient scaler has scaled it.

torch's functions are replaced only while somebody hears; nothing of torch stays changed after it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

__all__ = ["LossCatcher"]

_UNSCALED = "_torchtap_unscaled"  # a scaled loss has the loss itself under this name
_lock = threading.Lock()
_catchers: tuple[LossCatcher, ...] = ()
_put_back: list[Callable[[], None]] = []


@final
class LossCatcher:
    """Calls ``tell`` with the loss whenever a backward pass of a single number begins."""

    def __init__(self, tell: Callable[[Tensor], None]) -> None:
        self.tell = tell

    def start(self) -> None:
        """Hear from now on."""
        global _catchers
        with _lock:
            _catchers = (*_catchers, self)
            if not _put_back:
                _install()

    def stop(self) -> None:
        """Hear no more; a second time does nothing."""
        global _catchers
        with _lock:
            _catchers = tuple(each for each in _catchers if each is not self)
            if not _catchers:
                while _put_back:
                    _put_back.pop()()


def _install() -> None:
    original, original_scale = torch.autograd.backward, torch.amp.GradScaler.scale

    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        loss = tensors if isinstance(tensors, Tensor) else (tensors[0] if len(tensors) == 1 else None)
        if loss is not None and loss.numel() == 1 and not torch.compiler.is_compiling():
            value = getattr(loss, _UNSCALED, loss).detach()
            for each in _catchers:
                each.tell(value)
        return original(tensors, *args, **kwargs)

    @functools.wraps(original_scale)
    def scale(scaler: Any, outputs: Any) -> Any:
        scaled = original_scale(scaler, outputs)
        if isinstance(outputs, Tensor) and scaled is not outputs:
            setattr(scaled, _UNSCALED, outputs.detach())
        return scaled

    torch.autograd.backward = backward
    torch.amp.GradScaler.scale = scale  # type: ignore[method-assign, assignment]

    def put_back() -> None:
        torch.autograd.backward = original
        torch.amp.GradScaler.scale = original_scale  # type: ignore[method-assign]

    _put_back.append(put_back)
