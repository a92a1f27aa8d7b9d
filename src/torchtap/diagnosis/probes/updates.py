"""Whether what backward passes compute ever reaches an optimizer, and whether it is the same optimizer each time."""

from __future__ import annotations

import weakref
from typing import final

from torch import Tensor
from torch.optim import Optimizer

from torchtap.diagnosis.probes.base import ListeningProbe, Patient, Telling
from torchtap.receive.training import parameters_of

__all__ = ["UpdateProbe"]

_UNUSED = (
    20  # gradients that were set back and computed anew; fewer may be a look at the data before a training
)
_EMPTY = 2  # updates without any gradient
_RENEWED = 3  # updates in a row, each by an optimizer that was never seen before


@final
class UpdateProbe(ListeningProbe):
    """Hears every backward, and every update of whatever optimizer."""

    def __init__(self, patient: Patient, tell: Telling) -> None:
        self._tell = tell
        self._names = patient.names
        watched = patient.some_parameters(1)  # one stands for all
        self._name = next(iter(watched), "")
        self._parameter = watched.get(self._name)
        self._backwards = self._unused = self._empty = self._new = 0
        self._updated = self._reached = False
        self._first: str | None = None  # of the parameters that the first optimizer held
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def start(self) -> None:
        if self._parameter is not None:
            super().start()

    def stop(self) -> None:
        super().stop()
        if self._reached and not self._updated and self._backwards > _EMPTY:
            self._tell_unused()

    # -- backward -----------------------------------------------------------------------------------------

    def backward_begins(self, loss: Tensor | None, root: Tensor | None) -> None:
        if self._updated or self._parameter is None:
            return
        if self._reached and self._parameter.grad is None:
            self._unused += 1
            if self._unused == _UNUSED:
                self._tell_unused()

    def backward_ends(self) -> None:
        self._backwards += 1
        if not self._updated and self._parameter is not None:
            self._reached |= self._parameter.grad is not None

    def _tell_unused(self) -> None:
        text = f"backward() was called {self._backwards} times and no optimizer has stepped"
        self._tell.fact("never-updated", self._name, float(self._backwards), text)

    # -- the optimizer ------------------------------------------------------------------------------------

    def ready(self, optimizer: Optimizer) -> None:
        if self._empty < 0:
            return
        parameters = parameters_of(optimizer)
        if self._names.keys().isdisjoint(map(id, parameters)):
            return
        if self._reached or any(each.grad is not None for each in parameters):
            self._empty = -1  # something learns: what does not is for others to say
            return
        self._empty += 1
        if self._empty >= _EMPTY:
            self._tell_nothing_learns()
            self._empty = -1

    def _tell_nothing_learns(self) -> None:
        text = "backward() did not reach the model" if self._backwards else "backward() was never called"
        for name in self._names.values():
            self._tell.fact("nothing-learns", name, float(self._backwards), text)

    def updated(self, optimizer: Optimizer) -> None:
        if self._new < 0:
            return
        held = (self._names.get(id(each)) for each in parameters_of(optimizer))
        first = next((name for name in held if name is not None), None)
        if first is None:
            return
        self._updated = True
        if optimizer in self._known:
            self._new = -1  # it comes again: no optimizer is made for each step
            return
        self._known.add(optimizer)
        self._first = first if self._first is None else self._first
        self._new += bool(optimizer.state) and first == self._first  # not one for each part of the model
        if self._new >= _RENEWED:
            text = f"{self._new} updates, each by another {type(optimizer).__name__}"
            self._tell.fact("optimizer-renewed", first, float(self._new), text)
            self._new = -1
