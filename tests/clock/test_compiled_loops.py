"""The loop matrix for compiled models: the wrapper or the model inside it is watched, the wrapper is called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.clock.loops import TAPS, batch, loss_of, mlp, sgd
from tests.clock.truth import Kept, Truth, check, evaluating
from torch import nn

import torchtap as tt


def loop(called: nn.Module, model: nn.Module, watch: Any, truth: Truth | None) -> list[float]:
    """Accumulation, with an evaluation after each update."""
    losses, optimizer = [], sgd(model)
    if watch is not None:
        watch.follow(optimizer)
    for step in range(3):
        if truth is not None:
            truth.step = step
        for _ in range(3):
            loss = loss_of(called, batch())
            loss.backward()
            losses.append(loss.item())
        if truth is not None:
            truth.gradients()
        optimizer.step()
        optimizer.zero_grad()
        with evaluating(called):
            losses.append(loss_of(called, batch()).item())
    return losses


def compiled(called_before: bool) -> tuple[nn.Module, Any]:
    torch._dynamo.reset()
    torch.manual_seed(5)
    model = mlp()
    called = torch.compile(model, backend="aot_eager")
    if called_before:
        called(torch.ones(4, 6))
    return model, called


def by_hand() -> Truth:
    torch.manual_seed(5)
    model = mlp()
    truth = Truth(model)
    loop(model, model, None, truth)
    return truth


@pytest.mark.parametrize(("watched", "called_before"), [("inner", False), ("outer", False), ("outer", True)])
def test_every_number_of_a_compiled_model_is_in_its_step_and_phase(watched: str, called_before: bool) -> None:
    truth = by_hand()
    model, called = compiled(called_before)
    alone = loop(called, model, None, None)
    model, called = compiled(called_before)
    kept = Kept()
    with tt.watch(called if watched == "outer" else model, None, TAPS, sinks=[kept], strict=True) as watch:
        assert loop(called, model, watch, None) == alone
    check(kept, truth.values)
    assert [record.passes for record in kept.records] == [3, 1] * 3


def test_passes_through_code_that_was_compiled_before_are_told_to_be_unseen_and_nothing_is_misplaced() -> (
    None
):
    truth = by_hand()
    model, called = compiled(called_before=True)
    kept = Kept()
    with pytest.warns(RuntimeWarning, match="no call of the model was seen"):
        with tt.watch(model, None, TAPS, sinks=[kept]) as watch:
            loop(called, model, watch, None)
    recorded = kept.numbers()
    assert {key for key in recorded if key[1] == "train"}
    check(kept, {key: value for key, value in truth.values.items() if key in recorded})


def test_a_step_in_which_no_pass_was_seen_is_told() -> None:
    model = mlp()
    optimizer = sgd(model)
    with (
        pytest.warns(RuntimeWarning, match="no call of the model was seen"),
        tt.watch(model, None, TAPS) as watch,
    ):
        watch.follow(optimizer)
        value = batch()
        for part in model:
            value = part.forward(value)  # past every hook
        value.sum().backward()
        optimizer.step()
