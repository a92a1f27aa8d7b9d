"""Compare ways of doing the same work, fairly on a machine that is not quiet.

All cases run in one process, in rounds: every case once in each round, in random order, and the base right before
or right after it, so that what slows the machine down for a while slows both. A case's ratio is the median over rounds
of its time divided by that neighbour's. The spread is the range between the quartiles of those ratios.

The clock is the process's CPU time, which other processes disturb least; `wall` is for cases that wait.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch

__all__ = ["Case", "Ratio", "case", "compare", "fastest", "one_thread", "quartiles", "table", "verdict"]

# Entered before the work is timed and left afterwards; gives the work.
Case = Callable[[], AbstractContextManager[Callable[[], Any]]]


@final
@dataclass(frozen=True)
class Ratio:
    """How a case did beside the base: the median of paired ratios, its quartiles, and the case's own time."""

    ratio: float
    low: float
    high: float
    seconds: float
    rounds: int

    @property
    def error(self) -> float:
        """Twice the standard error of the median, as far as the quartiles tell."""
        return 2 * 0.93 * (self.high - self.low) / math.sqrt(self.rounds)

    def verdict(self, bar: float) -> str:
        """Whether the ratio is at most ``bar``; "undecided" where the noise is larger than the distance to it."""
        return verdict(self.ratio, self.error, bar)

    def share_of(self, other: Ratio) -> tuple[float, float]:
        """What this case adds to the base over what another adds to it, and twice the standard error of that."""
        share = (self.ratio - 1) / (other.ratio - 1)
        return share, math.hypot(self.error, share * other.error) / abs(other.ratio - 1)

    def __str__(self) -> str:
        return f"{self.ratio:.3f} [{self.low:.3f}–{self.high:.3f}]"


def verdict(found: float, error: float, bar: float) -> str:
    """Whether what was found is at most ``bar``, as far as its error lets one tell."""
    if found + error <= bar:
        return "yes"
    return "no" if found - error > bar else f"undecided (± {error:.3f})"


def case(work: Callable[[], Any]) -> Case:
    """A case that needs nothing before or after its work."""

    @contextmanager
    def entered() -> Iterator[Callable[[], Any]]:
        yield work

    return entered


def compare(
    cases: Mapping[str, Case],
    *,
    base: str,
    rounds: int,
    repeats: int = 1,
    warm_up: int = 1,
    clock: Callable[[], float] = time.process_time,
    seed: int = 0,
) -> dict[str, Ratio]:
    """The time of each case beside that of ``base``: ``repeats`` calls timed together, in each of ``rounds``.

    ``warm_up`` calls of a case come first each time; the base, which is called so much more often, needs none.
    """
    # What exists now stays: without this, collecting garbage would take longer than most of the work.
    gc.collect()
    gc.freeze()
    choice = random.Random(seed)
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in cases if name != base}
    for _ in range(rounds):
        for name in choice.sample(list(pairs), len(pairs)):
            seconds = {}
            for each in choice.sample((name, base), 2):
                with cases[each]() as work:
                    for _ in range(0 if each == base else warm_up):
                        work()
                    seconds[each] = _timed(work, repeats, clock)
            pairs[name].append((seconds[name], seconds[base]))
    alone = [of_base for each in pairs.values() for _, of_base in each]
    return {base: _ratio(list(zip(alone, alone, strict=True)))} | {
        name: _ratio(pairs[name]) for name in pairs
    }


def _timed(work: Callable[[], Any], repeats: int, clock: Callable[[], float]) -> float:
    # A collection belongs to no case in particular.
    gc.collect()
    gc.disable()
    try:
        begin = clock()
        for _ in range(repeats):
            work()
        return (clock() - begin) / repeats
    finally:
        gc.enable()


def _ratio(pairs: list[tuple[float, float]]) -> Ratio:
    low, middle, high = quartiles([mine / other for mine, other in pairs])
    return Ratio(middle, low, high, statistics.median(mine for mine, _ in pairs), len(pairs))


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """First quartile, median and third quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as a Markdown table; the first row's keys are the columns."""
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + " --- |" * len(rows[0])]
    lines += ["| " + " | ".join(_cell(value) for value in row.values()) + " |" for row in rows]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "yes" if value is True else "no" if value is False else str(value)


def fastest(
    work: Callable[[], Any], *, rounds: int = 5, clock: Callable[[], float] = time.perf_counter
) -> float:
    """The shortest of a few times: for costs that are measured alone."""
    return min(_timed(work, 1, clock) for _ in range(rounds))


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch on one thread, so that CPU time is work and not waiting."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
