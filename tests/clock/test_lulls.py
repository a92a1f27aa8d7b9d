"""Steps that no schedule asks for are only counted; nobody can tell by what is recorded."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import torchtap as tt
from torchtap.schedule import Every, Moment, Phase, Schedule, Steps
from torchtap.store.record import StepRecord


@dataclass(frozen=True)
class Asked(Schedule):
    """The same answers as another schedule, one step at a time: it cannot look ahead."""

    other: Schedule

    @property
    def by_phase(self) -> bool:
        return self.other.by_phase

    def live(self, moment: Moment) -> bool:
        return self.other.live(moment)

    def spec(self) -> dict[str, object]:
        return self.other.spec()


class Kept:
    """A consumer that keeps what it is given."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self.events: list[tuple[str, Any]] = []

    def write(self, record: StepRecord) -> None:
        self.records.append(record)

    def event(self, kind: str, **facts: Any) -> None:
        if kind in ("skipped", "warning", "lost"):
            self.events.append((kind, facts))

    def close(self) -> None:
        pass

    def told(self) -> list[Any]:
        return [
            (
                (each.step, each.epoch, each.batch, each.phase, each.passes, each.skipped),
                [(block.sites, str(block.values.tolist())) for block in each.scalars],
            )
            for each in self.records
        ]


Move = Callable[["Loop"], object]


class Loop:
    """A training of one layer that is moved by hand."""

    def __init__(self, schedule: Schedule, *, follows: bool) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(2, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.kept = Kept()
        taps = [tt.tap("*:output", when=schedule), tt.tap("0:param", when=schedule)]
        self.watch = tt.watch(self.model, None, taps, sinks=[self.kept])
        if follows:
            self.watch.follow(self.optimizer)
        self.seen: list[Any] = []

    def train(self) -> None:
        self.model(torch.ones(1, 2)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def in_block(self, step: int | None = None, **when: int) -> None:
        with self.watch.step(step, **when):
            self.train()

    def evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            self.model(torch.ones(1, 2))
        self.model.train()

    def in_phase(self) -> None:
        with self.watch.phase("valid"):
            self.model(torch.zeros(1, 2))

    def log_in_block(self) -> None:
        with self.watch.step():
            self.watch.log(loss=1.0)
            self.train()

    def jump(self, by: int) -> None:
        self.in_block(self.watch.step_number + by)

    def set_step(self, by: int) -> None:
        self.watch.set_step(self.watch.step_number + by)
        self.train()


BLOCKS: dict[str, Move] = {
    "a block": Loop.in_block,
    "three blocks": lambda loop: [loop.in_block() for _ in range(3)],
    "a block further on": lambda loop: loop.jump(3),
    "a step is set": lambda loop: loop.set_step(1),
    "a step further on is set": lambda loop: loop.set_step(4),
    "the same step is set": lambda loop: loop.watch.set_step(max(loop.watch.step_number, 0)),
    "a block with an epoch": lambda loop: loop.in_block(epoch=2),
    "an epoch": lambda loop: loop.watch.set_epoch(1),
    "a batch": lambda loop: loop.watch.set_batch(3),
    "the step ends": lambda loop: loop.watch.end_step(),
}
COMMON: dict[str, Move] = {
    "a number": lambda loop: loop.watch.log(loss=2.0),
    "a number in a block": Loop.log_in_block,
    "an evaluation": Loop.evaluate,
    "a named phase": Loop.in_phase,
    "a flush": lambda loop: loop.watch.flush(),
    "a look": lambda loop: loop.seen.append((loop.watch.step_number, loop.watch.live, repr(loop.watch))),
}
FOLLOWED: dict[str, Move] = {
    "an update": Loop.train,
    "four updates": lambda loop: [loop.train() for _ in range(4)],
    "a block": Loop.in_block,
    "a step is set": lambda loop: loop.watch.set_step(loop.watch.step_number + 2),
    "a batch": lambda loop: loop.watch.set_batch(3),
}
SCHEDULES = [
    Every(5),
    Every(4, 2),
    Steps([3, 4, 11]),
    Every(6) & Phase("valid"),
    Every(3) & Phase("eval"),
    Every(7) | Steps(range(2, 30, 9)),
]


def told(schedule: Schedule, moves: list[Move], *, follows: bool) -> tuple[Any, ...]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loop = Loop(schedule, follows=follows)
        for move in moves:
            try:
                move(loop)
            except tt.TorchtapError as error:
                loop.seen.append(str(error))
        loop.watch.close()
    assert not any(module._forward_hooks for module in loop.model.modules())
    return loop.kept.told(), loop.kept.events, loop.seen, loop.watch.step_number, loop.watch.passes


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(SCHEDULES), st.lists(st.sampled_from([*BLOCKS, *COMMON]), max_size=25))
def test_blocks_that_are_only_counted_leave_the_same_records(schedule: Schedule, names: list[str]) -> None:
    moves = [(BLOCKS | COMMON)[name] for name in names]
    assert told(schedule, moves, follows=False) == told(Asked(schedule), moves, follows=False)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(SCHEDULES), st.lists(st.sampled_from([*FOLLOWED, *COMMON]), max_size=25))
