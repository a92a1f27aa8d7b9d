"""Sort passes, updates and logged numbers into steps and phases. A pure state machine: events in, actions out.

The host folds values into *units* (small integers) and learns from the actions which step and phase a unit belongs to.
It guarantees:
- every unit is assigned to one step and phase, or dropped with a reason; never both, never twice;
- steps are numbered in the order of their updates, and a step that was left receives nothing more;
- a parameter is updated at most once in a step, unless the user marked the step.

The rules, with their reasons, are in ``docs/design/clock.md``:
- a pass that a backward runs through is training. In a step without any, the module's mode decides;
- a step begins with the first pass that a backward runs through. Evaluations and logged numbers before it belong to
  the update before it; passes that only run forward belong to the update after it, whose parameters they used;
- optimizers that take turns share a step. A step ends when one of its parameters is updated again; of an optimizer
  that at once updates again, the first update was no turn but a step of its own.

Not here: tensors, hooks, schedules, records.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias, final

from torchtap.errors import SessionError
from torchtap.schedule.base import Moment

__all__ = ["Action", "Assign", "Drop", "Leave", "Pass", "StepTracker", "Update"]

_UNDECIDED = 64  # passes of one update that are kept apart; further ones share a unit


@final
class Assign(NamedTuple):
    """The values of a unit belong to this step and phase; of the ``rest``, those that no other unit has."""

    unit: int
    moment: Moment
    rest: bool = False


@final
class Drop(NamedTuple):
    """The values of a unit belong to no step."""

    unit: int
    reason: str


@final
class Leave(NamedTuple):
    """Nothing more belongs to this step: its records are whole. Not ``whole``: that holds for the moment's phase."""

    moment: Moment
    updates: tuple[Update, ...]
    whole: bool = True


Action: TypeAlias = "Assign | Drop | Leave"


@final
@dataclass(frozen=True, slots=True)
class Update:
    """One call of an optimizer's ``step``: the atom of the clock."""

    number: int  # in the order of all updates
    optimizer: int
    skipped: bool = False  # a gradient scaler left it out


@final
@dataclass(slots=True)
class Pass:
    """One call of the model, or several that cannot be kept apart."""

    unit: int
    named: str | None  # the phase that the user named
    training: bool  # the module's mode
    grad: bool
    differentiable: bool | None = (
        None  # whether its output can be differentiated; None where that is not known
    )
    backward: bool = False

    def phase(self, evidence: bool) -> str:
        """Return the phase, given whether any pass of its update is known to be training."""
        if self.named is not None:
            return self.named
        if self.backward or (self.training and self.grad and not (evidence and self.is_known)):
            return "train"
        return "forward" if self.training and evidence else "eval"

    @property
    def is_known(self) -> bool:
        """Return True if a backward through this pass would have been seen."""
        return self.differentiable is not None

    @property
    def looks_on(self) -> bool:
        """Return True for an evaluation: it belongs to the update before it. Others use the next one's parameters."""
        return not self.backward and (self.named is not None or not self.training)


@final
@dataclass(slots=True)
class _Logged:
    unit: int
    phase: str
    ahead: bool = False  # of the update that follows, such as the loss of a backward


_Item: TypeAlias = "Pass | _Logged"


@final
@dataclass(slots=True)
class _Segment:
    """What happened since the update before: passes and logged numbers in order, and the state that was read."""

    items: list[_Item] = field(default_factory=list)
    begun: bool = False  # the items that belong to the update before have been handed to it
    state: int = -1  # the unit of parameters and gradients
    rest: int = -1  # the unit of what no optimizer brought, read at its end; the last one of a step counts
    shared: dict[tuple[object, ...], _Item] = field(default_factory=dict)
    updates: list[Update] = field(default_factory=list)
    tail: list[_Item] = field(default_factory=list)  # evaluations and numbers after its update

    @property
    def evidence(self) -> bool:
        return any(isinstance(each, Pass) and each.backward for each in self.items)

    def label(self) -> str:
        """Return the phase that the parameters belong to: that of the passes that train."""
        passes = [each for each in self.items if isinstance(each, Pass)]
        trains = [each.named or "train" for each in passes if each.backward]
        if trains:
            return trains[-1]
        phases = [each.named or ("train" if each.training else "eval") for each in passes]
        return "train" if not phases or "train" in phases else phases[0]


