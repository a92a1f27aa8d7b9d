"""A watch records the same values with and without native code, whatever the training does."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import torchtap as tt
from torchtap.reduce import kernel

KINDS = ("output", "grad_output", "param", "param_grad")
EVERYTHING = [tt.tap(f"*:{kind}") for kind in KINDS]
Records = list[dict[str, list[float]]]


class Wide(nn.Module):
    """Views of three dimensions, one of them changed in place; a container; a module that is called twice."""

    def __init__(self, *, repeats: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
        self.twice = nn.LayerNorm(8)
        self.unused = nn.Linear(8, 2)
        self.last = nn.Linear(8, 3)
        self.repeats = repeats

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu_(self.first(x))
        x = self.twice(x)
        x = checkpoint(self.second, x, use_reentrant=False) if self.repeats else self.second(x)
        self.unused(x)
        return self.last(self.twice(x))


class CutOff(nn.Module):
    """Takes its child's output out of the graph and returns the very same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)
        self.last = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.inner(x))
        return y.detach_().requires_grad_()


def once(model: nn.Module, x: Tensor) -> None:
    model(x).square().mean().backward()


def in_two_parts(model: nn.Module, x: Tensor) -> None:
    once(model, x[:2])
    once(model, x[2:])


def twice_through_one_graph(model: nn.Module, x: Tensor) -> None:
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def with_a_second_derivative(model: nn.Module, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
    slope.square().sum().backward()


def with_an_evaluation(model: nn.Module, x: Tensor) -> None:
    loss = model(x).square().mean()
    model.eval()
    with torch.no_grad():
        model(x[:1])
    model.train()
    loss.backward()


def with_a_part_alone(model: nn.Module, x: Tensor) -> None:
    once(model, x)
    for part in model.children():
        if isinstance(part, nn.Linear) and part.in_features == x.shape[-1]:
            part(x).sum().backward()


def records_of(model: nn.Module, train: Callable[[nn.Module, Tensor], None], taps: list[tt.Tap]) -> Records:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = tt.MemorySink()
    with tt.watch(model, None, taps, sinks=[kept]) as watch:
        for _ in range(4):
            with watch.step():
                train(model, torch.randn(4, 5, 6))
                optimizer.step()
                optimizer.zero_grad()
    return [
        {
            f"{record.phase}/{site}": block.values[row].tolist()
            for block in record.scalars
            for row, site in enumerate(block.sites)
            if block.present is None or block.present[row]
        }
        for record in kept.records
    ]


def fresh(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "wide": Wide,
    "checkpointed": lambda: Wide(repeats=True),
    "cut off": CutOff,
    "containers": lambda: nn.Sequential(
        nn.Sequential(nn.Sequential(nn.Linear(6, 6)), nn.ReLU()), nn.Linear(6, 2)
    ),
    "deep containers": lambda: nn.Sequential(nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(6, 3))))),
}
TRAININGS = (once, in_two_parts, twice_through_one_graph, with_an_evaluation, with_a_part_alone)


def assert_same(found: Records, expected: Records) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert list(ours) == list(theirs)
        for site in theirs:
            np.testing.assert_allclose(ours[site], theirs[site], rtol=2e-5, atol=1e-7, err_msg=site)


def without_native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "native", None)
    monkeypatch.setattr(kernel, "make_taker", lambda: None)


