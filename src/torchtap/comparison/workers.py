"""Workers of a Ray cluster: for recordings that outgrow one machine.

The cluster is the one that this process is connected to, else the one that ``RAY_ADDRESS`` names, else one that is
started on this machine and ended again. Every node must see the runs under the same address (a shared file system, or
an object store).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from itertools import cycle
from multiprocessing import get_context
from typing import Protocol, cast

from torchtap.comparison.align import Pair
from torchtap.comparison.result import Row
from torchtap.errors import MissingExtraError

__all__ = ["Ahead", "Make", "Measured", "Processes", "RayWorkers", "Spread", "Workers", "measured_ahead"]

# Of a step: the pairs of sites that were compared, their rows, and what their noise floors rested on.
Measured = tuple[tuple[Pair, ...], list[Row], tuple[str, ...]]
# What makes the function that measures; it is called once in each process.
Make = Callable[[], Callable[[int], Measured]]
# What gives the rows of a step, given the pairs; None where they are to be measured here.
Ahead = Callable[[int, Sequence[Pair]], tuple[list[Row], tuple[str, ...]] | None]

_IN_FLIGHT = 3  # steps for each process
_measure: Callable[[int], Measured] | None = None  # of a process that measures


class Workers(Protocol):
    """Processes that measure, wherever they are."""

    count: int

    def submit(self, step: int) -> Future[Measured]:
        """Begin to measure a step."""

    def close(self) -> None:
        """Let go of the processes; what was not begun is not measured."""


# What starts the processes.
Spread = Callable[[Make], Workers]


class Processes:
    """Workers on this machine, started afresh (spawned)."""

    def __init__(self, count: int, make: Make) -> None:
        self.count = count
        self._pool = ProcessPoolExecutor(count, get_context("spawn"), _begin, (make,))

    def submit(self, step: int) -> Future[Measured]:
        return self._pool.submit(_of_step, step)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


@contextmanager
def measured_ahead(workers: Workers, steps: Sequence[int]) -> Iterator[Ahead]:
    """Rows of these steps, asked for in this order."""
    waiting = iter(steps)
    running: deque[tuple[int, Future[Measured]]] = deque()

    def start() -> None:
        step = next(waiting, None)
        if step is not None:
            running.append((step, workers.submit(step)))

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
        for _ in range(_IN_FLIGHT * workers.count):
            start()
        yield rows
    finally:
        workers.close()


def _begin(make: Make) -> None:
    global _measure
    _measure = make()


def _of_step(step: int) -> Measured:
    assert _measure is not None
    return _measure(step)


class RayWorkers:
    """So many actors; steps go to them in turn."""

    def __init__(self, count: int, make: Make) -> None:
        try:
            import ray
        except ImportError:
            raise MissingExtraError(
                "workers of a Ray cluster need ray: pip install 'torchtap[ray]'", extra="ray"
            ) from None
        self._ray = ray
        self.count = count
        self._connected_here = not ray.is_initialized()
        if self._connected_here:
            ray.init(log_to_driver=False, include_dashboard=False, configure_logging=False)
        # No processor is reserved: on a busy or small cluster that would wait for ever. Nodes are used in turn.
        actor = ray.remote(num_cpus=0, scheduling_strategy="SPREAD")(_Measuring)
        self._actors = [actor.remote(make) for _ in range(count)]
        self._next = cycle(self._actors)

    def submit(self, step: int) -> Future[Measured]:
        return cast("Future[Measured]", next(self._next).measure.remote(step).future())

    def close(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)
        if self._connected_here:
            self._ray.shutdown()


class _Measuring:
    def __init__(self, make: Make) -> None:
        self._measure: Callable[[int], Measured] = make()

    def measure(self, step: int) -> Measured:
        return self._measure(step)