@final
class StepTracker:
    """Counts steps. Events are methods; what follows from them is taken with `actions`."""

    def __init__(self, first: int = 0) -> None:
        self.number = first  # of the open step, or of the one that begins next
        self.last: Moment | None = None  # the step that ended last
        self.epoch: int | None = None
        self.batch: int | None = None
        self.marked = False  # the open step was begun by the user
        self.follows = False
        self.updates = 0
        self.learnt = False  # any step had passes that train
        self._segment = _Segment()
        self._turns: list[_Segment] = []  # the updates of the open step
        self._sets: dict[int, frozenset[int]] = {}  # optimizer -> its parameters
        self._before: tuple[int, ...] = ()  # the optimizers of the step before
        self._units = 0
        self._actions: list[Action] = []
        self._left: list[tuple[Moment, tuple[Update, ...]]] = []  # ended, not left yet

    def actions(self) -> list[Action]:
        """Return what follows from the events so far, in order."""
        made, self._actions = self._actions, []
        return made

    @property
    def has_actions(self) -> bool:
        """Return True if anything is to be done."""
        return bool(self._actions)

    @property
    def is_fresh(self) -> bool:
        """Return True if what comes may still belong to the step that ended last."""
        return not self.marked and not self._segment.begun

    def open_units(self) -> list[int]:
        """Return the units of the passes since the update before that may be training."""
        items = self._segment.items
        return [each.unit for each in items if isinstance(each, Pass) and each.phase(False) == "train"]

    @property
    def training_passes(self) -> int:
        """Return how many passes since the update before look like training."""
        passes = [each for each in self._segment.items if isinstance(each, Pass)]
        return sum(each.phase(False) == "train" for each in passes)

    @property
    def state_alone(self) -> int | None:
        """Return the unit of the state that was read since the update before, if no pass shares it."""
        unit = self._segment.state
        return None if unit < 0 or any(each.unit == unit for each in self._segment.items) else unit

    @property
    def idle(self) -> bool:
        """Return True if no unit is waiting for anything."""
        return not (self._segment.items or self._turns or self._left) and self._segment.state < 0

    def candidates(self) -> range:
        """Return the numbers that the step of the next training pass may have."""
        joined = len(self._turns)
        return range(self.number, self.number + 1 + min(joined, 2))

    def only_evaluations(self) -> list[str]:
        """Return the phases of the open step if it has passes and none of them trains."""
        passes = [each for each in self._segment.items if isinstance(each, Pass)]
        phases = dict.fromkeys(each.phase(self._segment.evidence) for each in passes)
        return [] if "train" in phases or self._segment.evidence else list(phases)

    def moment(self, phase: str = "train") -> Moment:
        """Return the open step, or the one that comes next."""
        return Moment(self.number, self.epoch, self.batch, phase)

    # -- marks of the user --------------------------------------------------------------------------------

    def begin(self, step: int | None = None) -> None:
        """Begin a step that the user marks; it ends with `end`."""
        first = self.last is None and not self._turns and not self.marked
        newest = self.number if self.marked or self._turns else self.number - 1
        following = newest + 1 if step is None else whole(step, "step")
        if not first and following <= newest:
            raise SessionError(
                f"step {following} was asked for after step {newest}: steps only grow; "
                "a second training needs a watch of its own"
            )
        self.end()
        self._end_turns()
        if step is not None:
            self.number = max(following, self.number) if not first else following
        early, self._segment = self._segment, _Segment()
        self._place_outside(early)
        self._leave()
        self.marked = True

    def end(self) -> None:
        """End the step that the user has marked, if one is open."""
        if self.marked:
            self.marked = False
            segment, self._segment = self._segment, _Segment()
            self._finish([segment])
            moment, updates = self._left.pop()
            trains = replace(moment, phase=segment.label())
            if segment.evidence or trains.phase == "train":  # evaluations may follow
                self._actions.append(Leave(trains, updates, whole=False))
                updates = ()
            self._left.append((moment, updates))

    def leave(self) -> None:
        """End the open step; nothing that comes later belongs to it."""
        self.end()
        self._end_turns()
        self._leave()

    def flush(self) -> None:
        """Hand on what is whole. What comes later is not folded into it."""
        self._segment.shared.clear()
        self._leave()

    def set_start(self, step: int) -> None:
        """Give the next step this number."""
        self.number = whole(step, "start")

    def set_number(self, step: int) -> None:
        """Give the open step of followed optimizers another number, ending the one before it."""
        following = whole(step, "step")
        newest = self.number if self._turns else self.number - 1
        if self.last is not None and following <= max(newest, self.last.step):
            raise SessionError(
                f"step {following} was asked for after step {newest}: steps only grow; "
                "a second training needs a watch of its own"
            )
        self._end_turns()
        self.number = following

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; its batches are counted anew."""
        self.epoch, self.batch = whole(epoch, "epoch"), None

    def set_batch(self, batch: int) -> None:
        """Set the batch of the step that begins or is open."""
        self.batch = whole(batch, "batch")

    # -- passes and numbers -------------------------------------------------------------------------------

    def begin_pass(self, *, training: bool, grad: bool, named: str | None = None) -> Pass | None:
        """Return the pass that begins now; None for a training pass between the steps that the user marks."""
        if not self.marked and not self.follows and self.last is not None:
            return self._pass_outside(training, grad, named)
        self._settle()
        segment, key = self._segment, (named, training, grad)
        known = segment.shared.get(key)
        if isinstance(known, Pass) and (not grad or len(segment.items) > _UNDECIDED):
            return known
        made = Pass(self._unit(), named, training, grad)
        if grad and not self.marked:
            segment.shared.clear()  # whose step comes next is decided by this pass
        segment.shared[key] = made
        segment.items.append(made)
        return made

    def _pass_outside(self, training: bool, grad: bool, named: str | None) -> Pass | None:
        """Return a pass between two marked steps: an evaluation of the one that ended last, or none."""
        if training and grad and named is None:
            return None
        key = (named, training, grad)
        known = self._segment.shared.get(key)
        if isinstance(known, Pass):
            return known
        made = self._segment.shared[key] = Pass(self._unit(), named, training, grad)
        self._assign_last(made)
        return made

    def log(self, phase: str, *, ahead: bool = False) -> int:
        """Return the unit of numbers that are logged now; ``ahead``: they belong to the update that follows."""
        key = ("log", phase, ahead)
        if self.marked or (not self.follows and self.last is None):
            known = self._segment.shared.get(key)
            if known is not None:
                return known.unit
        elif not self.follows:
            logged = _Logged(self._unit(), phase)
            self._assign_last(logged)
            return logged.unit
        else:
            self._settle()
            newest = self._segment.items[-1] if self._segment.items else None
            if isinstance(newest, _Logged) and (newest.phase, newest.ahead) == (phase, ahead):
                return newest.unit
        logged = _Logged(self._unit(), phase, ahead)
        self._segment.shared[key] = logged
        self._segment.items.append(logged)
        return logged.unit

    def state(self) -> int:
        """Return the unit of parameters and gradients that are read now."""
        segment = self._segment
        if segment.state < 0:
            trains = [each for each in segment.items if isinstance(each, Pass) and each.backward]
            segment.state = trains[-1].unit if trains else self._unit()
        return segment.state

    def rest(self) -> int:
        """Return the unit of what is read when an update is over: the one of the state, if nothing can join it."""
        segment = self._segment
        if segment.rest < 0:
            optimizer = segment.updates[-1].optimizer if segment.updates else None
            alone = self.marked or not self.follows or (optimizer is not None and self._is_alone(optimizer))
            segment.rest = self.state() if alone else self._unit()
        return segment.rest

    # -- updates ------------------------------------------------------------------------------------------

    def know(self, optimizer: int, parameters: Iterable[int]) -> None:
        """Follow an optimizer, or learn that it holds other parameters now."""
        self.follows = True
        self._sets[optimizer] = frozenset(parameters)

    def parameters_of(self, optimizer: int) -> frozenset[int]:
        """Return the parameters of a followed optimizer, as far as they are known."""
        return self._sets.get(optimizer, frozenset())

    def forget(self, optimizer: int) -> None:
        """Wait for this optimizer no more."""
        self._sets.pop(optimizer, None)

    def enter(self) -> None:
        """An optimizer is about to update: which pass began the step is known at the latest now."""
        self._settle()

    def note_update(self, optimizer: int, *, skipped: bool = False) -> None:
        """An optimizer has updated its parameters, or a gradient scaler left that out. `end_update` follows."""
        self._segment.updates.append(Update(self.updates, optimizer, skipped))
        self.updates += 1
        if self.follows and not self.marked:
            self._settle()
            self._suppose_training()

    def end_update(self) -> None:
        """All that belongs to the update has been read: it becomes a step, or a turn of one."""
        if self.marked or not self.follows or not self._segment.updates:
            return
        optimizer = self._segment.updates[-1].optimizer
        self._begin_segment(len(self._segment.items))
        if any(self._overlap(optimizer, turn) for turn in self._turns):
            self._end_turns(by=optimizer)
        segment, self._segment = self._segment, _Segment()
        self._turns.append(segment)
        if self._is_sure():
            self._end_turns()

    def _suppose_training(self) -> None:
        """An update without any pass that looks like training: those that may have been differentiated were."""
        passes = [each for each in self._segment.items if isinstance(each, Pass)]
        if not any(each.backward or each.phase(False) == "train" for each in passes):
            for each in passes:
                each.backward = each.grad and not each.is_known and each.named is None

    def _is_alone(self, optimizer: int) -> bool:
        """Return True if an update of this optimizer ends a step by itself."""
        mine = self._sets.get(optimizer, frozenset())
        others = (its for each, its in self._sets.items() if each != optimizer)
        return not self._turns and not any(mine.isdisjoint(its) for its in others)

    def _overlap(self, optimizer: int, turn: _Segment) -> bool:
        other = turn.updates[0].optimizer
        mine, its = self._sets.get(optimizer, frozenset()), self._sets.get(other, frozenset())
        return optimizer == other or not mine.isdisjoint(its)

    def _is_sure(self) -> bool:
        """Return True if no other update can join the open step, and its last one was a turn."""
        took = tuple(turn.updates[0].optimizer for turn in self._turns)
        if len(took) > 1 and took != self._before:
            return False
        return all(any(self._overlap(each, turn) for turn in self._turns) for each in self._sets)

    def _end_turns(self, by: int | None = None) -> None:
        """End the open step. The last turn was a step of its own if its optimizer updates again at once."""
        turns, self._turns = self._turns, []
        if not turns:
            return
        took = tuple(turn.updates[0].optimizer for turn in turns)
        if by is not None and len(turns) > 1 and took[-1] == by and took != self._before:
            self._finish(turns[:-1])
            self._finish(turns[-1:])
            took = took[-1:]
        else:
            self._finish(turns)
        self._before = took

    # -- what belongs where -------------------------------------------------------------------------------

    def _settle(self) -> None:
        """After a backward: the first pass that it ran through begins the step."""
        segment = self._segment
        if self.marked or segment.begun or not self.follows:
            return
        for index, each in enumerate(segment.items):
            if isinstance(each, Pass) and each.backward:
                self._begin_segment(index)
                return

    def _begin_segment(self, index: int) -> None:
        """Hand the evaluations and numbers before an item to the update before; without a backward, by mode."""
        segment = self._segment
        if segment.begun:
            return
        if index == len(segment.items):  # no backward was seen: by what looks like training
            looks = [
                at
                for at, each in enumerate(segment.items)
                if isinstance(each, Pass) and each.phase(False) == "train"
            ]
            index = looks[0] if looks else index
        segment.begun = True
        before, after = segment.items[:index], segment.items[index:]
        stays: list[_Item] = [each for each in before if _is_ahead(each)]
        goes: list[_Item] = [each for each in before if not _is_ahead(each)]
        if self._turns:
            self._turns[-1].tail += goes
        elif self.last is not None:
            for each in goes:
                self._assign_last(each)
            self._leave()
        else:
            stays, goes = before, []
        segment.items = stays + after
        segment.shared.clear()

    def _finish(self, turns: list[_Segment]) -> None:
        """Give these updates a step number, and assign what belongs to them."""
        moment = self.moment()
        for turn in turns:
            evidence = turn.evidence
            self.learnt |= evidence or any(isinstance(each, Pass) and each.grad for each in turn.items)
            self._assign_all(turn.items, moment, evidence)
            self._assign_all(turn.tail, moment, evidence=True)
            held = {each.unit for each in turn.items}
            for unit in dict.fromkeys((turn.state, turn.rest)):
                if unit < 0 or unit in held:
                    continue
                if unit == turn.rest != turn.state and turn is not turns[-1]:
                    self._actions.append(Drop(unit, "replaced"))
                else:
                    at = replace(moment, phase=turn.label())
                    self._actions.append(Assign(unit, at, rest=unit == turn.rest != turn.state))
        self._leave()
        self._left.append((moment, tuple(each for turn in turns for each in turn.updates)))
        self.last = moment
        self.number += 1

    def _assign_all(self, items: Iterable[_Item], moment: Moment, evidence: bool) -> None:
        for each in items:
            phase = each.phase(evidence) if isinstance(each, Pass) else each.phase
            self._assign(each.unit, moment, phase)

    def _assign(self, unit: int, moment: Moment, phase: str) -> None:
        self._actions.append(Assign(unit, Moment(moment.step, moment.epoch, moment.batch, phase)))

    def _leave(self) -> None:
        left, self._left = self._left, []
        self._actions += [Leave(moment, updates) for moment, updates in left]

    def _place_outside(self, segment: _Segment) -> None:
        """Place what came between two steps, before the second one is marked."""
        self._drop_state(segment)
        if self.last is not None and not self.follows:
            return  # it was assigned as it came
        for each in segment.items:
            if isinstance(each, Pass) and each.phase(segment.evidence) == "train":
                self._actions.append(Drop(each.unit, "early" if self.last is None else "between"))
            elif self.last is None:
                self._segment.items.append(each)
            else:
                self._assign_last(each)

    def _drop_state(self, segment: _Segment) -> None:
        units = {segment.state, segment.rest} - {each.unit for each in segment.items}
        self._actions += [Drop(unit, "between") for unit in sorted(units) if unit >= 0]

    def _assign_last(self, item: _Item) -> None:
        """Assign a unit to the step that ended last, which may have been left."""
        assert self.last is not None
        phase = (item.named or "eval") if isinstance(item, Pass) else item.phase
        if not any(moment is self.last for moment, _ in self._left):
            self._left.append((self.last, ()))
        self._assign(item.unit, self.last, phase)

    def _unit(self) -> int:
        self._units += 1
        return self._units

    # -- the end ------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Place whatever is left: a backward without an update is a step that was not finished."""
        self.end()
        self._settle()
        segment, self._segment = self._segment, _Segment()
        self._end_turns()
        backward = any(isinstance(each, _Logged) and each.ahead for each in segment.items)
        unfinished = segment.evidence or backward or self.last is None
        if unfinished and (segment.items or segment.state >= 0 or segment.rest >= 0):
            self._finish([segment])
        elif self.last is not None:
            if self.follows:
                for each in segment.items:
                    self._assign_last(each)
            self._drop_state(segment)
        self._leave()


def _is_ahead(item: _Item) -> bool:
    """Return True for what belongs to the update that follows, wherever a step begins."""
    return not item.looks_on if isinstance(item, Pass) else item.ahead


def whole(value: int, what: str) -> int:
    """Return a number that is whole and not negative, or raise."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise SessionError(f"{what} {value!r}: a {what} is a whole number from 0 on")
    return value
