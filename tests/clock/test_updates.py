"""Updates of models too large for a second copy: every way to measure them, against plain copies."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.clock.truth import Kept
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import torchtap as tt
from torchtap.receive import updates

O = torch.optim  # noqa: E741
EXACT = [
    (O.SGD, {"lr": 0.1}),
    (O.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (O.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.2, "maximize": True}),
    (O.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": True}),
    (O.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    (O.Adam, {}),
    (O.Adam, {"amsgrad": True, "maximize": True, "weight_decay": 0.1}),
    (O.Adam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    (O.AdamW, {}),
    (O.AdamW, {"foreach": True}),
    (O.AdamW, {"lr": torch.tensor(0.01), "fused": True, "amsgrad": True}),
    (O.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    (O.RAdam, {"weight_decay": 0.1}),
    (O.Adamax, {}),
    (O.Adagrad, {"lr_decay": 0.1, "weight_decay": 0.1}),
    (O.Adagrad, {"fused": True}),
    (O.Adadelta, {}),
    (O.RMSprop, {"centered": True, "momentum": 0.5}),
    (O.Rprop, {}),
    (O.ASGD, {"weight_decay": 0.1}),
]
FACTORED: list[tuple[Any, dict[str, Any]]] = [
    (O.Adafactor, {}),
    (O.Adafactor, {"weight_decay": 0.1, "maximize": True, "foreach": False}),
]
COUNTS = ("count", "nans", "infs")
MOMENTS = ("mean", "std", "min", "max", "absmax", "l1", "l2", "rms")


@pytest.fixture(autouse=True)
def no_room_for_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave room for samples of 256 elements, and compute in blocks of 1,024."""
    monkeypatch.setattr(updates, "allowance", lambda nbytes: 1 << 10)
    monkeypatch.setattr(updates, "_BLOCK", 1024)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # in bfloat16 the last elements of each thread's range are rounded otherwise
    yield
    torch.set_num_threads(threads)


class Odd(nn.Module):
    """Parameters of several layouts and sizes, one of them never used."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(3, 1900, dtype=dtype))
        self.turned = nn.Parameter(torch.randn(60, 70, dtype=dtype).t())
        self.kernel = nn.Parameter(torch.randn(8, 7, 5, 5, dtype=dtype).to(memory_format=torch.channels_last))
        self.small = nn.Parameter(torch.randn(3, dtype=dtype))
        self.unused = nn.Parameter(torch.randn(40, 40, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        half = self.wide[:, ::2]  # the others have a gradient of zero
        return (
            (half * x).sum()
            + (self.turned * x).pow(2).sum()
            + (self.kernel * x).pow(3).sum()
            + self.small.sum()
        )


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, watch: Any, steps: int = 4
) -> list[dict[str, tuple[Tensor, Tensor]]]:
    """Train, and return each parameter's value before each step and its change."""
    watch.follow(optimizer)
    seen = []
    dtype = next(model.parameters()).dtype
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.tensor(1.0 + 0.3 * step, dtype=dtype)).backward()
        before = {name: each.detach().clone() for name, each in model.named_parameters()}
        optimizer.step()
        seen.append(
            {name: (before[name], each.detach() - before[name]) for name, each in model.named_parameters()}
        )
    return seen


def expected(change: Tensor) -> dict[str, float]:
    values = change.double().flatten()
    count, nans, infs = values.numel(), int(values.isnan().sum()), int(values.isinf().sum())
    zeros = (values == 0).double().mean().item()
    values = values[values.isfinite()]  # of which torchtap's moments are
    return {
        "count": count,
        "nans": nans,
        "infs": infs,
        "mean": values.mean().item(),
        "std": values.std().item(),
        "min": values.min().item(),
        "max": values.max().item(),
        "absmax": values.abs().max().item(),
        "l1": values.abs().sum().item(),
        "l2": values.norm().item(),
        "rms": values.norm().item() / math.sqrt(values.numel()),
        "zeros": zeros,
    }


