"""Find a training's epochs and batches from outside: from the DataLoader it iterates and the optimizer it steps.

While a clock runs, and in its thread only, iterators of ``torch.utils.data.DataLoader`` report each batch that
they hand out, and optimizers that update the model's parameters report each update. The rules:
- an iteration that begins while the model is in training mode is an epoch, each batch it hands out is a batch;
- one that begins in evaluation mode, or inside another iteration, is none (validation; a second loader);
- one that ends without an update, in a training that has seen updates, was none after all;
- without any DataLoader, each update ends a batch and all is one epoch.

It guarantees that nothing of torch stays changed after the clock has stopped.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol, Self, final

from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

__all__ = ["Listener", "TrainingClock"]


class Listener(Protocol):
    """Who is told."""

    def epoch_begins(self) -> None:
        """An epoch begins."""

    def batch_begins(self, index: int) -> None:
        """A batch of it begins."""

    def epoch_ends(self) -> None:
        """The epoch is over."""

    def epoch_was_none(self) -> None:
        """What was said to be an epoch has turned out not to be one."""


@final
class TrainingClock:
    """Listens to one training function in the thread that enters it."""

    def __init__(self, model: nn.Module, listener: Listener) -> None:
        self._model, self._listener = model, listener
        self._parameters = {id(parameter) for parameter in model.parameters()}
        self._thread = -1
        self._current: weakref.ref[_Followed] | None = None
        self._serial = 0  # of the current iteration: an older one that is dropped late ends nothing
        self._updates_before = 0  # in earlier iterations
        self._handle: Any = None
        self.iterations = 0  # that were epochs
        self.passed_over = 0  # that were not
        self.batches = 0
        self.updates = 0

    def __enter__(self) -> Self:
        self._thread = threading.get_ident()
        self._handle = register_optimizer_step_post_hook(self._on_update)
        _follow(self)
        return self

    def __exit__(self, *_: object) -> None:
        _unfollow(self)
        self._handle.remove()
        self._end(self._serial)

    def hears_this_thread(self) -> bool:
        return threading.get_ident() == self._thread

    def followed(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """An iterator that tells this clock what it hands out, if its iteration is an epoch."""
        if self._in_an_iteration() or not self._model.training:
            self.passed_over += 1
            return iterator
        self._end(self._serial)
        self._serial += 1
        followed = _Followed(iterator, self, self._serial)
        self._current = weakref.ref(followed)
        # A loop that breaks off drops its iterator, and with it ends the epoch.
        weakref.finalize(followed, self._end, self._serial).atexit = False
        self.iterations += 1
        self._updates_before = self.updates
        self._listener.epoch_begins()
        return followed

    def _in_an_iteration(self) -> bool:
        current = None if self._current is None else self._current()
        return current is not None and not current.ended

    def batch(self, index: int) -> None:
        self.batches += 1
        self._listener.batch_begins(index)

    def _end(self, serial: int) -> None:
        if self._current is None or serial != self._serial:
            return
        self._current = None
        if self.updates and self.updates == self._updates_before:
            self.iterations -= 1
            self.passed_over += 1
            self._listener.epoch_was_none()
        else:
            self._listener.epoch_ends()

    def _on_update(self, optimizer: Any, *_: Any) -> None:
        if not self.hears_this_thread():
            return
        of_model = any(id(p) in self._parameters for group in optimizer.param_groups for p in group["params"])
        if of_model:
            self.updates += 1
            if not self.iterations:
                self.batch(self.updates)


@final
class _Followed:
    """A DataLoader's iterator that counts what it hands out."""

    def __init__(self, iterator: Iterator[Any], clock: TrainingClock, serial: int) -> None:
        self._iterator, self._clock, self._serial = iterator, clock, serial
        self._index = 0
        self.ended = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._iterator)
        except StopIteration:
            if not self.ended:
                self.ended = True
                self._clock._end(self._serial)
            raise
        self._clock.batch(self._index)
        self._index += 1
        return batch

    def __len__(self) -> int:
        return len(self._iterator)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


# -- DataLoader.__iter__, replaced while any clock runs -----------------------------------------------------------

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
        if clock.hears_this_thread():
            iterator = clock.followed(iterator)
    return iterator
