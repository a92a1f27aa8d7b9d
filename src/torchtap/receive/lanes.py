"""Keep concurrent calls of one model apart.

Threads and asyncio tasks may call a model at the same time inside one capture. Each call of the model runs in a
*lane*: a receiver of its own. The lanes are joined when the capture ends. It guarantees:
- values of two calls are never folded together within a call number;
- one call of the model has the same number at every site;
- a capture receives the calls of its own context: those of the thread or asyncio task that opened it, of tasks
  started in it, and of threads that run in a copy of its context (``asyncio.to_thread``). ``everyone`` receives all.

The first lane is the receiver itself, so a capture without concurrency has one lane and nothing to join.
"""

from __future__ import annotations

import threading
from asyncio import current_task
from asyncio.events import _get_running_loop
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, final
from weakref import ReferenceType, ref

import torch

if TYPE_CHECKING:
    from torchtap.receive.accumulator import SiteState
    from torchtap.receive.receiver import PortState, Receiver

__all__ = ["Lanes"]


# The captures whose calls a context makes. Weak: a context may outlive a capture, also one that was never left.
_open: ContextVar[frozenset[ReferenceType[Lanes]]] = ContextVar("torchtap captures", default=frozenset())


@final
class Lanes:
    """The receivers of the calls that run at the same time.

    main: the receiver that has everything when `close` returns.
    make: return a new receiver for the same plan.
    everyone: receive the calls of all contexts.
    """

    def __init__(self, main: Receiver, make: Callable[[], Receiver], *, everyone: bool) -> None:
        self._main = main
        self._make = make
        self._everyone = everyone
        self._lock = threading.Lock()
        self._lanes = [main]  # in the order of first use
        self._free = [main]
        self._running: dict[int, tuple[Receiver, int]] = {}  # caller -> its lane, and the depth of its calls
        self._reference = ref(self)
        # None after `close`: a context may hold a capture that ended.
        self.model = main.plan.places[0].module if main.plan.places else None

    def join_context(self) -> None:
        """Receive calls of this context from now on."""
        _open.set(_open.get() | {self._reference})

    def hears(self) -> bool:
        """Return True if the running code belongs to a context whose calls are received."""
        return self._everyone or self._reference in _open.get()

    def is_others(self) -> bool:
        """Return True if the running code belongs to the context of another capture of this model."""
        if self.hears():
            return False
        others = (each() for each in _open.get())
        return any(other is not None and other.model is self.model for other in others)

    def current(self) -> Receiver | None:
        """Return the lane of the running caller; None if its calls are not received."""
        if not self._everyone and self._reference not in _open.get():
            return None
        running = self._running.get(_caller())
        return self._enter(0) if running is None else running[0]

    def begin(self) -> Receiver | None:
        """Return the lane of a call of the model that begins now; None if it is not received."""
        return self._enter(1) if self.hears() else None

    def _enter(self, depth: int) -> Receiver:
        caller = _caller()
        with self._lock:
            lane, before = self._running.get(caller, (None, 0))
            if lane is None:
                lane = self._free.pop() if self._free else self._new()
            self._running[caller] = lane, before + depth
        return lane

    def _new(self) -> Receiver:
        lane, main = self._make(), self._main
        lane.form = main.form
        lane.switch(main.accumulator.phase.key, main.accumulator.phase.live)
        lane.begin_step(None)
        self._lanes.append(lane)
        return lane

    def end(self) -> Receiver | None:
        """Return the lane of the call of the model that ends now, and free it for others; None if it has none."""
        caller = _caller()
        with self._lock:
            lane, depth = self._running.pop(caller, (None, 0))
            if lane is None:
                return None
            if depth > 1:
                self._running[caller] = lane, depth - 1
            else:
                self._free.append(lane)
        return lane

    def dispatch(self, make: Callable[[Receiver], Callable[..., Any]]) -> Callable[..., Any]:
        """Return a function that calls what ``make`` returns for the lane of its caller."""
        made: dict[int, Callable[..., Any]] = {}

        def call(*args: Any) -> Any:
            lane = self.current()
            if lane is None:
                return None
            fn = made.get(id(lane))
            if fn is None:
                fn = made[id(lane)] = make(lane)
            return fn(*args)

        return call

    def close(self) -> None:
        """Join all lanes in the main receiver."""
        self.model = None
        _open.set(_open.get() - {self._reference})
        with self._lock:
            lanes, self._lanes = self._lanes[1:], [self._main]
            self._running.clear()
            self._free = [self._main]
        for lane in lanes:
            lane.end_step()
            _join(self._main, lane)


def _caller() -> int:
    """Return a number for the running asyncio task, or for the thread if there is none."""
    loop = _get_running_loop()
    task = None if loop is None else current_task(loop)
    return threading.get_ident() if task is None else id(task)


def _join(main: Receiver, lane: Receiver) -> None:
    """Move everything that a lane holds to the main receiver. Its calls follow those that are there."""
    main.totals.passes += lane.totals.passes
    main.totals.late += lane.totals.late
    merged: set[int] = set()  # sites over all passes of the lane, which several of its sites have
    for key, port in lane.ports.items():
        into = main.ports[key]
        into.pass_number = max(into.pass_number, port.pass_number)
        into.note = into.note or port.note
        into.structure = into.structure if into.structure is not None else port.structure
        calls, of_leaves = into.calls, dict(into.leaf_calls)
        for (leaf, call), site in port.sites.items():
            if site is not None and site.shape is not None:
                before = (of_leaves.get(leaf, 0) or calls) if into.apart else 0
                _join_site(main, into, lane, site, (leaf, call, before), merged)
        if into.apart:
            into.calls = calls + port.calls
            for leaf, count in port.leaf_calls.items():
                into.leaf_calls[leaf] = of_leaves.get(leaf, 0) + count


def _join_site(
    main: Receiver,
    port: PortState,
    lane: Receiver,
    site: SiteState,
    place: tuple[str, int, int],
    merged: set[int],
) -> None:
    leaf, call, before = place
    # The number of the call in its own pass, for taps that fold passes beside those that keep them apart.
    in_pass = call if site.merged is None else site.merged.site.call
    port.earlier = (call + before - in_pass, {})
    into = main.accumulator.site(port, leaf, call + before)
    if into is None:
        return
    _merge(main, into, lane, site)
    if site.merged is not None and into.merged is not None and id(site.merged) not in merged:
        merged.add(id(site.merged))
        _merge(main, into.merged, lane, site.merged)


def _merge(main: Receiver, into: SiteState, lane: Receiver, site: SiteState) -> None:
    if into.shape is None:
        into.shape, into.dtype, into.how = site.shape, site.dtype, site.how
    phase = lane.accumulator.phase
    if 0 <= site.row < len(phase.arrived) and phase.arrived[site.row]:
        main.accumulator.fold_row(into, torch.from_numpy(phase.block.states()[site.row]))
    for key, fold in site.folds.get(phase.key, {}).items():
        there = into.folds[main.accumulator.phase.key].get(key)
        if fold.state is not None and there is not None:
            joined = there.reduction.merge(there.state, fold.state) if there.state is not None else fold.state
            there.state = joined
