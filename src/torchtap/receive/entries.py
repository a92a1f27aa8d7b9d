"""What a receiver keeps for each place of a plan while the model runs. Plain records, changed by the receiver only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final
from weakref import ref

import torch
from torch import Tensor

from torchtap._torch import version_of
from torchtap.plan.names import Kind
from torchtap.plan.plan import Port
from torchtap.plan.sites import Site, input_names
from torchtap.reduce.base import AnyReduction, RowBlock

__all__ = ["Entry", "Fold", "PortState", "RecentValues", "Tally", "gone"]


@final
class Fold:
    """One reduction at one site in one phase, and its state in the open step; no state means that nothing arrived.

    Equal reductions have equal keys.
    """

    __slots__ = ("key", "reduction", "seconds", "state")

    def __init__(self, key: str, reduction: AnyReduction) -> None:
        self.key = key
        self.reduction = reduction
        self.state: Any = None
        self.seconds = 0.0  # that it has taken, where somebody asks


@final
class Entry:
    """A site that was seen: who wants it, and what has been folded so far."""

    __slots__ = (
        "also",
        "asked",
        "dtype",
        "folds",
        "generation",
        "how",
        "live_folds",
        "measured",
        "name",
        "quick",
        "row",
        "shape",
        "site",
        "taps",
    )

    def __init__(self, site: Site, taps: tuple[int, ...]) -> None:
        self.site = site
        self.name = site.name
        self.taps = taps
        self.generation = -1
        self.also: Entry | None = None  # which takes the same values, of all passes together
        self.measured = False  # whether a row of the block is wanted in this generation
        self.quick = False  # True if a value only has to be folded into the row
        self.asked = False  # True if the newest call, replays apart, requested its gradient
        self.row = -1  # in each tally's block, once it has one
        self.folds: dict[str, dict[str, Fold]] = {}  # by phase, then by key
        self.live_folds: tuple[Fold, ...] = ()
        self.shape: tuple[int, ...] | None = None  # of the first value; None means that none ever came
        self.dtype: torch.dtype | None = None
        self.how = ""  # how the value was obtained, if not by reading it


@final
class Tally:
    """What one phase has folded in the open step. Passes of different phases never meet in one.

    ``serial`` changes when the tally is emptied: a gradient that comes later than that has nowhere to go.
    """

    __slots__ = (
        "_block",
        "_make_block",
        "arrived",
        "generation",
        "live",
        "numbers",
        "passes",
        "phase",
        "serial",
        "take",
        "touched",
    )

    def __init__(self, phase: str, make_block: Callable[[int], RowBlock], rows: int) -> None:
        self.phase = phase
        self.live: frozenset[int] = frozenset()
        self.generation = 0  # of the live taps
        self.passes = 0
        self.serial = 0
        self.touched = False  # whether it was turned to since it was emptied
        self.numbers: dict[
            str, dict[str, float | Tensor]
        ] = {}  # that came as such: statistic -> site -> number
        self._make_block = make_block
        self._block: RowBlock | None = None  # made for the first value: many a look keeps no statistics
        self.take: Callable[[int, Tensor], bool] = _not_taken
        self.arrived = bytearray(rows)  # rows that have a value

    @property
    def block(self) -> RowBlock:
        """The rows of all sites."""
        if self._block is None:
            self._block = self._make_block(len(self.arrived))
            self.take = self._block.take  # bound once: it is called for every value
        return self._block

    def forget(self) -> None:
        """Recognise none of the values that came."""
        if self._block is not None:
            self._block.forget()

    def reserve(self, rows: int) -> None:
        """Have room for so many sites."""
        if rows > len(self.arrived):
            more = max(rows, 2 * len(self.arrived))
            if self._block is not None:
                self._block.grow(more)
            self.arrived.extend(bytes(more - len(self.arrived)))

    def clear(self) -> None:
        """Nothing has arrived: a new step begins."""
        self.serial += 1
        self.touched = False
        self.passes = 0
        self.numbers = {}
        if 1 in self.arrived:
            self.block.reset()
            self.arrived[:] = bytes(len(self.arrived))


@final
class PortState:
    """A plan's port at run time: counts calls in a pass and keeps the entries of its leaves.

    ``apart`` are the taps that keep each pass by itself: their calls are counted on from pass to pass.
    """

    __slots__ = (
        "apart",
        "called",
        "calls",
        "earlier",
        "entries",
        "first",
        "input_names",
        "kind",
        "leaf",
        "leaf_calls",
        "module",
        "note",
        "pass_number",
        "port",
        "recalls",
        "structure",
    )

    def __init__(self, port: Port, apart: frozenset[int] = frozenset()) -> None:
        self.pass_number = -1
        self.calls = self.recalls = 0
        self.leaf_calls: dict[str, int] = {}
        self.called = False  # in any pass
        self.port = port
        self.apart = apart.intersection(port.taps)
        self.earlier: tuple[int, dict[str, int]] = (0, {})  # calls, and calls of each leaf, in earlier passes
        self.kind: Kind = port.site.kind
        self.leaf = port.site.leaf
        self.entries: dict[tuple[str, int], Entry | None] = {}
        self.first: Entry | None = None  # of the first call and the port's own leaf: most values are of it
        self.structure: Any = None  # of an output that is not one tensor, from the first call
        self.note = ""  # why a call brought nothing
        self.module = module = port.site.module  # asked for at every step
        takes_arguments = self.kind in ("input", "grad_input") and module is not None
        self.input_names = input_names(module) if takes_arguments and module is not None else None

    def next_call(self, pass_number: int) -> int:
        """The number of this call in the pass."""
        if self.pass_number != pass_number:
            self.start_pass(pass_number)
        call = self.calls
        self.calls = call + 1
        return call

    def next_recall(self) -> int:
        """The number of a call that activation checkpointing repeats: that of the call it repeats."""
        call = self.recalls
        self.recalls = call + 1
        return call

    def next_leaf_call(self, pass_number: int, leaf: str) -> int:
        """The same for values that arrive one by one, not as one structure a call."""
        if self.pass_number != pass_number:
            self.start_pass(pass_number)
        call = self.leaf_calls.get(leaf, 0)
        self.leaf_calls[leaf] = call + 1
        return call

    def start_pass(self, pass_number: int) -> None:
        """Count from 0, but for taps that keep passes apart."""
        self.pass_number, self.called = pass_number, True
        if self.apart:
            self.earlier = self.calls, dict(self.leaf_calls)
            return
        self.calls = self.recalls = 0
        if self.leaf_calls:
            self.leaf_calls.clear()

    @property
    def arrived(self) -> bool:
        """Whether any value has come."""
        return any(entry is not None and entry.shape is not None for entry in self.entries.values())

    def call_in_pass(self, leaf: str, call: int) -> int:
        """The number that a call has in its own pass."""
        calls, of_leaves = self.earlier
        return call - of_leaves.get(leaf, 0) - calls


@final
class RecentValues:
    """Recognises a tensor that was seen a moment ago and has not changed since.

    A container returns what its last child returned, and what one module returns the next is given. The values are
    not held: a model that lets go of one uses its memory again for the next, while that is still in the cache.
    """

    SLOTS = 4
    __slots__ = ("copies", "keys", "measured", "next_slot", "slots", "tensors", "versions")

    keys: list[int]
    tensors: list[Callable[[], Tensor | None]]
    versions: list[int]
    measured: bytearray  # whether the block has the numbers of what is in a slot
    copies: list[dict[str, Any]]  # what Full made of it, by key

    def __init__(self) -> None:
        self.next_slot = 0
        self.slots: dict[int, int] = {}  # id of a tensor, which may be gone by now -> its slot

    def forget(self) -> None:
        if self.slots:
            self.slots = {}
            self.copies = []

    def _begin(self) -> None:
        """Made for the first value that Python folds: most are folded by native code."""
        self.keys = [0] * self.SLOTS
        self.tensors = [gone] * self.SLOTS
        self.versions = [0] * self.SLOTS
        self.measured = bytearray(self.SLOTS)
        self.copies = [{} for _ in range(self.SLOTS)]

    def slot_of(self, tensor: Tensor) -> tuple[int, bool]:
        """A slot for this tensor, and whether the very same value is in it already."""
        if not self.slots:
            self._begin()
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


def gone() -> None:
    """A reference to no value."""


def _not_taken(row: int, value: Tensor) -> bool:
    """There is no row yet."""
    return False
