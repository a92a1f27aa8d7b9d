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
from torchtap.receive.collect import PendingNumbers, numbers_on_host
from torchtap.receive.gradients import ask_at_its_node
from torchtap.schedule.base import Moment
from torchtap.session.audit import Audit
from torchtap.session.outlets import Outlets
from torchtap.session.tapping import Tapping
from torchtap.session.tracker import Assign, Drop, Leave, Pass, StepTracker, Update
from torchtap.store.record import ScalarBlock, StepRecord, TensorItem

if TYPE_CHECKING:
    from torchtap.session.spending import Spending

__all__ = ["StepRecorder"]

_When: TypeAlias = tuple[int, int | None, int | None, str]
_MOMENTS = 16  # of which the active taps are cached
_STATISTICS = ("value",)


@final
class StepRecorder:
    """Fold passes and states into units, and make records of those that the tracker has assigned."""

    def __init__(
        self,
        tap: Callable[[StepRecorder], Tapping],
        outlets: Outlets,
        hand_on: Callable[[StepRecord], None],
        left: Callable[[Moment, tuple[Update, ...]], None],
        audit: Audit,
        *,
        first: int = 0,
    ) -> None:
        self.tracker = StepTracker(first)
        self.named: str | None = None  # the phase that the user named
        self.ever_live: frozenset[int] = frozenset()
        self.taps = tap(self)
        self._outlets, self._audit = outlets, audit
        self._hand_on, self._left = hand_on, left
        self._spending: Spending | None = None  # where no tap has a budget
        self._live: dict[_When, frozenset[int]] = {}
        self._units = _Units()
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
        if tracker.last is not None and not tracker.marked and (self.named is not None or not training):
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
        key = self._units.release(action.unit)
        self._audit.dropped(action.unit, action.reason)
        if key is not None:
            passes = self.taps.drop(key)
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
        unit = self.tracker.log(self.named or "train")
        self._audit.note("log", unit)
        self.act()
        merge_numbers(self._units.logged.setdefault(unit, {}), read)

    def change_taps(self, tap: Callable[[StepRecorder], Tapping]) -> Tapping:
        """The model has other modules now: hand on what the hooks have brought, and register others."""
        self.tracker.leave()
        self.act()
        before = self.taps
        before.receiver.end_step()
        before.detach()
        self.taps = tap(self)
        self._units = _Units(self._units.logged)
        self.taps.receiver.follow(before.receiver)
        self._live = {}
        if self._spending is not None:
            self._spending.turn_to(self.taps.plan, self.taps.receiver)
        return self.taps

    def settle(self) -> None:
        """Hand on whatever is whole, waiting for numbers that are on their way."""
        self.tracker.flush()
        self.act()
        self._let_go(all_of_them=True)

    def close(self) -> None:
        """Place and hand on everything that is left."""
        tracker = self.tracker
        if tracker.marked or (tracker.last is None and not tracker.idle):
            self.read_rest()
        tracker.close()
        self.act()
        self._let_go(all_of_them=True)
        self.taps.receiver.end_step()

    def so_far(self) -> StepRecord | None:
        """Return the statistics of the passes since the update before that may train; the step goes on."""
        keys = [self._units.keys[unit] for unit in self.tracker.open_units() if unit in self._units.keys]
        passes, block = self.taps.peek(keys)
        if block is None:
            return None
        return PartialRecord(self.tracker.moment(), passes, False, (block,), (), []).record()

    # -- records ------------------------------------------------------------------------------------------

    def _release(self, leave: Leave) -> None:
        """Make the records of a step, the one that trains first."""
        if self._waiting and self._waiting[0].moment.step < leave.moment.step:
            self._let_go(all_of_them=True)
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
        keys, rest = ([self._units.release(each) for each in units] for units in (whole.units, whole.rest))
        made = PartialRecord(moment, 0, False, (), (), [])
        live = self.live_at(moment, moment.phase)
        self._collect(made, [key for key in keys if key is not None], live)
        if rest:
            other = PartialRecord(moment, 0, False, (), (), [])
            self._collect(other, [key for key in rest if key is not None], live)
            made.add_rest(other)
        if logged:
            scalars, tensors = _as_blocks(logged, made.coming)
            made.scalars, made.tensors = (*made.scalars, *scalars), (*made.tensors, *tensors)
        return made if made.scalars or made.tensors else None

    def _collect(self, made: PartialRecord, keys: list[str], live: frozenset[int]) -> None:
        if not keys:
            return
        if not live:
            for key in keys:
                self.taps.drop(key)
            return
        self.ever_live |= live
        made.passes, collected = self.taps.collect(keys, live, made.moment.phase)
        made.scalars, made.tensors, made.coming = collected
        if self._spending is not None:
            made.tensors = self._spending.end_step(made.moment.step, made.tensors, live, keys)
            self._live = {}

    def _let_go(self, *, all_of_them: bool = False) -> None:
        """Hand on the records whose numbers are there, in order."""
        while self._waiting and (all_of_them or self._waiting[0].whole):
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
    """Where the values of units are: keys of tallies, which are used again, and logged numbers."""

    __slots__ = ("_free", "_made", "keys", "logged")

    def __init__(self, logged: dict[int, dict[str, Any]] | None = None) -> None:
        self.keys: dict[int, str] = {}
        self.logged = {} if logged is None else logged
        self._free: list[str] = []
        self._made = 0

    def key(self, unit: int) -> str:
        """Return the key of a unit's tally."""
        key = self.keys.get(unit)
        if key is None:
            if not self._free:
                self._free.append(f"unit {self._made}")
                self._made += 1
            key = self.keys[unit] = self._free.pop()
        return key

    def release(self, unit: int) -> str | None:
        """Return the key of a unit that gets no more values; another may use it when it was emptied."""
        key = self.keys.pop(unit, None)
        if key is not None:
            self._free.append(key)
        return key


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

    @property
    def whole(self) -> bool:
        """Return True if all numbers are there."""
        return all(each.done() for each in self.coming)

    def add_rest(self, other: PartialRecord) -> None:
        """Add what another record of the same step has of sites that are not in this one."""
        known = sites_of(self.scalars)
        held = {item.site for item in self.tensors}
        self.scalars = (*self.scalars, *without(other.scalars, known))
        self.tensors = (*self.tensors, *(item for item in other.tensors if item.site not in held | known))
        self.coming += other.coming

    def record(self) -> StepRecord:
        """Return the record. Waits for the numbers that are not there yet."""
        for each in self.coming:
            each.fill()
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
    tensors = tuple(TensorItem(site, "value", "full", tensor.cpu()) for site, tensor in whole.items())
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


def without(blocks: Iterable[ScalarBlock], sites: set[str]) -> tuple[ScalarBlock, ...]:
    """Return blocks without the rows of some sites."""
    kept: list[ScalarBlock] = []
    for block in blocks:
        present = np.array([site not in sites for site in block.sites])
        if block.present is not None:
            present &= block.present
        if present.all():
            kept.append(block)
        elif present.any():
            kept.append(replace(block, present=present))
    return tuple(kept)


def sites_of(blocks: Iterable[ScalarBlock]) -> set[str]:
    """Return the sites that blocks have numbers of."""
    return {
        site
        for block in blocks
        for row, site in enumerate(block.sites)
        if block.present is None or block.present[row]
    }
