"""The step tracker without torch: generated events against a specification that looks at the whole sequence."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtap.errors import SessionError
from torchtap.session.tracker import Assign, Drop, Leave, Pass, StepTracker


@dataclass
class Event:
    """One thing that happens in a training; ``trains`` is known to the generator, not to the tracker at that time."""

    kind: str  # pass, log, update
    training: bool = True
    grad: bool = True
    trains: bool = False
    optimizer: int = 0
    skipped: bool = False


PASSES = st.builds(
    Event, st.just("pass"), training=st.booleans(), grad=st.booleans(), trains=st.booleans()
).map(lambda e: Event("pass", e.training, e.grad, e.trains and e.grad))
LOGS = st.just("log").map(Event)


def updates(optimizers: int) -> st.SearchStrategy[Event]:
    return st.builds(
        Event, st.just("update"), optimizer=st.integers(0, optimizers - 1), skipped=st.booleans()
    )


def play(events: list[Event], optimizers: int) -> tuple[dict[int, tuple[int, str]], list[Leave], list[int]]:
    """Feed a tracker; return where each event's unit went, the steps that were left, and the unit of each event."""
    tracker = StepTracker()
    for each in range(optimizers):
        tracker.know(each, [each])
    units: list[int] = []
    waiting: list[Pass] = []
    for event in events:
        if event.kind == "pass":
            made = tracker.begin_pass(training=event.training, grad=event.grad)
            assert made is not None
            made.differentiable = event.grad
            units.append(made.unit)
            if event.trains:
                waiting.append(made)
        elif event.kind == "log":
            for each in waiting:  # every backward runs before the next number at the latest
                each.backward = True
            waiting.clear()
            units.append(tracker.log("train"))
        else:
            for each in waiting:
                each.backward = True
            waiting.clear()
            tracker.enter()
            tracker.note_update(event.optimizer, skipped=event.skipped)
            tracker.end_update()
            units.append(-1)
    for each in waiting:
        each.backward = True
    tracker.close()
    placed: dict[int, tuple[int, str]] = {}
    left: list[Leave] = []
    for action in tracker.actions():
        if isinstance(action, Assign):
            assert action.unit not in placed, "a unit is assigned once"
            placed[action.unit] = action.moment.step, action.moment.phase
            assert all(leave.moment.step != action.moment.step for leave in left), (
                "a step that was left is whole"
            )
        elif isinstance(action, Leave):
            left.append(action)
        else:
            assert isinstance(action, Drop)
            raise AssertionError(f"{action}: nothing is dropped where optimizers are followed")
    return placed, left, units


def expected(events: list[Event]) -> list[tuple[int, str] | None]:
    """The specification for one optimizer, by looking at the whole sequence: where each event belongs."""
    ends = [index for index, event in enumerate(events) if event.kind == "update"]
    found: list[tuple[int, str] | None] = []
    for index, event in enumerate(events):
        step = sum(end < index for end in ends)  # of the update that follows
        start = max([end + 1 for end in ends if end < index], default=0)
        stop = min([end for end in ends if end >= index], default=len(events))
        segment = [each for each in events[start:stop] if each.kind == "pass"]
        trained = any(each.trains for each in segment)
        finished = stop < len(events)
        begun = any(each.kind == "pass" and each.trains for each in events[start:index])
        if event.kind == "update":
            found.append(None)
        elif event.kind == "log":
            looks = begun or (not trained and finished and any(_looks(each) for each in events[start:index]))
            own = step == 0 or looks or (not finished and not trained and step == 0)
            found.append((step if own else step - 1, "train"))
        else:
            found.append(_place(event, step, begun, trained, finished, events[start:index]))
    return found


def _looks(event: Event) -> bool:
    """A pass that looks like training, if no backward tells otherwise."""
    return event.kind == "pass" and event.training and event.grad


def _place(
    event: Event, step: int, begun: bool, trained: bool, finished: bool, before: list[Event]
) -> tuple[int, str]:
    if event.trains:
        return step, "train"
    if not trained:  # the mode decides
        if not finished and step:
            return step - 1, "eval"
        if _looks(event):
            return step, "train"
        if event.training:
            return step, "eval"
        return (step if not step or any(map(_looks, before)) else step - 1), "eval"
    if event.training:
        return step, "forward"
    return (step if begun or not step else step - 1), "eval"


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(PASSES, PASSES, LOGS, updates(1)), max_size=24))
def test_every_event_of_one_optimizer_is_where_the_specification_puts_it(events: list[Event]) -> None:
    # A unit may hold several passes that nothing tells apart; they belong to the same place.
    placed, left, units = play(events, 1)
    wanted = expected(events)
    for event, unit, where in zip(events, units, wanted, strict=True):
        if where is not None:
            assert placed[unit] == where, (event, events)
    count = sum(event.kind == "update" for event in events)
    assert [update.number for leave in left for update in leave.updates] == list(range(count))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(PASSES, LOGS, updates(3), updates(3)), max_size=30))
def test_several_optimizers_update_each_parameter_once_in_a_step(events: list[Event]) -> None:
    placed, left, units = play(events, 3)
    assert all(unit in placed for unit in units if unit >= 0), "everything belongs to a step"
    numbers = [update.number for leave in left for update in leave.updates]
    assert numbers == list(range(sum(event.kind == "update" for event in events)))
    for leave in left:
        took = [update.optimizer for update in leave.updates]
        assert len(took) == len(set(took)), "a parameter is updated once in a step"
    steps = [leave.moment.step for leave in left]
    assert steps == sorted(steps)
    # A training pass is in the step of the update that follows it.
    step_of = {update.number: leave.moment.step for leave in left for update in leave.updates}
    for index, event in enumerate(events):
        follows = sum(each.kind == "update" for each in events[:index])
        if event.kind == "pass" and event.trains and follows in step_of:
            assert placed[units[index]] == (step_of[follows], "train")


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(PASSES, LOGS, st.just(Event("begin")), st.just(Event("end"))), max_size=20))
def test_what_happens_in_a_marked_step_belongs_to_it(events: list[Event]) -> None:
    tracker = StepTracker()
    inside: dict[int, int] = {}
    for event in events:
        if event.kind == "begin":
            tracker.begin()
        elif event.kind == "end":
            tracker.end()
        elif event.kind == "log":
            unit = tracker.log("train")
            if tracker.marked:
                inside[unit] = tracker.number
        else:
            made = tracker.begin_pass(training=event.training, grad=event.grad)
            if tracker.marked and made is not None:
                made.backward = event.trains
                inside[made.unit] = tracker.number
    tracker.close()
    placed = {each.unit: each.moment.step for each in tracker.actions() if isinstance(each, Assign)}
    assert {unit: placed.get(unit) for unit in inside} == inside


def test_steps_only_grow_and_are_whole_numbers() -> None:
    tracker = StepTracker()
    tracker.begin(5)
    for wrong in (5, 3):
        with pytest.raises(SessionError, match="steps only grow"):
            tracker.begin(wrong)
    with pytest.raises(SessionError, match="whole number"):
        tracker.begin(True)