def check(kept: Kept, seen: list[dict[str, tuple[Tensor, Tensor]]], rel: float, zeros: float = 0.0) -> None:
    numbers = kept.numbers()
    for step, of_parameters in enumerate(seen):
        for name, (before, change) in of_parameters.items():
            recorded = numbers[step, "train", f":update.{name}"]
            true = expected(change)
            assert [recorded[each] for each in COUNTS] == [true[each] for each in COUNTS]
            scale = true["absmax"] or 1.0
            for statistic in MOMENTS:
                assert recorded[statistic] == pytest.approx(true[statistic], rel=rel, abs=rel * scale), (
                    statistic
                )
            assert recorded["zeros"] == pytest.approx(true["zeros"], abs=zeros)
            ratio = (change.double().norm() / before.double().norm()).item()
            assert recorded["ratio"] == pytest.approx(ratio, rel=max(rel, 1e-6), nan_ok=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("kind", "options"), EXACT, ids=lambda each: getattr(each, "__name__", str(each)))
def test_a_rehearsed_update_has_the_statistics_of_the_update(
    kind: Callable[..., Any], options: dict[str, Any], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model, kept = Odd(dtype), Kept()
    optimizer = kind(model.parameters(), **options)
    with tt.watch(model, None, ":update", sinks=[kept], strict=True) as watch:
        seen = train(model, optimizer, watch)
    check(kept, seen, rel=1e-9 if dtype is torch.float64 else 1e-6)


@pytest.mark.parametrize(
    ("dtype", "rel", "zeros"),
    [(torch.float32, 1e-4, 1e-3), (torch.float64, 1e-9, 0.0), (torch.bfloat16, 0.05, 0.02)],
    ids=str,
)
@pytest.mark.parametrize(("kind", "options"), FACTORED, ids=lambda each: getattr(each, "__name__", str(each)))
def test_adafactor_is_rehearsed_within_the_rounding_of_its_norms(
    kind: Callable[..., Any], options: dict[str, Any], dtype: torch.dtype, rel: float, zeros: float
) -> None:
    torch.manual_seed(0)
    model, kept = Odd(dtype), Kept()
    optimizer = kind(model.parameters(), **options)
    with tt.watch(model, None, ":update", sinks=[kept], strict=True) as watch:
        seen = train(model, optimizer, watch)
    check(kept, seen, rel=rel, zeros=zeros)


@pytest.mark.parametrize(
    ("kind", "options"), [*EXACT, *FACTORED], ids=lambda each: getattr(each, "__name__", "")
)
def test_a_rehearsal_leaves_parameters_state_and_random_numbers_alone(
    kind: Callable[..., Any], options: dict[str, Any]
) -> None:
    def outcome(taps: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = Odd(torch.float32)
        optimizer = kind(model.parameters(), **options)
        with tt.watch(model, None, taps) as watch:
            train(model, optimizer, watch)
        state = [
            value for each in optimizer.state.values() for value in each.values() if isinstance(value, Tensor)
        ]
        return [each.detach().clone() for each in (*model.parameters(), *state, torch.rand(3))]

    for watched, plain in zip(outcome(":update"), outcome(":param"), strict=True):
        assert torch.equal(watched, plain)


class Lion(torch.optim.Optimizer):
    """An optimizer that torch does not have."""

    def __init__(self, parameters: Any, lr: float = 1e-2) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad.sign(), alpha=-group["lr"])


class Doubled(torch.optim.SGD):
    """A subclass whose step is not that of its base."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        super().step()
        return super().step()


def _clamped(parameters: Any) -> torch.optim.Optimizer:
    """An optimizer that clamps weights in a hook."""
    optimizer = torch.optim.SGD(parameters, 1e-3)

    def clamp(optimizer: Any, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            for each in optimizer.param_groups[0]["params"]:
                each.clamp_(-1, 1)

    optimizer.register_step_post_hook(clamp)
    return optimizer


@pytest.mark.parametrize(
    "kind", [Lion, lambda each: Doubled(each, 1e-3), _clamped], ids=["lion", "doubled", "hook"]
)
def test_the_update_of_another_optimizer_is_estimated_from_a_sample(kind: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, kept = Odd(torch.float32), Kept()
    optimizer = kind(model.parameters())
    with tt.watch(model, tmp_path, ":update", sinks=[kept], strict=True) as watch:
        seen = train(model, optimizer, watch)
    numbers = kept.numbers()
    for step, of_parameters in enumerate(seen):
        for name, (before, change) in of_parameters.items():
            recorded, true = numbers[step, "train", f":update.{name}"], expected(change)
            exact = change.numel() <= 256
            assert recorded["count"] == true["count"]
            for statistic in ("l1", "l2", "rms"):
                # five standard errors of a sample of 256, for values with at most five times the kurtosis of a normal
                assert recorded[statistic] == pytest.approx(true[statistic], rel=1e-6 if exact else 0.5)
            assert recorded["zeros"] == pytest.approx(true["zeros"], abs=0.0 if exact else 0.16)
            ratio = (change.double().norm() / before.double().norm()).item()
            assert recorded["ratio"] == pytest.approx(ratio, rel=1e-5 if exact else 0.5)
            if not change.any():
                assert recorded["zeros"] == 1
                assert recorded["ratio"] == 0
    sites = {each["name"]: each for each in tt.open(tmp_path).events("sites")[-1]["sites"]}
    assert sites[":update.wide"]["how"] == "estimated from 256 of 5,700 elements"
    assert "how" not in sites[":update.small"]


def test_a_step_that_does_something_else_is_found_out_and_sampled_from_then_on() -> None:
    torch.manual_seed(0)
    model, kept = Odd(torch.float32), Kept()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with tt.watch(model, None, ":update", sinks=[kept]) as watch:
            handle = register_optimizer_step_pre_hook(_halve_gradients)
            try:
                seen = train(model, optimizer, watch)
            finally:
                handle.remove()
            assert any("did something else" in each for each in watch.lost)
    numbers = kept.numbers()
    assert "rms" not in numbers.get((0, "train", ":update.wide"), {})
    for step in (1, 2, 3):
        _, change = seen[step]["wide"]
        recorded = numbers[step, "train", ":update.wide"]
        assert recorded["rms"] == pytest.approx(expected(change)["rms"], rel=0.5)


def _halve_gradients(optimizer: Any, args: Any, kwargs: Any) -> None:
    with torch.no_grad():
        for each in optimizer.param_groups[0]["params"]:
            if each.grad is not None:
                each.grad.mul_(0.5)


def test_several_updates_in_one_step_are_one_change_from_the_second_live_step_on() -> None:
    torch.manual_seed(0)
    model, kept = Odd(torch.float32), Kept()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    changes = []
    with tt.watch(model, None, ":update", sinks=[kept]) as watch:
        for _ in range(3):
            with watch.step():
                before = model.wide.detach().clone()
                for _ in range(2):
                    optimizer.zero_grad()
                    model(torch.tensor(1.0)).backward()
                    optimizer.step()
                changes.append(model.wide.detach() - before)
    numbers = kept.numbers()
    assert "rms" not in numbers.get((0, "train", ":update.wide"), {})
    for step in (1, 2):
        recorded = numbers[step, "train", ":update.wide"]
        assert recorded["rms"] == pytest.approx(expected(changes[step])["rms"], rel=0.5)


def test_lbfgs_is_sampled_over_all_its_closure_calls() -> None:
    torch.manual_seed(0)
    model, kept = Odd(torch.float32), Kept()
    optimizer = torch.optim.LBFGS([model.wide, model.small], 1e-3, max_iter=3)
    with tt.watch(model, None, ":update.wide", sinks=[kept], strict=True) as watch:
        watch.follow(optimizer)
        before = model.wide.detach().clone()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(torch.tensor(1.0))
            loss.backward()
            return loss

        optimizer.step(closure)
        change = model.wide.detach() - before
    recorded = kept.numbers()[0, "train", ":update.wide"]
    assert recorded["rms"] == pytest.approx(expected(change)["rms"], rel=0.5)


def test_sparse_gradients_are_sampled() -> None:
    torch.manual_seed(0)
    model, kept = nn.Embedding(100, 20, sparse=True), Kept()
    optimizer = torch.optim.SparseAdam(model.parameters(), 0.1)
    with tt.watch(model, None, ":update", sinks=[kept], strict=True) as watch:
        watch.follow(optimizer)
        model(torch.arange(50)).sum().backward()
        optimizer.step()
    recorded = kept.numbers()[0, "train", ":update.weight"]
    assert recorded["count"] == 2000
    assert recorded["zeros"] == pytest.approx(0.5, abs=0.16)


def test_each_group_is_rehearsed_with_its_own_settings() -> None:
    torch.manual_seed(0)
    model, kept = Odd(torch.float32), Kept()
    groups = [
        {"params": [model.wide], "lr": 0.5},
        {"params": [model.turned, model.kernel, model.small, model.unused], "momentum": 0.9},
    ]
    optimizer = torch.optim.SGD(groups, 0.1)
    with tt.watch(model, None, ":update", sinks=[kept], strict=True) as watch:
        seen = train(model, optimizer, watch)
    check(kept, seen, rel=1e-6)


def test_a_histogram_is_folded_in_blocks() -> None:
    torch.manual_seed(0)
    model = Odd(torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    kept = Kept()
    with tt.watch(
        model, None, tt.tap(":update.wide", tt.Histogram(10, range=(-1.0, 1.0))), sinks=[kept]
    ) as watch:
        seen = train(model, optimizer, watch, steps=1)
    counts = kept.records[0].tensors[0].value
    assert counts.sum() == 5700
    low = int((seen[0]["wide"][1] < 0).sum())
    assert int(counts[:5].sum()) == low


def test_a_whole_update_is_kept_while_there_is_room_and_reported_when_there_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    for room, fits in ((1 << 10, False), (200_000, True)):
        monkeypatch.setattr(updates, "allowance", lambda nbytes, room=room: room)
        monkeypatch.setattr(updates, "SAMPLE", 256)
        model, kept = Odd(torch.float32), Kept()
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with tt.watch(model, None, tt.tap(":update", tt.Full()), sinks=[kept]) as watch:
                seen = train(model, optimizer, watch, steps=1)
        found = {each.site: each.value for each in kept.records[0].tensors}
        assert torch.equal(found[":update.small"], seen[0]["small"][1])
        for name in ("wide", "turned", "kernel"):
            assert (f":update.{name}" in found) == fits
            if fits:
                assert torch.equal(found[f":update.{name}"], seen[0][name][1])
        assert any("in one piece" in each for each in watch.lost) != fits


def test_a_tap_may_be_given_more_memory() -> None:
    torch.manual_seed(0)
    model, kept = Odd(torch.float32), Kept()
    tap = tt.tap(":update", tt.Full(), budget=tt.Budget(memory=1 << 20))
    optimizer = Lion(model.parameters())
    with tt.watch(model, None, tap, sinks=[kept], strict=True) as watch:
        seen = train(model, optimizer, watch, steps=1)
    assert json.loads(json.dumps(watch.plan.asked[0].spec()))["budget"]["memory"] == 1 << 20
    found = {each.site: each.value for each in kept.records[0].tensors}
    for name, (_, change) in seen[0].items():
        assert torch.equal(found[f":update.{name}"], change)


@pytest.mark.parametrize("count", [1, 2, 255, 256, 257, 1000, 4096, 65_537, 1 << 18])
def test_a_sample_has_distinct_positions_that_are_spread_evenly(count: int) -> None:
    found = updates.sample(torch.arange(count), 256)
    assert len(found) == min(count, 256)
    assert len(set(found.tolist())) == len(found)
    if count > 2560:
        quarters = torch.bucketize(found, torch.tensor([count // 4, count // 2, 3 * count // 4]))
        assert (torch.bincount(quarters, minlength=4) - 64).abs().max() <= 4
        assert torch.equal(updates.sample(torch.arange(count).view(-1, 1).t(), 256), found)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 1900), (2, 3, 4), (1, 1, 5000), (0, 4), (5000, 2, 1)])
def test_blocks_cover_a_shape_once(shape: tuple[int, ...]) -> None:
    seen = torch.zeros(shape, dtype=torch.int64)
    for index in updates.blocks_of(shape, 1000):
        assert seen[index].numel() <= 1000
        seen[index] += 1
    assert (seen == 1).all()