def test_updates_that_are_only_counted_leave_the_same_records(schedule: Schedule, names: list[str]) -> None:
    moves = [(FOLLOWED | COMMON)[name] for name in names]
    assert told(schedule, moves, follows=True) == told(Asked(schedule), moves, follows=True)


def test_steps_in_a_lull_are_not_made() -> None:
    loop = Loop(Every(50), follows=False)
    for _ in range(60):
        loop.in_block()
    assert loop.watch._lull.newest == 59
    assert loop.watch._maker.clock.step == 51  # the one in which the hooks came off
    assert loop.watch.step_number == 59
    loop.watch.close()
    assert [record.step for record in loop.kept.records] == [0, 50]


def test_followed_steps_in_a_lull_are_not_made() -> None:
    loop = Loop(Every(50), follows=True)
    for _ in range(60):
        loop.train()
    assert loop.watch._lull.newest == 60  # the one that the next update ends
    assert loop.watch._maker.clock.step < 60
    loop.watch.close()
    assert [record.step for record in loop.kept.records] == [0, 50]


def test_a_predicate_is_asked_at_every_step() -> None:
    asked: list[int] = []

    def predicate(moment: Moment) -> bool:
        asked.append(moment.step)
        return moment.step == 7

    model = nn.Sequential(nn.Linear(2, 2))
    kept = Kept()
    with tt.watch(model, None, [tt.tap("*:output", when=predicate)], sinks=[kept]) as watch:
        for _ in range(12):
            with watch.step():
                model(torch.ones(1, 2))
    assert set(asked) == set(range(12))
    assert [record.step for record in kept.records] == [7]


def test_a_step_in_a_step_is_refused_in_a_lull_too() -> None:
    loop = Loop(Every(50), follows=False)
    for _ in range(5):
        loop.in_block()
    with (
        loop.watch.step(),
        pytest.raises(tt.SessionError, match="cannot hold another"),
        loop.watch.step(),
    ):
        pass
    loop.in_block()
    assert loop.watch.step_number == 6
    loop.watch.close()


def test_a_step_back_is_refused_in_a_lull_too() -> None:
    loop = Loop(Every(50), follows=False)
    for _ in range(5):
        loop.in_block()
    with pytest.raises(tt.SessionError, match="steps only grow"), loop.watch.step(2):
        pass
    with pytest.raises(tt.SessionError, match="whole number"), loop.watch.step(True):
        pass
    loop.watch.close()


def test_a_closed_watch_has_no_lull() -> None:
    loop = Loop(Every(50), follows=False)
    for _ in range(5):
        loop.in_block()
    loop.watch.close()
    with pytest.raises(tt.SessionError, match="closed"), loop.watch.step():
        pass
    with pytest.raises(tt.SessionError, match="closed"):
        loop.watch.set_step(9)


def test_a_step_that_raises_in_a_lull_is_over() -> None:
    loop = Loop(Every(50), follows=False)
    for _ in range(3):
        loop.in_block()
    with pytest.raises(ZeroDivisionError), loop.watch.step():
        raise ZeroDivisionError
    loop.in_block()
    assert loop.watch.step_number == 4
    loop.watch.close()


def test_whoever_looks_does_not_end_a_lull() -> None:
    loop = Loop(Every(50), follows=False)
    for _ in range(9):
        loop.in_block()
    loop.watch.flush()
    loop.watch.coverage()
    assert "after step 8" in repr(loop.watch)
    with loop.watch.step() as watch:
        assert (watch.step_number, watch.live, watch.so_far()) == (9, False, None)
        assert "in step 9" in repr(watch)
    assert loop.watch._maker.clock.step == 1
    loop.watch.close()


def test_no_step_is_lost_when_other_threads_catch_up() -> None:
    loop = Loop(Every(10_000), follows=False)
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            assert loop.watch._steps is not None

    looking = threading.Thread(target=look)
    looking.start()
    for _ in range(5_000):
        with loop.watch.step():
            pass
    over.set()
    looking.join()
    assert loop.watch.step_number == 4_999
    loop.watch.close()
