"""Which call of a module it is: counted in one place, for values that hooks bring and for those that the op brings."""

from __future__ import annotations

from torchtap.taps.walk.records import CallFields

__all__ = ["CallCounter"]


class CallCounter(CallFields):
    """Counts the calls at one place of a model within a pass. A new pass number starts at 0 again."""

    __slots__ = ()

    def __init__(self) -> None:
        self.pass_number = -1
        self.calls = 0
        self.recalls = 0
        self.leaf_calls = {}
        self.called = False

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
        """Count from 0."""
        self.pass_number = pass_number
        self.calls = self.recalls = 0
        if self.leaf_calls:
            self.leaf_calls.clear()
        self.called = True
