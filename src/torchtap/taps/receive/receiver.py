"""Where every value arrives, whatever form the model has and whatever carried it out.

A receiver knows which taps are live, finds the site's entry, and folds the value into its reductions. It
guarantees:
- each tensor is measured once, though it may show up at several sites in a row;
- a failing reduction costs that value only: it is noted, and the model goes on (unless ``strict``);
- between two `collect` calls, passes over the model fold into one result for each site.

The hot path is `take` → `_fold`: no parsing, no matching, no allocation for a site that was seen before.

Not here: hooks (`eager` and the other forms), the clock (`session`), arithmetic (`reduce`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any, final

import torch
from torch import Tensor, nn

from torchtap._torch import is_traced_by_script
from torchtap.errors import ReductionError, TorchtapError
from torchtap.names import paths_around
from torchtap.plan import Plan
from torchtap.reduce import Full, Stats
from torchtap.sites import Site
from torchtap.taps.receive.entries import Entry, Fold, Grid, LivePort, RecentValues
from torchtap.taps.receive.gradients import ask_for_gradient
from torchtap.taps.walk.leaves import input_leaves, leaves
from torchtap.taps.walk.structure import skeleton

__all__ = ["Receiver"]

_NO_THREAD = -1


@final
class Receiver:
    """Takes values from a model, keeps what live taps ask for."""

    def __init__(
        self,
        plan: Plan,
        *,
        fold_passes: bool = True,
        strict: bool = False,
        one_mode: bool = False,
        copy: Callable[[Tensor], Tensor] = torch.clone,
        on_lost: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.plan = plan
        self.strict = strict
        self.live: frozenset[int] = frozenset()
        self.ports: dict[tuple[str, str, str], LivePort] = {}
        for port in plan.ports:
            self.ports[port.site.path, port.site.kind, port.site.leaf] = LivePort(port)
        self.thread: int | None = _NO_THREAD  # the one that is heard; None hears every thread
        # Values come from several threads where all are heard, and gradients from whichever runs the backward. One at
        # a time: rows, slots and entries are shared. Reentrant, since reductions may call the model.
        self.lock = threading.RLock()
        self._open = False
        self.used = False  # whether the model ran, or anything came, in this step
        self.timed = False  # whether folds are to know how long they took
        self._fold_passes = fold_passes
        self._one_mode = one_mode  # a step's first pass decides whether it is of training or of evaluation
        self._mode: bool | None = None
        self._passed_over: tuple[int | None] | None = (
            None  # whom to hear again after a pass of the other mode
        )
        self._copy = copy  # of whole tensors on the host
        self._on_lost = on_lost
        self._paths = {id(place.module): place.path for place in plan.places}
        self._kinds = {port.site.kind for port in plan.ports}
        self.keys = [repr(each.keep) for each in plan.taps]
        self._whole = [each.whole for each in plan.taps]
        self._enclosing: dict[tuple[str, str], tuple[LivePort, ...]] = {}
        self.entries: list[Entry] = []  # in the order of first arrival, which is the order of execution
        self.grid = Grid(RecentValues.SLOTS)
        self.generation = 0
        self._pass_number = 0
        self.passes = 0  # calls of the model in open steps
        self.knows_positions = True  # whether the form tells where in a structure a tensor stands
        self.missing: dict[str, str] = {}  # sites that a form is known not to have, with the reason
        self._recent = RecentValues()

    # -- what a carrier asks ------------------------------------------------------------------------------

    def hears_this_thread(self) -> bool:
        """Whether values of the running thread are meant for this receiver."""
        return self.thread is None or self.thread == threading.get_ident()

    def listens_to(self, kind: str) -> bool:
        """Whether any tap of the plan asks for this kind."""
        return kind in self._kinds

    def path_of(self, module: nn.Module) -> str | None:
        """The path of a module of this model, or None for a stranger."""
        return self._paths.get(id(module))

    # -- the clock ----------------------------------------------------------------------------------------

    def begin_step(self, live: frozenset[int], thread: int | None) -> None:
        """From now on these taps are live, for values of this thread (of every thread: None)."""
        self.thread, self._open, self.used = thread, True, False
        self._mode = self._passed_over = None
        if live != self.live:
            self.live = live
            self.generation += 1
        self._pass_number += 1

    def end_step(self) -> None:
        """Until the next step begins nothing is heard."""
        self.thread, self._open = _NO_THREAD, False
        self._passed_over = None

    def holds_anything(self) -> bool:
        """Whether any value has come since the last collection."""
        if any(self.grid.arrived):
            return True
        return any(fold.state is not None for entry in self.entries for fold in entry.live_folds)

    @contextmanager
    def not_listening(self) -> Iterator[None]:
        """A block in which nothing is heard; the open step goes on after it."""
        thread, self.thread = self.thread, _NO_THREAD
        is_open, self._open = self._open, False
        try:
            yield
        finally:
            self.thread, self._open = thread, is_open

    def begin_pass(self, training: bool | None = None) -> None:
        """The model was called: calls of its modules are counted anew, unless each pass is kept apart."""
        self.passes += self._open
        if self._open and self.hears_this_thread() and self._is_beside_the_step(training):
            self._passed_over = (self.thread,)
            self.thread = _NO_THREAD
        self.used = True
        if self._fold_passes:
            self._pass_number += 1

    def _is_beside_the_step(self, training: bool | None) -> bool:
        """Whether a pass only serves TorchScript's tracer, which must not find us in it, or is of the other mode."""
        if is_traced_by_script():
            return True
        if not self._one_mode or training is None:
            return False
        if self._mode is None:
            self._mode = training
        return self._mode != training

    def end_pass(self) -> None:
        """Let go of the values that were held to recognise repeats."""
        if self._passed_over is not None:
            (self.thread,), self._passed_over = self._passed_over, None
        with self.lock:
            self._recent.forget()

    # -- values -------------------------------------------------------------------------------------------

    def take(self, port: LivePort, tree: Any) -> None:
        """A module's output, or any other structure of tensors, of the port's next call."""
        call = port.next_call(self._pass_number)
        if isinstance(tree, Tensor):
            entry = self._entry(port, "", call)
            if entry is not None:
                self._fold(entry, tree)
            return
        if port.structure is None:
            port.structure = skeleton(tree)
        if not self._take_leaves(port, call, leaves(tree)):
            port.note = f"{port.kind} is not a tensor but {type(tree).__name__}"

    def take_inputs(self, port: LivePort, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A module's arguments."""
        call = port.next_call(self._pass_number)
        if not self._take_leaves(port, call, input_leaves(port.input_names, args, kwargs)):
            port.note = "no argument is a tensor"

    def take_gradients(
        self, port: LivePort, found: Iterable[tuple[str, Tensor]], recomputed: bool = False
    ) -> None:
        """Ask autograd for the gradients of these values, which a module was given or gave.

        A checkpoint's repetition asks only where the call that it repeats could not: the values that came into the
        checkpoint were there both times.
        """
        call = port.next_recall() if recomputed else port.next_call(self._pass_number)
        try:
            for leaf, tensor in found:
                if not tensor.requires_grad:
                    port.note = "the value does not require grad"
                    known = port.entries.get((leaf, call))
                    if known is not None:
                        known.asked = False
                    continue
                entry = self._entry(port, leaf, call)
                if entry is not None and not (recomputed and entry.asked):
                    entry.asked = not recomputed
                    ask_for_gradient(tensor, partial(self._take_gradient, entry))
        except Exception as error:
            self._lose(port.port.site.name, error)

    def _take_gradient(self, entry: Entry, gradient: Tensor) -> None:
        # A backward that comes after its step has ended has nowhere to put its values.
        if self._open and entry.generation == self.generation:
            self._fold(entry, gradient)

    def take_tensor(self, port: LivePort, tensor: Tensor) -> None:
        """The value of a port that stands for one tensor: a parameter, its gradient, a buffer."""
        port.next_call(self._pass_number)
        self._take_leaf(port, port.port.site.leaf, 0, tensor)

    def take_named(self, path: str, kind: str, leaf: str, tensor: Tensor, call: int | None = None) -> None:
        """A value of which only the name is known. It is dropped unless a tap of the plan asks for it."""
        port = self.ports.get((path, kind, "")) or self.ports.get((path, kind, leaf))
        if port is not None:
            self._take_leaf(
                port, leaf, port.next_leaf_call(self._pass_number, leaf) if call is None else call, tensor
            )

    def next_call(self, path: str, kind: str, leaf: str) -> int:
        """The number of the call that a named value of which only the gradient will come belongs to."""
        port = self.ports.get((path, kind, ""))
        return port.next_leaf_call(self._pass_number, leaf) if port is not None else 0

    def note(self, path: str, kind: str, reason: str) -> None:
        """Why a named place brings nothing."""
        port = self.ports.get((path, kind, ""))
        if port is not None:
            port.note = reason

    def await_gradient(self, path: str, kind: str, leaf: str, tensor: Tensor, *, again: bool = False) -> None:
        """Ask autograd for the gradient of a value of which only the name is known.

        ``again``: of the newest call, if it was not asked for already.
        """
        port = self.ports.get((path, kind, ""))
        if port is None:
            return
        call = port.leaf_calls.get(leaf, 1) - 1 if again else port.next_leaf_call(self._pass_number, leaf)
        entry = self._entry(port, leaf, call)
        if entry is not None and not (again and entry.asked):
            entry.asked = not again
            ask_for_gradient(tensor, partial(self._take_gradient, entry))

    def take_state(
        self, path: str, kind: str, leaf: str, state: Tensor, shape: Iterable[int], call: int | None = None
    ) -> None:
        """The statistics of a value that were computed where it was made; the value itself stays there."""
        port = self.ports.get((path, kind, ""))
        if port is None:
            return
        entry = self._entry(
            port, leaf, port.next_leaf_call(self._pass_number, leaf) if call is None else call
        )
        if entry is None or not entry.measured:
            return
        if entry.shape is None:
            entry.shape = tuple(shape)
        with self.lock:
            row = entry.row if entry.row >= 0 else self.grid.add(entry)
            self.grid.block.fold_state(row, state)
            self.grid.arrived[row] = 1

    def take_from_inside(self, kind: str, owner: str | None, leaf: str, tensor: Tensor) -> None:
        """A value made in a module's code: it goes to the innermost enclosing module that each tap asks about."""
        for port in self.enclosing(kind, owner or ""):
            self._take_leaf(port, leaf, port.next_leaf_call(self._pass_number, leaf), tensor)

    def enclosing(self, kind: str, owner: str) -> tuple[LivePort, ...]:
        """For each tap that asks for this kind, the port of the innermost module around ``owner``."""
        known = self._enclosing.get((kind, owner))
        if known is None:
            found: dict[int, LivePort] = {}
            for index in range(len(self.plan.taps)):
                for path in (owner, *paths_around(owner)):
                    port = self.ports.get((path, kind, ""))
                    if port is not None and index in port.port.taps:
                        found[id(port)] = port
                        break
            known = self._enclosing[kind, owner] = tuple(found.values())
        return known

    def take_pieces(
        self, port: LivePort, leaf: str, shape: tuple[int, ...], pieces: Callable[[], Iterable[Tensor]]
    ) -> None:
        """A value too large to hold, cut along dimension 1: reductions that do not mind get it piece by piece."""
        entry = self._entry(port, leaf, port.next_leaf_call(self._pass_number, leaf))
        if entry is None:
            return
        entry.shape = entry.shape or shape
        self.lock.acquire()
        try:
            if entry.measured:
                for piece in pieces():
                    self._measure(entry, piece)
            for fold in entry.live_folds:
                began = perf_counter()
                fold.state = fold.reduction.update_pieces(fold.state, pieces())
                fold.seconds += perf_counter() - began
        except Exception as error:
            self.lose(entry, error)
        finally:
            self.lock.release()

    def _take_leaves(self, port: LivePort, call: int, found: Iterable[tuple[str, Tensor]]) -> bool:
        """The tensors of a structure; says whether it has any. Types of the user's may fail to be looked through."""
        came = False
        try:
            for leaf, tensor in found:
                came = True
                self._take_leaf(port, leaf, call, tensor)
        except Exception as error:
            self._lose(port.port.site.name, error)
        return came

    # -- the hot path -------------------------------------------------------------------------------------

    def _take_leaf(self, port: LivePort, leaf: str, call: int, tensor: Tensor) -> None:
        entry = self._entry(port, leaf, call)
        if entry is not None:
            self._fold(entry, tensor)

    def _entry(self, port: LivePort, leaf: str, call: int) -> Entry | None:
        """The entry of a leaf, or None where no live tap wants it."""
        try:
            entry = port.entries[leaf, call]
        except KeyError:
            entry = self._new_entry(port, leaf, call)
        if entry is None:
            return None
        if entry.generation != self.generation:
            with self.lock:
                self._refresh(entry)
        return entry if entry.measured or entry.live_folds else None

    def _fold(self, entry: Entry, tensor: Tensor) -> None:
        self.used = True
        self.lock.acquire()
        try:
            if entry.shape is None:
                entry.shape, entry.dtype = tuple(tensor.shape), tensor.dtype
            if entry.measured:
                self._measure(entry, tensor)
            for fold in entry.live_folds:
                if self.timed:
                    began = perf_counter()
                    self._update(fold, tensor)
                    fold.seconds += perf_counter() - began
                else:
                    self._update(fold, tensor)
        except Exception as error:
            self.lose(entry, error)
        finally:
            self.lock.release()

    def _measure(self, entry: Entry, tensor: Tensor) -> None:
        grid = self.grid
        row = entry.row
        if row < 0:
            row = grid.add(entry)
        slot, known = self._recent.slot_of(tensor)
        if known:
            grid.block.fold(row, slot)
        else:
            grid.block.measure_into(row, slot, tensor)
        grid.arrived[row] = 1

    def _update(self, fold: Fold, tensor: Tensor) -> None:
        reduction = fold.reduction
        if not isinstance(reduction, Full):
            fold.state = reduction.update(fold.state, tensor.detach())
            return
        # One copy serves every site that shows the same value: copies are never changed.
        slot, known = self._recent.slot_of(tensor)
        copies = self._recent.copies[slot]
        state = copies.get(fold.key) if known else None
        if state is None:
            state = copies[fold.key] = reduction.update(None, tensor.detach(), self._copy)
        fold.state = list(state) if fold.state is None else reduction.merge(fold.state, state)

    # -- entries ------------------------------------------------------------------------------------------

    def _new_entry(self, port: LivePort, leaf: str, call: int) -> Entry | None:
        names = port.port.names
        if (leaf or call) and not names[0].leaf:  # not a listed tensor: they are known only now
            names = tuple(Site(name.path, name.kind, leaf, call, module=name.module) for name in names)
        taps = tuple(
            index for index in port.port.taps if self._whole[index] or self.plan.taps[index].wants(names)
        )
        with self.lock:
            if (leaf, call) not in port.entries:  # another thread may have come first
                entry = port.entries[leaf, call] = Entry(names[0], taps) if taps else None
                if entry is not None:
                    self.entries.append(entry)
            return port.entries[leaf, call]

    def wants_statistics(self, entry: Entry) -> bool:
        """Whether a live tap keeps statistics of this site."""
        return any(
            index in self.live and isinstance(self.plan.taps[index].keep, Stats) for index in entry.taps
        )

    def _refresh(self, entry: Entry) -> None:
        """Which of the entry's reductions are live now. Two taps with the same reduction share one fold."""
        entry.measured = self.wants_statistics(entry)
        live: dict[str, Fold] = {}
        for index in entry.taps:
            reduction = self.plan.taps[index].keep
            if index not in self.live or isinstance(reduction, Stats):
                continue
            key = self.keys[index]
            fold = entry.folds.get(key)
            if fold is None:
                fold = entry.folds[key] = Fold(key, reduction)
            live[key] = fold
        entry.live_folds = tuple(live.values())
        entry.generation = self.generation  # last: another thread must not go on with half of it

    # -- what went wrong ----------------------------------------------------------------------------------

    def lose(self, entry: Entry, error: Exception) -> None:
        self._lose(entry.name, error)

    def _lose(self, site: str, error: Exception) -> None:
        if self.strict:
            if isinstance(error, TorchtapError):
                raise error
            raise ReductionError(f"{site}: {type(error).__name__}: {error}") from error
        self._on_lost(f"{site}: {type(error).__name__}: {error}")
