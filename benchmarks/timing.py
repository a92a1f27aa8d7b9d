"""Compare ways of doing the same work, fairly on a machine that is not quiet.

All cases run in one process, in rounds: every case once in each round, in random order. A case's ratio is the
median over rounds of its time divided by the base's time in the same round, so that what slows the machine down
for a while slows both. The spread is the range between the quartiles of those ratios.

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

__all__ = ["Case", "Ratio", "case", "compare", "fastest", "one_thread", "quartiles", "table"]

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
        if self.ratio + self.error <= bar:
            return "yes"
        return "no" if self.ratio - self.error > bar else f"undecided (± {self.error:.3f})"

    def __str__(self) -> str:
        return f"{self.ratio:.3f} [{self.low:.3f}–{self.high:.3f}]"


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
    """The time of each case beside that of ``base``: ``repeats`` calls timed together, in each of ``rounds``."""
    # What exists now stays: without this, collecting garbage would take longer than most of the work.
    gc.collect()
    gc.freeze()
    order = list(cases)
    shuffle = random.Random(seed).shuffle
    seconds: dict[str, list[float]] = {name: [] for name in order}
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            with cases[name]() as work:
                for _ in range(warm_up):
                    work()
                seconds[name].append(_timed(work, repeats, clock))
    return {name: _ratio(seconds[name], seconds[base]) for name in cases}


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


def _ratio(seconds: list[float], base: list[float]) -> Ratio:
    ratios = [mine / other for mine, other in zip(seconds, base, strict=True)]
    low, middle, high = quartiles(ratios)
    return Ratio(middle, low, high, statistics.median(seconds), len(ratios))


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
