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
    # What is used inside the graph has a gradient from there, which nobody outside sees: nothing rather than a part.
    inside = [site for site in eager if "grad" in site and not site.startswith(":grad")]
    assert [site for site in compiled if "grad" in site] == inside
    for site in compiled:
        torch.testing.assert_close(compiled[site], eager[site], msg=site)
    why = {each.site: each.reason for each in compiled.coverage()}
    assert why[":grad_output"] == reasons.OUTSIDE_THE_GRAPH


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
