"""The backward calls of a process and their losses.

Functions of torch are wrapped only while there is a listener. The loss is the one that the user computed, without the
factor of a gradient scaler. The loss of an update is the sum over the backward calls since the update before: the
optimizer uses the gradient of that sum. So micro-batches whose losses are divided by their number add up to the mean.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, final

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from torchtap._torch import innermost_transform
from torchtap.hooks.leaves import Function
from torchtap.receive import training
from torchtap.receive.training import StepListener

__all__ = ["BackwardListener", "LossCatcher", "UpdateLosses", "listen", "stop_listening"]


class BackwardListener(Protocol):
    """Receive the backward calls of a training, in the thread that trains.

    A listener with ``gradient_begins(loss, inputs)`` is called for ``torch.autograd.grad`` on a single number, too.
    """

    def backward_begins(self, loss: Tensor | None, root: Tensor | None) -> None:
        """``backward()`` was called on ``root``; ``loss`` is it without a scale. None where there are several."""

    def backward_ends(self) -> None:
        """Gradients are where they belong."""


_MOST_ASKED = 64  # calls of `grad` in one update
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
            _replace(torch.autograd, "grad", _telling_of_grad)
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


def _telling_of_grad(original: Function) -> Function:
    @functools.wraps(original)
    def grad(outputs: Any, inputs: Any, *args: object, **kwargs: object) -> object:
        loss = outputs if isinstance(outputs, Tensor) else next(iter(outputs), None)
        if isinstance(loss, Tensor) and not torch.compiler.is_compiling() and innermost_transform() is None:
            several = not isinstance(outputs, Tensor) and len(outputs) != 1
            for listener in _listeners:
                begins = getattr(listener, "gradient_begins", None)
                if begins is not None and not several and loss.numel() == 1:
                    begins(getattr(loss, _UNSCALED, loss).detach(), _listed(inputs))
        return original(outputs, inputs, *args, **kwargs)

    return grad


def _listed(inputs: object) -> list[object]:
    return list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]


def _remembering(original: Function) -> Function:
    @functools.wraps(original)
    def scale(scaler: object, outputs: object) -> object:
        scaled = original(scaler, outputs)
        if isinstance(outputs, Tensor) and scaled is not outputs:
            setattr(scaled, _UNSCALED, outputs.detach())
        return scaled

    return scale


@final
class LossCatcher:
    """Call ``tell`` with the loss whenever a backward pass of a single number begins."""

    def __init__(self, tell: Callable[[Tensor], None]) -> None:
        self.tell = tell

    def start(self) -> None:
        """Begin."""
        listen(self)

    def stop(self) -> None:
        """Stop; a second time does nothing."""
        stop_listening(self)

    def backward_begins(self, loss: Tensor | None, root: Tensor | None) -> None:
        if loss is not None:
            self.tell(loss)

    def backward_ends(self) -> None:
        pass


@final
class UpdateLosses(StepListener):
    """Call ``add`` with each loss, and ``done`` with an optimizer and the sum that its update used.

    ``torch.autograd.grad`` counts if no ``backward()`` came since the update before, and if it was asked for a
    gradient of the optimizer's parameters.
    """

    def __init__(self, add: Callable[[Tensor], None], done: Callable[[Optimizer, Tensor], None]) -> None:
        self._add, self._done = add, done
        self.pending: Tensor | None = None  # the sum since the update before
        self._asked: list[tuple[Tensor, set[int]]] = []  # losses of `grad`, and what it was asked for
        self._runs = False

    def start(self) -> None:
        """Begin; a second time does nothing."""
        if not self._runs:
            self._runs = True
            listen(self)
            training.listen(self)

    def stop(self) -> None:
        """Stop; a second time does nothing."""
        self._runs = False
        stop_listening(self)
        training.stop_listening(self)

    def backward_begins(self, loss: Tensor | None, root: Tensor | None) -> None:
        if loss is not None:
            self.pending = loss.float() if self.pending is None else self.pending + loss.float()
            self._add(loss)

    def backward_ends(self) -> None:
        pass

    def gradient_begins(self, loss: Tensor, inputs: Sequence[object]) -> None:
        if len(self._asked) < _MOST_ASKED:
            self._asked.append((loss, set(map(id, inputs))))

    def updated(self, optimizer: Optimizer) -> None:
        asked, self._asked = self._asked, []
        if self.pending is None and asked:
            held = {id(each) for each in training.parameters_of(optimizer)}
            for loss, inputs in asked:
                if not held.isdisjoint(inputs):
                    self.backward_begins(loss, None)
        total, self.pending = self.pending, None
        if total is not None:
            self._done(optimizer, total)

    def skipped(self, optimizer: Optimizer) -> None:
        self.updated(optimizer)
