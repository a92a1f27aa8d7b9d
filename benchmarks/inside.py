"""Time of the training's thread inside torchtap: timed where torchtap is entered, whoever calls it.

Entries are its hooks on modules, gradient callbacks, what listens to optimizers and to ``backward()``, the functions
of torch that a doctor looks at, and the beginning and the end of a step. One inside another counts once. What torch
takes to call a hook at all is not in it (1.4 µs each). The clock is the thread's CPU time; where several threads share
the work it is to be the wall's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torchtap.diagnosis.doctor import Doctor
from torchtap.diagnosis.flight.step import PassKeeper
from torchtap.diagnosis.probes.loop import GradientProbe
from torchtap.diagnosis.probes.losses import LossProbe
from torchtap.diagnosis.probes.model import FunctionProbe, HiddenProbe, PaddingProbe
from torchtap.hooks.conceal import Hook
from torchtap.receive import by_name, training
from torchtap.receive.backward import LossCatcher
from torchtap.receive.receiver import Receiver
from torchtap.session.audit import Audit
from torchtap.session.census import Lookout, ModelChanges
from torchtap.session.watch import Watch

__all__ = ["AUDIT_AND_CENSUS", "Spent", "row_of_share", "timed_inside"]

Entries = tuple[tuple[Any, tuple[str, ...]], ...]

# What a run checks about itself, and how it notices that the model changes.
AUDIT_AND_CENSUS: Entries = (
    (Audit, ("note", "backward", "update", "assigned", "dropped", "left", "record")),
    (ModelChanges, ("look", "look_at_modules")),
    (Lookout, ("look", "look_for_modes", "begin_pass", "end_pass", "_output")),
)
_ENTRIES: Entries = (
    (Hook, ("__call__",)),
    (Receiver, ("take_gradient",)),
    (by_name, ("take",)),  # from a compiled graph
    (training, ("_tell_ready", "_after_step")),
    (PassKeeper, ("take_seed",)),
    (FunctionProbe, ("_quietly",)),
    (PaddingProbe, ("_on_gradient",)),
    *((each, ("backward_begins", "backward_ends"))
      for each in (Doctor, GradientProbe, HiddenProbe, LossProbe, LossCatcher)),
)  # fmt: skip


class Spent:
    """Seconds inside torchtap since `clear`; what the clock takes is taken off."""

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self.clock = clock
        self._raw, self._entries, self.depth = 0.0, 0, 0
        # Seconds that timing an entry adds to what is measured, and beside it.
        self._inside, self._beside = 0.0, 0.0
        empty, calls = self.timed(lambda: None), 2000
        begin = clock()
        for _ in range(calls):
            empty()
        whole = (clock() - begin) / calls
        self._inside, self._beside = self._raw / calls, whole - self._raw / calls
        self.clear()

    def clear(self) -> None:
        """Count from zero."""
        self._raw, self._entries = 0.0, 0

    @property
    def seconds(self) -> float:
        """What torchtap took."""
        return self._raw - self._inside * self._entries

    @property
    def timing(self) -> float:
        """What the clock took."""
        return (self._inside + self._beside) * self._entries

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose seconds count."""
        clock = self.clock

        def measured(*args: Any, **kwargs: Any) -> Any:
            if self.depth:
                return function(*args, **kwargs)
            self.depth += 1
            begin = clock()
            try:
                return function(*args, **kwargs)
            finally:
                self._raw += clock() - begin
                self._entries += 1
                self.depth -= 1

        return measured


@contextmanager
def timed_inside(
    clock: Callable[[], float] = time.thread_time, entries: Entries | None = None
) -> Iterator[Spent]:
    """Count the seconds inside torchtap, or inside some ``entries`` alone, within this block.

    What was opened before the block is not counted.
    """
    spent = Spent(clock)
    begin_step: Callable[[Watch], AbstractContextManager[Watch]] = Watch.step

    @contextmanager
    def timed_step(watch: Watch) -> Iterator[None]:
        block = begin_step(watch)
        spent.timed(block.__enter__)()
        yield
        spent.timed(block.__exit__)(None, None, None)

    with ExitStack() as stack:
        if entries is None:
            stack.enter_context(patch.object(Watch, "step", timed_step))
        for owner, names in _ENTRIES if entries is None else entries:
            for name in names:
                stack.enter_context(patch.object(owner, name, spent.timed(getattr(owner, name))))
        yield spent


def row_of_share(
    model: str,
    case: str,
    opened: Callable[[], AbstractContextManager[object]],
    step: Callable[[], object],
    steps: int,
    bar: float | None = None,
    *,
    before: int = 0,
) -> dict[str, Any]:
    """A row of a table: what steps cost by the time inside torchtap, that of its own threads with it.

    The first step, which meets every site for the first time, counts as the others do; ``before`` says how many do not.
    """
    whole, inside, others = 0.0, 0.0, 0.0
    with timed_inside() as spent, opened():
        for _ in range(before):
            step()
        for _ in range(steps):
            spent.clear()
            begin, all_threads = time.thread_time(), time.process_time()
            step()
            took = time.thread_time() - begin - spent.timing
            whole, inside = whole + took - spent.seconds, inside + spent.seconds
            others += time.process_time() - all_threads - took - spent.timing
    ratio = (whole + inside + others) / whole
    return {
        "model": model,
        "case": f"{case}, by the share inside torchtap",
        "with / without": f"{ratio:.4f}",
        "ms": f"{(whole + inside) / steps * 1e3:,.2f}",
        "bar": "" if bar is None else f"≤ {bar}",
        "holds": "" if bar is None else ratio <= bar,
    }
