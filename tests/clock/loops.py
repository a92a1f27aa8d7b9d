"""Training loops as people write them, each with its truth beside it: what the tests of the clock run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from tests.clock.truth import Truth, evaluating
from torch import Tensor, nn

import torchtap as tt

Loop = Callable[[nn.Module, "tt.Watch | None", "Truth | None"], list[float]]
TAPS = ["*:output", "*:grad_output", "*:param_grad"]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def batch() -> Tensor:
    return torch.randn(4, 6)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).pow(2).mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def plain(model: nn.Module, watch: Any, truth: Truth | None) -> list[float]:
    losses, optimizer = [], sgd(model)
    if watch is not None:
        assert watch.follow(optimizer) is watch
    for step in range(4):
        if truth is not None:
            truth.step = step
        optimizer.zero_grad()
        loss = loss_of(model, batch())
        loss.backward()
        if truth is not None:
            truth.gradients()
        optimizer.step()
        losses.append(loss.item())
    return losses


def accumulation(model: nn.Module, watch: Any, truth: Truth | None) -> list[float]:
    losses, optimizer = [], sgd(model)
    if watch is not None:
        watch.follow(optimizer)
    for step in range(3):
        if truth is not None:
            truth.step = step
        for _ in range(4):
            loss = loss_of(model, batch()) / 4
            loss.backward()
            losses.append(loss.item())
        if truth is not None:
            truth.gradients()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def by_closure(make: Callable[[nn.Module], torch.optim.Optimizer], keyword: bool) -> Loop:
    def loop(model: nn.Module, watch: Any, truth: Truth | None) -> list[float]:
        losses: list[float] = []
        optimizer = make(model)
        if watch is not None:
            watch.follow(optimizer)
        for step in range(4):
            if truth is not None:
                truth.step = step
            x = batch()

            def closure(x: Tensor = x) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, x)
                loss.backward()
                if truth is not None:
                    truth.gradients()
                losses.append(loss.item())
                return loss

            if keyword:
                optimizer.step(closure=closure)
            else:
                optimizer.step(closure)
        return losses

    return loop


def clipping(clip: Callable[[Any], Any]) -> Loop:
    def loop(model: nn.Module, watch: Any, truth: Truth | None) -> list[float]:
        losses, optimizer = [], sgd(model)
        if watch is not None:
            watch.follow(optimizer)
        for step in range(3):
            if truth is not None:
                truth.step = step
            optimizer.zero_grad()
            loss = 50 * loss_of(model, batch())
            loss.backward()
            if truth is not None:
                truth.gradients("param_grad_unclipped")
                truth.gradients("param_grad_accumulated")
            clip(model.parameters())
            if truth is not None:
                truth.gradients()
            optimizer.step()
            losses.append(loss.item())
        return losses

    return loop


def scaler(model: nn.Module, watch: Any, truth: Truth | None) -> list[float]:
    """Every second update overflows and is left out; each is a step all the same."""
    losses, optimizer = [], sgd(model)
    scale = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    if watch is not None:
        watch.follow(optimizer)
    for step in range(6):
        if truth is not None:
            truth.step = step
        optimizer.zero_grad()
        x = batch()
        loss = loss_of(model, x) * (torch.tensor(float("inf")) if step % 2 else 1.0)
        scale.scale(loss).backward()
        if truth is not None:
            truth.gradients("param_grad_accumulated")
        scale.unscale_(optimizer)
        if truth is not None:
            truth.gradients()
        scale.step(optimizer)
        scale.update()
        losses.append(loss.item())
    return losses


def evaluation(where: str) -> Loop:
    def loop(model: nn.Module, watch: Any, truth: Truth | None) -> list[float]:
        losses, optimizer = [], sgd(model)
        if watch is not None:
            watch.follow(optimizer)

        def evaluate(step: int) -> None:
            if truth is not None:
                truth.step = step
            with evaluating(model):
                losses.extend(loss_of(model, batch()).item() for _ in range(3))

        if where == "before":
            evaluate(0)
        for step in range(4):
            if where == "before each" and step:
                evaluate(step - 1)
            if truth is not None:
                truth.step = step
            optimizer.zero_grad()
            loss = loss_of(model, batch())
            if where == "inside":
                evaluate(step)
            loss.backward()
            if truth is not None:
                truth.gradients()
            optimizer.step()
            losses.append(loss.item())
            if where == "after each" or (where == "some" and step in (1, 3)):
                evaluate(step)
        if where == "after":
            evaluate(3)
        return losses

    return loop


def with_blocks(where: str) -> Loop:
    """The same with ``with watch.step():``."""

    def loop(model: nn.Module, watch: Any, truth: Truth | None) -> list[float]:
        losses, optimizer = [], sgd(model)

        def evaluate(step: int) -> None:
            if truth is not None:
                truth.step = step
            with evaluating(model):
                losses.append(loss_of(model, batch()).item())

        def train(step: int) -> None:
            if truth is not None:
                truth.step = step
            optimizer.zero_grad()
            loss = loss_of(model, batch())
            loss.backward()
            if truth is not None:
                truth.gradients()
            optimizer.step()
            losses.append(loss.item())

        if where == "before":
            evaluate(0)
        for step in range(3):
            if watch is not None:
                with watch.step(step):
                    train(step)
            else:
                train(step)
            if where == "after":
                evaluate(step)
        return losses

    return loop


def ema(model: nn.Module, watch: Any, truth: Truth | None) -> list[float]:
    """A copy of the model that is averaged and evaluated: it is not the model that is watched."""
    losses, optimizer, copied = [], sgd(model), None
    if watch is not None:
        watch.follow(optimizer)
    for step in range(3):
        if truth is not None:
            truth.step = step
        loss = loss_of(model, batch())
        loss.backward()
        if truth is not None:
            truth.gradients()
        optimizer.step()
        optimizer.zero_grad()
        if truth is not None:
            truth.step = None  # its hooks are in the copy too, and must not hear it
        copied = copy.deepcopy(model)
        losses += [loss.item(), loss_of(copied, torch.ones(4, 6)).item()]
    return losses


def gradient_penalty(model: nn.Module, watch: Any, truth: Truth | None) -> list[float]:
    losses, optimizer = [], sgd(model)
    if watch is not None:
        watch.follow(optimizer)
    for step in range(3):
        if truth is not None:
            truth.step = step
        optimizer.zero_grad()
        x = batch().requires_grad_()
        out = model(x)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = out.pow(2).mean() + (grad.norm(dim=1) - 1).pow(2).mean()
        loss.backward()
        if truth is not None:
            truth.gradients()
        optimizer.step()
        losses.append(loss.item())
    return losses


def reinforcement(model: nn.Module, watch: Any, truth: Truth | None) -> list[float]:
    """Several forwards lead to one backward."""
    losses, optimizer = [], sgd(model)
    if watch is not None:
        watch.follow(optimizer)
    for step in range(3):
        if truth is not None:
            truth.step = step
        optimizer.zero_grad()
        loss = torch.stack([loss_of(model, batch()) for _ in range(5)]).sum()
        loss.backward()
        if truth is not None:
            truth.gradients()
        optimizer.step()
        losses.append(loss.item())
    return losses


def generation(model: nn.Module, watch: Any, truth: Truth | None) -> list[float]:
    """Passes without gradients inside a training step, the model being in training mode."""
    losses, optimizer = [], sgd(model)
    if watch is not None:
        watch.follow(optimizer)
    for step in range(3):
        if truth is not None:
            truth.step = step
        loss = loss_of(model, batch())
        with torch.no_grad():
            model(batch())
        loss.backward()
        with torch.no_grad():
            model(batch())
        if truth is not None:
            truth.gradients()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def in_evaluation_mode(model: nn.Module, watch: Any, truth: Truth | None) -> list[float]:
    """Fine-tuning with a model in evaluation mode: a backward runs through its passes, so they are training."""
    model.eval()
    losses, optimizer = [], sgd(model)
    if watch is not None:
        watch.follow(optimizer)
    for step in range(3):
        if truth is not None:
            truth.step = step
        optimizer.zero_grad()
        loss = loss_of(model, batch())
        loss.backward()
        if truth is not None:
            truth.gradients()
        optimizer.step()
        losses.append(loss.item())
    return losses


def late_optimizer(model: nn.Module, watch: Any, truth: Truth | None) -> list[float]:
    """The optimizer comes after a pass without a backward, and gets a parameter group later."""
    losses = []
    losses.append(loss_of(model, batch()).item())
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters[:2], 0.1)
    if watch is not None:
        watch.follow(optimizer)
    for step in range(3):
        if truth is not None:
            truth.step = step
        if step == 1:
            optimizer.add_param_group({"params": parameters[2:]})
        model.zero_grad()
        loss = loss_of(model, batch())
        loss.backward()
        if truth is not None:
            truth.gradients()
        optimizer.step()
        losses.append(loss.item())
    return losses


def named_phases(model: nn.Module, watch: Any, truth: Truth | None) -> list[float]:
    losses, optimizer = [], sgd(model)
    if watch is not None:
        watch.follow(optimizer)
    for step in range(3):
        if truth is not None:
            truth.step, truth.named = step, None
        loss = loss_of(model, batch())
        loss.backward()
        if truth is not None:
            truth.gradients()
        optimizer.step()
        optimizer.zero_grad()
        for name in ("valid", "test"):
            if truth is not None:
                truth.named = name
            if watch is not None:
                with watch.phase(name), evaluating(model):
                    losses.append(loss_of(model, batch()).item())
            else:
                with evaluating(model):
                    losses.append(loss_of(model, batch()).item())
        losses.append(loss.item())
    return losses


LOOPS: dict[str, tuple[Loop, list[str]]] = {
    "plain": (plain, TAPS),
    "accumulation": (accumulation, TAPS),
    "closure": (by_closure(sgd, False), TAPS),
    "closure by keyword": (by_closure(lambda m: torch.optim.AdamW(m.parameters(), 1e-2), True), TAPS),
    "LBFGS": (by_closure(lambda m: torch.optim.LBFGS(m.parameters(), max_iter=4), False), TAPS),
    "clipping by norm": (
        clipping(lambda p: torch.nn.utils.clip_grad_norm_(p, 0.1)),
        [*TAPS, "*:param_grad_unclipped", "*:param_grad_accumulated"],
    ),
    "clipping by value": (
        clipping(lambda p: torch.nn.utils.clip_grad_value_(p, 0.01)),
        [*TAPS, "*:param_grad_unclipped", "*:param_grad_accumulated"],
    ),
    "scaler": (scaler, [*TAPS, "*:param_grad_accumulated"]),
    "evaluation before": (evaluation("before"), TAPS),
    "evaluation before each": (evaluation("before each"), TAPS),
    "evaluation inside": (evaluation("inside"), TAPS),
    "evaluation after": (evaluation("after"), TAPS),
    "evaluation after each": (evaluation("after each"), TAPS),
    "evaluation after some": (evaluation("some"), TAPS),
    "blocks": (with_blocks("never"), TAPS),
    "blocks, evaluation before": (with_blocks("before"), TAPS),
    "blocks, evaluation after": (with_blocks("after"), TAPS),
    "EMA copy": (ema, TAPS),
    "gradient penalty": (gradient_penalty, TAPS),
    "reinforcement": (reinforcement, TAPS),
    "generation": (generation, TAPS),
    "in evaluation mode": (in_evaluation_mode, TAPS),
    "late optimizer": (late_optimizer, TAPS),
    "named phases": (named_phases, TAPS),
}
