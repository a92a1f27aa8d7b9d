"""How often ready-made plans record."""

from __future__ import annotations

import pytest

from torchtap.plan import next_live
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


class Time:
    """A clock that only moves when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.mark.parametrize("extra", [0.0, 0.1, 1.0, 3.0])
@pytest.mark.parametrize("share", [0.02, 0.1])
def test_the_share_holds_from_the_second_recorded_step_on(
    extra: float, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Time()
    monkeypatch.setattr(next_live, "time", clock)
    pace = Pace(10, share)
    spent, live, lives = 0.0, False, 0
    for step in range(2000):
        live = pace(Moment(step))
        if live:
            lives += 1
            # Before a third step is recorded, the share of the time covers the two before it.
            assert lives < 3 or spent <= share * clock.now + 1e-6 + share
            spent += extra
        clock.now += (5.0 if step < 2 else 1.0) + extra * live
    assert lives >= min(2000 // 10, int(2000 * share / extra) // 2 if extra else 200)
