"""The fields that are asked for at every value: of a place's calls, an entry, a tally, the folding and the receiver.

Where native code was built, these are its own (`reduce/_native_records.h`), with the same names. Then a value that
comes like most is taken without any Python in between, and Python still reads and writes each field as an attribute.
Classes that build on these add methods and all that is asked for less often.
"""

from __future__ import annotations

from typing import Any

from torchtap.reduce import kernel

__all__ = ["CallFields", "EntryFields", "FoldingFields", "ReceiverFields", "TallyFields"]


class CallFields:
    """Which call of a place this is."""

    __slots__ = ("called", "calls", "first", "leaf_calls", "pass_number", "recalls")

    pass_number: int
    calls: int
    recalls: int
    called: bool  # in any pass
    leaf_calls: dict[str, int]
    first: Any  # the entry of the first call and of the place's own leaf, if most calls are like it


class EntryFields:
    """Where the values of a site go."""

    __slots__ = ("asked", "generation", "quick", "row")

    generation: int
    row: int  # in each tally's block, once it has one
    quick: bool  # whether the block may take its values, with nothing else to do
    asked: bool  # whether the newest call, repetitions apart, asked for its gradient


class TallyFields:
    """Where the rows of a phase are."""

    __slots__ = ("arrived", "serial", "taker")

    arrived: bytearray  # which rows a value has come into
    serial: int
    taker: object  # native code that has the rows; None without


class FoldingFields:
    """Which tally is folded into."""

    generation: int  # of the taps that are live in it
    tally: Any


class ReceiverFields:
    """Who is heard, and where in a step it is."""

    thread: int | None  # the one that is heard; None hears every thread
    _folding: Any
    pass_number: int
    open: bool  # whether a step is
    between_passes: bool  # a value that comes now is of a part that was called without the model


if kernel.hearing is not None:
    CallFields = kernel.hearing.CallFields  # type: ignore[misc]
    EntryFields = kernel.hearing.EntryFields  # type: ignore[misc]
    TallyFields = kernel.hearing.TallyFields  # type: ignore[misc]
    FoldingFields = kernel.hearing.FoldingFields  # type: ignore[misc]
    ReceiverFields = kernel.hearing.ReceiverFields  # type: ignore[misc]
