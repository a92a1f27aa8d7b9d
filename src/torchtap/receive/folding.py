"""The folding half of a receiver: find a site's entry and fold a value into the reductions that want it.

It guarantees:
- each tensor is measured once, though it may show up at several sites in a row;
- values of one phase are folded into that phase's tally and into no other;
- a failing reduction costs that value only: it is noted, and the model goes on (unless ``strict``).

The hot path is `entry` → `fold`: no parsing, no matching, no allocation for a site that was seen before.

Not here: which values are meant for us (`receiver`), arithmetic (`reduce`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from torchtap.errors import ReductionError, TorchtapError
from torchtap.plan.plan import Plan
from torchtap.plan.sites import Site
from torchtap.receive.entries import Entry, Fold, PortState, RecentValues, Tally
from torchtap.reduce.measuring import measure
from torchtap.reduce.moments import FIELDS, WIDTH

if TYPE_CHECKING:
    from torchtap.receive.placing import Placing

__all__ = ["Folding"]

_ROWS = 64


@final
class Folding:
    """What has been folded so far: a tally for each phase, and the entries of all sites that were seen."""

    def __init__(
        self,
        plan: Plan,
        *,
        strict: bool,
        copy: Callable[[Tensor], Tensor],
        on_lost: Callable[[str], None],
        placing: Placing | None = None,
    ) -> None:
        self._taps = plan.taps
        self._placing = placing  # None where this process is alone
        self._strict = strict
        self._copy = copy  # of whole tensors on the host
        self._on_lost = on_lost
        self.keys = plan.keys
        self._whole = plan.wants_all
        self._make_block = partial(plan.block, scratch=RecentValues.SLOTS)
        self._in_rows = plan.in_rows
        self.entries: list[Entry] = []  # in the order of first arrival, which is the order of execution
        self.over_passes: dict[
            str, Entry
        ] = {}  # where a tap keeps passes apart: what the others fold over them
        self.folded: list[Entry] = []  # those that have reductions of their own, in the same order
        self.rows: list[Entry] = []  # those that have a row in the tallies' blocks
        # Values come from several threads where all are heard, and gradients from whichever runs the backward. One at
        # a time: rows, slots and entries are shared. Reentrant, since reductions may call the model.
        self.lock = threading.RLock()
        self.timed = False  # whether folds are to know how long they took
        self._recent = RecentValues()
        self._generations = 0
        self.tallies: dict[str, Tally] = {}
        self.tally: Tally = Tally("", self._make_block, 1)  # nobody's, until one is turned to
        self.generation = 0

    # -- phases -------------------------------------------------------------------------------------------

    def tally_of(self, phase: str, live: frozenset[int]) -> Tally:
        """The tally of a phase, in which these taps are live."""
        tally = self.tallies.get(phase)
        if tally is None:
            tally = self.tallies[phase] = Tally(phase, self._make_block, _ROWS)
        if tally.live != live or not tally.generation:
            tally.live = live
            self._generations += 1
            tally.generation = self._generations
        return tally

    def turn_to(self, tally: Tally) -> None:
        """Fold into this tally from now on."""
        if len(self.rows) > len(tally.arrived):
            tally.reserve(len(self.rows))
        tally.touched = True
        if tally is not self.tally:
            self.tally = tally
            self._recent.forget()
        self.generation = tally.generation

    def holds_anything(self, tally: Tally) -> bool:
        """Whether any value has come into a tally since it was emptied."""
        if not tally.touched:
            return False
        if tally.numbers or any(tally.arrived):
            return True
        return any(
            fold.state is not None
            for entry in self.folded
            for fold in entry.folds.get(tally.phase, {}).values()
        )

    def drop(self, tally: Tally) -> None:
        """Forget what a tally holds."""
        tally.clear()
        for entry in self.folded:
            for fold in entry.folds.get(tally.phase, {}).values():
                fold.state = None

    def forget_values(self) -> None:
        """Let go of what was remembered to recognise repeats."""
        with self.lock:
            if self._recent.slots:
                self._recent.forget()
            for tally in self.tallies.values():
                tally.forget()

    # -- the hot path -------------------------------------------------------------------------------------

    def entry(self, port: PortState, leaf: str, call: int) -> Entry | None:
        """The entry of a leaf, or None where no live tap wants it."""
        try:
            entry = port.entries[leaf, call]
        except KeyError:
            entry = self._new_entry(port, leaf, call)
        if entry is None:
            return None
        if entry.generation != self.generation:
            with self.lock:
                self.refresh(entry)
        return entry if entry.measured or entry.live_folds or entry.also is not None else None

    def fold_placed(self, entry: Entry, tensor: Tensor) -> None:
        """`fold`, and note which part of the whole the value is."""
        self.fold(entry, tensor)
        if self._placing is not None:
            self._placing.note(entry, tensor, self.tally.phase)

    def fold(self, entry: Entry, tensor: Tensor) -> None:
        """Fold a value into whatever of the entry is live."""
        if entry.quick:
            tally = self.tally
            try:
                if tally.take(entry.row, tensor):  # in one go, so that it needs no lock
                    tally.arrived[entry.row] = 1
                    return
            except Exception as error:
                self.lose(entry.name, error)
                return
        self._fold_with_care(entry, tensor)

    def _fold_with_care(self, entry: Entry, tensor: Tensor) -> None:
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
            if entry.also is not None:
                self.fold(entry.also, tensor)
            entry.quick = _is_quick(entry)
        except Exception as error:
            self.lose(entry.name, error)
        finally:
            self.lock.release()

    def _measure(self, entry: Entry, tensor: Tensor) -> None:
        tally = self.tally
        row = entry.row
        if row < 0:
            row = self._new_row(entry)
        if not tally.block.take_any(row, tensor):
            recent = self._recent
            slot, known = recent.slot_of(tensor)
            if known and recent.measured[slot]:
                tally.block.fold(row, slot)
            else:
                tally.block.measure_into(row, slot, tensor)
                recent.measured[slot] = 1
        tally.arrived[row] = 1

    def _update(self, fold: Fold, tensor: Tensor) -> None:
        reduction = fold.reduction
        if not reduction.whole:
            fold.state = reduction.update(fold.state, tensor.detach())
            return
        # One copy serves every site that shows the same value: copies are never changed.
        slot, known = self._recent.slot_of(tensor)
        copies = self._recent.copies[slot]
        state = copies.get(fold.key) if known else None
        if state is None:
            state = copies[fold.key] = reduction.first(tensor.detach(), self._copy)
        fold.state = list(state) if fold.state is None else reduction.merge(fold.state, state)

    def fold_block(self, entry: Entry, block: Tensor, scale: float) -> None:
        """Fold a block of a value, each of whose elements stands for ``scale`` elements."""
        with self.lock:
            try:
                if entry.measured and scale == 1:
                    self._measure(entry, block)
                elif entry.measured:
                    self._fold_scaled(entry, block, scale)
                for fold in entry.live_folds:
                    if not fold.reduction.elementwise:
                        raise ReductionError(
                            f"{fold.reduction.name} needs the update in one piece, which is more than the memory that "
                            "torchtap may hold; give its tap a Budget(memory=…)"
                        )
                    fold.state = fold.reduction.update(fold.state, block)
            except Exception as error:
                self.lose(entry.name, error)
        if entry.also is not None:
            self.fold_block(entry.also, block, scale)

    def _fold_scaled(self, entry: Entry, sample: Tensor, scale: float) -> None:
        """Fold the statistics of a sample as those of the whole: counts and sums are scaled."""
        row = entry.row if entry.row >= 0 else self._new_row(entry)
        state = measure(sample)
        factors = torch.ones(WIDTH, dtype=state.dtype)
        factors[[FIELDS.index(name) for name in ("count", "nans", "infs", "zeros", "l1")]] = scale
        self.tally.block.fold_state(row, state * factors.to(state.device))
        self.tally.arrived[row] = 1

    def fold_pieces(
        self, entry: Entry, shape: tuple[int, ...], pieces: Callable[[], Iterable[Tensor]]
    ) -> None:
        """Fold a value too large to hold, cut along dimension 1."""
        entry.shape = entry.shape or shape
        self.lock.acquire()
        try:
            if entry.measured:
                for piece in _noting_dtype(entry, pieces()):
                    self._measure(entry, piece)
            for fold in entry.live_folds:
                began = perf_counter()
                fold.state = fold.reduction.update_pieces(fold.state, _noting_dtype(entry, pieces()))
                fold.seconds += perf_counter() - began
            if entry.also is not None:
                self.fold_pieces(entry.also, shape, pieces)
        except Exception as error:
            self.lose(entry.name, error)
        finally:
            self.lock.release()

    def fold_state(self, entry: Entry, shape: Iterable[int], state: Tensor) -> None:
        """Fold a row's state that was computed where the value was made."""
        if entry.also is not None:
            self.fold_state(entry.also, shape, state)
        if not entry.measured:
            return
        if entry.shape is None:
            entry.shape = tuple(shape)
        with self.lock:
            row = entry.row if entry.row >= 0 else self._new_row(entry)
            self.tally.block.fold_state(row, state)
            self.tally.arrived[row] = 1

    # -- entries ------------------------------------------------------------------------------------------

    def _new_row(self, entry: Entry) -> int:
        entry.row = len(self.rows)
        self.rows.append(entry)
        self.tally.reserve(len(self.rows))
        return entry.row

    def _new_entry(self, port: PortState, leaf: str, call: int) -> Entry | None:
        with self.lock:
            if (leaf, call) not in port.entries:  # another thread may have come first
                entry = self._made(port, leaf, call, port.apart or frozenset(port.port.taps))
                if entry is not None:
                    self._add(entry)
                port.entries[leaf, call] = entry = self._with_other_passes(port, leaf, call, entry)
                if not call and leaf == port.port.site.leaf and not port.apart:
                    port.first = entry
            return port.entries[leaf, call]

    def _with_other_passes(self, port: PortState, leaf: str, call: int, entry: Entry | None) -> Entry | None:
        """Have the taps that fold passes get the value too, where another tap keeps passes apart."""
        if not port.apart or len(port.apart) == len(port.port.taps):
            return entry
        in_pass = port.call_in_pass(leaf, call)
        other = self._made(port, leaf, in_pass, frozenset(port.port.taps) - port.apart)
        if other is None:
            return entry
        other = self.over_passes.setdefault(other.name, other)
        if entry is None:
            if other not in self.entries:
                self._add(other)
            return other
        entry.also = other
        return entry

    def _made(self, port: PortState, leaf: str, call: int, among: frozenset[int]) -> Entry | None:
        """An entry for those of some taps that want the site; None if none does."""
        names = port.port.names
        more = leaf.removeprefix(names[0].leaf)
        if more or call:  # what a port does not list is known only now
            names = tuple(
                Site(name.path, name.kind, name.leaf + more, call, module=name.module) for name in names
            )
        taps = tuple(
            index
            for index in port.port.taps
            if index in among and (self._whole[index] or self._taps[index].wants(names))
        )
        return Entry(names[0], taps) if taps else None

    def wants_row(self, entry: Entry, live: frozenset[int]) -> bool:
        """Whether a live tap keeps this site in the block."""
        return any(index in live and self._in_rows[index] for index in entry.taps)

    def fold_keys(self, entry: Entry, live: frozenset[int]) -> set[str]:
        """Return the keys of the reductions that live taps keep beside the block."""
        return {self.keys[index] for index in entry.taps if index in live and not self._in_rows[index]}

    def refresh(self, entry: Entry) -> None:
        """Which of the entry's reductions are live now. Two taps with the same reduction share one fold."""
        if entry.also is not None:
            self.refresh(entry.also)
        tally = self.tally
        entry.measured = self.wants_row(entry, tally.live)
        known = entry.folds.setdefault(tally.phase, {})
        live: dict[str, Fold] = {}
        for index in entry.taps:
            if index not in tally.live or self._in_rows[index]:
                continue
            key = self.keys[index]
            fold = known.get(key)
            if fold is None:
                fold = known[key] = Fold(key, self._taps[index].keep)
            live[key] = fold
        entry.live_folds = tuple(live.values())
        entry.quick = _is_quick(entry)
        entry.generation = tally.generation  # last: another thread must not go on with half of it

    def _add(self, entry: Entry) -> None:
        self.entries.append(entry)
        if not all(self._in_rows[index] for index in entry.taps):
            self.folded.append(entry)

    # -- what went wrong ----------------------------------------------------------------------------------

    def lose(self, site: str, error: Exception) -> None:
        """Note a value that could not be kept."""
        if self._strict:
            if isinstance(error, TorchtapError):
                error.args = (f"{site}: {error.args[0] if error.args else ''}", *error.args[1:])
                raise error
            raise ReductionError(f"{site}: {type(error).__name__}: {error}") from error
        self._on_lost(f"{site}: {type(error).__name__}: {error}")


def _is_quick(entry: Entry) -> bool:
    """Whether there is nothing to do with a value of this entry but to have the block take it."""
    known = entry.row >= 0 and entry.shape is not None
    return known and entry.measured and not entry.live_folds and entry.also is None


def _noting_dtype(entry: Entry, pieces: Iterable[Tensor]) -> Iterator[Tensor]:
    """The pieces, of which the first tells the dtype of the whole."""
    for piece in pieces:
        entry.dtype = entry.dtype or piece.dtype
        yield piece
