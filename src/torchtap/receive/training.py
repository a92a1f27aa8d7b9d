"""The events of a training: the moments at which its gradients and parameters can be read.

In one update these come in this order, each if it happens:

- ``entered``: an optimizer's ``step`` was called. The parameters are those before the update;
- ``evaluating``: an optimizer calls its closure once more, for other gradients than it had;
- ``unscaling``: a gradient scaler is about to divide an optimizer's gradients by its scale;
- ``clipping``: gradients are about to be clipped;
- ``ready``: an optimizer is about to change its parameters. Where it was given a closure, that has run;
- ``updated``: it has changed them;
- ``skipped``: a gradient scaler found infinities and left the update out.

A call of ``step`` inside another, over the same parameters (``super().step()``, the base optimizer of SAM), is part of
that update and no event of its own. A listener that comes while ``step`` runs gets ``entered`` at once.

The sources are torch's global optimizer hooks, which every framework passes, `GradScaler` and torch's functions for
clipping. They are registered only while there is a listener, and nothing of torch stays changed after it.
Readers are called before clocks, so that what belongs to a step is read before the step is over.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType

import torch
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from torchtap.hooks.leaves import Args, Function, Kwargs

__all__ = ["StepListener", "innermost", "is_updating", "listen", "parameters_of", "stop_listening"]


class StepListener:
    """Receive the events of a training loop, in the thread that trains. Override the methods that you need."""

    def entered(self, optimizer: Optimizer) -> None:
        """``step`` of this optimizer was called; nothing has changed yet."""

    def evaluating(self, optimizer: Optimizer) -> None:
        """This optimizer calls its closure again within one update: the gradients that it had are not its last."""

    def unscaling(self, optimizer: Optimizer) -> None:
        """Gradients of this optimizer are about to be unscaled."""

    def clipping(self, gradients: Sequence[Tensor]) -> None:
        """These gradients are about to be clipped."""

    def ready(self, optimizer: Optimizer) -> None:
        """This optimizer has its gradients and is about to change its parameters; once for each closure call."""

    def updated(self, optimizer: Optimizer) -> None:
        """This optimizer has changed its parameters."""

    def skipped(self, optimizer: Optimizer) -> None:
        """A gradient scaler left this optimizer's update out."""


_lock = threading.Lock()
_readers: tuple[StepListener, ...] = ()
_clocks: tuple[StepListener, ...] = ()
_installed: list[Callable[[], None]] = []  # what takes everything off again
_in_scaler = threading.local()
_in_step = threading.local()  # the calls of optimizers' steps that are running


def listen(listener: StepListener, *, clock: bool = False) -> None:
    """Tell this listener from now on; clocks are called after all others."""
    global _readers, _clocks
    with _lock:
        if clock:
            _clocks = (*_clocks, listener)
        else:
            _readers = (*_readers, listener)
        if not _installed:
            _install()
    running = _calls()
    if running:
        listener.entered(running[0][0])


def stop_listening(listener: StepListener) -> None:
    """The opposite of `listen`; harmless for a stranger."""
    global _readers, _clocks
    with _lock:
        _readers = tuple(each for each in _readers if each is not listener)
        _clocks = tuple(each for each in _clocks if each is not listener)
        if not _readers and not _clocks:
            while _installed:
                _installed.pop()()


