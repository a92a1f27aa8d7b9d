"""A training under watch: each step's values become a record, for the run folder and the sinks.

It guarantees:
- what the clock says (`step`, `set_step`, `set_batch`, `follow`) decides when a step ends; passes over the
  model within a step fold into one record;
- on a step that no tap asked for, the model carries no hook;
- the host does not wait at a step's end for numbers of a device that copies by itself: such a step's record is handed
  on when they are there, at the latest when the next step ends or when anyone asks (`latest`, `summary`, `end_step`,
  `flush`, `close`). Records keep their order;
- a sink or a reduction that fails costs its own values, never the training (unless ``strict``);
- a tap that is over its budget keeps less;
- `close` leaves the model as it was found.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import IO, Any, Self, cast, final

import torch
from torch import Tensor

from torchtap.clock import Clock
from torchtap.coverage import Missing, missing_sites
from torchtap.errors import RecordingLostError, SessionError
from torchtap.names import site_name
from torchtap.plan import Plan
from torchtap.schedule import Moment
from torchtap.spending import Spending
from torchtap.store.record import Consumer, ScalarBlock, StepRecord, TensorItem
from torchtap.store.write.pool import HostPool
from torchtap.taps.attach import attach
from torchtap.taps.receive.collect import Collector, Coming, numbers_on_host
from torchtap.taps.receive.receiver import Receiver
from torchtap.taps.walk.ways import WayName

__all__ = ["Watch"]


@final
class Watch:
    """Made by `torchtap.watch`. A context manager; also closed by `close`."""

    def __init__(
        self,
        model: Any,
        plan: Plan,
        consumers: Sequence[Consumer],
        *,
        strict: bool = False,
        via: WayName = "hook",
        one_mode: bool = False,
    ) -> None:
        self.plan = plan
        self._lost: list[str] = []
        self._model = model
        self._consumers = list(consumers)
        self._strict = strict
        self._receiver = Receiver(
            plan, strict=strict, on_lost=self._note_loss, one_mode=one_mode, copy=HostPool().copy
        )
        self._collector = Collector(self._receiver)
        self._spending = Spending(plan, self._receiver, self._note_spent) if plan.fallbacks else None
        self._attachment = attach(model, self._receiver, via)
        self._clock = Clock()
        self._moment: Moment | None = None  # the step that is open
        self._ever_live: frozenset[int] = frozenset()
        self._logged: dict[str, Any] = {}
        self._logged_tensors: dict[str, Tensor] = {}
        self._latest: dict[tuple[str, ...], ScalarBlock] = {}
        self._waiting: tuple[StepRecord, list[Coming]] | None = None  # a step whose numbers are on their way
        self._sites_told = 0
        self._handles: list[Any] = []
        self._in_block = False
        self._closed = False
        self._implicit = True
        self._begin()

    # -- the clock ----------------------------------------------------------------------------------------

    @contextmanager
    def step(
        self, step: int | None = None, *, epoch: int | None = None, batch: int | None = None
    ) -> Iterator[Self]:
        """One training step: forward, backward and update are inside. Passes over the model fold together."""
        if self._in_block:
            raise SessionError("watch.step() inside watch.step(): a step cannot hold another")
        self._advance(step, epoch, batch)
        self._in_block = True
        try:
            yield self
        finally:
            self._in_block = False
            self._end()

    def set_step(self, step: int) -> None:
        """The step before is over, this one begins. The same number again changes nothing."""
        if self._moment is None or self._implicit or step != self._clock.step:
            self._advance(step, None, None)

    def set_epoch(self, epoch: int) -> None:
        """The step before is over, and so is its epoch; the next step begins with `set_batch` or `step`."""
        self._finish_open()
        self._clock.set_epoch(epoch)

    def set_batch(self, batch: int) -> None:
        """The step before is over; a step with this batch begins."""
        self._advance(None, None, batch)

    def end_step(self) -> None:
        """The open step is over, and what came in it is handed on; nothing is taken until the next begins."""
        self._finish_open()
        self._settle()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A block in which passes over the model are not taken: a look at it that is no part of the training."""
        with self._receiver.not_listening():
            yield

    def follow(self, optimizer: Any) -> None:
        """Let an optimizer be the clock: each of its updates ends a step, however many backward passes led to it."""
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise SessionError(
                f"follow({optimizer!r}): give a torch.optim.Optimizer, whose updates end the steps"
            )
        handle = optimizer.register_step_post_hook(lambda *_: self._advance(None, None, None))
        self._handles.append(handle)
        if self._moment is None:
            self._advance(None, None, None)

    def _advance(self, step: int | None, epoch: int | None, batch: int | None) -> None:
        self._check_open()
        self._finish_open()
        if epoch is not None:
            self._clock.set_epoch(epoch)
        if batch is not None:
            self._clock.set_batch(batch)
        self._implicit = False
        self._begin(step)

    def _finish_open(self) -> None:
        """End the open step. The one that a watch starts with counts only if the model was used in it."""
        if self._implicit and not self._receiver.used and not self._logged:
            self._receiver.end_step()
            self._moment = None
            self._clock.step = -1
        else:
            self._end()
        self._implicit = False

    def _begin(self, step: int | None = None) -> None:
        if self._waiting is not None and all(coming.done() for coming in self._waiting[1]):
            self._settle()
        self._clock.next_step(step)
        training = getattr(self._model, "training", True)
        self._moment = self._clock.moment("train" if training else "eval")
        live = self.plan.live(self._moment)
        if self._spending is not None:
            live = self._spending.begin_step(live)
        # Values of other threads belong to other sessions. Until the clock has moved, any thread may start.
        self._receiver.begin_step(live, None if self._implicit else threading.get_ident())
        self._attachment.arm(live)

    def _end(self) -> bool:
        """Collect the open step and hand it on; says whether there was anything."""
        moment, self._moment = self._moment, None
        if moment is None:
            return False
        if not (self._receiver.live or self._logged or self._logged_tensors):
            # Most steps of most trainings: the code below would have to be fetched from memory to find nothing.
            self._receiver.end_step()
            self._settle()
            return False
        self._ever_live |= self._receiver.live
        # Parameters are always there to be read: they alone do not make the step that nobody began.
        idle = self._implicit and not self._receiver.holds_anything()
        try:
            if not idle:
                self._attachment.finish_step()
            scalars, tensors, coming = self._collector.collect()
            if self._spending is not None:
                tensors = self._spending.end_step(moment.step, tensors)
        finally:
            # Hooks stay where they are, since the next step most often wants them again; they hear nothing.
            self._receiver.end_step()
        logged, logged_tensors = self._take_logged(coming)
        scalars, tensors = (*scalars, *logged), (*tensors, *logged_tensors)
        self._settle()
        if not scalars and not tensors:
            return False
        record = StepRecord(
            moment.step, moment.epoch, moment.batch, moment.phase, time.time(), scalars, tensors
        )
        if coming:
            self._waiting = record, coming
        else:
            self._hand_on(record)
        return True

    def _settle(self) -> None:
        """Hand on the step that was waiting for its numbers, if there is one."""
        if self._waiting is not None:
            (record, owed), self._waiting = self._waiting, None
            for coming in owed:
                coming.fill()
            self._hand_on(record)

    # -- what comes out -----------------------------------------------------------------------------------

    def log(
        self,
        name: str | Mapping[str, float | Tensor] | None = None,
        value: float | Tensor | None = None,
        **numbers: float | Tensor,
    ) -> None:
        """Numbers of the training's own: ``watch.log("loss", loss)``, ``watch.log(loss=loss)``, or a mapping.

        A tensor is read when the step ends, together with everything else. One with more than one element is
        kept whole. A name with a colon is a full site name, any other becomes ``:value.<name>``.
        """
        self._check_open()
        if name is not None:
            numbers |= name if isinstance(name, Mapping) else {name: cast("float", value)}
        for key, number in numbers.items():
            site = key if ":" in key else site_name("", "value", key)
            if isinstance(number, Tensor) and number.numel() != 1:
                self._logged_tensors[site] = number.detach().clone()
            elif isinstance(number, Tensor) and not number.is_complex():
                self._logged[site] = number.detach()
            else:
                try:
                    self._logged[site] = float(number)
                except (TypeError, ValueError, RuntimeError):
                    raise SessionError(f"log: {key!r} is {number!r}, which is no number") from None

    def _take_logged(self, coming: list[Coming]) -> tuple[tuple[ScalarBlock, ...], tuple[TensorItem, ...]]:
        logged, self._logged = self._logged, {}
        whole, self._logged_tensors = self._logged_tensors, {}
        tensors = tuple(TensorItem(site, "value", "full", tensor.cpu()) for site, tensor in whole.items())
        if not logged:
            return (), tensors
        rows: list[list[Any]] = [
            [number.reshape(()) if isinstance(number, Tensor) and not number.is_cpu else float(number)]
            for number in logged.values()
        ]
        values = numbers_on_host(rows, coming)
        return (ScalarBlock(tuple(logged), ("value",), values),), tensors

    @property
    def lost(self) -> list[str]:
        """What could not be kept, a sentence each: by the watch, by the run's writer, by the sinks."""
        return [
            *self._lost,
            *(text for consumer in self._consumers for text in getattr(consumer, "lost", ())),
        ]

    @property
    def passes(self) -> int:
        """How many times the model was called while a step was open and a tap live."""
        return self._receiver.passes

    def structure(self, path: str) -> Any:
        """The structure of a module's output where it is not one tensor: names of leaves stand for tensors."""
        port = self._receiver.ports.get((path, "output", ""))
        return None if port is None else port.structure

    def _hand_on(self, record: StepRecord) -> None:
        for block in record.scalars:
            self._latest.pop(block.sites, None)  # the newest last
            self._latest[block.sites] = block
        entries = self._receiver.entries
        # Once at the start and then each time they have doubled: a model may have a new site every step.
        if len(entries) >= 2 * self._sites_told and entries:
            self._sites_told = len(entries)
            self._tell("sites", sites=self._describe_sites())
        for consumer in self._consumers:
            self._try(consumer, "write", partial(consumer.write, record))

    def _describe_sites(self) -> list[dict[str, Any]]:
        """What was found out about the sites since the plan was made, in the order of execution."""
        return [
            {
                "name": entry.name,
                "shape": None if entry.shape is None else list(entry.shape),
                "dtype": None if entry.dtype is None else str(entry.dtype).removeprefix("torch."),
            }
            for entry in self._receiver.entries
        ]

    def coverage(self) -> list[Missing]:
        """Each site that the plan expects and that did not arrive so far, with the reason."""
        return missing_sites(self._receiver, self._ever_live)

    def summary(self, file: IO[str] | None = None) -> None:
        """Print the newest statistics of each site as a table."""
        from torchtap.summary import print_summary

        self._settle()
        print_summary(self._latest.values(), self.coverage(), self.lost, file)

    def latest(self, site: str, statistic: str = "value") -> float:
        """The newest number of a site."""
        self._settle()
        for block in reversed(list(self._latest.values())):
            if site in block.sites and statistic in block.statistics:
                return float(block.values[block.sites.index(site), block.statistics.index(statistic)])
        raise SessionError(f"no {statistic!r} of {site!r} has arrived yet")

    def flush(self) -> None:
        """Have everything so far on disk and visible to readers."""
        self._settle()
        for consumer in self._consumers:
            flush: Callable[[], None] | None = getattr(consumer, "flush", None)
            if flush is not None:
                self._try(consumer, "flush", flush)

    # -- the end ------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the open step, write the coverage, take every hook off, close the run and the sinks."""
        if self._closed:
            return
        try:
            self._finish_open()
            self._settle()
        finally:
            self._closed = True
            self._attachment.detach()
            for handle in self._handles:
                handle.remove()
            self._tell("sites", sites=self._describe_sites())
            self._tell("coverage", missing=[{"site": m.site, "reason": m.reason} for m in self.coverage()])
            for consumer in self._consumers:
                self._try(consumer, "close", consumer.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise SessionError("this watch is closed; make a new one to go on")

    # -- what goes wrong ----------------------------------------------------------------------------------

    def _tell(self, kind: str, **facts: Any) -> None:
        for consumer in self._consumers:
            event = getattr(consumer, "event", None)
            if event is not None:
                self._try(consumer, "event", partial(event, kind, **facts))

    def _try(self, consumer: Consumer, what: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            if self._strict:
                raise
            self._note_loss(f"{type(consumer).__name__}.{what} failed: {type(error).__name__}: {error}")

    def _note_loss(self, message: str) -> None:
        if self._strict:
            raise RecordingLostError(message)
        if not self._lost:
            _warn(f"torchtap lost a value and goes on: {message}")
        # A failure tends to repeat with every step: it is told once, and the list stays short.
        if message not in self._lost and len(self._lost) < 1000:
            self._write_down(message)

    def _note_spent(self, message: str) -> None:
        """A budget is there to be reached: that is told like a loss, and is no error to the strictest."""
        _warn(f"torchtap: {message}")
        self._write_down(message)

    def _write_down(self, message: str) -> None:
        self._lost.append(message)
        self._tell("lost", message=message)


def _warn(message: str) -> None:
    with suppress(RuntimeWarning):  # where warnings are errors, this one must still not end a training
        warnings.warn(message, RuntimeWarning, stacklevel=4)
