"""Workers of a Ray cluster: for recordings that outgrow one machine.

The cluster is the one that this process is connected to, else the one that ``RAY_ADDRESS`` names, else one that is
started on this machine and ended again. Every node must see the runs under the same address (a shared file system, or
an object store).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from itertools import cycle
from typing import TYPE_CHECKING, cast

from torchtap.errors import MissingExtraError

if TYPE_CHECKING:
    from torchtap.comparison.recorded.ahead import Make, Measured

__all__ = ["RayWorkers"]


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
