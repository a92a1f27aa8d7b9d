"""What a receiver keeps for each place of a plan while the model runs. Plain records, changed by the receiver only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final
from weakref import ref

import torch
from torch import Tensor

from torchtap.names import Kind
from torchtap.plan import Port
from torchtap.reduce import Reduction, StatsBlock
from torchtap.sites import Site, input_names

__all__ = ["Entry", "Fold", "Grid", "LivePort", "RecentValues", "gone"]


@final
class Fold:
    """One reduction at one site and its state in the current step; no state means that nothing arrived.

    Equal reductions have equal keys.
    """

    __slots__ = ("key", "reduction", "seconds", "state")

    def __init__(self, key: str, reduction: Reduction[Any]) -> None:
        self.key = key
        self.reduction = reduction
        self.state: Any = None
        self.seconds = 0.0  # that it has taken, where somebody asks


@final
class Entry:
    """A site that was seen: who wants it, and what has been folded so far."""

    __slots__ = (
        "asked",
        "dtype",
        "folds",
        "generation",
        "live_folds",
        "measured",
        "name",
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
        self.measured = False  # whether statistics are wanted in this generation
        self.asked = False  # whether the newest call, repetitions apart, asked for its gradient
        self.row = -1  # its row in the grid of statistics, once it has one
        self.folds: dict[str, Fold] = {}
        self.live_folds: tuple[Fold, ...] = ()
        self.shape: tuple[int, ...] | None = None  # of the first value; None means that none ever came
        self.dtype: torch.dtype | None = None


@final
class Grid:
    """The statistics of all sites: a row a site, in the order of first arrival."""

    __slots__ = ("arrived", "block", "entries")

    def __init__(self, scratch: int, rows: int = 64) -> None:
        self.block = StatsBlock(rows, scratch=scratch)
        self.arrived = bytearray(rows)
        self.entries: list[Entry] = []

    def add(self, entry: Entry) -> int:
        """A row for a new site."""
        row = len(self.entries)
        self.entries.append(entry)
        if row >= len(self.arrived):
            self.block.grow(2 * len(self.arrived))
            self.arrived.extend(bytes(len(self.arrived)))
        entry.row = row
        return row

    def clear(self) -> None:
        """Nothing has arrived: a new step begins."""
        self.block.reset()
        self.arrived[:] = bytes(len(self.arrived))


@final
class LivePort:
    """A plan's port at run time: counts calls in a pass and keeps the entries of its leaves."""

    __slots__ = (
        "called",
        "calls",
        "entries",
        "input_names",
        "kind",
        "leaf_calls",
        "note",
        "pass_number",
        "port",
        "recalls",
        "structure",
    )

    def __init__(self, port: Port) -> None:
        self.port = port
        self.kind: Kind = port.site.kind
        self.entries: dict[tuple[str, int], Entry | None] = {}
        self.pass_number = -1
        self.calls = 0
        self.recalls = 0
        self.leaf_calls: dict[str, int] = {}
        self.called = False
        self.structure: Any = None  # of an output that is not one tensor, from the first call
        self.note = ""  # why a call brought nothing
        module = port.site.module
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
        self.pass_number = pass_number
        self.calls = self.recalls = 0
        if self.leaf_calls:
            self.leaf_calls.clear()
        self.called = True


@final
class RecentValues:
    """Recognises a tensor that was seen a moment ago and has not changed since.

    A container returns what its last child returned, and what one module returns the next is given. The values are
    not held: a model that lets go of one uses its memory again for the next, while that is still in the cache.
    """

    SLOTS = 4
    __slots__ = ("copies", "keys", "next_slot", "slots", "tensors", "versions")

    def __init__(self) -> None:
        self.next_slot = 0
        self.forget()

    def forget(self) -> None:
        self.slots: dict[int, int] = {}  # id of a tensor, which may be gone by now -> its slot
        self.keys = [0] * self.SLOTS
        self.tensors: list[Callable[[], Tensor | None]] = [gone] * self.SLOTS
        self.versions = [0] * self.SLOTS
        self.copies: list[dict[str, Any]] = [{} for _ in range(self.SLOTS)]  # what Full made of it, by key

    def slot_of(self, tensor: Tensor) -> tuple[int, bool]:
        """A slot for this tensor, and whether the very same value is in it already."""
        # An inference tensor keeps no version, so nothing proves it unchanged.
        version = -1 if tensor.is_inference() else tensor._version
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
        if self.copies[slot]:
            self.copies[slot] = {}
        return slot, False


def gone() -> None:
    """A reference to no value."""
