"""The loop matrix: in every loop that people write, each number is in its own step and phase.

Each loop runs twice from the same seed: once with hand-written hooks, once watched. Losses are bit-identical, every
recorded number is that of the hooks, and nothing is recorded that they did not see.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from tests.clock.loops import LOOPS, TAPS, Loop, batch, loss_of, mlp, scaler, sgd
from tests.clock.truth import Call, Kept, Truth, check, evaluating
from torch import nn

import torchtap as tt


def watched(loop: Loop, taps: Any, **options: Any) -> tuple[list[float], Kept]:
    torch.manual_seed(7)
    model, kept = mlp(), Kept()
    with tt.watch(model, None, taps, sinks=[kept], strict=True, **options) as watch:
        return loop(model, watch, None), kept


@pytest.mark.parametrize("name", LOOPS)
def test_every_number_is_in_its_step_and_phase_and_the_losses_are_the_same(name: str) -> None:
    loop, taps = LOOPS[name]
    torch.manual_seed(7)
    model = mlp()
    truth = Truth(model)
    by_hand = loop(model, None, truth)
    losses, kept = watched(loop, taps)
    torch.manual_seed(7)
    assert losses == by_hand == loop(mlp(), None, None)
    check(kept, truth.values)
    steps = [(record.step, record.phase) for record in kept.records]
    assert len(steps) == len(set(steps)), "a record for each step and phase"


@pytest.mark.parametrize("name", ["plain", "evaluation after each", "evaluation before", "generation"])
def test_a_schedule_is_judged_for_each_pass(name: str) -> None:
    loop, _ = LOOPS[name]
    _, every = watched(loop, ["*:output", "*:param_grad"])
    whole = every.numbers()
    for options, picks in (
        ({"every": 2}, lambda step, phase: step % 2 == 0),
        ({"phase": "train"}, lambda step, phase: phase == "train"),
        ({"phase": "eval"}, lambda step, phase: phase == "eval"),
        ({"steps": [1], "phase": "eval"}, lambda step, phase: step == 1 and phase == "eval"),
    ):
        _, kept = watched(loop, [tt.tap(["*:output", "*:param_grad"], **options)])
        assert kept.numbers() == {key: v for key, v in whole.items() if picks(key[0], key[1])}, options


def test_two_models_and_two_optimizers_share_a_clock_and_a_run() -> None:
    def loop(watch: Any, truths: Any) -> list[float]:
        torch.manual_seed(3)
        models = {"G": mlp(), "D": nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))}
        generator, judge = models["G"], models["D"]
        if truths is not None:
            truths += [Truth(model, name, calls) for name, model in models.items()]
        optimizers = [
            torch.optim.Adam(judge.parameters(), 1e-2),
            torch.optim.Adam(generator.parameters(), 1e-2),
        ]
        made = watch(models) if watch is not None else None
        if made is not None:
            made.follow(*optimizers)
        losses = []
        for step in range(3):
            for truth in truths or ():
                truth.step = step
            judge.zero_grad()
            loss = judge(torch.randn(4, 3)).mean() - judge(generator(batch()).detach()).mean()
            loss.backward()
            if truths:
                truths[1].gradients()
            optimizers[0].step()
            generator.zero_grad()
            second = judge(generator(batch())).pow(2).mean()
            second.backward()
            if truths:
                truths[0].gradients()
            optimizers[1].step()
            losses += [loss.item(), second.item()]
        if made is not None:
            made.close()
        return losses

    calls: list[Call] = []
    truths, kept = list[Truth](), Kept()
    by_hand = loop(None, truths)
    losses = loop(lambda models: tt.watch(models, None, TAPS, sinks=[kept], strict=True), None)
    assert losses == by_hand == loop(None, None)
    # The generator's pass for the judge is detached: it only runs forward.
    assert [(record.step, record.phase, record.passes) for record in kept.records] == [
        (step, phase, passes) for step in range(3) for phase, passes in (("train", 4), ("forward", 1))
    ]
    check(kept, truths[0].values | truths[1].values)


def test_optimizers_that_step_one_after_the_other_end_one_step() -> None:
    torch.manual_seed(0)
    model, kept = mlp(), Kept()
    halves = [torch.optim.SGD([p], 0.1) for p in model.parameters()]
    with tt.watch(model, None, "*:param_grad", sinks=[kept]) as watch:
        watch.follow(*halves)
        for _ in range(3):
            model.zero_grad()
            loss_of(model, batch()).backward()
            for optimizer in halves:
                optimizer.step()
    assert [record.step for record in kept.records] == [0, 1, 2]
    assert all(record.scalars[0].sites == kept.records[0].scalars[0].sites for record in kept.records)


def test_a_wrapped_optimizer_can_be_followed_and_a_stranger_is_refused() -> None:
    class Wrapped(torch.optim.Optimizer):  # as Accelerate's: a subclass whose constructor is not run
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.optimizer.step()

    model, kept = mlp(), Kept()
    wrapped = Wrapped(sgd(model))
    with tt.watch(model, None, "*:output", sinks=[kept]) as watch:
        with pytest.raises(tt.SessionError, match="follow"):
            watch.follow(nn.Linear(1, 1))
        watch.follow(wrapped)
        for _ in range(3):
            loss_of(model, batch()).backward()
            wrapped.step()
    assert [record.step for record in kept.records] == [0, 1, 2]


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("after", [True, False])
def test_numbers_logged_after_the_update_belong_to_the_step_that_it_ended(every: int, after: bool) -> None:
    torch.manual_seed(0)
    model, kept = mlp(), Kept()
    optimizer, losses = sgd(model), []
    with tt.watch(model, None, [tt.tap("*:output", every=every)], sinks=[kept]) as watch:
        watch.follow(optimizer)
        if not after:
            watch.log(ready=1)
        for _ in range(7):
            loss = loss_of(model, batch())
            if not after:
                watch.log(loss=loss)
            loss.backward()
            optimizer.step()
            if after:
                watch.log(loss=loss.item())
            losses.append(loss.item())
    numbers = kept.numbers()
    assert [numbers[step, "train", ":value.loss"]["value"] for step in range(7)] == pytest.approx(losses)
    steps = [record.step for record in kept.records]
    assert steps == list(range(7)), "one record for each step, whether a tap was live or not"


def test_skipped_steps_are_marked() -> None:
    _, kept = watched(scaler, TAPS)
    assert [(record.step, record.skipped) for record in kept.records] == [(i, i % 2 == 1) for i in range(6)]


@pytest.mark.parametrize("clock", ["set_step", "set_batch"])
def test_an_evaluation_at_the_end_of_an_epoch_does_not_fold_into_its_last_batch(clock: str) -> None:
    model, kept = mlp(), Kept()
    numbers = itertools.count()
    with tt.watch(model, None, "0:output", sinks=[kept]) as watch:
        for epoch in range(2):
            watch.set_epoch(epoch)
            for index in range(3):
                watch.set_batch(index) if clock == "set_batch" else watch.set_step(next(numbers))
                loss_of(model, torch.ones(1, 6))
            with evaluating(model):
                loss_of(model, torch.ones(26, 6))
    assert [(r.step, r.phase, r.scalars[0].values[0, 0]) for r in kept.records] == [
        (0, "train", 8), (1, "train", 8), (2, "train", 8), (2, "eval", 208),
        (3, "train", 8), (4, "train", 8), (5, "train", 8), (5, "eval", 208),
    ]  # fmt: skip
