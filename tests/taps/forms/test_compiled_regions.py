"""What is compiled for taps: made once for a set of sites, by the model's own settings, and gone with the model."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import torchtap as tt


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def _in_place(plain: nn.Module) -> nn.Module:
    plain.compile(backend="eager")
    return plain


def _by_forward(plain: nn.Module) -> nn.Module:
    plain.forward = torch.compile(plain.forward, backend="eager")
    return plain


COMPILED: dict[str, Callable[[nn.Module], Any]] = {
    "torch.compile(model)": lambda plain: torch.compile(plain, backend="eager"),
    "model.compile()": _in_place,
    "model.forward = torch.compile(model.forward)": _by_forward,
}


@pytest.mark.parametrize("way", COMPILED)
def test_a_compiled_model_that_was_tapped_is_let_go(way: str) -> None:
    def tapped_once() -> tuple[weakref.ref[Any], weakref.ref[Any]]:
        plain, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4)
        model = COMPILED[way](plain)
        with tt.capture(model, "*:output", "*:value") as seen:
            model(x)
        assert len(dict(seen.items())) == 3
        return weakref.ref(plain), weakref.ref(model)

    held = tapped_once()
    gc.collect()
    assert [each() for each in held] == [None, None]


@pytest.mark.parametrize("way", COMPILED)
def test_a_second_session_on_the_same_sites_compiles_nothing_again(way: str) -> None:
    torch.manual_seed(0)
    plain, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4)
    model = COMPILED[way](plain)
    model(x)
    compiled = []
    for _ in range(3):
        with tt.capture(model, "*:output") as seen:
            model(x)
        assert torch.equal(seen["0:output"], plain[0](x))
        compiled.append(int(counters["stats"]["unique_graphs"]))
    assert compiled[0] == compiled[1] == compiled[2]


def test_a_model_that_is_compiled_in_place_anew_has_taps_with_its_new_settings() -> None:
    plain, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4)
    asked: list[str] = []

    def backend(name: str) -> Callable[..., Any]:
        def compile_graph(graph: Any, inputs: object) -> Any:
            asked.append(name)
            return graph.forward

        return compile_graph

    for name in ("first", "second"):
        plain.compile(backend=backend(name))
        with tt.capture(plain, "*:output") as seen:
            plain(x)
        assert len(dict(seen.items())) == 3
    assert asked == ["first", "second"]


def test_a_copy_of_a_model_that_is_compiled_in_place_is_tapped_by_itself() -> None:
    plain, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4)
    plain.compile(backend="eager")
    with tt.capture(plain, "0:output"):
        plain(x)
    other = copy.deepcopy(plain)
    with torch.no_grad():
        other[0].weight.zero_()
    other.compile(backend="eager")
    with tt.capture(other, "0:output") as seen:
        other(x)
    assert torch.equal(seen["0:output"], other[0].bias.expand(2, 4))
