"""How often ready-made plans record."""

from __future__ import annotations

from torchtap.plan.next_live import Pace, Seldom
from torchtap.schedule import Moment


def steps_at_which(predicate: Pace | Seldom, count: int) -> list[int]:
    return [step for step in range(count) if predicate(Moment(step)) and predicate(Moment(step))]


def test_what_is_dear_comes_in_the_first_steps_and_then_in_one_of_four() -> None:
    assert steps_at_which(Seldom(Pace(10, None, dense=20), 4), 50) == [0, 1, 2, 3, 7, 11, 15, 19, 29, 39, 49]


def test_without_dense_steps_it_comes_with_the_pace() -> None:
    assert (
        steps_at_which(Seldom(Pace(10, None), 4), 31) == steps_at_which(Pace(10, None), 31) == [0, 10, 20, 30]
    )
