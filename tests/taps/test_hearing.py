"""What native code takes past Python is what Python takes, at the same sites, whatever the training does."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import torchtap as tt
from torchtap.receive import hearing
from torchtap.receive.asking import Asking
from torchtap.receive.entries import PortState
from torchtap.receive.held import Held
from torchtap.receive.receiver import Receiver
from torchtap.reduce import kernel

pytestmark = pytest.mark.skipif(kernel.hearing is None, reason="native code was not built, or torch is older")

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
            np.testing.assert_array_equal(ours[site], theirs[site], err_msg=site)


@pytest.mark.filterwarnings("ignore:torchtap")
@pytest.mark.parametrize("train", TRAININGS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("name", sorted(MODELS))
def test_an_ear_takes_what_python_takes(name: str, train: Callable[[nn.Module, Tensor], None]) -> None:
    for taps in (EVERYTHING, EVERYTHING[:1], EVERYTHING[1:2]):
        found = records_of(fresh(MODELS[name]), train, taps)
        with patch.object(Receiver, "ear", lambda *_: None):
            expected = records_of(fresh(MODELS[name]), train, taps)
        assert_same(found, expected)


@pytest.mark.filterwarnings("ignore:torchtap")
def test_a_second_derivative_is_read_as_python_reads_it() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))

    found = records_of(fresh(make), with_a_second_derivative, EVERYTHING)
    with patch.object(Receiver, "ear", lambda *_: None):
        assert_same(found, records_of(fresh(make), with_a_second_derivative, EVERYTHING))


def test_from_the_second_step_on_python_takes_no_value_of_an_ordinary_training() -> None:
    model = fresh(MODELS["containers"])
    calls: list[str] = []

    def noted(owner: type, name: str) -> Any:
        original = getattr(owner, name)

        def method(*args: Any) -> Any:
            calls.append(f"{owner.__name__}.{name}")
            return original(*args)

        return patch.object(owner, name, method)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ExitStack() as stack:
        for owner in ((Receiver, "take"), (Receiver, "take_gradient"), (Asking, "of_output"), (Held, "take")):
            stack.enter_context(noted(*owner))
        with tt.watch(model, None, EVERYTHING) as watch:
            for step in range(3):
                with watch.step():
                    once(model, torch.randn(4, 5, 6))
                    optimizer.step()
                if step == 0:
                    taken = {"Receiver.take", "Receiver.take_gradient", "Asking.of_output", "Held.take"}
                    assert taken == set(calls)
                    calls.clear()
    assert calls == []


def test_sites_that_show_one_value_wait_for_its_gradient_together() -> None:
    model = fresh(MODELS["deep containers"])  # five sites of one value
    heard: list[Any] = []
    listener = kernel.hearing.Listener  # type: ignore[union-attr]
    original = listener.__call__

    def call(self: Any, gradient: Tensor) -> None:
        heard.append(self)
        original(self, gradient)

    with patch.object(listener, "__call__", call), tt.watch(model, None, EVERYTHING[:2]) as watch:
        for _ in range(2):
            heard.clear()
            with watch.step():
                once(model, torch.randn(4, 6))
    assert len(heard) == 2  # one serves three of them


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


def test_another_thread_is_not_heard() -> None:
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


def test_listeners_go_with_their_graph_and_ears_with_their_watch() -> None:
    model = fresh(Wide)
    native = kernel.hearing
    assert native is not None

    def alive() -> int:
        gc.collect()
        return sum(
            type(each) in (native.Listener, native.BaseListener, native.Ear) for each in gc.get_objects()
        )

    before = alive()
    watch = tt.watch(model, None, EVERYTHING)
    for _ in range(3):
        with watch.step():
            once(model, torch.randn(4, 5, 6))
    with watch.step():
        output = model(torch.randn(4, 5, 6))
    assert alive() > before
    watch.close()
    del watch
    output.sum().backward()  # what was asked for comes too late, and harms nobody
    del output
    assert alive() == before


def test_fields_that_hold_nonsense_are_not_believed() -> None:
    native = kernel.hearing
    assert native is not None
    model = nn.Sequential(nn.Linear(6, 2))
    receivers: list[Receiver] = []
    original = Receiver.ear

    def noted(self: Receiver, *ports: PortState | None) -> Any:
        receivers.append(self)
        return original(self, *ports)

    value = torch.ones(3)
    with patch.object(Receiver, "ear", noted), tt.watch(model, None, EVERYTHING) as watch:
        for _ in range(2):
            with watch.step():
                once(model, torch.ones(4, 6))
        receiver = receivers[0]
        port = receiver.ports["0", "output", ""]
        hear = native.Ear(receiver, port, None).hear
        receiver.thread, receiver.between_passes = None, False
        receiver.pass_number += 1
        places: list[tuple[Any, str]] = [
            (port, "first"),
            (port, "leaf_calls"),
            (receiver, "_folding"),
            (receiver.folding, "tally"),
            (receiver.folding.tally, "taker"),
            (receiver.folding.tally, "arrived"),
        ]
        for place, field in places:
            held = getattr(place, field)
            for nonsense in (None, 5, "x", [held], {"x": 1}, object()):
                setattr(place, field, nonsense)
                assert hear(value) == 0
                if field not in ("_folding", "leaf_calls"):
                    assert native.take_each(receiver.folding, [port], [value]) == [0]
            setattr(place, field, held)
        receiver.thread = "main"  # type: ignore[assignment]
        assert hear(value) == 0
        receiver.thread = None
        for other in (None, 3, "x", [value], torch.ones(3).to_sparse(), torch.empty(3, device="meta")):
            assert hear(other) == 0
        assert hear(value) == 2
        assert hear(value) == 0  # the second call in a pass is not like most
        receiver.thread = -1
        receiver.between_passes = True


def test_an_ear_is_for_receivers_and_ports() -> None:
    native = kernel.hearing
    assert native is not None
    for wrong in ((), (1, 2, 3), (None, None, None)):
        with pytest.raises(TypeError):
            native.Ear(*wrong)
    for name in ("Listener", "BaseListener"):
        with pytest.raises(TypeError):
            getattr(native, name)()
    for lists in ((None, [], []), (1, [], [1])):
        with pytest.raises(TypeError):
            native.take_each(*lists)


def test_a_large_value_is_left_to_python_and_arrives() -> None:
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
from tests.taps.test_hearing import EVERYTHING, MODELS, fresh, once, records_of
from torchtap.reduce import kernel
assert kernel.hearing is None
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


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_model_that_serves_does_not_close_the_way_past_python(mode: Callable[[], Any]) -> None:
    hearing._native.cache_clear()
    served, x = fresh(MODELS["wide"]), torch.ones(2, 3, 6)
    taken: list[str] = []
    take = Receiver.take

    def noted(self: Receiver, port: PortState, tree: object) -> None:
        taken.append(port.port.site.path)
        take(self, port, tree)

    with patch.object(Receiver, "take", noted), mode(), tt.watch(served, None, [tt.tap("*:output")]) as watch:
        for _ in range(3):
            taken.clear()
            with watch.step():
                served(x)
    assert set(taken) <= {"twice"}  # a module's second call is Python's
    found = records_of(fresh(MODELS["wide"]), once, EVERYTHING)
    with patch.object(kernel, "hearing", None):
        hearing._native.cache_clear()
        expected = records_of(fresh(MODELS["wide"]), once, EVERYTHING)
    hearing._native.cache_clear()
    assert found == expected
