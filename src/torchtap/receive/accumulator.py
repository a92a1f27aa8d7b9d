"""Fold values into the reductions of active taps: one `SiteState` for each site, one `PhaseState` for each phase.

It guarantees:
- each tensor is measured once, also if several sites show it in a row;
- values of one phase are folded into that phase and into no other;
- a failing reduction costs that value only: it is noted, and the model continues (unless ``strict``).

Statistics of all sites are rows of one `StatsBlock` for each phase. Other reductions have a `Fold` for each site and
phase.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from time import perf_counter
from typing import TYPE_CHECKING, Any, final
from weakref import ref

import torch
from torch import Tensor

from torchtap._torch import version_of
from torchtap.errors import ReductionError, TorchtapError
from torchtap.plan.plan import Plan
from torchtap.plan.sites import Site
from torchtap.reduce.device_copy import line_to
from torchtap.reduce.moments import FIELDS, WIDTH
from torchtap.reduce.reduction import AnyReduction
from torchtap.reduce.stats import StatsBlock, measure

if TYPE_CHECKING:
    from torchtap.receive.placing import Placing
    from torchtap.receive.receiver import PortState

__all__ = ["Accumulator", "Fold", "PhaseState", "SiteState"]

_ROWS = 64
_SCALED = [FIELDS.index(name) for name in ("count", "nans", "infs", "zeros", "l1")]
_generations = count(1)  # of sets of active taps


@final
class Fold:
    """One reduction at one site in one phase, and its state; None if it has no value. Equal reductions share a key."""

    __slots__ = ("key", "reduction", "seconds", "state")

    def __init__(self, key: str, reduction: AnyReduction) -> None:
        self.key = key
        self.reduction = reduction
        self.state: Any = None
        self.seconds = 0.0  # spent in it, if the accumulator is timed


@final
class SiteState:
    """A site that had a value: its taps and its reductions."""

    __slots__ = (
        "dtype",
        "folds",
        "generation",
        "grad_requested",
        "how",
        "live_folds",
        "measured",
        "merged",
        "name",
        "row",
        "shape",
        "site",
        "stats_only",
        "taps",
    )

    def __init__(self, site: Site, taps: tuple[int, ...]) -> None:
        self.site = site
        self.name = site.name
        self.taps = taps
        self.generation = -1  # of the active taps for which the next fields hold
        self.measured = False  # True if an active tap keeps statistics
        self.live_folds: tuple[Fold, ...] = ()
        self.stats_only = False  # True if a value only has to be folded into the row
        self.merged: SiteState | None = None  # receives the same values, of all passes together
        self.grad_requested = False  # True if the newest call, replays apart, requested its gradient
        self.row = -1  # in each phase's block, once it has one
        self.folds: dict[str, dict[str, Fold]] = {}  # by phase, then by key
        self.shape: tuple[int, ...] | None = None  # of the first value; None if there was none
        self.dtype: torch.dtype | None = None
        self.how = ""  # how the value was obtained, if it was not read

    def update_stats_only(self) -> None:
        """Note if a value only has to be folded into the row."""
        known = self.row >= 0 and self.shape is not None
        self.stats_only = known and self.measured and not self.live_folds and self.merged is None


@final
class PhaseState:
    """The values of one phase since it was collected. ``serial`` grows then: later gradients have nowhere to go."""

    __slots__ = (
        "_block",
        "arrived",
        "forget",
        "generation",
        "key",
        "live",
        "numbers",
        "passes",
        "serial",
        "take",
        "touched",
    )

    def __init__(self, key: str, rows: int = _ROWS) -> None:
        self.key = key
        self.live: frozenset[int] = frozenset()  # the active taps
        self.generation = 0
        self.passes = 0
        self.serial = 0
        self.touched = False  # True if values may have been folded since it was cleared
        # Numbers that need no reduction: statistic -> site -> number.
        self.numbers: dict[str, dict[str, float | Tensor]] = {}
        self.arrived = bytearray(rows)  # 1 for each row with a value
        self._block: StatsBlock | None = None  # made for the first value: many captures keep no statistics
        # The block's methods, bound once: `take` is called for every value.
        self.take: Callable[[int, Tensor], bool] = _not_taken
        self.forget: Callable[[], None] = _nothing

    @property
    def block(self) -> StatsBlock:
        """Return the rows of all sites."""
        if self._block is None:
            self._block = StatsBlock(len(self.arrived), scratch=_RecentValues.SLOTS)
            self.take, self.forget = self._block.take, self._block.forget
        return self._block

    def reserve(self, rows: int) -> None:
        """Grow to at least ``rows`` rows."""
        if rows > len(self.arrived):
            more = max(rows, 2 * len(self.arrived))
            if self._block is not None:
                self._block.grow(more)
            self.arrived.extend(bytes(more - len(self.arrived)))

    def clear(self) -> None:
        """Drop all statistics and numbers."""
        self.serial += 1
        self.touched = False
        self.passes = 0
        self.numbers = {}
        if self._block is not None and 1 in self.arrived:
            self._block.reset()
            self.arrived[:] = bytes(len(self.arrived))


def _not_taken(row: int, value: Tensor) -> bool:
    return False


def _nothing() -> None:
    pass


@final
class _RecentValues:
    """Recognise a tensor that was seen a moment ago and has not changed since.

    A container returns what its last child returned, and the next module is given it. The values are not held, so a
    model can reuse their memory at once, while it is in the cache.
    """

    SLOTS = 4
    __slots__ = ("copies", "keys", "measured", "next_slot", "slots", "tensors", "versions")

    def __init__(self) -> None:
        self.next_slot = 0
        self.slots: dict[int, int] = {}  # id of a tensor, which may be gone -> its slot
        self.keys = [0] * self.SLOTS
        self.tensors: list[Callable[[], Tensor | None]] = [_nothing] * self.SLOTS
        self.versions = [0] * self.SLOTS
        self.measured = bytearray(self.SLOTS)  # 1 if the block has the statistics of a slot
        self.copies: list[dict[str, Any]] = [{} for _ in range(self.SLOTS)]  # what `Full` made of it, by key

    def forget(self) -> None:
        if self.slots:
            self.slots = {}
            self.copies = [{} for _ in range(self.SLOTS)]

    def slot_of(self, tensor: Tensor) -> tuple[int, bool]:
        """Return a slot for this tensor, and True if the same value is in it already."""
        version = version_of(tensor)
        key = id(tensor)
        slot = self.slots.get(key, -1)
        if slot < 0:
            slot = self.next_slot
            self.next_slot = (slot + 1) % self.SLOTS
            self.slots.pop(self.keys[slot], None)
            self.slots[key] = slot
            self.keys[slot] = key
        elif self.versions[slot] == version >= 0 and self.tensors[slot]() is tensor:
            return slot, True
        self.tensors[slot] = ref(tensor)
        self.versions[slot] = version
        self.measured[slot] = 0
        if self.copies[slot]:
            self.copies[slot] = {}
        return slot, False


@final
class Accumulator:
    """The phases, and the sites that had a value."""

    def __init__(
        self,
        plan: Plan,
        *,
        strict: bool,
        copy: Callable[[Tensor], Tensor],
        on_lost: Callable[[str], None],
        placing: Placing | None = None,
    ) -> None:
        self.plan = plan
        self._placing = placing  # None if this process is alone
        self._strict = strict
        self._copy = copy  # of whole tensors on the host
        self._on_lost = on_lost
        self.sites: list[SiteState] = []  # in the order of execution
        self.folded: list[SiteState] = []  # those with reductions other than statistics
        self.rows: list[SiteState] = []  # those with a row in the blocks
        # If a tap keeps passes apart: the sites at which the other taps fold all passes.
        self.over_passes: dict[str, SiteState] = {}
        # Values may come from several threads, and gradients from the thread that runs the backward. Reentrant, because
        # reductions may call the model.
        self.lock = threading.RLock()
        self.timed = False  # True if folds have to know how long they took
        self._recent = _RecentValues()
        self.phases: dict[str | int, PhaseState] = {}
        self._spare: list[PhaseState] = []  # for further phases: sites have folds under their keys
        self.phase = PhaseState("", 1)  # the current one

    # -- phases -------------------------------------------------------------------------------------------

    def switch(self, key: str | int, live: frozenset[int]) -> PhaseState:
        """Fold into this phase from now on, with these taps active."""
        phase = self.phases.get(key)
        if phase is None:
            phase = self._spare.pop() if self._spare else PhaseState(str(len(self.phases)))
            self.phases[key] = phase
        if phase.live != live or not phase.generation:
            phase.live = live
            phase.generation = next(_generations)
        self.resume(phase)
        return phase

    def resume(self, phase: PhaseState) -> None:
        """Fold into a known phase again."""
        if len(self.rows) > len(phase.arrived):
            phase.reserve(len(self.rows))
        phase.touched = True
        if phase is not self.phase:
            self.forget_values()
            self.phase = phase

    def release(self, keys: Iterable[str | int]) -> list[PhaseState]:
        """Return the phases that these keys have; the keys have none afterwards."""
        released = [self.phases.pop(key) for key in keys if key in self.phases]
        self._spare += released
        return released

    def drop(self, phases: Iterable[PhaseState]) -> int:
        """Drop the values of phases, and return how many passes they had."""
        passes = 0
        for phase in phases:
            passes += phase.passes
            phase.clear()
            for site in self.folded:
                for fold in site.folds.get(phase.key, {}).values():
                    fold.state = None
        return passes

    def forget_values(self) -> None:
        """Recognise none of the values that were seen so far."""
        with self.lock:
            self._recent.forget()
            self.phase.forget()

    # -- values -------------------------------------------------------------------------------------------

    def site(self, port: PortState, leaf: str, call: int) -> SiteState | None:
        """Return the state of a leaf's site, or None if no active tap selects it."""
        try:
            site = port.sites[leaf, call]
        except KeyError:
            site = self._new_site(port, leaf, call)
        if site is None:
            return None
        if site.generation != self.phase.generation:
            with self.lock:
                self.refresh(site)
        return site if site.measured or site.live_folds or site.merged is not None else None

    def fold(self, site: SiteState, tensor: Tensor) -> None:
        """Fold a value into the active reductions of a site."""
        phase = self.phase
        try:
            if site.stats_only and phase.take(site.row, tensor):  # atomic, so it needs no lock
                phase.arrived[site.row] = 1
            else:
                with self.lock:
                    self._fold_any(site, tensor)
        except Exception as error:
            self.lose(site.name, error)
        if self._placing is not None:
            self._placing.note(site, tensor, phase.key)

    def _fold_any(self, site: SiteState, tensor: Tensor) -> None:
        if site.shape is None:
            site.shape, site.dtype = tuple(tensor.shape), tensor.dtype
        if site.measured:
            self._measure(site, tensor)
        for fold in site.live_folds:
            began = perf_counter() if self.timed else 0.0
            self._update(fold, tensor)
            if self.timed:
                fold.seconds += perf_counter() - began
        if site.merged is not None:
            self.fold(site.merged, tensor)
        site.update_stats_only()

    def _measure(self, site: SiteState, tensor: Tensor) -> None:
        row = self._row_of(site)
        block, recent = self.phase.block, self._recent
        if not block.take_any(row, tensor):
            slot, known = recent.slot_of(tensor)
            if known and recent.measured[slot]:
                block.fold(row, slot)
            else:
                block.measure_into(row, slot, tensor)
                recent.measured[slot] = 1
        self.phase.arrived[row] = 1

    def _update(self, fold: Fold, tensor: Tensor) -> None:
        if not tensor.is_cpu and not tensor.is_meta:
            line_to(tensor.device).note()
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

    def fold_block(self, site: SiteState, block: Tensor, scale: float) -> None:
        """Fold a block of a value. Each of its elements stands for ``scale`` elements."""
        with self.lock:
            try:
                if site.measured and scale == 1:
                    self._measure(site, block)
                elif site.measured:  # counts and sums of a sample are scaled to those of the whole
                    state = measure(block)
                    factors = torch.ones(WIDTH, dtype=state.dtype)
                    factors[_SCALED] = scale
                    self.fold_row(site, state * factors.to(state.device))
                for fold in site.live_folds:
                    if not fold.reduction.elementwise:
                        raise ReductionError(
                            f"{fold.reduction.name} needs the update in one piece, which is more than the memory that "
                            "torchtap may hold; give its tap a Budget(memory=…)"
                        )
                    fold.state = fold.reduction.update(fold.state, block)
            except Exception as error:
                self.lose(site.name, error)
        if site.merged is not None:
            self.fold_block(site.merged, block, scale)

    def fold_pieces(
        self, site: SiteState, shape: tuple[int, ...], pieces: Callable[[], Iterable[Tensor]]
    ) -> None:
        """Fold a value too large to hold, cut along dimension 1."""
        site.shape = site.shape or shape
        with self.lock:
            try:
                if site.measured:
                    for piece in _noting_dtype(site, pieces()):
                        self._measure(site, piece)
                for fold in site.live_folds:
                    began = perf_counter()
                    fold.state = fold.reduction.update_pieces(fold.state, _noting_dtype(site, pieces()))
                    fold.seconds += perf_counter() - began
                if site.merged is not None:
                    self.fold_pieces(site.merged, shape, pieces)
            except Exception as error:
                self.lose(site.name, error)

    def fold_state(self, site: SiteState, shape: Iterable[int], state: Tensor) -> None:
        """Fold statistics that were computed in a graph."""
        if site.merged is not None:
            self.fold_state(site.merged, shape, state)
        if site.measured:
            if site.shape is None:
                site.shape = tuple(shape)
            self.fold_row(site, state)

    def fold_row(self, site: SiteState, state: Tensor) -> None:
        """Fold a row's state into a site alone."""
        with self.lock:
            row = self._row_of(site)
            self.phase.block.fold_state(row, state)
            self.phase.arrived[row] = 1

    def _row_of(self, site: SiteState) -> int:
        if site.row < 0:
            site.row = len(self.rows)
            self.rows.append(site)
            self.phase.reserve(len(self.rows))
        return site.row

    # -- sites --------------------------------------------------------------------------------------------

    def _new_site(self, port: PortState, leaf: str, call: int) -> SiteState | None:
        with self.lock:
            if (leaf, call) not in port.sites:  # another thread may have been first
                site = self._made(port, leaf, call, port.apart or frozenset(port.port.taps))
                if site is not None:
                    self._add(site)
                port.sites[leaf, call] = site = self._with_other_passes(port, leaf, call, site)
                if not call and leaf == port.site.leaf and not port.apart:
                    port.first = site
            return port.sites[leaf, call]

    def _with_other_passes(
        self, port: PortState, leaf: str, call: int, site: SiteState | None
    ) -> SiteState | None:
        """Let the taps that fold passes receive the value too, if another tap keeps passes apart."""
        if not port.apart or len(port.apart) == len(port.port.taps):
            return site
        in_pass = port.call_in_pass(leaf, call)
        other = self._made(port, leaf, in_pass, frozenset(port.port.taps) - port.apart)
        if other is None:
            return site
        other = self.over_passes.setdefault(other.name, other)
        if site is None:
            if other not in self.sites:
                self._add(other)
            return other
        site.merged = other
        return site

    def _made(self, port: PortState, leaf: str, call: int, among: frozenset[int]) -> SiteState | None:
        """Return a new state for those of some taps that select the site; None if none does."""
        names, plan = port.port.names, self.plan
        more = leaf.removeprefix(names[0].leaf)
        if more or call:  # a port does not list these
            names = tuple(
                Site(name.path, name.kind, name.leaf + more, call, module=name.module) for name in names
            )
        taps = tuple(
            index
            for index in port.port.taps
            if index in among and (plan.wants_all[index] or plan.taps[index].wants(names))
        )
        return SiteState(names[0], taps) if taps else None

    def _add(self, site: SiteState) -> None:
        self.sites.append(site)
        if not all(self.plan.in_rows[index] for index in site.taps):
            self.folded.append(site)

    def wants_row(self, site: SiteState, live: frozenset[int]) -> bool:
        """Return True if an active tap keeps statistics of this site."""
        return any(index in live and self.plan.in_rows[index] for index in site.taps)

    def fold_keys(self, site: SiteState, live: frozenset[int]) -> dict[str, AnyReduction]:
        """Return the other reductions of active taps by key. Two taps with the same reduction share one fold."""
        plan = self.plan
        kept = [index for index in site.taps if index in live and not plan.in_rows[index]]
        return {plan.keys[index]: plan.taps[index].keep for index in kept}

    def refresh(self, site: SiteState) -> None:
        """Find the reductions of a site for the active taps of the current phase."""
        if site.merged is not None:
            self.refresh(site.merged)
        phase = self.phase
        site.measured = self.wants_row(site, phase.live)
        known = site.folds.setdefault(phase.key, {})
        wanted = self.fold_keys(site, phase.live)
        site.live_folds = tuple(
            known.get(key) or known.setdefault(key, Fold(key, keep)) for key, keep in wanted.items()
        )
        site.update_stats_only()
        site.generation = phase.generation  # last: another thread must not use half of it

    def lose(self, site: str, error: Exception) -> None:
        """Note a value that was lost, or raise if the user wants that."""
        if self._strict:
            if isinstance(error, TorchtapError):
                error.args = (f"{site}: {error.args[0] if error.args else ''}", *error.args[1:])
                raise error
            raise ReductionError(f"{site}: {type(error).__name__}: {error}") from error
        self._on_lost(f"{site}: {type(error).__name__}: {error}")


def _noting_dtype(site: SiteState, pieces: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the pieces, and note the dtype of the first."""
    for piece in pieces:
        site.dtype = site.dtype or piece.dtype
        yield piece
