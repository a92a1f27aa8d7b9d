"""Make the records of a training: fold values into units, and hand each step on when it is whole.

`StepTracker` decides which step and phase a unit belongs to; here a unit is the key of a phase in the receiver, or of
logged numbers. It guarantees:
- a record has one step and one phase, and holds what the taps that are active at that step and phase ask for;
- records are handed on in the order of their steps;
- the host does not wait at a step's end for numbers of a device that copies by itself: such records are handed on when
  they are there, at the latest when the next step ends or when they are asked for.

Not here: who moves the clock (`watch`), where records go (`consumers`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast, final

import numpy as np
from torch import Tensor

from torchtap.errors import SessionError
from torchtap.forms.attach import attach
from torchtap.hooks.hooks import WayName
from torchtap.hooks.leaves import leaves
from torchtap.plan.names import site_name
from torchtap.plan.plan import Plan
from torchtap.receive.collect import (
    Collected,
    Collector,
    PendingNumbers,
    numbers_on_host,
    tensors_on_host,
)
from torchtap.receive.gradients import ask_at_its_node
from torchtap.receive.receiver import Receiver
from torchtap.schedule.base import Moment
from torchtap.session.audit import Audit
from torchtap.session.census import ModelChanges
from torchtap.session.consumers import Consumers
from torchtap.session.tracker import Assign, Drop, Leave, Pass, StepTracker
from torchtap.store.record import ScalarBlock, StepRecord, TensorItem

if TYPE_CHECKING:
    from torchtap.session.spending import Spending

__all__ = ["AttachedPlan", "StepRecorder", "Summed"]

_When: TypeAlias = tuple[int, int | None, int | None, str]
_MOST_WAITING = 1000  # records whose numbers are on their way from a device
_MOMENTS = 16  # of which the active taps are cached
_STATISTICS = ("value",)
_CHANGED = "the model was changed between passes; what the later ones brought is missing"
NO_CLOCK = (
    "nothing moves the clock: all passes fold into one record, which is written when the watch is closed. Use "
    "watch.follow(optimizer), or `with watch.step():`"
)


@final
class AttachedPlan:
    """A plan on a model. It is replaced as a whole if the model gets other modules."""

    def __init__(self, model: object, receiver: Receiver, way: WayName) -> None:
        self.plan, self.receiver = receiver.plan, receiver
        self.collector = Collector(receiver.accumulator, receiver.placing)
        self.attachment = attach(model, receiver, way)
        self.armed: frozenset[int] = frozenset()  # the taps that the model has hooks for
        self.armings = 0  # how often that has changed

    def arm(self, live: frozenset[int]) -> None:
        """Register the hooks that these taps need, at the beginning of a step."""
        self.armings += live != self.armed
        self.armed = live
        self.attachment.arm(live)

    def drop(self, units: Iterable[int]) -> int:
        """Drop the values of units, and return how many passes they had."""
        accumulator = self.receiver.accumulator
        return accumulator.drop(accumulator.release(units))


@final
class ActiveTaps:
    """Which taps are active when: by their schedules, and by what those with a budget have spent."""

    def __init__(self, taps: AttachedPlan, consumers: Consumers) -> None:
        self.ever: frozenset[int] = frozenset()  # those that were active at a recorded step
        self.spending: Spending | None = None  # None if no tap has a budget
        if taps.plan.fallbacks:
            from torchtap.session.spending import Spending

            self.spending = Spending(taps.plan, taps.receiver, consumers.note_spent)
        self.turn_to(taps)

    def turn_to(self, taps: AttachedPlan) -> None:
        """The same taps, bound to other modules."""
        self._plan, self._cached = taps.plan, dict[_When, frozenset[int]]()
        self.always = taps.plan.always if self.spending is None else None  # all taps, if there is no schedule
        if self.spending is not None:
            self.spending.turn_to(taps.plan, taps.receiver)

    def at(self, moment: Moment, phase: str) -> frozenset[int]:
        """Return the taps that are active at a step in a phase."""
        if self.always is not None:
            return self.always
        when = (moment.step, moment.epoch, moment.batch, phase if self._plan.by_phase else "train")
        active = self._cached.get(when)
        if active is None:
            if len(self._cached) > _MOMENTS:
                self._cached.clear()
            active = self._plan.live(Moment(*when))
            if self.spending is not None:
                active = self.spending.replaced(active)
            self._cached[when] = active
        return active

    def end_step(
        self, step: int, tensors: tuple[TensorItem, ...], live: frozenset[int]
    ) -> tuple[TensorItem, ...]:
        """Note that taps were active at a step; return the tensors that their budgets allow."""
        self.ever |= live
        if self.spending is not None:
            tensors = self.spending.end_step(step, tensors, live)
            self._cached.clear()
        return tensors


@final
class StepRecorder:
    """Fold passes and states into units, and make records of those that the tracker has assigned.

    tap: attach a plan to the model, with this recorder as the clock of its receiver.
    """

    def __init__(
        self,
        tap: Callable[[StepRecorder, Plan], AttachedPlan],
        plan: Plan,
        consumers: Consumers,
        changes: ModelChanges,
        *,
        first: int = 0,
    ) -> None:
        self.tracker = StepTracker(first)
        self.audit = Audit()
        self.named: str | None = None  # the phase that the user named
        self.taps = tap(self, plan)
        self.active = ActiveTaps(self.taps, consumers)
        self._tap, self._consumers, self._changes = tap, consumers, changes
        self._older: list[
            AttachedPlan
        ] = []  # on modules that the model had before, with values of open steps
        self._logged: dict[int, dict[str, Any]] = {}  # numbers by unit
        self._open: dict[tuple[int, str], PartialRecord] = {}  # by step and phase
        self._waiting: list[PartialRecord] = []  # whole but for numbers that are on their way
        self._pass: Pass | None = None  # the newest

    # -- what the receiver asks ---------------------------------------------------------------------------

    def begin_pass(self, training: bool, grad: bool) -> tuple[int, frozenset[int]] | None:
        tracker, armed = self.tracker, self.taps.armed
        plan = self._changes.look_at_modules(self.taps) if armed else None
        if plan is not None:  # the hook that called belongs to a receiver that is replaced now
            self._change_taps(plan)
            self.taps.receiver.begin_step(threading.get_ident())
            self.taps.arm(armed)
            self.taps.receiver.begin_pass(training, grad)
            return None
        made = self._pass = tracker.begin_pass(training=training, grad=grad, named=self.named)
        if made is None:
            self.act()
            self._consumers.hint("between", _between(tracker.last))
            return None
        self.audit.note("pass", made.unit, grad=grad, named=self.named is not None)
        self.act()
        if tracker.clockless and len(tracker.open_units()) == 2:
            self._consumers.hint("clock", NO_CLOCK)
        if self.active.always is not None:
            return made.unit, self.active.always
        if self.named is not None:
            phases = [self.named]
        elif training:
            phases = ["train", "forward"] if grad else ["forward", "eval"]
        else:
            phases = ["train", "eval"] if grad else ["eval"]
        looks_on = self.named is not None or not training or not (grad or tracker.follows)
        return made.unit, self.wanted(phases, last=looks_on and not tracker.marked)

    def output(self, tree: object) -> None:
        """The newest pass has returned this; None: it raised. A backward through it makes it training."""
        made = self._pass
        if made is None or not made.grad or made.backward:
            return
        found: list[Tensor] = []
        with suppress(Exception):  # a structure of the user's own may fail to be looked through
            found += [tensor for _, tensor in leaves(tree)]
        asked = [tensor for tensor in found if tensor.requires_grad]
        if asked or found or tree is None:
            made.differentiable = bool(asked)
        for tensor in asked:
            ask_at_its_node(tensor, self._backward, made)

    def _backward(self, made: Pass, gradient: Tensor | None) -> None:
        """A backward runs through a pass."""
        made.backward = True
        self.audit.backward(made.unit)

    def state_key(self) -> tuple[int, frozenset[int]]:
        unit = self.tracker.state()
        self.audit.note("state", unit)
        return unit, self.wanted([self.named or "train", "eval"])

    # -- schedules ----------------------------------------------------------------------------------------

    def wanted(self, phases: Iterable[str], *, last: bool = False) -> frozenset[int]:
        """Return the taps that may be active in these phases of the next steps; ``last``: or of the one before."""
        if self.active.always is not None:
            return self.active.always
        tracker = self.tracker
        moments = [Moment(step, tracker.epoch, tracker.batch) for step in tracker.candidates()]
        if last and tracker.last is not None:
            moments.append(tracker.last)
        return frozenset[int]().union(*[self.active.at(each, phase) for each in moments for phase in phases])

    def arm(self, *, evaluation: bool = False) -> None:
        """Register the hooks that the next pass may need; ``evaluation``: also those of the step that ended last."""
        wanted = self.wanted(self._phases, last=evaluation and self.tracker.is_fresh)
        if wanted != self.taps.armed:
            self.taps.arm(wanted)

    @property
    def _phases(self) -> list[str]:
        return ["train", "forward", "eval", *([] if self.named is None else [self.named])]

    # -- the clock ----------------------------------------------------------------------------------------

    def begin_step(self, thread: int | None) -> None:
        """A step begins: values of this thread are received."""
        self._let_go()
        if self.active.spending is not None:
            self.active.spending.begin_step()
        wanted = self.wanted(self._phases)
        plan = self._changes.look(self.taps) if wanted or self.taps.armed else None
        if plan is not None:
            self._change_taps(plan)
        self.taps.receiver.begin_step(thread)
        self.taps.arm(wanted)

    def act(self) -> None:
        """Carry out what follows from the events so far."""
        for action in self.tracker.actions():
            if isinstance(action, Assign):
                self.audit.assigned(action.unit, action.moment)
                key = action.moment.step, action.moment.phase
                record = self._open.setdefault(key, PartialRecord(action.moment))
                (record.rest_units if action.rest else record.units).append(action.unit)
            elif isinstance(action, Drop):
                self._drop(action)
            else:
                self._leave(action)

    def _drop(self, action: Drop) -> None:
        self.audit.dropped(action.unit, action.reason)
        self._logged.pop(action.unit, None)
        passes = sum(taps.drop([action.unit]) for taps in (*self._older, self.taps))
        if passes and action.reason == "early":
            self._consumers.hint(
                "early", f"{passes} training pass(es) came before the first step and are in no record"
            )
        elif passes and action.reason == "between":
            self._consumers.hint("between", _between(self.tracker.last))

    def read_rest(self) -> None:
        """The step or update is over: read what no optimizer has brought."""
        if self.taps.armed:
            self.taps.attachment.finish_step()

    def log(self, name: object, value: object, numbers: dict[str, Any]) -> None:
        """Keep numbers of the training's own until their step is whole."""
        read = _numbers(name, value, numbers)
        ahead = any(isinstance(each, Summed) for each in read.values())
        unit = self.tracker.log(self.named or "train", ahead=ahead)
        self.audit.note("log", unit)
        self.act()
        _merge_numbers(self._logged.setdefault(unit, {}), read)

    def _change_taps(self, plan: Plan) -> None:
        """The model has other modules now: register other hooks. What the ones before have brought stays."""
        before = self.taps
        state = self.tracker.state_alone
        if state is not None:  # it is read again, under the names that parameters have now
            before.drop([state])
        before.receiver.end_step()
        before.attachment.detach()
        self._older = [*(each for each in self._older if each.receiver.accumulator.phases), before]
        self.taps = self._tap(self, plan)
        self.taps.receiver.follow(before.receiver)
        self.active.turn_to(self.taps)
        self._consumers.model_changed(before.plan, before.receiver.sites, plan)
        self.audit.model_changed()

    def settle(self) -> None:
        """Hand on whatever is whole, waiting for numbers that are on their way."""
        self.tracker.flush()
        self.act()
        self._let_go(most=0)

    def close(self) -> None:
        """Place and hand on everything that is left."""
        tracker = self.tracker
        if tracker.marked or (tracker.last is None and not tracker.idle):
            self.read_rest()
        tracker.close()
        self.act()
        self._let_go(most=0)
        self.taps.receiver.end_step()

    def so_far(self) -> StepRecord | None:
        """Return the statistics of the passes since the update before that may train; the step goes on."""
        passes, block = self.taps.collector.peek(self.tracker.open_units(), self.taps.armed)
        if block is None:
            return None
        record = PartialRecord(self.tracker.moment())
        record.add(Collected(passes, (block,), (), []))
        return record.finished()

    # -- records ------------------------------------------------------------------------------------------

    def _leave(self, leave: Leave) -> None:
        """Make the records of a step, the one that trains first."""
        moment, updates = leave.moment, leave.updates
        self.audit.left(moment, updates)
        skipped = [each for each in updates if each.skipped]
        for _ in skipped:
            self._consumers.tell("skipped", step=moment.step)
        found = [
            key for key in self._open if key[0] == moment.step and (leave.whole or key[1] == moment.phase)
        ]
        for key in sorted(found, key=lambda key: key[1] != moment.phase):
            record = self._open.pop(key)
            self._fill(record)
            if record.scalars or record.tensors or record.rest:
                record.skipped = bool(skipped) and key[1] == moment.phase
                self._waiting.append(record)
        self._let_go()

    def _fill(self, record: PartialRecord) -> None:
        """Put what its units hold into a record, as far as an active tap asks for it."""
        moment = record.moment
        live = self.active.at(moment, moment.phase)
        for units in (record.units, record.rest_units):
            for taps in (*self._older, self.taps) if units else ():
                if not live:
                    taps.drop(units)
                elif not taps.receiver.accumulator.phases.keys().isdisjoint(units):
                    held = taps.collector.collect(units, live, moment.phase)
                    held = held._replace(tensors=self.active.end_step(moment.step, held.tensors, live))
                    if record.add(held) and units is record.units:
                        what = f"phase {moment.phase!r} of step {moment.step}: {_CHANGED}"
                        self._consumers.note_loss(what, step=moment.step, phase=moment.phase)
        logged = dict[str, Any]()
        for unit in record.units:
            if unit in self._logged:
                _merge_numbers(logged, self._logged.pop(unit))
        if logged:
            scalars, tensors = _as_blocks(logged, record.coming)
            record.scalars, record.tensors = (*record.scalars, *scalars), (*record.tensors, *tensors)

    def _let_go(self, *, most: int = _MOST_WAITING) -> None:
        """Hand on the records whose numbers are there, in order. Wait for the oldest if more than ``most`` are left."""
        waiting = self._waiting
        while waiting and (len(waiting) > most or all(each.done() for each in waiting[0].coming)):
            record = waiting.pop(0).finished()
            self.audit.record(record)
            self._consumers.hand_on(record, self.taps.receiver.sites)