def innermost(optimizer: object) -> list[Optimizer]:
    """The torch optimizers inside whatever a framework hands out as one; nothing where there is none."""
    several = getattr(optimizer, "optimizers", None)
    if isinstance(several, dict):
        several = list(several.values())
    if isinstance(several, (list, tuple)) and several:
        return [found for each in several for found in innermost(each)]
    inner = getattr(optimizer, "optimizer", None)
    if inner is not None and inner is not optimizer and (found := innermost(inner)):
        return found
    return [optimizer] if isinstance(optimizer, Optimizer) else []


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """All parameters that an optimizer holds, group by group."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _all() -> tuple[StepListener, ...]:
    return (*_readers, *_clocks)


def _install() -> None:
    before = register_optimizer_step_pre_hook(_before_step)
    after = register_optimizer_step_post_hook(_after_step)
    _installed.extend((before.remove, after.remove))
    _replace(torch.amp.GradScaler, "unscale_", _telling_unscale)
    _replace(torch.amp.GradScaler, "step", _telling_scaled_step)
    # Everything in torch that clips gradients sorts them with this function first, whatever name the user calls.
    if hasattr(clip_grad, "_group_tensors_by_device_and_dtype"):
        _replace(clip_grad, "_group_tensors_by_device_and_dtype", _telling_clip)


def _replace(owner: object, name: str, wrapped: Callable[[Function], Function]) -> None:
    original = getattr(owner, name)
    setattr(owner, name, wrapped(original))
    _installed.append(lambda: setattr(owner, name, original))


def _calls() -> list[tuple[Optimizer, FrameType]]:
    """Return the calls of ``step`` that run in this thread, the outermost first.

    A call that raised never passed the second hook: its frame is not on the stack any more.
    """
    calls: list[tuple[Optimizer, FrameType]] = getattr(_in_step, "calls", [])
    if calls:
        running: list[FrameType] = []
        above: FrameType | None = sys._getframe().f_back
        while above is not None:
            running.append(above)
            above = above.f_back
        calls = [call for call in calls if any(call[1] is each for each in running)]
        _in_step.calls = calls
    return calls


def is_updating() -> bool:
    """Return True inside of an optimizer's ``step``."""
    return bool(_calls())


def _is_part(optimizer: Optimizer, calls: Sequence[tuple[Optimizer, FrameType]]) -> bool:
    """Return True if a call of this optimizer is part of an update that runs already."""
    if any(each is optimizer for each, _ in calls):
        return True
    if not calls:
        return False
    held = {id(parameter) for each, _ in calls for parameter in parameters_of(each)}
    return any(id(parameter) in held for parameter in parameters_of(optimizer))


def _before_step(optimizer: Optimizer, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
    """Call listeners when gradients are ready; where a closure computes them, once it has."""
    caller = sys._getframe().f_back
    calls = _calls()
    is_part = _is_part(optimizer, calls)
    if caller is not None:
        _in_step.calls = [*calls, (optimizer, caller)]
    if is_part:
        return None
    for listener in _all():
        listener.entered(optimizer)
    positional = len(args) > 1 and callable(args[1])
    closure = args[1] if positional else kwargs.get("closure")
    if not callable(closure):
        _tell_ready(optimizer)
        return None

    evaluated = False

    def closure_then_tell(*arguments: object, **keywords: object) -> object:
        nonlocal evaluated
        if evaluated:
            for listener in _all():
                listener.evaluating(optimizer)
        evaluated = True
        loss = closure(*arguments, **keywords)
        _tell_ready(optimizer)
        return loss

    if positional:
        return (args[0], closure_then_tell, *args[2:]), kwargs
    return args, {**kwargs, "closure": closure_then_tell}


def _tell_ready(optimizer: Optimizer) -> None:
    for listener in _all():
        listener.ready(optimizer)


def _after_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    calls: list[tuple[Optimizer, FrameType]] = getattr(_in_step, "calls", [])
    while calls and calls.pop()[0] is not optimizer:
        pass  # calls inside of this one that raised, and were caught
    for stepped in getattr(_in_scaler, "stack", ()):
        stepped.append(id(optimizer))
    if _is_part(optimizer, calls):
        return
    for listener in _all():
        listener.updated(optimizer)


def _telling_unscale(original: Function) -> Function:
    def unscale_(scaler: torch.amp.GradScaler, optimizer: object) -> object:
        if scaler.is_enabled():
            for each in innermost(optimizer):
                for listener in _all():
                    listener.unscaling(each)
        return original(scaler, optimizer)

    return unscale_


def _telling_scaled_step(original: Function) -> Function:
    def step(scaler: object, optimizer: object, *args: object, **kwargs: object) -> object:
        stepped: list[int] = []
        _in_scaler.stack = (*getattr(_in_scaler, "stack", ()), stepped)
        try:
            result = original(scaler, optimizer, *args, **kwargs)
        finally:
            _in_scaler.stack = _in_scaler.stack[:-1]
        for each in innermost(optimizer):
            if id(each) not in stepped:
                for listener in _all():
                    listener.skipped(each)
        return result

    return step


def _telling_clip(original: Function) -> Function:
    def group(tensors: Sequence[Sequence[Tensor]], *args: object, **kwargs: object) -> object:
        for listener in _all():
            listener.clipping(tensors[0])
        return original(tensors, *args, **kwargs)

    return group
