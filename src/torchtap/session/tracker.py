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
    parameters: frozenset[int] = frozenset()
    skipped: bool = False  # a gradient scaler left it out

    def overlaps(self, optimizer: int, parameters: frozenset[int]) -> bool:
        """Return True if an optimizer updates what this update has updated."""
        return optimizer == self.optimizer or not parameters.isdisjoint(self.parameters)


@final
@dataclass(slots=True)
class Pass:
    """One call of the model, or several that cannot be kept apart."""

    unit: int
    named: str | None  # the phase that the user named
    training: bool  # the module's mode
    grad: bool
    differentiable: bool | None = None  # None if it is not known whether its output has a gradient
    backward: bool = False

    def phase(self, evidence: bool) -> str:
        """Return the phase, given whether any pass of its update is known to be training."""
        if self.named is not None:
            return self.named
        seen = self.differentiable is not None  # a backward through this pass would have been seen
        if self.backward or (self.training and self.grad and not (evidence and seen)):
            return "train"
        return "forward" if self.training and evidence else "eval"

    @property
    def ahead(self) -> bool:
        """Return True if it uses the parameters of the update that follows; an evaluation belongs to the one before."""
        return self.backward or (self.named is None and self.training)


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
    def passes(self) -> list[Pass]:
        return [each for each in self.items if isinstance(each, Pass)]

    @property
    def evidence(self) -> bool:
        return any(each.backward for each in self.passes)

    def label(self) -> str:
        """Return the phase that the parameters belong to: that of the passes that train."""
        trains = [each.named or "train" for each in self.passes if each.backward]
        if trains:
            return trains[-1]
        phases = [each.named or ("train" if each.training else "eval") for each in self.passes]
        return "train" if not phases or "train" in phases else phases[0]

    def alone(self) -> list[int]:
        """Return the units of the state that no pass shares."""
        held = {each.unit for each in self.items}
        return [unit for unit in dict.fromkeys((self.state, self.rest)) if unit >= 0 and unit not in held]


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
    def clockless(self) -> bool:
        """Return True if nothing has moved the clock so far."""
        return self.last is None and not self.marked and not self.follows

    @property
    def is_fresh(self) -> bool:
        """Return True if what comes may still belong to the step that ended last."""
        return not self.marked and not self._segment.begun

    def open_units(self) -> list[int]:
        """Return the units of the passes since the update before that may be training."""
        return [each.unit for each in self._segment.passes if each.phase(False) == "train"]

    @property
    def state_alone(self) -> int | None:
        """Return the unit of the state that was read since the update before, if no pass shares it."""
        unit = self._segment.state
        return unit if unit in self._segment.alone() else None

    @property
    def idle(self) -> bool:
        """Return True if no unit is waiting for anything."""
        return not (self._segment.items or self._turns or self._left) and self._segment.state < 0

    def candidates(self) -> range:
        """Return the numbers that the step of the next training pass may have."""
        return range(self.number, self.number + 1 + min(len(self._turns), 2))

    def only_evaluations(self) -> list[str]:
        """Return the phases of the open step if it has passes and none of them trains."""
        evidence = self._segment.evidence
        phases = dict.fromkeys([each.phase(evidence) for each in self._segment.passes])
        return [] if evidence or "train" in phases else list(phases)

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
            raise _not_growing(following, newest)
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
            raise _not_growing(following, newest)
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
        self.enter()
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
            self.enter()
            newest = self._segment.items[-1] if self._segment.items else None
            if isinstance(newest, _Logged) and (newest.phase, newest.ahead) == (phase, ahead):
                return newest.unit
        logged = _Logged(self._unit(), phase, ahead)
        self._segment.shared[key] = logged
        self._segment.items.append(logged)
        return logged.unit

    def state(self) -> int:
        """Return the unit of parameters and gradients that are read now.

        After an update that others may join in a step, what is read has a unit of its own.
        """
        segment = self._segment
        if segment.updates and self.follows and not self.marked and not self._is_alone(segment.updates[-1]):
            if segment.rest < 0:
                segment.rest = self._unit()
            return segment.rest
        if segment.state < 0:
            trains = [each.unit for each in segment.passes if each.backward]
            segment.state = trains[-1] if trains else self._unit()
        return segment.state

    # -- updates ------------------------------------------------------------------------------------------

    def know(self, optimizer: int, parameters: Iterable[int]) -> None:
        """Follow an optimizer, or learn that it holds other parameters now."""
        self.follows = True
        self._sets[optimizer] = frozenset(parameters)

    def forget(self, optimizer: int) -> None:
        """Wait for this optimizer no more."""
        self._sets.pop(optimizer, None)

    def note_update(self, optimizer: int, *, skipped: bool = False) -> None:
        """An optimizer has updated its parameters, or a gradient scaler left that out. `end_update` follows."""
        parameters = self._sets.get(optimizer, frozenset())
        self._segment.updates.append(Update(self.updates, optimizer, parameters, skipped))
        self.updates += 1
        if self.follows and not self.marked:
            self.enter()
            self._suppose_training()

    def end_update(self) -> None:
        """All that belongs to the update has been read: it becomes a step, or a turn of one."""
        if self.marked or not self.follows or not self._segment.updates:
            return
        made = self._segment.updates[-1]
        self._begin_segment(len(self._segment.items))
        if any(turn.updates[0].overlaps(made.optimizer, made.parameters) for turn in self._turns):
            self._end_turns(by=made.optimizer)
        segment, self._segment = self._segment, _Segment()
        self._turns.append(segment)
        if self._is_sure():
            self._end_turns()

    def _suppose_training(self) -> None:
        """An update without any pass that looks like training: those that may have been differentiated were."""
        passes = self._segment.passes
        if not any(each.backward or each.phase(False) == "train" for each in passes):
            for each in passes:
                each.backward = each.grad and each.differentiable is None and each.named is None

    def _is_alone(self, made: Update) -> bool:
        """Return True if an update ends a step by itself."""
        return not self._turns and all(made.overlaps(*each) for each in self._sets.items())

    def _is_sure(self) -> bool:
        """Return True if no other update can join the open step, and its last one was a turn."""
        took = tuple(turn.updates[0].optimizer for turn in self._turns)
        if len(took) > 1 and took != self._before:
            return False
        return all(
            any(turn.updates[0].overlaps(*each) for turn in self._turns) for each in self._sets.items()
        )

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

    def enter(self) -> None:
        """After a backward, or before an update: the first pass that a backward ran through begins the step."""
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
            looks = self.open_units()
            index = next((at for at, each in enumerate(segment.items) if each.unit in looks[:1]), index)
        segment.begun = True
        before, after = segment.items[:index], segment.items[index:]
        stays, goes = [each for each in before if each.ahead], [each for each in before if not each.ahead]
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
            self.learnt |= evidence or any(each.grad for each in turn.passes)
            for each in turn.items:
                self._assign(each, moment, evidence)
            for each in turn.tail:
                self._assign(each, moment, evidence=True)
            for unit in turn.alone():
                if unit == turn.rest and turn is not turns[-1]:
                    self._actions.append(Drop(unit, "replaced"))
                else:
                    at = replace(moment, phase=turn.label())
                    self._actions.append(Assign(unit, at, rest=unit == turn.rest))
        self._leave()
        self._left.append((moment, tuple(each for turn in turns for each in turn.updates)))
        self.last = moment
        self.number += 1

    def _assign(self, item: _Item, moment: Moment, evidence: bool) -> None:
        phase = item.phase(evidence) if isinstance(item, Pass) else item.phase
        self._actions.append(Assign(item.unit, Moment(moment.step, moment.epoch, moment.batch, phase)))

    def _leave(self) -> None:
        left, self._left = self._left, []
        self._actions += [Leave(moment, updates) for moment, updates in left]

    def _place_outside(self, segment: _Segment) -> None:
        """Place what came between two steps, before the second one is marked."""
        self._actions += [Drop(unit, "between") for unit in segment.alone()]
        if self.last is not None and not self.follows:
            return  # it was assigned as it came
        for each in segment.items:
            if isinstance(each, Pass) and each.phase(segment.evidence) == "train":
                self._actions.append(Drop(each.unit, "early" if self.last is None else "between"))
            elif self.last is None:
                self._segment.items.append(each)
            else:
                self._assign_last(each)

    def _assign_last(self, item: _Item) -> None:
        """Assign a unit to the step that ended last, which may have been left."""
        assert self.last is not None
        phase = (item.named or "eval") if isinstance(item, Pass) else item.phase
        if not any(moment is self.last for moment, _ in self._left):
            self._left.append((self.last, ()))
        self._actions.append(Assign(item.unit, replace(self.last, phase=phase)))

    def _unit(self) -> int:
        self._units += 1
        return self._units

    # -- the end ------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Place whatever is left: a backward without an update is a step that was not finished."""
        self.end()
        self.enter()
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
            self._actions += [Drop(unit, "between") for unit in segment.alone()]
        self._leave()


def _not_growing(step: int, newest: int) -> SessionError:
    return SessionError(
        f"step {step} was asked for after step {newest}: steps only grow; a second training needs a watch of its own"
    )


def whole(value: int, what: str) -> int:
    """Return a number that is whole and not negative, or raise."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise SessionError(f"{what} {value!r}: a {what} is a whole number from 0 on")
    return value