def _between(last: Moment | None) -> str:
    after = "" if last is None else f"after step {last.step} and "
    return (
        f"a training pass came {after}before the next one; it is in no record. Have the pass inside "
        "`with watch.step():`, or let watch.follow(optimizer) move the clock"
    )


@final
@dataclass(slots=True)
class PartialRecord:
    """A step's record while its values are still in units, or some of its numbers on their way from a device."""

    moment: Moment
    units: list[int] = field(default_factory=list)
    rest_units: list[int] = field(default_factory=list)  # of sites that the other units may not have
    passes: int = 0
    skipped: bool = False
    scalars: tuple[ScalarBlock, ...] = ()
    tensors: tuple[TensorItem, ...] = ()
    rest: tuple[ScalarBlock, ...] = ()  # what is in `scalars` as well is not used
    coming: list[PendingNumbers] = field(default_factory=list)

    def add(self, held: Collected) -> bool:
        """Add what was collected. What the record has already wins; returns True if that is any of it."""
        self.passes += held.passes
        self.coming += held.coming
        if not self.scalars and not self.tensors:
            self.scalars, self.tensors = held.scalars, held.tensors
            return False
        scalars = sites_of(self.scalars)
        known = {item.site for item in self.tensors} | scalars
        self.tensors = (*self.tensors, *(item for item in held.tensors if item.site not in known))
        self.rest += held.scalars
        return not scalars.isdisjoint(sites_of(held.scalars))

    def finished(self) -> StepRecord:
        """Return the record. Waits for the numbers that are not there yet."""
        for each in self.coming:
            each.fill()
        scalars = _joined_blocks(self.scalars, self.rest) if self.rest else self.scalars
        moment = self.moment
        return StepRecord(
            moment.step,
            moment.epoch,
            moment.batch,
            moment.phase,
            time.time(),
            scalars,
            self.tensors,
            self.passes,
            self.skipped,
        )


