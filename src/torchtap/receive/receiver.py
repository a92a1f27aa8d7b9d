"""`Receiver`: every value arrives here, in every form of a model, and is folded into the reductions of active taps.

    hook → `Receiver.take(port, value)` → row of the phase's block, or `Accumulator.fold` → reduction

Read from top to bottom: whose values are received (`Callers`), which call of the model a value belongs to (`Pass`),
which site (`PortState`, `SiteState`), which phase (`PhaseState`), and how it is folded (`Accumulator`). It guarantees:
- a pass belongs to one phase, which the clock names; passes of one phase fold into one result for each site;
- passes that run at the same time are counted apart. One pass has the same number at every site;
- a gradient goes to the phase of the pass that requested it, or nowhere after that phase was collected;
- each tensor is measured once, also if several sites show it in a row;
- a call that is not received changes nothing, and is counted;
- a failing reduction costs that value only: it is noted, and the model continues (unless ``strict``).

Not here: hooks (`eager` and the other forms), where autograd has a gradient (`gradients`), values of graphs
(`by_name`), parameters and buffers (`state`).
"""

from __future__ import annotations

import threading
from asyncio import current_task
from asyncio.events import _get_running_loop
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from threading import get_ident
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol, final
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from torchtap._torch import script_tracer, version_of
from torchtap.errors import ReductionError, TorchtapError
from torchtap.hooks.leaves import input_leaves, leaves
from torchtap.plan.names import Kind, paths_around
from torchtap.plan.plan import Plan, Port
from torchtap.plan.sites import Site, input_names
from torchtap.receive import reasons
from torchtap.receive.gradients import Ask, ask_for_gradient, release_leaves
from torchtap.reduce.device_copy import line_to
from torchtap.reduce.moments import FIELDS, WIDTH
from torchtap.reduce.reduction import AnyReduction
from torchtap.reduce.stats import StatsBlock, measure

if TYPE_CHECKING:
    from torchtap.hooks.leaves import Args
    from torchtap.receive.placing import Placing

__all__ = [
    "Accumulator",
    "Context",
    "Fold",
    "FormFacts",
    "Pass",
    "PassClock",
    "PhaseState",
    "PortState",
    "Receiver",
    "SiteState",
]

_ROWS = 64
_RECENT = 4  # values
_SCALED = [FIELDS.index(name) for name in ("count", "nans", "infs", "zeros", "l1")]
_generations = count(1)  # of sets of active taps


class PassClock(Protocol):
    """Decide where the values of a pass are folded. A key names a phase; which step it belongs to is known later."""

    def begin_pass(self, training: bool, grad: bool) -> tuple[int, frozenset[int]] | None:
        """Return the key and the active taps of a pass that begins now; None for one that is not recorded.

        ``training`` is the module's mode; ``grad`` is True if autograd records.
        """

    def state_key(self) -> tuple[int, frozenset[int]]:
        """Return the same for parameters, gradients and buffers that are read now."""


@final
@dataclass(slots=True)
class FormFacts:
    """Facts about a model's form that decide how its values are named and what is missing."""

    # Given the number of passes so far, a path and a leaf: the leaf's name, if the form is not certain of it.
    rename: Callable[[int, str, str], str] | None = None
    knows_positions: bool = True  # False if the form cannot tell where in a structure a tensor is
    missing: dict[str, str] = field(default_factory=dict)  # sites that it does not have, with the reason
    unnamed_reason: str = ""  # why it may have sites that it cannot name; empty if it names all


@final
@dataclass(slots=True)
class Totals:
    """Counts of a whole session. They continue when the model's modules are replaced."""

    passes: int = 0  # calls of the model in open steps
    late: int = 0  # gradients that were computed after their phase was collected
    other_thread_calls: int = 0
    arrived_before: frozenset[str] = frozenset()  # bare names of sites that had values before the replacement


# -- whose values, and of which call of the model -----------------------------------------------------------------


# The captures whose calls a context makes. Weak: a context may outlive a capture, also one that was never left.
_joined: ContextVar[frozenset[ReferenceType[Context]]] = ContextVar("torchtap captures", default=frozenset())


