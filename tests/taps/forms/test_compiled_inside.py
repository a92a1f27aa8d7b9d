"""The inner model is watched while its compiled wrapper is called: every gradient, with its own value, in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchtap as tt
from torchtap.receive import reasons

KINDS = ("*:output", "*:grad_output", "*:grad_input")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Straight(nn.Module):
    """Returns what its last module returns."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())


class Around(Straight):
    """Uses its input twice, so that the input's whole gradient is not that of its first module's input."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu() + x) * 2


class Pair(Straight):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        middle = self.first(x)
        return {"middle": middle, "end": self.last(middle.relu())}


def total(output: Any) -> Tensor:
    return (
        output.square().mean()
        if isinstance(output, Tensor)
        else sum(map(total, output.values()), torch.zeros(()))
    )


def gradients(watched: nn.Module, called: Any, given: Tensor) -> tt.Seen:
    with tt.capture(watched, *KINDS) as seen:
        total(called(given)).backward()
    return seen


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("make", [Straight, Around, Pair])
def test_inside_it_are_the_gradients_of_eager_in_the_order_of_its_forward(make: Any, backend: str) -> None:
    torch.manual_seed(0)
    model, given = make(), torch.randn(4, 6, requires_grad=True)
    eager = gradients(model, model, given)
    compiled = gradients(model, torch.compile(model, backend=backend), given)
    missing = {each.site: each.reason for each in compiled.coverage()}
    # What the graph made may be used in it too: outside, only a part of the gradient is seen.
    assert missing == {":grad_output": reasons.ACROSS_GRAPHS}
    expected = [site for site in eager if "grad" in site and not site.startswith(":grad_output")]
    assert [site for site in compiled if "grad" in site] == expected
    for site in compiled:
        torch.testing.assert_close(compiled[site], eager[site], msg=site)


@pytest.mark.parametrize("make", [Straight, Around, Pair])
def test_the_compiled_model_itself_has_them_all(make: Any) -> None:
    torch.manual_seed(0)
    model, given = make(), torch.randn(4, 6, requires_grad=True)
    eager = gradients(model, model, given)
    wrapper = torch.compile(model, backend="aot_eager")
    compiled = gradients(wrapper, wrapper, given)
    assert set(compiled) == set(eager)
    for site, value in eager.items():
        torch.testing.assert_close(compiled[site], value, msg=site)


def test_gradients_of_a_compiled_model_are_recorded_in_the_order_of_its_forward() -> None:
    model = torch.compile(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), backend="aot_eager")
    with tt.capture(model, "*:grad_output") as seen:
        model(torch.randn(2, 4)).sum().backward()
    assert list(seen) == ["0:grad_output", "1:grad_output", "2:grad_output", "3:grad_output", ":grad_output"]


def test_a_second_backward_through_the_same_graph_is_the_same_call() -> None:
    model, given = Straight(), torch.randn(4, 6)
    compiled = torch.compile(model, backend="aot_eager")
    with tt.capture(model, "first:grad_output", "last:grad_output", keep=tt.Stats()) as seen:
        loss = total(compiled(given))
        loss.backward(retain_graph=True)
        loss.backward()
    assert list(seen) == ["first:grad_output", "last:grad_output"]
    assert seen["last:grad_output"]["count"] == 24


class Broken(Straight):
    """A graph break after a value that the first graph used, or wrote over one that it did not need any more."""

    def __init__(self, handed_on: bool) -> None:
        super().__init__()
        self.handed_on = handed_on

    def forward(self, x: Tensor) -> Tensor:
        made = self.first(x)
        given, more = (made.contiguous(), made.sin().sum()) if self.handed_on else (made * 2, 0)
        torch._dynamo.graph_break()
        return self.last(given) + more


@pytest.mark.parametrize("handed_on", [True, False])
def test_a_value_across_a_graph_break_has_its_own_gradient(handed_on: bool) -> None:
    torch.manual_seed(0)
    model, given = Broken(handed_on), torch.randn(4, 6, requires_grad=True)
    eager = gradients(model, model, given)
    wrapper = torch.compile(model, backend="inductor")
    compiled = gradients(wrapper, wrapper, given)
    assert set(compiled) == set(eager)
    for site, value in eager.items():
        torch.testing.assert_close(compiled[site], value, msg=site)
