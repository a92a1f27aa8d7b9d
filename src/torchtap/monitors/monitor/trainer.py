"""`MonitoredTrainer`: a training function as it is, with a `Monitor` that knows the epoch and the batch.

A function that takes ``epoch_callback`` and ``batch_callback`` is given them. Any other is listened to from
outside (`trainer_clock`). What was done is in ``trainer.report`` and in the log ``torchtap``.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar, final

from torchtap.monitors.monitor.monitor import Monitor
from torchtap.monitors.monitor.trainer_clock import TrainingClock

__all__ = ["MonitoredTrainer", "TrainingReport"]

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
_CALLBACKS = ("epoch_callback", "batch_callback")


@final
@dataclass(slots=True)
class TrainingReport:
    """How a training's epochs and batches were found, and how many."""

    source: Literal["callbacks", "dataloader", "optimizer", "nothing"] = "nothing"
    epochs: int = 0
    batches: int = 0
    updates: int = 0
    passed_over: int = 0  # iterations of a DataLoader that were not epochs
    saved: list[Path] = field(default_factory=list)

    def __str__(self) -> str:
        found = {
            "callbacks": "the function called its callbacks",
            "dataloader": "epochs are iterations of a DataLoader in training mode, batches what it handed out",
            "optimizer": "no DataLoader was iterated, so each optimizer update ended a batch of one epoch",
            "nothing": "neither callbacks, nor a DataLoader, nor an optimizer were used: nothing was recorded",
        }[self.source]
        passed_over = f", {self.passed_over} iterations passed over" if self.passed_over else ""
        return (
            f"{found}; {self.epochs} epochs, {self.batches} batches, {self.updates} updates{passed_over}; "
            f"{len(self.saved)} files saved"
        )


@final
class MonitoredTrainer:
    """Runs training functions under a monitor.

    first_epoch: the number of the first epoch where the function does not say it. save: write what the function
    has not saved itself, at the end of each epoch. remove_hooks: when the function returns or raises.
    """

    def __init__(
        self, monitor: Monitor, *, first_epoch: int = 1, save: bool = True, remove_hooks: bool = True
    ) -> None:
        self.monitor = monitor
        self.report = TrainingReport()
        self._first_epoch = first_epoch
        self._save, self._remove_hooks = save, remove_hooks

    def wrap_training_function(
        self, function: Callable[_Parameters, _Result]
    ) -> Callable[_Parameters, _Result]:
        """The same function, monitored. Arguments and result are its own."""
        taken = _callbacks_taken(function)

        @functools.wraps(function)
        def monitored(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
            told = _Told(self.monitor, self._first_epoch, self._save)
            for name in taken:
                kwargs[name] = told.chained(name, kwargs.get(name))
            try:
                with TrainingClock(self.monitor.model, told) as clock:
                    told.start()
                    return function(*args, **kwargs)
            finally:
                try:
                    told.finish()
                    if self._remove_hooks:
                        self.monitor.remove_hooks()
                finally:
                    self.report = told.report(clock)
                    logging.getLogger("torchtap").info("%s: %s", _name(function), self.report)

        return monitored


@final
class _Told:
    """Moves the monitor's clock, as callbacks say or, until one does, as the training's signs do."""

    def __init__(self, monitor: Monitor, first_epoch: int, save: bool) -> None:
        self._monitor, self._save = monitor, save
        self._first_epoch = first_epoch
        self._next_epoch = first_epoch
        self._by_callback = False
        self._callback_epochs = self._callback_batches = 0
        self._saved: list[Path] = []

    # -- by callbacks ---------------------------------------------------------------------------------------

    def chained(self, name: str, other: Any) -> Callable[[int], None]:
        """The callback, followed by one that the caller gave."""
        own = self._on_epoch if name == "epoch_callback" else self._on_batch

        def callback(number: int) -> None:
            own(number)
            if other is not None:
                other(number)

        return callback

    def _on_epoch(self, epoch: int) -> None:
        self._by_callback = True
        self._callback_epochs += 1
        self.finish()
        self._monitor.set_epoch(epoch)

    def _on_batch(self, index: int) -> None:
        if not self._by_callback:
            self._by_callback = True
            self._callback_epochs += 1
            self._monitor.set_epoch(self._first_epoch)
        self._callback_batches += 1
        self._monitor.set_batch_idx(index)

    # -- by signs -------------------------------------------------------------------------------------------

    @property
    def _deaf(self) -> bool:
        return self._by_callback or self._monitor.hooks_removed

    def start(self) -> None:
        """Until an iteration begins, everything counts as the first batch of the first epoch."""
        if not self._deaf:
            self._monitor.set_epoch(self._first_epoch)
            self._monitor.set_batch_idx(0)

    def epoch_begins(self) -> None:
        if not self._deaf:
            self._monitor.set_epoch(self._next_epoch)
            self._next_epoch += 1

    def batch_begins(self, index: int) -> None:
        if not self._deaf:
            self._monitor.set_batch_idx(index)

    def epoch_ends(self) -> None:
        if not self._deaf:
            self.finish()

    def epoch_was_none(self) -> None:
        if not self._deaf:
            self._next_epoch -= 1
            self._monitor.clear_current_epoch_data()

    # -- the end --------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Save what is there and was not saved."""
        if self._save:
            self._saved += self._monitor.save_single_outputs()
            self._saved += self._monitor.save_epoch_outputs()

    def report(self, clock: TrainingClock) -> TrainingReport:
        source: Literal["callbacks", "dataloader", "optimizer", "nothing"] = "nothing"
        epochs, batches = clock.iterations, clock.batches
        if self._by_callback:
            source, epochs, batches = "callbacks", self._callback_epochs, self._callback_batches
        elif clock.iterations:
            source = "dataloader"
        elif clock.updates:
            source, epochs = "optimizer", 1
        return TrainingReport(source, epochs, batches, clock.updates, clock.passed_over, self._saved)


def _callbacks_taken(function: Callable[..., object]) -> tuple[str, ...]:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return ()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return _CALLBACKS
    return tuple(name for name in _CALLBACKS if name in parameters)


def _name(function: Callable[..., object]) -> str:
    return getattr(function, "__qualname__", repr(function))
