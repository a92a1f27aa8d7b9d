"""The accounts of taps that are held to a budget: what each has cost, and what it may keep from now on.

It guarantees:
- no more tensors than a budget's bytes are handed on; what no longer fits is let go and counted;
- a tap only ever goes down, and each time it is reported once;
- a tap that keeps whole tensors leaves a tenth of its bytes to the samples that come after them;
- a value that a tap without a budget keeps as well costs the budget nothing.

Time is judged over the steps since a tap began to keep what it keeps, from the third on, so that the first copies
into fresh memory do not decide. Only the training's thread is timed, not the writer's nor a device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import final

from torchtap.plan.plan import Plan
from torchtap.plan.tap import Tap
from torchtap.receive.receiver import Receiver, SiteState
from torchtap.store.format.payload import nbytes_of
from torchtap.store.record import TensorItem

__all__ = ["Spending"]

_SETTLED = 3  # steps
_KEEPS = {"full": "whole tensors", "sample": "samples", "stats": "statistics"}


@final
class Spending:
    """What the taps with a budget spend, step by step."""

    def __init__(self, plan: Plan, receiver: Receiver, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._accounts = {
            index: _Account(plan.taps[index], (index, *below)) for index, below in plan.fallbacks.items()
        }
        self._began = 0.0
        self.turn_to(plan, receiver)

    def turn_to(self, plan: Plan, receiver: Receiver) -> None:
        """The same taps, bound anew: what they have spent stays."""
        self._plan = plan
        self._receiver = receiver
        self._keys = receiver.accumulator.plan.keys
        receiver.accumulator.timed = any(
            account.budget.share is not None for account in self._accounts.values()
        )

    def begin_step(self) -> None:
        """A step begins."""
        self._began = time.perf_counter()

    def replaced(self, live: frozenset[int]) -> frozenset[int]:
        """The taps that are live, those over their budget replaced by what they have come down to."""
        accounts = self._accounts
        return frozenset(accounts[index].tap if index in accounts else index for index in live)

    def end_step(
        self, step: int, tensors: tuple[TensorItem, ...], live: frozenset[int]
    ) -> tuple[TensorItem, ...]:
        """Book what a phase has kept in a step; gives back the tensors that the budgets allow."""
        seconds = time.perf_counter() - self._began
        for account in self._accounts.values():
            if account.tap in live and not account.at_the_end:
                paid = [entry for entry in self._receiver.sites if self._pays(account.tap, entry, live)]
                name = self._plan.taps[account.tap].keep.name
                tensors = account.admit(tensors, name, {entry.name for entry in paid})
                account.book_time(sum(self._seconds(account.tap, entry) for entry in paid), seconds)
                if reason := account.over():
                    account.go_down()
                    instead = self._plan.taps[account.tap].keep.name
                    self._tell(
                        f"tap {account.text!r} {reason} after step {step}; from here on it keeps "
                        f"{_KEEPS[instead]} instead of {_KEEPS.get(name, name)}"
                    )
        return tensors

    def _pays(self, tap: int, entry: SiteState, live: frozenset[int]) -> bool:
        """Whether a tap is who keeps a site's value. One that has no budget goes before those that have."""
        if tap not in entry.taps:
            return False
        key = self._keys[tap]
        also = [index for index in entry.taps if index in live and self._keys[index] == key]
        held = {account.tap for account in self._accounts.values()}
        return min(also, key=lambda index: (index in held, index)) == tap

    def _seconds(self, tap: int, entry: SiteState) -> float:
        """Return the time that a tap's reduction took at a site since it was asked for last."""
        total = 0.0
        for folds in entry.folds.values():
            fold = folds.get(self._keys[tap])
            if fold is not None:
                total, fold.seconds = total + fold.seconds, 0.0
        return total


@final
class _Account:
    """One tap's."""

    def __init__(self, asked: Tap, levels: tuple[int, ...]) -> None:
        if asked.budget is None:
            raise ValueError("a tap without a budget has no account")
        self.budget = asked.budget
        self.text = " ".join(selector.text for selector in asked.selectors)
        self._levels = levels  # the tap of the user, and what replaces it
        self._nbytes = 0
        self._reached(0)

    def _reached(self, level: int) -> None:
        self._level = level
        self.tap = self._levels[level]
        self.at_the_end = level == len(self._levels) - 1
        self._newest = self._let_go = self._steps = 0
        self._seconds = self._step_seconds = 0.0

    def admit(self, tensors: tuple[TensorItem, ...], name: str, sites: set[str]) -> tuple[TensorItem, ...]:
        """The tensors without those of this tap that the budget has no room for."""
        before, kept = self._nbytes, []
        for item in tensors:
            if item.reduction == name and item.site in sites:
                nbytes = nbytes_of(item.value)
                if self._limit is not None and self._nbytes + nbytes > self._limit:
                    self._let_go += 1
                    continue
                self._nbytes += nbytes
            kept.append(item)
        self._newest = self._nbytes - before
        return tuple(kept)

    @property
    def _limit(self) -> float | None:
        if self.budget.bytes is None:
            return None
        return self.budget.bytes * (0.9 if len(self._levels) - self._level > 2 else 1.0)

    def book_time(self, spent: float, of: float) -> None:
        self._seconds += spent
        self._step_seconds += of
        self._steps += 1

    def over(self) -> str:
        """Why the tap has to go down; nothing where it has not."""
        if self._limit is not None and (self._let_go or self._nbytes + self._newest > self._limit):
            lost = f", and let go of {self._let_go} tensors," if self._let_go else ""
            return f"has kept {self._nbytes:,} of its {self.budget.bytes:,} bytes{lost}"
        share = self._seconds / self._step_seconds if self._step_seconds else 0.0
        if self.budget.share is not None and self._steps >= _SETTLED and share > self.budget.share:
            return f"took {share:.1%} of a step's time, over its {self.budget.share:.1%},"
        return ""

    def go_down(self) -> None:
        self._reached(self._level + 1)
