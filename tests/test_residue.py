"""Closing a session leaves nothing behind: random models, taps, and ways to open and close."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import torch
from tests.residue import Residue
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import torchtap as tt

CASES = int(os.environ.get("TORCHTAP_RESIDUE_CASES", "100"))


class Positions(nn.Module):
    """A parameter is given to a module: a leaf tensor enters it."""

    def __init__(self) -> None:
        super().__init__()
        self.pos = nn.Parameter(torch.randn(1, 8))
        self.drop, self.out = nn.Dropout(0.1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.out(x + self.drop(self.pos))
        return mixed


class Shared(nn.Module):
    """One layer is called twice, and the output is a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        once = self.layer(x)
        return {"once": once, "twice": self.norm(self.layer(once))}


MODELS: list[Callable[[], nn.Module]] = [
    lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 4)),
    Positions,
    Shared,
    lambda: nn.LSTM(8, 6, batch_first=True),
    lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
    lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 4)),
]
KINDS = (
    "output",
    "input",
    "grad_output",
    "grad_input",
    "param",
    "param_grad",
    "update",
    "optim_state",
)
REDUCTIONS: list[Callable[[], Any]] = [tt.Stats, tt.Full, tt.Histogram, tt.Sample]


class Stopped(Exception):
    """The user's code raised."""


def _first(tree: Any) -> Tensor:
    if isinstance(tree, dict):
        return torch.cat([each.flatten() for each in tree.values()])
    return tree if isinstance(tree, Tensor) else _first(tree[0])


def _taps(draw: random.Random) -> list[tt.Tap]:
    chosen = draw.sample(KINDS, draw.randint(1, 4))
    return [tt.tap(f"*:{kind}", draw.choice(REDUCTIONS)(), every=draw.choice([1, 1, 2])) for kind in chosen]


def _step(model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer, plan: list[str]) -> None:
    for what in plan:
        if what == "eval":
            model.eval()
            with torch.no_grad():
                model(x)
            model.train()
        elif what == "forward":
            model(x)
        elif what == "raise":
            raise Stopped
        else:
            _first(model(x)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _open(draw: random.Random, stack: ExitStack, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Open one session, closed with the stack or by its own close; return what begins one of its steps."""
    way = draw.choice(["capture", "steps", "follow", "doctor"])
    if way == "capture":
        stack.enter_context(tt.capture(model, [f"*:{kind}" for kind in draw.sample(KINDS[:4], 2)]))
        return None
    if way == "doctor":
        stack.enter_context(tt.doctor(model, optimizer, quiet=True))
        return None
    watch = tt.watch(model, None, _taps(draw))
    stack.callback(watch.close)
    if way == "follow":
        watch.follow(optimizer)
        return None
    return watch


def _run(seed: int, watched: bool) -> tuple[list[str], list[Tensor], Tensor]:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    model = draw.choice(MODELS)()
    shape = (2, 3, 8) if isinstance(model, (nn.LSTM, nn.TransformerEncoderLayer)) else (4, 8)
    x = torch.randn(shape, requires_grad=draw.random() < 0.5)
    optimizer = draw.choice([torch.optim.SGD, torch.optim.AdamW])(model.parameters(), lr=1e-3)
    steps = [
        draw.choices(["backward", "forward", "eval", "raise"], [8, 2, 2, 1], k=draw.randint(1, 3))
        for _ in range(3)
    ]
    residue = Residue(model, x)
    with ExitStack() as stack:
        opened = [_open(draw, stack, model, optimizer) for _ in range(draw.randint(1, 2))] if watched else []
        for plan in steps:
            with suppress(Stopped), ExitStack() as blocks:
                for watch in opened:
                    if watch is not None:
                        blocks.enter_context(watch.step())
                _step(model, x, optimizer, plan)
    model.zero_grad()
    return residue.left, [each.detach().clone() for each in model.parameters()], torch.get_rng_state()


@pytest.mark.parametrize("first", range(0, CASES, 20))
def test_nothing_remains_after_any_session(first: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(first, min(first + 20, CASES)):
            left, parameters, state = _run(seed, watched=True)
            _, plain, plain_state = _run(seed, watched=False)
            assert left == [], f"case {seed}"
            assert torch.equal(state, plain_state), f"case {seed}"
            for one, other in zip(parameters, plain, strict=True):
                assert torch.equal(one, other), f"case {seed}"


def test_the_checker_finds_what_is_left_on_purpose() -> None:
    model = Positions()
    x = torch.randn(2, 8, requires_grad=True)
    residue = Residue(model, x)
    assert residue.left == []
    handles = [
        model.drop.register_forward_hook(lambda *_: None),
        model.pos.register_hook(lambda gradient: None),
        x.register_hook(lambda gradient: None),
        register_optimizer_step_post_hook(lambda *_: None),
    ]
    model.out.spare = 1  # type: ignore[assignment]
    left = residue.left
    assert {"module drop", "module out", "hooks of pos", "hooks of tensor 0"} <= set(left)
    assert any("optimizer" in each for each in left)
    for handle in handles:
        handle.remove()


def test_a_leaf_that_enters_a_module_has_one_gradient_a_micro_batch_and_no_hook_afterwards() -> None:
    model, seen = Positions(), []
    x = torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    residue = Residue(model)
    with tt.watch(model, None, "drop:grad_input", sinks=[sink := _Kept()]) as watch:
        for _ in range(3):
            with watch.step():
                total = torch.zeros(8)
                for _ in range(2):
                    model.pos.grad = None
                    model(x).sum().backward()
                    total += model.pos.grad.flatten()  # type: ignore[union-attr]
                seen.append(total)
                optimizer.step()
            assert not model.pos._backward_hooks
    assert residue.left == []
    for step, total in enumerate(seen):
        assert sink.numbers[step]["count"] == 16
        assert sink.numbers[step]["mean"] == pytest.approx(total.sum().item() / 16, rel=1e-5)


class _Kept:
    name = "kept"

    def __init__(self) -> None:
        self.numbers: list[dict[str, float]] = []

    def write(self, record: Any) -> None:
        block = record.scalars[0]
        self.numbers.append(dict(zip(block.statistics, block.values[0].tolist(), strict=True)))

    def close(self) -> None:
        pass