@pytest.mark.filterwarnings("ignore:torchtap")
@pytest.mark.parametrize("train", TRAININGS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("name", sorted(MODELS))
def test_native_code_and_torch_record_the_same(
    name: str, train: Callable[[nn.Module, Tensor], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    recordings = (EVERYTHING, EVERYTHING[:1], EVERYTHING[1:2])
    found = [records_of(fresh(MODELS[name]), train, taps) for taps in recordings]
    without_native(monkeypatch)
    for taps, by_native in zip(recordings, found, strict=True):
        assert_same(by_native, records_of(fresh(MODELS[name]), train, taps))


@pytest.mark.filterwarnings("ignore:torchtap")
def test_a_second_derivative_is_recorded_by_both(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))

    found = records_of(fresh(make), with_a_second_derivative, EVERYTHING)
    without_native(monkeypatch)
    assert_same(found, records_of(fresh(make), with_a_second_derivative, EVERYTHING))


@pytest.mark.parametrize("name", ["wide", "containers", "cut off"])
def test_outputs_and_gradients_are_those_of_plain_hooks(name: str) -> None:
    model, x = fresh(MODELS[name]), torch.randn(4, 5, 6)
    expected: dict[str, float] = {}
    calls: dict[str, int] = {}

    def hook(path: str, output: Tensor) -> None:
        number = calls[path] = calls.get(path, -1) + 1
        site = f"{path}:output" + (f"#{number}" if number else "")
        expected[site] = output.detach().double().abs().sum().item()

    handles = [
        module.register_forward_hook(lambda _, __, output, path=path: hook(path, output))
        for path, module in model.named_modules()
    ]
    with tt.capture(model, "*:output", "*:grad_output", keep=tt.Stats()) as seen:
        once(model, x)
    for handle in handles:
        handle.remove()
    found = {site: numbers["l1"] for site, numbers in seen.items() if ":output" in site}
    assert found == pytest.approx(expected, rel=1e-6)
    # The model's own gradients follow from those of its outputs, by hand for a linear layer.
    if name == "containers":
        grad = seen["1:grad_output"]["mean"] * 40 / model[1].bias.numel()
        assert model[1].bias.grad.mean().item() == pytest.approx(grad, rel=1e-5)


@pytest.mark.filterwarnings("ignore:torchtap")
def test_a_backward_after_its_step_is_in_no_record_and_is_counted() -> None:
    model = fresh(MODELS["containers"])
    kept = tt.MemorySink()
    losses = []
    with tt.watch(model, None, ["*:grad_output"], sinks=[kept]) as watch:
        for _ in range(3):
            with watch.step():
                once(model, torch.randn(4, 6))
        with watch.step():
            losses.append(model(torch.randn(4, 6)).sum())
            once(model, torch.zeros(4, 6))
        before = kept.series("1:grad_output", "l1").values[-1]
        with watch.step():
            losses.pop().backward()
            once(model, torch.zeros(4, 6))
    late = kept.series("1:grad_output", "l1").values
    assert late[-1] == before
    assert kept.series("1:grad_output", "count").values[-1] == 8  # of the step's own backward alone


def test_calls_of_another_thread_are_not_recorded() -> None:
    model = fresh(MODELS["containers"])
    kept = tt.MemorySink()
    with tt.watch(model, None, ["*:output"], sinks=[kept]) as watch:
        for _ in range(3):
            with watch.step():
                model(torch.ones(4, 6))
                other = threading.Thread(target=lambda: model(torch.ones(100, 6)))
                other.start()
                other.join()
    assert kept.series("1:output", "count").values.tolist() == [8, 8, 8]


def test_large_values_are_recorded_at_every_step() -> None:
    model = nn.Sequential(nn.Linear(6, 70_000))
    kept = tt.MemorySink()
    with tt.watch(model, None, EVERYTHING, sinks=[kept]) as watch:
        for _ in range(3):
            with watch.step():
                once(model, torch.ones(4, 6))
    for site in ("0:output", "0:grad_output", ":output"):
        assert kept.series(site, "count").values.tolist() == [280_000] * 3


_WITHOUT = """
import sys
sys.modules["torchtap.reduce._native"] = None
import torch
from tests.taps.test_trainings import EVERYTHING, MODELS, fresh, once, records_of
from torchtap.reduce import kernel
assert kernel.native is None
for step in records_of(fresh(MODELS["containers"]), once, EVERYTHING):
    print(sorted((site, numbers[0]) for site, numbers in step.items()))
"""


def test_without_native_code_the_same_sites_have_values() -> None:
    command = [sys.executable, "-W", "ignore", "-c", _WITHOUT]
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | paths)
    expected = records_of(fresh(MODELS["containers"]), once, EVERYTHING)
    lines = [str(sorted((site, numbers[0]) for site, numbers in step.items())) for step in expected]
    assert done.stdout.splitlines() == lines
