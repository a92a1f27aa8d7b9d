"""Measure the rows of steps in other processes, ahead of the comparison that judges them in order.

A row rests on its own step alone, so the result is that of one process to the last bit: only who measures changes. The
processes are started afresh (spawned) and open the recordings themselves; no value travels, only rows do. Steps beyond
the first difference are measured in vain, a few for each process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

from torchtap.comparison.align.pairing import Pair
from torchtap.comparison.judge.result import Row

__all__ = ["Ahead", "Measured", "measured_ahead"]

# Of a step: the pairs of sites that were compared, their rows, and what their noise floors rested on.
Measured = tuple[tuple[Pair, ...], list[Row], tuple[str, ...]]
# What gives the rows of a step, given the pairs; None where they are to be measured here.
Ahead = Callable[[int, Sequence[Pair]], tuple[list[Row], tuple[str, ...]] | None]

_IN_FLIGHT = 3  # steps for each process
_measure: Callable[[int], Measured] | None = None  # of a process that measures


@contextmanager
def measured_ahead(
    make: Callable[..., Callable[[int], Measured]],
    arguments: tuple[Any, ...],
    steps: Sequence[int],
    workers: int,
) -> Iterator[Ahead]:
    """Rows of these steps, asked for in this order, from so many processes; ``make(*arguments)`` is made in each."""
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _begin, (make, arguments))
    waiting = iter(steps)
    running: deque[tuple[int, Future[Measured]]] = deque()

    def start() -> None:
        step = next(waiting, None)
        if step is not None:
            running.append((step, pool.submit(_of_step, step)))

    def rows(step: int, pairs: Sequence[Pair]) -> tuple[list[Row], tuple[str, ...]] | None:
        while running and running[0][0] != step:
            running.popleft()[1].cancel()
        if not running:
            return None
        found = running.popleft()[1].result()
        start()
        # Sites that are paired by their values may pair otherwise where a process begins in the middle.
        return (found[1], found[2]) if found[0] == tuple(pairs) else None

    try:
        for _ in range(_IN_FLIGHT * workers):
            start()
        yield rows
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(make: Callable[..., Callable[[int], Measured]], arguments: tuple[Any, ...]) -> None:
    global _measure
    _measure = make(*arguments)


def _of_step(step: int) -> Measured:
    assert _measure is not None
    return _measure(step)