@final
class Context:
    """The calls that a capture receives: those of the thread or asyncio task that opened it.

    Tasks that are started in it belong to it, and so do threads that run in a copy of it (``asyncio.to_thread``).
    """

    def __init__(self, model: nn.Module) -> None:
        self.model: nn.Module | None = model  # None after `leave`: a context may hold a capture that ended
        self._reference = ref(self)

    def join(self) -> None:
        """Receive calls of the running context from now on."""
        _joined.set(_joined.get() | {self._reference})

    def leave(self) -> None:
        """Receive no more calls."""
        self.model = None
        _joined.set(_joined.get() - {self._reference})

    def is_here(self) -> bool:
        """Return True if the running code belongs to it."""
        return self._reference in _joined.get()

    def is_others(self) -> bool:
        """Return True if the running code belongs to the context of another capture of this model."""
        others = (each() for each in _joined.get())
        return any(other is not None and other.model is self.model for other in others)


@final
class Pass:
    """One call of the model: how often each port was called in it."""

    __slots__ = ("calls", "ended_before", "leaf_calls", "number", "open", "recorded", "replays")

    def __init__(self, number: int, ended_before: int, recorded: bool, is_open: bool) -> None:
        self.number = number
        self.ended_before = ended_before  # passes
        self.recorded = recorded
        self.open = is_open
        self.calls: dict[PortState, int] = {}
        self.replays: dict[PortState, int] = {}  # by activation checkpointing
        # Of values that are made inside a module's code.
        self.leaf_calls: dict[tuple[PortState, str], int] = {}

    def next_call(self, port: PortState) -> int:
        """Return the number of this call of a port."""
        port.called = True
        call = self.calls.get(port, 0)
        self.calls[port] = call + 1
        return call

    def next_replay(self, port: PortState) -> int:
        """Return the number of the call that activation checkpointing repeats now."""
        call = self.replays.get(port, 0)
        self.replays[port] = call + 1
        return call

    def next_leaf_call(self, port: PortState, leaf: str) -> int:
        """Count the values of one leaf, not the calls: for values that are made inside a module's code."""
        port.called = True
        call = self.leaf_calls.get((port, leaf), 0)
        self.leaf_calls[port, leaf] = call + 1
        return call

    def advance(self, port: PortState, calls: int, *, replayed: bool = False) -> int:
        """Count this many calls, 0 for a further value of the newest one. Return the number of the newest."""
        port.called = True
        counted = self.replays if replayed else self.calls
        counted[port] = counted.get(port, 0) + calls
        return max(counted[port] - 1, 0)


@final
class Callers:
    """The newest pass of each thread or asyncio task whose values are received."""

    def __init__(self) -> None:
        self.open = False  # True inside a step
        self.of: int | Context | None = None  # a thread, the context of a capture, or everyone
        self.newest: dict[int, Pass] = {}
        self.begun = self.ended = 0  # passes

    def admits(self) -> bool:
        """Return True if values of the running code are received."""
        of = self.of
        if of is None or not self.open:
            return self.open
        return of == get_ident() if isinstance(of, int) else of.is_here()


def _caller() -> int:
    """Return a number for the running asyncio task, or for the thread if there is none."""
    loop = _get_running_loop()
    task = None if loop is None else current_task(loop)
    return get_ident() if task is None else id(task)


# -- ports, sites, phases -----------------------------------------------------------------------------------------


