"""Find a training's epochs and batches from outside: from the DataLoader it iterates and the optimizer it steps.

While a clock runs, and in its thread only, iterators of ``torch.utils.data.DataLoader`` report each batch that
they hand out, and optimizers that update the model's parameters report each update. The rules:
- an iteration that begins while the model is in training mode is an epoch, each batch it hands out is a batch;
- one that begins in evaluation mode, or inside another iteration, is none (validation; a second loader), unless the
  training switches to training mode before the first pass: some trainers do so when they have the first batch;
- one that ends without an update, in a training that has seen updates, was none after all;
- a loop that fetches several batches before it uses one is recognised by its first pass over the model, and its
  batches are numbered as they are used: each pass in training mode uses one, as far as there are any;
- without any DataLoader, each update ends a batch and all is one epoch.

It guarantees that nothing of torch stays changed after the clock has stopped.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol, Self, final

from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from torchtap.forms.attach import form_of
from torchtap.hooks.modes import ModeHook
from torchtap.hooks.ways import HookWay
from torchtap.receive.training import parameters_of

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
        self._handles: list[Any] = []
        self._hooked = False  # whether passes over the model are heard
        # Tells that an iteration which began in evaluation mode is one of training after all.
        self._undecided: ModeHook | None = None
        self._ahead: int | None = None  # batches fetched before the first was used; None until that is known
        self._fetched = 0  # in this iteration
        self._group = 0  # of these, since the last pass
        self._last = 0  # the last batch that the passes after this group may use
        self._index = 0  # of the batch in use
        self._in_use = False  # whether a pass has used it
        self._exhausted = False
        self.iterations = 0  # that were epochs
        self.passed_over = 0  # that were not
        self.batches = 0
        self.updates = 0

    def __enter__(self) -> Self:
        self._thread = threading.get_ident()
        self._handles = [register_optimizer_step_post_hook(self._on_update)]
        if form_of(self._model) == "eager":  # a hook on a compiled model would become part of it
            self._handles.append(HookWay().before(self._model, self._on_pass))
            self._handles.append(HookWay().after(self._model, self._on_pass_end))
            self._hooked = True
        _follow(self)
        return self

    def __exit__(self, *_: object) -> None:
        _unfollow(self)
        self._decide()
        for handle in self._handles:
            handle.remove()
        self._end(self._serial, for_good=True)

    def hears_this_thread(self) -> bool:
        return threading.get_ident() == self._thread

    def followed(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """An iterator that tells this clock what it hands out, if its iteration is an epoch."""
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
        """The mode was switched before the first pass; to training means that the iteration is an epoch after all."""
        if not training:
            return
        self._decide()
        if self.hears_this_thread() and not self._in_an_iteration():
            self.passed_over -= 1
            self._begin(followed)

    def _begin(self, followed: _Followed) -> None:
        """An iteration is an epoch."""
        self._end(self._serial, for_good=True)
        self._serial += 1
        followed.serial, self._exhausted = self._serial, followed.ended
        self._ahead = None if self._hooked else 0
        self._fetched = self._group = followed.handed_out
        self._current = weakref.ref(followed)
        # A loop that breaks off drops its iterator, and with it ends the epoch.
        weakref.finalize(followed, self._end, self._serial).atexit = False
        self.iterations += 1
        self._updates_before = self.updates
        self._listener.epoch_begins()
        if self._fetched:
            self._use(0)

    def _in_an_iteration(self) -> bool:
        current = None if self._current is None else self._current()
        return current is not None and not current.ended

    def fetched(self, serial: int) -> None:
        """A batch was handed out."""
        if serial != self._serial:
            return
        self._fetched += 1
        self._group += 1
        if self._ahead is None and self.updates > self._updates_before:
            self._ahead = 0  # it trains without ever calling the model as a whole
        if self._fetched == 1:
            self._use(0)
        elif self._ahead == 0:
            self._use(self._fetched - 1)
        elif self._ahead is not None and self._in_use:
            self._use(self._index + 1)

    def exhausted(self, serial: int) -> None:
        """The iterator has no more."""
        if serial == self._serial:
            self._exhausted = True
            if self._ahead and self._in_use and self._index + 1 < self._fetched:
                self._use(self._index + 1)
        self._end(serial)

    def _use(self, index: int) -> None:
        self._index, self._in_use = index, False
        self.batches += 1
        self._listener.batch_begins(index)

    def _on_pass(self, *_: object) -> None:
        if not self.hears_this_thread():
            return
        self._decide()
        if self._current is None or not self._model.training:
            return
        if self._ahead is None:
            self._ahead = max(0, self._fetched - 1)
        if self._group:  # the first pass since batches were fetched
            self._last, self._group = self._index + self._group - 1, 0
        self._in_use = True

    def _on_pass_end(self, *_: object) -> None:
        """The next of the batches that were fetched together comes next."""
        if not self._ahead or self._current is None or not self._in_use:
            return
        last = self._fetched - 1 if self._exhausted else self._last
        if self._model.training and self.hears_this_thread() and self._index < last:
            self._use(self._index + 1)

    def _end(self, serial: int, for_good: bool = False) -> None:
        if self._current is None or serial != self._serial:
            return
        if self._ahead and not for_good:
            return  # what was fetched ahead is still to be used; the next iteration or the end will tell
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
        if any(id(each) in self._parameters for each in parameters_of(optimizer)):
            self.updates += 1
            if not self.iterations:
                self._use(self.updates)


@final
class _Followed:
    """A DataLoader's iterator that counts what it hands out."""

    def __init__(self, iterator: Iterator[object], clock: TrainingClock) -> None:
        self._iterator, self._clock = iterator, clock
        self.serial = -1  # until it is an epoch
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
                self._clock.exhausted(self.serial)
            raise
        self.handed_out += 1
        self._clock.fetched(self.serial)
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
