"""Make the records of a training: fold values into units, and hand each step on when it is whole.

`StepTracker` decides which step and phase a unit belongs to; here units are tallies of the receiver and logged
numbers. It guarantees:
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
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast, final

import numpy as np
from torch import Tensor

from torchtap.errors import SessionError
from torchtap.hooks.leaves import leaves
from torchtap.plan.names import site_name
from torchtap.receive.collect import PendingNumbers, numbers_on_host, tensors_on_host
from torchtap.receive.gradients import ask_at_its_node
from torchtap.schedule.base import Moment
from torchtap.session.attached import AttachedPlan
from torchtap.session.audit import Audit
from torchtap.session.consumers import Consumers
from torchtap.session.tracker import Assign, Drop, Leave, Pass, StepTracker, Update
from torchtap.store.record import ScalarBlock, StepRecord, TensorItem

if TYPE_CHECKING:
    from torchtap.session.spending import Spending

__all__ = ["StepRecorder"]

_Tally: TypeAlias = "tuple[AttachedPlan, str]"  # and its key
_When: TypeAlias = tuple[int, int | None, int | None, str]
_MOST_WAITING = 1000  # records whose numbers are on their way from a device
_MOMENTS = 16  # of which the active taps are cached
_STATISTICS = ("value",)
_CHANGED = "the model was changed between passes; what the later ones brought is missing"


@final
class StepRecorder:
    """Fold passes and states into units, and make records of those that the tracker has assigned."""

    def __init__(
        self,
        tap: Callable[[StepRecorder], AttachedPlan],
        outlets: Consumers,
        hand_on: Callable[[StepRecord], None],
        left: Callable[[Moment, tuple[Update, ...]], None],
        audit: Audit,
        model_changed: Callable[[], bool],
        *,
        first: int = 0,
    ) -> None:
        self.tracker = StepTracker(first)
        self.named: str | None = None  # the phase that the user named
        self.ever_live: frozenset[int] = frozenset()
        self.taps = tap(self)
        self._outlets, self._audit = outlets, audit
        self._hand_on, self._left = hand_on, left
        self._model_changed = model_changed
        self._spending: Spending | None = None  # where no tap has a budget
        self._live: dict[_When, frozenset[int]] = {}
        self._units = _Units(self.taps)
        self._assigned: dict[tuple[int, str], _Whole] = {}  # by step and phase
        self._waiting: list[PartialRecord] = []  # whole but for numbers that are on their way
        self._pass: Pass | None = None  # the newest
        self._reads_rest = False
        if self.taps.plan.fallbacks:
            from torchtap.session.spending import Spending

            self._spending = Spending(self.taps.plan, self.taps.receiver, outlets.note_spent)

    # -- what the receiver asks ---------------------------------------------------------------------------

    def begin_pass(self, training: bool, grad: bool) -> tuple[str, frozenset[int]] | None:
        tracker = self.tracker
        armed = self.taps.armed
        if armed and self._model_changed():
            # The hook that called belongs to a receiver that was replaced.
            self.taps.receiver.begin_step(threading.get_ident())
            self.taps.arm(armed)
            self.taps.receiver.begin_pass(training, grad)
            return None
        made = self._pass = tracker.begin_pass(training=training, grad=grad, named=self.named)
        if made is not None:
            self._audit.note("pass", made.unit, grad=grad, named=self.named is not None)
        self.act()
        if made is None:
            self._outlets.hint("between", _between(tracker.last))
            return None
        return self._units.key(made.unit), self._may_want(training, grad)

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
            ask_at_its_node(tensor, self._mark, made)

    def _mark(self, made: Pass, gradient: Tensor | None) -> None:
        made.backward = True
        self._audit.backward(made.unit)

    def state_key(self) -> tuple[str, frozenset[int]]:
        tracker = self.tracker
        unit = tracker.rest() if self._reads_rest else tracker.state()
        self._audit.note("state", unit)
        wanted: frozenset[int] = frozenset()
        for step in tracker.candidates():
            wanted |= self.live_at(step, self.named or "train")
            if self.taps.plan.by_phase:
                wanted |= self.live_at(step, "eval")
        return self._units.key(unit), wanted

    def _may_want(self, training: bool, grad: bool) -> frozenset[int]:
        """Return the taps that may be active in a pass, whatever it turns out to be."""
        tracker, plan = self.tracker, self.taps.plan
        always = plan.always
        if always is not None and self._spending is None:
            return always
        if self.named is not None:
            phases = [self.named]
        elif training:
            phases = ["train", "forward"] if grad else ["forward", "eval"]
        else:
            phases = ["train", "eval"] if grad else ["eval"]
        steps: set[int] = set(tracker.candidates())
        wanted = frozenset[int]().union(*(self.live_at(step, phase) for step in steps for phase in phases))
        looks_on = self.named is not None or not training or not (grad or tracker.follows)
        if tracker.last is not None and not tracker.marked and looks_on:
            wanted |= self.live_at(tracker.last, phases[-1])
        return wanted

    # -- schedules ----------------------------------------------------------------------------------------

    def live_at(self, step: int | Moment, phase: str) -> frozenset[int]:
        """Return the taps that are active at a step in a phase."""
        plan, tracker = self.taps.plan, self.tracker
        if plan.always is not None and self._spending is None:
            return plan.always
        moment = step if isinstance(step, Moment) else Moment(step, tracker.epoch, tracker.batch)
        if not plan.by_phase:
            phase = "train"
        when = (moment.step, moment.epoch, moment.batch, phase)
        live = self._live.get(when)
        if live is None:
            if len(self._live) > _MOMENTS:
                self._live = {}
            live = plan.live(Moment(*when))
            if self._spending is not None:
                live = self._spending.replaced(live)
            self._live[when] = live
        return live

    def wanted(self) -> frozenset[int]:
        """Return the taps that a pass may want that comes next."""
        found: frozenset[int] = frozenset()
        for step in self.tracker.candidates():
            found |= self.wanted_at(step)
        return found

    def wanted_at(self, step: int | Moment) -> frozenset[int]:
        """Return the taps that any pass of a step may want."""
        wanted = self.live_at(step, "train")
        if self.taps.plan.by_phase:
            wanted |= self.live_at(step, "forward") | self.live_at(step, "eval")
            if self.named is not None:
                wanted |= self.live_at(step, self.named)
        return wanted

    def arm(self, *, evaluation: bool = False, anew: bool = False) -> None:
        """Register the hooks that the next pass may need; ``evaluation``: also those of the step that ended last.

        ``anew``: nothing has been read of this step yet.
        """
        wanted = self.wanted()
        if evaluation and self.tracker.last is not None and self.tracker.is_fresh:
            wanted |= self.wanted_at(self.tracker.last)
        if anew or wanted != self.taps.armed:
            self.taps.arm(wanted)

    # -- the clock ----------------------------------------------------------------------------------------

    def act(self) -> None:
        """Carry out what follows from the events so far."""
        tracker = self.tracker
        if not tracker.has_actions:
            return
        for action in tracker.actions():
            if isinstance(action, Assign):
                self._audit.assigned(action.unit, action.moment)
                key = action.moment.step, action.moment.phase
                whole = self._assigned.setdefault(key, _Whole(action.moment, [], []))
                (whole.rest if action.rest else whole.units).append(action.unit)
            elif isinstance(action, Drop):
                self._drop(action)
            else:
                self._release(action)

    def _drop(self, action: Drop) -> None:
        self._audit.dropped(action.unit, action.reason)
        for taps, key in self._units.release(action.unit):
            passes = taps.drop(key)
            if passes and action.reason == "early":
                self._outlets.hint(
                    "early", f"{passes} training pass(es) came before the first step and are in no record"
                )
            elif passes and action.reason == "between":
                self._outlets.hint("between", _between(self.tracker.last))
        self._units.logged.pop(action.unit, None)

    def read_rest(self) -> None:
        """The step or update is over: read what no optimizer has brought."""
        if not self.taps.armed:
            return
        self._reads_rest = True
        try:
            self.taps.read_state()
        finally:
            self._reads_rest = False

    def begin_step(self, thread: int | None) -> None:
        """A step begins: values of this thread are received."""
        if self._waiting:
            self._let_go()
        if self._spending is not None:
            self._spending.begin_step()
        self.taps.receiver.begin_step(thread)
        self.arm(anew=True)

    def log(self, name: object, value: object, numbers: dict[str, Any]) -> None:
        """Keep numbers of the training's own until their step is whole."""
        read = _numbers(name, value, numbers)
        ahead = any(isinstance(each, Summed) for each in read.values())
        unit = self.tracker.log(self.named or "train", ahead=ahead)
        self._audit.note("log", unit)
        self.act()
        merge_numbers(self._units.logged.setdefault(unit, {}), read)

    def change_taps(self, tap: Callable[[StepRecorder], AttachedPlan]) -> AttachedPlan:
        """The model has other modules now: register other hooks. What the ones before have brought stays."""
        before = self.taps
        state = self.tracker.state_alone
        if state is not None:  # it is read again, under the names that parameters have now
            for taps, key in self._units.release(state):
                taps.drop(key)
        before.receiver.end_step()
        before.detach()
        self.taps = tap(self)
        self._units.turn_to(self.taps)
        self.taps.receiver.follow(before.receiver)
        self._live = {}
        if self._spending is not None:
            self._spending.turn_to(self.taps.plan, self.taps.receiver)
        return self.taps

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
        passes, block = self.taps.peek(self._units.keys(self.tracker.open_units()))
        if block is None:
            return None
        return PartialRecord(self.tracker.moment(), passes, False, (block,), (), []).record()

    # -- records ------------------------------------------------------------------------------------------

    def _release(self, leave: Leave) -> None:
        """Make the records of a step, the one that trains first."""
        self._left(leave.moment, leave.updates)
        found = [key for key in self._assigned if key[0] == leave.moment.step]
        if not leave.whole:
            found = [key for key in found if key[1] == leave.moment.phase]
        for key in sorted(found, key=lambda key: key[1] != leave.moment.phase):
            made = self._made(self._assigned.pop(key))
            if made is not None:
                trains = key[1] == leave.moment.phase
                made.skipped = trains and any(each.skipped for each in leave.updates)
                self._waiting.append(made)
        if self._waiting:
            self._let_go()

    def _made(self, whole: _Whole) -> PartialRecord | None:
        """Return a record of these units; None if they hold nothing that an active tap asks for."""
        moment, logged = whole.moment, dict[str, Any]()
        for unit in whole.units:
            merge_numbers(logged, self._units.logged.pop(unit, {}))
        made = PartialRecord(moment, 0, False, (), (), [])
        live = self.live_at(moment, moment.phase)
        for units in (whole.units, whole.rest):
            tallies: dict[AttachedPlan, list[str]] = {}
            for taps, key in (each for unit in units for each in self._units.release(unit)):
                tallies.setdefault(taps, []).append(key)
            for taps, keys in tallies.items():
                if self._collect(made, taps, keys, live) and units is whole.units:
                    what = f"phase {moment.phase!r} of step {moment.step}: {_CHANGED}"
                    self._outlets.note_loss(what, step=moment.step, phase=moment.phase)
        if logged:
            scalars, tensors = _as_blocks(logged, made.coming)
            made.scalars, made.tensors = (*made.scalars, *scalars), (*made.tensors, *tensors)
        return made if made.scalars or made.tensors or made.rest else None

    def _collect(
        self, made: PartialRecord, taps: AttachedPlan, keys: list[str], live: frozenset[int]
    ) -> bool:
        """Add what tallies hold to a record. Returns True if it has some of these sites already: those are dropped."""
        if not live:
            for key in keys:
                taps.drop(key)
            return False
        self.ever_live |= live
        passes, (scalars, tensors, coming) = taps.collect(keys, live, made.moment.phase)
        if self._spending is not None:
            timed = keys if taps is self.taps else []
            tensors = self._spending.end_step(made.moment.step, tensors, live, timed)
            self._live = {}
        twice = bool(made.scalars) and not sites_of(made.scalars).isdisjoint(sites_of(scalars))
        made.add(passes, scalars, tensors, coming)
        return twice

    def _let_go(self, *, most: int = _MOST_WAITING) -> None:
        """Hand on the records whose numbers are there, in order. Wait for the oldest if more than ``most`` are left."""
        while self._waiting and (len(self._waiting) > most or self._waiting[0].whole):
            self._hand_on(self._waiting.pop(0).record())


