"""Taps that are held to a budget: what they come down to, when, and what they say."""

from __future__ import annotations

import itertools
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchtap as tt
from torchtap.receive.receiver import Receiver

STEP = 2 * 8 * 100 * 4  # bytes of whole tensors of the two outputs of `model` in one step


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(100, 100), nn.ReLU())


def kept(run: tt.Run, site: str = "0:output") -> dict[str, list[int]]:
    """The steps in which each field was kept, statistics as well."""
    steps: dict[str, list[int]] = {}
    for stored in run.tensors(site):
        steps.setdefault(stored.field, []).append(stored.step)
    with suppress(LookupError):
        steps["std"] = run.series(site, "std").steps.tolist()
    return steps


def watched(folder: Path, taps: Any, steps: int = 8, **options: Any) -> tt.Watch:
    net = model()
    with tt.watch(net, folder, taps, **options) as watch:
        for _ in range(steps):
            with watch.step():
                net(torch.randn(8, 100))
    return watch


def test_whole_tensors_become_samples_and_then_statistics(tmp_path: Path) -> None:
    sample = 2 * 64 * (4 + 8)  # values and positions
    budget = tt.Budget(bytes=(2 * STEP + 3 * sample) * 10 // 9)
    with pytest.warns(RuntimeWarning) as told:
        watch = watched(tmp_path, tt.tap(["0:output", "1:output"], tt.Full(), budget=budget), steps=24)
    fields = kept(tt.open(tmp_path))
    assert fields["value"] == [0, 1]
    samples = fields["values"]
    assert samples[0] == 2
    assert fields["std"] == list(range(samples[-1] + 1, 24)), "each step keeps something"
    texts = [str(warning.message) for warning in told]
    assert len(texts) == len(watch.lost) == 2
    assert "'0:output 1:output' has kept 12,800 of its" in texts[0]
    assert texts[0].endswith("after step 1; from here on it keeps samples instead of whole tensors")
    assert texts[1].endswith("it keeps statistics instead of samples")
    assert [event["message"] for event in tt.open(tmp_path).events("lost")] == watch.lost


def test_no_more_bytes_are_handed_on_than_were_allowed(tmp_path: Path) -> None:
    net, sizes = model(), iter([1, 2, 50, 1])
    sink = tt.MemorySink()
    tap = tt.tap("0:output", tt.Full(), budget=tt.Budget(bytes=10_000))
    with (
        pytest.warns(RuntimeWarning, match="let go of 1 tensors"),
        tt.watch(net, None, tap, sinks=[sink]) as w,
    ):
        for size in sizes:
            with w.step():
                net(torch.randn(size, 100))
    handed_on = [item.value.nbytes for record in sink.records for item in record.tensors]
    assert handed_on[:2] == [400, 800]
    assert sum(handed_on) <= 10_000


def test_a_share_of_the_step_is_judged_from_the_third_step_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count()  # each look at the clock is a second later
    for module in (
        "torchtap.session.spending.time.perf_counter",
        "torchtap.receive.receiver.perf_counter",
    ):
        monkeypatch.setattr(module, lambda: float(next(ticks)))
    # A step: begin, two looks around the one fold, end: a third of it is the tap's.
    dear, cheap = (tt.tap("0:output", tt.Full(), budget=tt.Budget(share=share)) for share in (0.3, 0.4))
    with pytest.warns(RuntimeWarning, match=r"took 33.3% of a step's time, over its 30.0%, after step 2"):
        watched(tmp_path / "dear", dear)
    assert kept(tt.open(tmp_path / "dear"))["value"] == [0, 1, 2]
    assert not watched(tmp_path / "cheap", cheap).lost
    assert kept(tt.open(tmp_path / "cheap"))["value"] == list(range(8))


def test_another_tap_on_the_same_value_keeps_it_and_the_budget_pays_nothing(tmp_path: Path) -> None:
    taps = [tt.tap("0:output", tt.Full()), tt.tap("*:output", tt.Full(), budget=tt.Budget(bytes=STEP * 10))]
    watch = watched(tmp_path, taps)
    assert not watch.lost, "one site of the two is paid for: half of STEP in each of eight steps"
    with pytest.warns(RuntimeWarning):
        watched(tmp_path / "b", [taps[0], tt.tap("*:output", tt.Full(), budget=tt.Budget(bytes=STEP))])
    run = tt.open(tmp_path / "b")
    assert kept(run)["value"] == list(range(8))
    assert kept(run, "1:output")["value"] == [0]


def test_a_budget_that_is_spent_is_no_error_even_where_warnings_and_losses_are(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watch = watched(tmp_path, tt.tap("*:output", tt.Full(), budget=tt.Budget(bytes=STEP)), strict=True)
    assert watch.lost


def test_other_reductions_become_statistics_and_a_schedule_is_kept(tmp_path: Path) -> None:
    tap = tt.tap("0:output", tt.Histogram(), every=2, budget=tt.Budget(bytes=2000))
    with pytest.warns(RuntimeWarning, match="it keeps statistics instead of histogram"):
        watched(tmp_path, tap)
    fields = kept(tt.open(tmp_path))
    assert fields["counts"] + fields["std"] == [0, 2, 4, 6]


def test_without_a_budget_nothing_is_timed_and_nothing_added() -> None:
    plan = tt.make_plan(model(), [tt.tap("*:output", tt.Full())])
    assert not plan.fallbacks
    assert plan.asked == plan.taps
    assert not Receiver(plan).accumulator.timed


def test_a_plan_shows_a_budget_and_hides_what_it_falls_back_to() -> None:
    plan = tt.make_plan(model(), [tt.tap("*:output", tt.Full(), budget=tt.Budget(share=0.1))])
    assert "plan: 1 taps on" in str(plan)
    assert "within {'bytes': None, 'share': 0.1}" in str(plan)
    assert plan.fallbacks == {0: (1, 2)}
    assert plan.live(tt.Moment(0)) == {0}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tt.Budget(), "limits nothing"),
        (lambda: tt.Budget(bytes=-1), "whole number of bytes"),
        (lambda: tt.Budget(share=5), "between 0 and 1"),
        (lambda: tt.tap("*", tt.Full(), budget=10), "give a Budget"),  # type: ignore[arg-type]
        (
            lambda: tt.make_plan(model(), [tt.tap("*", budget=tt.Budget(bytes=1))]),
            "the least that a tap keeps",
        ),
    ],
)
def test_a_budget_that_makes_no_sense_is_refused(make: Any, message: str) -> None:
    with pytest.raises(tt.PlanError, match=message):
        make()