@final
class PortState:
    """A port of the plan at run time, and the sites of its leaves.

    apart: taps that keep each pass by itself. For them calls are counted from pass to pass.
    """

    __slots__ = (
        "apart",
        "called",
        "earlier",
        "ended_calls",
        "first",
        "input_names",
        "kind",
        "note",
        "port",
        "site",
        "sites",
        "structure",
    )

    def __init__(self, port: Port, apart: frozenset[int] = frozenset()) -> None:
        self.port = port
        self.site = site = port.names[0]
        self.kind: Kind = site.kind
        self.apart = apart.intersection(port.taps)
        self.called = False  # in any pass
        # Calls in passes that have ended, and calls of single leaves, if a tap keeps passes apart.
        self.ended_calls: dict[str | None, int] = {}
        self.earlier: dict[
            int, dict[str | None, int]
        ] = {}  # what it was when a pass ended, by the pass's number
        # By leaf, call in its pass, and the number of the pass if it is kept apart (else 0).
        self.sites: dict[tuple[str, int, int], SiteState | None] = {}
        self.first: SiteState | None = None  # of the first call and the port's own leaf: most values
        self.structure: Any = None  # of an output that is not one tensor, from the first call
        self.note = ""  # why a call had no value
        takes_arguments = self.kind in ("input", "grad_input") and site.module is not None
        self.input_names = input_names(site.module) if takes_arguments and site.module is not None else None

    @property
    def arrived(self) -> bool:
        """Return True if there was any value."""
        return any(site is not None and site.shape is not None for site in self.sites.values())

    def number(self, leaf: str, call: int, of: int) -> int:
        """Return the number of a call among those of all passes. It holds if the pass has ended or ends next."""
        earlier = self.earlier.get(of, self.ended_calls) if of else {}
        return call + earlier.get(None, 0) + earlier.get(leaf, 0)


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

    def renumber(self, call: int) -> None:
        """Let it be another call."""
        site = self.site
        self.site = Site(site.path, site.kind, site.leaf, call, module=site.module)
        self.name = self.site.name

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
            self._block = StatsBlock(len(self.arrived), scratch=_RECENT)
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
class _Recent:
    """A value that was seen a moment ago. It is not held, so a model can reuse its memory at once."""

    __slots__ = ("copies", "measured", "slot", "tensor", "version")

    def __init__(self, slot: int, tensor: Tensor, version: int) -> None:
        self.slot = slot  # of the block
        self.tensor = ref(tensor)
        self.version = version
        self.measured = False  # True if the slot has its statistics
        self.copies: dict[str, Any] = {}  # what `Full` made of it, by key


@final
class Accumulator:
    """The phases, and the sites that had a value."""

    def __init__(
        self,
        plan: Plan,
        *,
        copy: Callable[[Tensor], Tensor],
        on_lost: Callable[[str], None] | None,
        placing: Placing | None = None,
    ) -> None:
        self.plan = plan
        self._placing = placing  # None if this process is alone
        self._copy = copy  # of whole tensors on the host
        self._on_lost = on_lost  # None to raise instead
        self.sites: list[SiteState] = []  # in the order of execution
        self.folded: list[SiteState] = []  # those with reductions other than statistics
        self.rows: list[SiteState] = []  # those with a row in the blocks
        # If a tap keeps passes apart: the sites at which the other taps fold all passes.
        self.over_passes: dict[str, SiteState] = {}
        # Values may come from several threads, and gradients from the thread that runs the backward. Reentrant, because
        # reductions may call the model.
        self.lock = threading.RLock()
        self.timed = False  # True if folds have to know how long they took
        # The oldest first. A container returns what its last child returned, and the next module is given it.
        self._recent: deque[_Recent] = deque()
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
            self._recent.clear()
            self.phase.forget()

    def _seen(self, tensor: Tensor) -> _Recent:
        """Return what is known of a value; nothing is if it was not seen a moment ago, or has changed since."""
        version = version_of(tensor)
        for known in self._recent:
            if known.version == version >= 0 and known.tensor() is tensor:
                return known
        used = len(self._recent)
        made = _Recent(used if used < _RECENT else self._recent.popleft().slot, tensor, version)
        self._recent.append(made)
        return made

    # -- values -------------------------------------------------------------------------------------------

    def site(self, port: PortState, leaf: str, call: int, of: int = 0) -> SiteState | None:
        """Return the state of a leaf's site, or None if no active tap selects it.

        call: the number of the call in its pass.
        of: the number of the pass; 0 for what the model holds and no pass brings.
        """
        key = (leaf, call, of if port.apart else 0)
        site = port.sites[key] if key in port.sites else self._new_site(port, *key)
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
        block = self.phase.block
        if not block.take_any(row, tensor):
            seen = self._seen(tensor)
            if seen.measured:
                block.fold(row, seen.slot)
            else:
                block.measure_into(row, seen.slot, tensor)
                seen.measured = True
        self.phase.arrived[row] = 1

    def _update(self, fold: Fold, tensor: Tensor) -> None:
        if not tensor.is_cpu and not tensor.is_meta:
            line_to(tensor.device).note()
        reduction = fold.reduction
        if not reduction.whole:
            fold.state = reduction.update(fold.state, tensor.detach())
            return
        # One copy serves every site that shows the same value: copies are never changed.
        copies = self._seen(tensor).copies
        state = copies.get(fold.key)
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

    def _new_site(self, port: PortState, leaf: str, call: int, of: int) -> SiteState | None:
        with self.lock:
            key = leaf, call, of
            if key not in port.sites:  # another thread may have been first
                number = port.number(leaf, call, of)
                site = self._made(port, leaf, number, port.apart or frozenset(port.port.taps))
                if 0 < len(port.apart) < len(port.port.taps):
                    site = self._with_other_passes(port, leaf, call, site)
                elif site is not None:
                    self._add(site)
                port.sites[key] = site
                if not call and leaf == port.site.leaf and not port.apart:
                    port.first = site
            return port.sites[key]

    def _with_other_passes(
        self, port: PortState, leaf: str, call: int, site: SiteState | None
    ) -> SiteState | None:
        """Let the taps that fold passes receive the value too, if another tap keeps passes apart."""
        if site is not None:
            self._add(site)
        other = self._made(port, leaf, call, frozenset(port.port.taps) - port.apart)
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

    def number_calls(self, ended: Pass, *, overlapped: bool) -> None:
        """Count the calls of a pass that has ended, for taps that keep passes apart.

        If passes ended while it ran, its calls follow theirs.
        """
        for port in {*ended.calls, *(port for port, _ in ended.leaf_calls)}:
            port.earlier[ended.number] = dict(port.ended_calls)
            for (leaf, call, of), site in port.sites.items() if overlapped else ():
                if of == ended.number and site is not None and self.over_passes.get(site.name) is not site:
                    site.renumber(port.number(leaf, call, of))
        for port, calls in ended.calls.items():
            port.ended_calls[None] = port.ended_calls.get(None, 0) + calls
        for (port, leaf), calls in ended.leaf_calls.items():
            port.ended_calls[leaf] = port.ended_calls.get(leaf, 0) + calls

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
        if self._on_lost is None:
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


