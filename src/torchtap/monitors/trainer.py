"""`MonitoredTrainer`: run a training function under a `Monitor`, with the epochs and batches found from outside.

A function that takes ``epoch_callback`` and ``batch_callback`` gets them. For any other, a `TrainingClock` follows the
DataLoader that it iterates and the optimizer that it steps. The result is in ``trainer.report`` and in the log
``torchtap``. Nothing of torch stays changed after the function has returned.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, ParamSpec, Protocol, Self, TypeVar, final

from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from torchtap.forms.attach import form_of
from torchtap.hooks.hooks import after, before
from torchtap.hooks.replace import ModeHook
from torchtap.monitors.monitor import Monitor
from torchtap.spi import parameters_of

__all__ = ["ClockListener", "MonitoredTrainer", "TrainingClock", "TrainingReport"]

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
_CALLBACKS = ("epoch_callback", "batch_callback")
_Source = Literal["callbacks", "dataloader", "optimizer", "nothing"]


@final
@dataclass(slots=True)
class TrainingReport:
    """The number of epochs and batches of a training, and how they were found."""

    source: _Source = "nothing"
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
    """Run training functions under a monitor.

        trainer = MonitoredTrainer(monitor)
        trainer.wrap_training_function(train)(config, device)

    monitor: the `Monitor` whose epochs and batches are set.
    first_epoch: the number of the first epoch, unless a callback gives it.
    save: write at the end of each epoch what the function has not saved itself.
    remove_hooks: remove the monitor's hooks when the function returns or raises.
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
        """Return the function, monitored. Its arguments and result do not change."""
        taken = _callbacks_taken(function)

        @functools.wraps(function)
        def monitored(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
            driver = _ClockDriver(self.monitor, self._first_epoch, self._save)
            for name in taken:
                kwargs[name] = driver.chained(name, kwargs.get(name))
            try:
                with TrainingClock(self.monitor.model, driver) as clock:
                    driver.start()
                    return function(*args, **kwargs)
            finally:
                try:
                    driver.save()
                    if self._remove_hooks:
                        self.monitor.remove_hooks()
                finally:
                    self.report = driver.report(clock)
                    title = getattr(function, "__qualname__", repr(function))
                    logging.getLogger("torchtap").info("%s: %s", title, self.report)

        return monitored


def _callbacks_taken(function: Callable[..., object]) -> tuple[str, ...]:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return ()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return _CALLBACKS
    return tuple(name for name in _CALLBACKS if name in parameters)


class ClockListener(Protocol):
    """Receives the events of a `TrainingClock`."""

    def epoch_begins(self) -> None:
        """Begin an epoch."""

    def batch_begins(self, index: int) -> None:
        """Begin a batch of the epoch."""

    def epoch_ends(self) -> None:
        """End the epoch."""

    def epoch_was_none(self) -> None:
        """Drop the epoch: the iteration turned out not to be one."""


@final
class _ClockDriver:
    """Set a monitor's epoch and batch: from callbacks, and until the first of them from a clock."""

    def __init__(self, monitor: Monitor, first_epoch: int, save: bool) -> None:
        self._monitor, self._save = monitor, save
        self._first_epoch = first_epoch
        self._next_epoch = first_epoch
        self._by_callback = False
        self._callback_epochs = self._callback_batches = 0
        self._saved: list[Path] = []

    # -- callbacks ---------------------------------------------------------------------------------------------

    def chained(self, name: str, other: Any) -> Callable[[int], None]:
        """Return the callback of this name, followed by the caller's own."""
        own = self._on_epoch if name == "epoch_callback" else self._on_batch

        def callback(number: int) -> None:
            own(number)
            if other is not None:
                other(number)

        return callback

    def _on_epoch(self, epoch: int) -> None:
        self._by_callback = True
        self._callback_epochs += 1
        self.save()
        self._monitor.set_epoch(epoch)

    def _on_batch(self, index: int) -> None:
        if not self._by_callback:
            self._by_callback = True
            self._callback_epochs += 1
            self._monitor.set_epoch(self._first_epoch)
        self._callback_batches += 1
        self._monitor.set_batch_idx(index)

    # -- the clock ---------------------------------------------------------------------------------------------

    @property
    def _follows_clock(self) -> bool:
        return not self._by_callback and not self._monitor.hooks_removed

    def start(self) -> None:
        """Count everything before the first iteration as the first batch of the first epoch."""
        if self._follows_clock:
            self._monitor.set_epoch(self._first_epoch)
            self._monitor.set_batch_idx(0)

    def epoch_begins(self) -> None:
        if self._follows_clock:
            self._monitor.set_epoch(self._next_epoch)
            self._next_epoch += 1

    def batch_begins(self, index: int) -> None:
        if self._follows_clock:
            self._monitor.set_batch_idx(index)

    def epoch_ends(self) -> None:
        if self._follows_clock:
            self.save()

    def epoch_was_none(self) -> None:
        if self._follows_clock:
            self._next_epoch -= 1
            self._monitor.clear_current_epoch_data()

    # -- the end -----------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Save all outputs that are not saved yet."""
        if self._save:
            self._saved += self._monitor.save_single_outputs()
            self._saved += self._monitor.save_epoch_outputs()

    def report(self, clock: TrainingClock) -> TrainingReport:
        source: _Source = "nothing"
        epochs, batches = clock.iterations, clock.batches
        if self._by_callback:
            source, epochs, batches = "callbacks", self._callback_epochs, self._callback_batches
        elif clock.iterations:
            source = "dataloader"
        elif clock.updates:
            source, epochs = "optimizer", 1
        return TrainingReport(source, epochs, batches, clock.updates, clock.passed_over, self._saved)


# -- epochs and batches from outside ---------------------------------------------------------------------------


@final
@dataclass(slots=True, eq=False)
class _Iteration:
    """An iteration of a DataLoader that is an epoch."""

    updates_before: int
    ahead: int | None  # batches fetched before the first was used; None until that is known
    followed: weakref.ref[_Followed]
    fetched: int = 0
    group: int = 0  # batches fetched since the last pass
    last: int = 0  # the last batch that the passes after this group may use
    index: int = 0  # of the batch in use
    in_use: bool = False  # True after a pass has used it
    exhausted: bool = False


@final
class TrainingClock:
    """Find the epochs and batches of a training function, in the thread that enters the block.

    Iterators of ``torch.utils.data.DataLoader`` report each batch, optimizers of the model's parameters each update:
    - an iteration that begins in training mode is an epoch, and each batch that it returns is a batch;
    - one that begins in evaluation mode or inside another iteration is not, unless the function switches to training
      mode before the first pass: some trainers do so when they have the first batch;
    - one that ends without an update, in a training that has seen updates, was no epoch;
    - if several batches are fetched before the first pass, batches are numbered as passes in training mode use them;
    - without any DataLoader, each update ends a batch, and all batches are one epoch.
    """

    def __init__(self, model: nn.Module, listener: ClockListener) -> None:
        self._model, self._listener = model, listener
        self._parameters = {id(parameter) for parameter in model.parameters()}
        self._thread = -1
        self._current: _Iteration | None = None
        self._handles: list[Any] = []
        self._hooked = form_of(model) == "eager"  # a hook on a compiled model would become part of it
        # Notices that an iteration which began in evaluation mode is an epoch after all.
        self._undecided: ModeHook | None = None
        self.iterations = 0  # that were epochs
        self.passed_over = 0  # that were not
        self.batches = 0
        self.updates = 0

    def __enter__(self) -> Self:
        self._thread = threading.get_ident()
        self._handles = [register_optimizer_step_post_hook(self._on_update)]
        if self._hooked:
            self._handles.append(before(self._model, self._on_pass))
            self._handles.append(after(self._model, self._on_pass_end))
        _follow(self)
        return self

    def __exit__(self, *_: object) -> None:
        _unfollow(self)
        self._decide()
        for handle in self._handles:
            handle.remove()
        self._end(self._current, for_good=True)

    def is_own_thread(self) -> bool:
        """Return True in the thread that entered the block."""
        return threading.get_ident() == self._thread

    # -- iterations --------------------------------------------------------------------------------------------

    def followed(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Return an iterator that reports its batches to this clock, if its iteration is or may be an epoch."""
        if self._in_an_iteration():
            self.passed_over += 1
            return iterator
        self._decide()
        followed = _Followed(iterator, self)
        if getattr(self._model, "training", True):
            self._begin(followed)
            return followed
        self.passed_over += 1
        if not self._hooked:
            return iterator
        self._undecided = ModeHook(self._model, partial(self._switched, followed))
        self._undecided.put_on()
        return followed

    def _decide(self) -> None:
        undecided, self._undecided = self._undecided, None
        if undecided is not None:
            undecided.take_off()

    def _switched(self, followed: _Followed, training: bool) -> None:
        """Begin an epoch if the mode is switched to training before the first pass."""
        if not training:
            return
        self._decide()
        if self.is_own_thread() and not self._in_an_iteration():
            self.passed_over -= 1
            self._begin(followed)

    def _in_an_iteration(self) -> bool:
        followed = None if self._current is None else self._current.followed()
        return followed is not None and not followed.ended

    def _begin(self, followed: _Followed) -> None:
        self._end(self._current, for_good=True)
        fetched = followed.handed_out
        self._current = followed.iteration = iteration = _Iteration(
            self.updates,
            None if self._hooked else 0,
            weakref.ref(followed),
            fetched,
            fetched,
            exhausted=followed.ended,
        )
        # A loop that breaks drops its iterator, which ends the epoch.
        weakref.finalize(followed, self._end, iteration).atexit = False
        self.iterations += 1
        self._listener.epoch_begins()
        if fetched:
            self._use(0)

    def _end(self, iteration: _Iteration | None, for_good: bool = False) -> None:
        if iteration is None or iteration is not self._current:
            return
        if iteration.ahead and not for_good:
            return  # batches that were fetched ahead are still to be used
        self._current = None
        if self.updates and self.updates == iteration.updates_before:
            self.iterations -= 1
            self.passed_over += 1
            self._listener.epoch_was_none()
        else:
            self._listener.epoch_ends()

    # -- batches -----------------------------------------------------------------------------------------------

    def fetched(self, iteration: _Iteration | None) -> None:
        """Note a batch that the iterator returned."""
        if iteration is None or iteration is not self._current:
            return
        iteration.fetched += 1
        iteration.group += 1
        if iteration.ahead is None and self.updates > iteration.updates_before:
            iteration.ahead = 0  # it trains without calling the model as a whole
        if iteration.fetched == 1:
            self._use(0)
        elif iteration.ahead == 0:
            self._use(iteration.fetched - 1)
        elif iteration.ahead is not None and iteration.in_use:
            self._use(iteration.index + 1)

    def exhausted(self, iteration: _Iteration | None) -> None:
        """Note that the iterator has no more batches."""
        if iteration is not None and iteration is self._current:
            iteration.exhausted = True
            if iteration.ahead and iteration.in_use and iteration.index + 1 < iteration.fetched:
                self._use(iteration.index + 1)
        self._end(iteration)

    def _use(self, index: int) -> None:
        if self._current is not None:
            self._current.index, self._current.in_use = index, False
        self.batches += 1
        self._listener.batch_begins(index)

    def _on_pass(self, *_: object) -> None:
        if not self.is_own_thread():
            return
        self._decide()
        iteration = self._current
        if iteration is None or not self._model.training:
            return
        if iteration.ahead is None:
            iteration.ahead = max(0, iteration.fetched - 1)
        if iteration.group:  # the first pass since batches were fetched
            iteration.last, iteration.group = iteration.index + iteration.group - 1, 0
        iteration.in_use = True

    def _on_pass_end(self, *_: object) -> None:
        """Begin the next of the batches that were fetched together."""
        iteration = self._current
        if iteration is None or not iteration.ahead or not iteration.in_use:
            return
        last = iteration.fetched - 1 if iteration.exhausted else iteration.last
        if self._model.training and self.is_own_thread() and iteration.index < last:
            self._use(iteration.index + 1)

    def _on_update(self, optimizer: Any, *_: Any) -> None:
        if self.is_own_thread() and any(id(each) in self._parameters for each in parameters_of(optimizer)):
            self.updates += 1
            if not self.iterations:
                self._use(self.updates)


@final
class _Followed:
    """A DataLoader's iterator that reports its batches."""

    def __init__(self, iterator: Iterator[object], clock: TrainingClock) -> None:
        self._iterator, self._clock = iterator, clock
        self.iteration: _Iteration | None = None  # until it is an epoch
        self.ended = False
        self.handed_out = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> object:
        try:
            batch = next(self._iterator)
        except StopIteration:
            if not self.ended:
                self.ended = True
                self._clock.exhausted(self.iteration)
            raise
        self.handed_out += 1
        self._clock.fetched(self.iteration)
        return batch

    def __len__(self) -> int:
        return len(self._iterator)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


# DataLoader.__iter__ is replaced while any clock runs.

_lock = threading.Lock()
_clocks: tuple[TrainingClock, ...] = ()
_original: Callable[..., Any] | None = None


def _follow(clock: TrainingClock) -> None:
    global _clocks, _original
    with _lock:
        _clocks = (*_clocks, clock)
        if _original is None:
            _original = DataLoader.__iter__
            DataLoader.__iter__ = _iterate  # type: ignore[method-assign]


def _unfollow(clock: TrainingClock) -> None:
    global _clocks, _original
    with _lock:
        _clocks = tuple(each for each in _clocks if each is not clock)
        if not _clocks and _original is not None:
            DataLoader.__iter__ = _original  # type: ignore[method-assign]
            _original = None


def _iterate(loader: DataLoader[Any]) -> Any:
    original = _original
    iterator = original(loader) if original is not None else DataLoader.__iter__(loader)
    for clock in _clocks:
        if clock.is_own_thread():
            iterator = clock.followed(iterator)
    return iterator