# -- logged numbers -----------------------------------------------------------------------------------------------


@final
class Summed(NamedTuple):
    """A number that is added to those before it in the same step."""

    value: Any


def _merge_numbers(into: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Add logged numbers: later ones replace earlier ones, or are added up."""
    for site, number in more.items():
        before = into.get(site)
        if isinstance(number, Summed) and isinstance(before, Summed):
            number = Summed(before.value + number.value)
        into[site] = number


def _numbers(name: object, value: object, numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Return logged numbers by site. A name with a colon is a full site name, others become ``:value.<name>``."""
    if name is not None:
        given = name if isinstance(name, Mapping) else {name: value}
        numbers = {**cast("Mapping[str, Any]", given), **numbers}
    read: dict[str, Any] = {}
    for key, number in numbers.items():
        site = key if ":" in key else site_name("", "value", key)
        if isinstance(number, Summed):
            added: Any = number.value
            read[site] = Summed(added.detach().float() if isinstance(added, Tensor) else float(added))
        elif isinstance(number, Tensor) and (number.numel() != 1 or not number.is_complex()):
            read[site] = number.detach().clone()
        else:
            try:
                read[site] = float(number)
            except (TypeError, ValueError, RuntimeError):
                raise SessionError(f"log: {key!r} is {number!r}, which is no number") from None
    return read


_known: dict[tuple[str, ...], tuple[str, ...]] = {}  # sites: consumers cache by the identity of equal tuples


def _as_blocks(
    logged: Mapping[str, Any], coming: list[PendingNumbers]
) -> tuple[tuple[ScalarBlock, ...], tuple[TensorItem, ...]]:
    logged = {site: each.value if isinstance(each, Summed) else each for site, each in logged.items()}
    whole = {site: each for site, each in logged.items() if isinstance(each, Tensor) and each.numel() != 1}
    items = [TensorItem(site, "value", "full", tensor) for site, tensor in whole.items()]
    tensors = tuple(tensors_on_host(items, coming))
    sites = tuple(site for site in logged if site not in whole)
    if not sites:
        return (), tensors
    rows: list[list[Any]] = [
        [each.reshape(()) if isinstance(each, Tensor) and not each.is_cpu else float(each)]
        for each in (logged[site] for site in sites)
    ]
    if len(_known) > 1000:
        _known.clear()
    block = ScalarBlock(_known.setdefault(sites, sites), _STATISTICS, numbers_on_host(rows, coming))
    return (block,), tensors


def _joined_blocks(blocks: tuple[ScalarBlock, ...], rest: tuple[ScalarBlock, ...]) -> tuple[ScalarBlock, ...]:
    """Return blocks with the rows of others whose sites they do not have. A record has each table of sites once."""
    known, made = sites_of(blocks), list(blocks)
    for block in rest:
        missing = np.array([site not in known for site in block.sites])
        present = missing if block.present is None else missing & block.present
        same = [
            at
            for at, each in enumerate(made)
            if (each.sites, each.statistics) == (block.sites, block.statistics)
        ]
        if same and present.any():
            into = made[same[0]]
            values = np.where(present[:, None], block.values, into.values)
            there = np.ones_like(present) if into.present is None else into.present
            made[same[0]] = replace(into, values=values, present=there | present)
        elif present.any():
            made.append(replace(block, present=None if present.all() else present))
    return tuple(made)


def sites_of(blocks: Iterable[ScalarBlock]) -> set[str]:
    """Return the sites that blocks have numbers of."""
    return {
        site
        for block in blocks
        for row, site in enumerate(block.sites)
        if block.present is None or block.present[row]
    }