# -- the receiver -------------------------------------------------------------------------------------------------


@final
class Receiver:
    """Collect values from hooks and feed them to the reductions of the active taps."""

    def __init__(
        self,
        plan: Plan,
        *,
        apart: frozenset[int] = frozenset(),
        strict: bool = False,
        copy: Callable[[Tensor], Tensor] = torch.clone,
        on_lost: Callable[[str], None] = lambda _: None,
        clock: PassClock | None = None,
        placing: Placing | None = None,
    ) -> None:
        self.plan = plan
        self.placing = placing  # None if this process is alone
        self.accumulator = Accumulator(plan, copy=copy, on_lost=None if strict else on_lost, placing=placing)
        ports = [PortState(port, apart) for port in plan.ports]
        self.ports = {(port.site.path, str(port.kind), port.site.leaf): port for port in ports}
        self.form = FormFacts()
        self.totals = Totals()
        self.callers = Callers()
        self._apart = bool(apart)
        self._clock = clock  # None if all passes belong to one phase
        self._enclosing: dict[tuple[str, str], tuple[PortState, ...]] = {}

    @cached_property
    def _paths(self) -> dict[int, str]:
        return {id(place.module): place.path for place in self.plan.places}

    @property
    def sites(self) -> list[SiteState]:
        """Return the sites that had a value, in the order of execution."""
        return self.accumulator.sites

    def silent_taps(self) -> list[int]:
        """Return the taps of the user that had no value at all."""
        silent = set(range(len(self.plan.asked)))
        for site in self.sites:
            if site.shape is not None:
                silent.difference_update(site.taps, site.merged.taps if site.merged is not None else ())
        return sorted(silent)

    def hears_this_thread(self) -> bool:
        """Return True if values of the running code are received."""
        known = self.callers.newest.get(_caller())
        return self.callers.admits() and (known is None or known.recorded or not known.open)

    def current(self) -> Pass | None:
        """Return the newest pass of the running caller; None if its values are not received."""
        known = self.callers.newest.get(_caller())
        if known is not None and known.open:
            return known if known.recorded else None
        if not self.callers.admits():
            return None
        return known if known is not None and known.recorded else self._begin(True, is_open=False)

    def listens_to(self, kind: str) -> bool:
        """Return True if any tap of the plan selects this kind."""
        return kind in self.plan.kinds

    def path_of(self, module: nn.Module) -> str | None:
        """Return the path of a module; None if it is not part of this model."""
        return self._paths.get(id(module))

    # -- steps and passes ---------------------------------------------------------------------------------

    def follow(self, before: Receiver) -> None:
        """Continue the totals of the receiver before: the model has other modules now."""
        came = (port.site.name for port in before.ports.values() if port.arrived)
        self.totals = before.totals
        self.totals.arrived_before = self.totals.arrived_before.union(came)

    def begin_step(self, of: int | Context | None) -> None:
        """Receive values of a thread, of the context of a capture, or of everyone (None)."""
        self.end_step()
        self.callers.of, self.callers.open = of, True

    def end_step(self) -> None:
        """Receive nothing until the next step begins."""
        release_leaves(self)
        for each in self.callers.newest.values():
            if each.open:
                self._close(each)
        self.callers.newest.clear()
        self.callers.open = False

    def switch(self, phase: str, live: frozenset[int]) -> None:
        """Fold into this phase from now on, with these taps active."""
        self.accumulator.switch(phase, live)

    def switch_to_state(self) -> None:
        """Switch to the phase of values that are read from the model, not from a pass."""
        if self._clock is not None:
            self.accumulator.switch(*self._clock.state_key())

    @contextmanager
    def not_listening(self) -> Iterator[None]:
        """Receive nothing inside this block; the open step continues after it."""
        callers = self.callers
        newest, callers.newest = callers.newest, {}
        is_open, callers.open = callers.open, False
        try:
            yield
        finally:
            callers.newest, callers.open = newest, is_open

    def begin_pass(self, training: bool | None = None, learning: bool | None = None) -> None:
        """Begin a call of the model: number the calls of its modules from 0.

        training: the model's mode, None if it has none.
        learning: True if autograd records; by default torch is asked.
        """
        callers = self.callers
        if not callers.admits():
            # A call in the context of another capture is that one's.
            others = isinstance(callers.of, Context) and callers.of.is_others()
            self.totals.other_thread_calls += callers.open and not others
            return
        known = callers.newest.get(_caller())
        if known is not None and known.open:
            if not known.recorded:
                return
            self._close(known)
        self._begin(script_tracer() is None and self._is_recorded(training, learning))

    def pass_of(self, port: PortState) -> Pass | None:
        """Return the open pass of the running caller; None if its values are not received.

        A module that is called outside of the model begins one. It lasts until the model is called.
        """
        loop = _get_running_loop()
        current = self.callers.newest.get(get_ident() if loop is None else _caller())
        if current is not None and current.open:
            return current if current.recorded else None
        training = getattr(port.site.module, "training", None)
        if not self.callers.admits() or not self._is_recorded(training, None):
            return None
        return self._begin(True)

    def _begin(self, recorded: bool, *, is_open: bool = True) -> Pass:
        """Begin a pass of the running caller."""
        callers = self.callers
        callers.begun += 1
        self.totals.passes += recorded and is_open
        made = callers.newest[_caller()] = Pass(callers.begun, callers.ended, recorded, is_open)
        return made

    def _is_recorded(self, training: bool | None, learning: bool | None) -> bool:
        """Return True if a pass is recorded, after switching to its phase."""
        if self.placing is not None and self.placing.infers_shapes():
            return False
        if self._clock is not None:
            learning = torch.is_grad_enabled() if learning is None else learning
            begun = self._clock.begin_pass(training is not False, learning)
            if begun is None:
                return False
            self.accumulator.switch(*begun).passes += 1
        return True

    def end_pass(self) -> None:
        """End a call of the model."""
        known = self.callers.newest.get(_caller())
        if known is not None and known.open:
            self._close(known)
        self.accumulator.forget_values()

    def _close(self, ended: Pass) -> None:
        ended.open = False
        if self._apart:
            with self.accumulator.lock:
                overlapped = ended.ended_before != self.callers.ended
                self.accumulator.number_calls(ended, overlapped=overlapped)
                self.callers.ended += 1

    # -- values -------------------------------------------------------------------------------------------

    def take(self, port: PortState, tree: object) -> None:
        """Receive an output, or any other structure of tensors, of the port's next call."""
        current = self.pass_of(port)
        if current is None:
            return
        call = current.next_call(port)
        if isinstance(tree, Tensor):
            site, phase = port.first, self.accumulator.phase
            if call or site is None or not site.stats_only or site.generation != phase.generation:
                self.take_leaf(port, "", call, tree, current.number)
            elif self.placing is None and phase.take(site.row, tree):  # atomic, so it needs no lock
                phase.arrived[site.row] = 1
            else:
                self.accumulator.fold(site, tree)
            return
        if port.structure is None:
            from torchtap.hooks.leaves import skeleton  # most modules return one tensor

            port.structure = skeleton(tree)
        if not self._take_leaves(port, call, current.number, leaves(tree)):
            port.note = reasons.NO_TENSOR.format(kind=port.kind, name=type(tree).__name__)

    def take_inputs(self, port: PortState, args: Args, kwargs: Mapping[str, Any]) -> None:
        """Receive a module's arguments."""
        current = self.pass_of(port)
        if current is None:
            return
        found = input_leaves(port.input_names, args, kwargs)
        if not self._take_leaves(port, current.next_call(port), current.number, found):
            port.note = reasons.NO_ARGUMENT

    def request_gradients(
        self,
        port: PortState,
        found: Iterable[tuple[str, Tensor]],
        replayed: bool = False,
        ask: Ask = ask_for_gradient,
    ) -> None:
        """Request the gradients of these inputs or outputs of a call.

        A checkpoint's replay requests a gradient only if the call that it repeats could not.
        """
        current = self.current() if replayed else self.pass_of(port)
        if current is None:
            return
        call = current.next_replay(port) if replayed else current.next_call(port)
        try:
            for leaf, tensor in found:
                self.request_gradient(port, leaf, (call, current.number), tensor, replayed, ask)
        except Exception as error:
            self.accumulator.lose(port.site.name, error)

    def request_gradient(
        self,
        port: PortState,
        leaf: str,
        call: tuple[int, int],
        tensor: Tensor,
        replayed: bool,
        ask: Ask = ask_for_gradient,
    ) -> None:
        """Request the gradient of one value. ``call`` is its number in its pass, and that of the pass."""
        if not tensor.requires_grad:
            port.note = reasons.NO_GRADIENT
            known = port.sites.get((leaf, call[0], call[1] if port.apart else 0))
            if known is not None:
                known.grad_requested = False
            return
        site = self.accumulator.site(port, leaf, *call)
        if site is not None and not (replayed and site.grad_requested):
            site.grad_requested = not replayed
            phase = self.accumulator.phase
            ask(tensor, self.take_gradient, site, phase, phase.serial)

    def take_gradient(self, site: SiteState, phase: PhaseState, serial: int, gradient: Tensor | None) -> None:
        """Receive a gradient that was requested (`gradients`) when the phase had this serial."""
        if gradient is None:
            return
        # A backward after its phase was collected has nowhere to put its values.
        if not self.callers.open or phase.serial != serial:
            self.totals.late += 1
            return
        accumulator = self.accumulator
        if phase is not accumulator.phase:  # another pass came between the forward and its backward
            accumulator.resume(phase)
        if site.generation != phase.generation:
            accumulator.refresh(site)
        accumulator.fold(site, gradient)

    def take_from_inside(self, kind: str, owner: str | None, leaf: str, tensor: Tensor) -> None:
        """Receive a value of a module's code, for the innermost enclosing module that each tap selects."""
        current = self.current()
        if current is not None:
            for port in self.enclosing(kind, owner or ""):
                self.take_leaf(port, leaf, current.next_leaf_call(port, leaf), tensor, current.number)

    def enclosing(self, kind: str, owner: str) -> tuple[PortState, ...]:
        """Return, for each tap of this kind, the port of the innermost module around ``owner``."""
        known = self._enclosing.get((kind, owner))
        if known is None:
            found: dict[int, PortState] = {}
            for index in range(len(self.plan.taps)):
                for path in (owner, *paths_around(owner)):
                    port = self.ports.get((path, kind, ""))
                    if port is not None and index in port.port.taps:
                        found[id(port)] = port
                        break
            known = self._enclosing[kind, owner] = tuple(found.values())
        return known

    def _take_leaves(self, port: PortState, call: int, of: int, found: Iterable[tuple[str, Tensor]]) -> bool:
        """Receive the tensors of a structure. Return True if it has any. Classes of the user may fail to be walked."""
        came = False
        try:
            for leaf, tensor in found:
                came = True
                self.take_leaf(port, leaf, call, tensor, of)
        except Exception as error:
            self.accumulator.lose(port.site.name, error)
        return came

    def take_leaf(self, port: PortState, leaf: str, call: int, tensor: Tensor, of: int = 0) -> None:
        """Receive one tensor of a port's call; ``of`` is the number of the pass, 0 for what the model holds."""
        site = self.accumulator.site(port, leaf, call, of)
        if site is not None:
            self.accumulator.fold(site, tensor)
