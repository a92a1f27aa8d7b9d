"""When a tap is live."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtap.errors import PlanError
from torchtap.plan.tap import tap
from torchtap.schedule import (
    Always,
    Epochs,
    Every,
    First,
    Moment,
    Never,
    Phase,
    Schedule,
    Steps,
    When,
    schedule_of,
)
from torchtap.schedule.base import NO_STEP


def live(schedule: Schedule, steps: range = range(12)) -> list[int]:
    return [step for step in steps if schedule.live(Moment(step))]


def test_each_rule_is_live_where_it_says() -> None:
    assert live(Every(4)) == [0, 4, 8]
    assert live(Every(4, offset=3)) == [3, 7, 11]
    assert live(Steps([2, 5])) == [2, 5]
    assert live(Steps(range(1, 10, 4))) == [1, 5, 9]
    assert live(First(2)) == [0, 1]
    assert live(When(lambda moment: moment.step > 9)) == [10, 11]
    assert live(Never()) == []
    assert len(live(Always())) == 12


def test_epochs_and_batches_multiply() -> None:
    schedule = Epochs([1, 3], [0])
    moments = [(e, b) for e in range(5) for b in range(3) if schedule.live(Moment(0, e, b))]
    assert moments == [(1, 0), (3, 0)]
    assert Epochs(batches=[2]).live(Moment(0, 9, 2))
    assert not Epochs([0]).live(Moment(0))  # no epoch was set yet


def test_phases_are_told_apart() -> None:
    assert Phase("eval").live(Moment(0, phase="eval"))
    assert not Phase("eval").live(Moment(0))
    with pytest.raises(PlanError, match="'train', 'eval' or a name"):
        Phase("")


def _rules() -> st.SearchStrategy[Schedule]:
    some = st.lists(st.integers(0, 40), max_size=4)
    ranges = st.builds(range, st.integers(0, 40), st.integers(0, 40), st.integers(-7, 7).filter(bool))
    simple = st.one_of(
        st.builds(Every, st.integers(1, 9), st.integers(0, 12)),
        st.builds(Steps, some | ranges),
        st.builds(Epochs, st.none() | some, st.none() | some),
        st.builds(First, st.integers(1, 30)),
        st.sampled_from([Always(), Never(), Phase("eval"), When(lambda moment: moment.step % 3 == 1)]),
    )
    return st.recursive(
        simple,
        lambda rules: st.one_of(
            st.tuples(rules, rules).map(lambda two: two[0] & two[1]),
            st.tuples(rules, rules).map(lambda two: two[0] | two[1]),
            rules.map(lambda rule: ~rule),
        ),
        max_leaves=4,
    )


@given(_rules(), st.integers(0, 45), st.integers(0, 3), st.integers(0, 3))
def test_no_rule_is_live_before_the_earliest_step_that_it_names(
    rule: Schedule, step: int, epoch: int, batch: int
) -> None:
    earliest = rule.earliest(Moment(step, epoch, batch))
    assert earliest >= step
    for before in range(step, min(earliest, 100)):
        assert not any(rule.live(Moment(before, epoch, batch, phase)) for phase in ("train", "eval", "own"))


def test_rules_of_steps_look_ahead() -> None:
    assert Every(10, 3).earliest(Moment(4)) == 13
    assert Every(10, 30).earliest(Moment(4)) == 30
    assert Steps([2, 9]).earliest(Moment(3)) == 9
    assert Steps(range(20, 0, -5)).earliest(Moment(6)) == 10
    assert (Every(10) & Phase("eval")).earliest(Moment(1)) == 10
    assert (Every(10) | Steps([4])).earliest(Moment(1)) == 4
    assert Never().earliest(Moment(1)) == First(1).earliest(Moment(1)) == NO_STEP
    assert When(bool).earliest(Moment(1)) == 1


@given(st.integers(1, 9), st.integers(0, 9), st.integers(0, 200))
def test_rules_combine_as_logic_does(n: int, offset: int, step: int) -> None:
    a, b, moment = Every(n, offset), First(50), Moment(step)
    assert (a & b).live(moment) == (a.live(moment) and b.live(moment))
    assert (a | b).live(moment) == (a.live(moment) or b.live(moment))
    assert (~a).live(moment) != a.live(moment)


def test_keywords_of_a_tap_all_have_to_agree() -> None:
    schedule = schedule_of(every=2, first=7, when=lambda moment: moment.step != 4)
    assert live(schedule) == [0, 2, 6]
    json.dumps(schedule.spec())


@pytest.mark.parametrize("bad", [{"every": 0}, {"every": 1.5}, {"steps": 3}, {"offset": 2}, {"phase": ""}])
def test_what_cannot_be_meant_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(PlanError):
        schedule_of(**bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong", [{"every": True}, {"every": 2.5}, {"first": 0}, {"first": -1}, {"epochs": 3}, {"batches": 0}]
)
def test_a_number_that_makes_no_schedule_is_refused_by_its_name(wrong: dict[str, Any]) -> None:
    (name, value), *_ = wrong.items()
    with pytest.raises(PlanError, match=f"{name}={value!r}"):
        schedule_of(**wrong)


def test_a_schedule_says_whether_the_phase_matters() -> None:
    quiet = (
        Always(),
        Never(),
        Every(3),
        Steps([1]),
        Epochs([1]),
        First(2),
        ~Every(2),
        Every(2) & First(9),
        First(1) | Every(4),
    )
    asking = (
        Phase("eval"),
        When(lambda moment: True),
        ~Phase("train"),
        Every(2) & Phase("eval"),
        Phase("a") | Every(4),
    )
    assert not any(each.by_phase for each in quiet)
    assert all(each.by_phase for each in asking)
    for each in quiet:
        for step in range(12):
            answers = {each.live(Moment(step, 1, 1, phase)) for phase in ("train", "eval", "mine")}
            assert len(answers) == 1


def test_an_option_that_a_tap_does_not_have_is_told_with_those_it_has() -> None:
    with pytest.raises(PlanError, match=r"a tap has no option 'evry': there are every, .*phase, kind"):
        tap("*:output", evry=10)