def _between(last: Moment | None) -> str:
    after = "" if last is None else f"after step {last.step} and "
    return (
        f"a training pass came {after}before the next one; it is in no record. Have the pass inside "
        "`with watch.step():`, or let watch.follow(optimizer) move the clock"
    )


@final
@dataclass(slots=True)
class _Whole:
    """The units of one step and phase."""

    moment: Moment
    units: list[int]
    rest: list[int]


@final
class _Units:
    """Where the values of units are: tallies, whose keys are used again, and logged numbers.

    If the model changes, a unit may have values in the taps before and after.
    """

    __slots__ = ("_free", "_held", "_made", "_taps", "logged")

    def __init__(self, taps: AttachedPlan) -> None:
        self.logged: dict[int, dict[str, Any]] = {}
        self._held: dict[int, list[_Tally]] = {}
        self.turn_to(taps)

    def turn_to(self, taps: AttachedPlan) -> None:
        """Give out keys of these taps from now on."""
        self._taps = taps
        self._free: list[str] = []
        self._made = 0

    def key(self, unit: int) -> str:
        """Return the key of a unit's tally."""
        held = self._held.setdefault(unit, [])
        for taps, key in held:
            if taps is self._taps:
                return key
        if not self._free:
            self._free.append(f"unit {self._made}")
            self._made += 1
        held.append((self._taps, self._free.pop()))
        return held[-1][1]

    def keys(self, units: Iterable[int]) -> list[str]:
        """Return the keys of the units that have values in the taps that are attached."""
        held = (each for unit in units for each in self._held.get(unit, ()))
        return [key for taps, key in held if taps is self._taps]

    def release(self, unit: int) -> list[_Tally]:
        """Return the tallies of a unit that gets no more values; another may use the key when it was emptied."""
        held = self._held.pop(unit, [])
        self._free += [key for taps, key in held if taps is self._taps]
        return held


@final
@dataclass(slots=True)
class PartialRecord:
    """A step's record while some of its numbers are still on their way from a device."""

    moment: Moment
    passes: int
    skipped: bool
    scalars: tuple[ScalarBlock, ...]
    tensors: tuple[TensorItem, ...]
    coming: list[PendingNumbers]
    rest: tuple[ScalarBlock, ...] = ()  # of sites that are not in `scalars`

    @property
    def whole(self) -> bool:
        """Return True if all numbers are there."""
        return all(each.done() for each in self.coming)

    def add(
        self,
        passes: int,
        scalars: tuple[ScalarBlock, ...],
        tensors: tuple[TensorItem, ...],
        coming: list[PendingNumbers],
    ) -> None:
        """Add what was collected. What the record has already wins."""
        self.passes += passes
        if self.scalars or self.tensors:
            held = {item.site for item in self.tensors} | sites_of(self.scalars)
            self.tensors = (*self.tensors, *(item for item in tensors if item.site not in held))
            self.rest += scalars
        else:
            self.scalars, self.tensors = scalars, tensors
        self.coming += coming

    def record(self) -> StepRecord:
        """Return the record. Waits for the numbers that are not there yet."""
        for each in self.coming:
            each.fill()
        if self.rest:
            self.scalars = joined_blocks(self.scalars, self.rest)
        moment = self.moment
        return StepRecord(
            moment.step,
            moment.epoch,
            moment.batch,
            moment.phase,
            time.time(),
            self.scalars,
            self.tensors,
            self.passes,
            self.skipped,
        )


# -- logged numbers -----------------------------------------------------------------------------------------------


@final
class Summed(NamedTuple):
    """A number that is added to those before it in the same step."""

    value: Any


def merge_numbers(into: dict[str, Any], more: Mapping[str, Any]) -> None:
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
            continue
        if isinstance(number, Tensor) and (number.numel() != 1 or not number.is_complex()):
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
    rows: list[list[Any]] = [
        [each.reshape(()) if isinstance(each, Tensor) and not each.is_cpu else float(each)]
        for site, each in logged.items()
        if site not in whole
    ]
    if not rows:
        return (), tensors
    sites = tuple(site for site in logged if site not in whole)
    if len(_known) > 1000:
        _known.clear()
    return (
        ScalarBlock(_known.setdefault(sites, sites), _STATISTICS, numbers_on_host(rows, coming)),
    ), tensors


def joined_blocks(blocks: tuple[ScalarBlock, ...], rest: tuple[ScalarBlock, ...]) -> tuple[ScalarBlock, ...]:
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
