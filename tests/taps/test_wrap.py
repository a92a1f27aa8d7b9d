"""The three ways of putting a tap on: they see the same, and leave the model exactly as it was."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tests.models import GPT, PLAIN, Thrice, make, tensors_of
from torch import Tensor, nn

import torchtap as tt

WAYS = ["hook", "wrap", "forward"]


def picture(model: nn.Module) -> dict[str, Any]:
    """Everything about a model that a tap could leave a trace in."""
    return {
        "modules": {name: id(module) for name, module in model.named_modules()},
        "types": [type(module) for module in model.modules()],
        "order": [list(module._modules) for module in model.modules()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        "state": list(model.state_dict()),
    }


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("raises", [False, True])
def test_leaving_the_block_leaves_the_model_exactly_as_before(way: str, raises: bool) -> None:
    case = make("gpt")
    before, expected = picture(case.model), case.model(*case.args)
    with (
        pytest.raises(ValueError, match="the body's own") if raises else nullcontext(),
        tt.capture(case.model, "*:output", "*:input", "*:grad_output", way=way),
    ):
        case.model(*case.args).sum().backward()
        if raises:
            raise ValueError("the body's own")
    assert picture(case.model) == before
    assert torch.equal(case.model(*case.args), expected)


@pytest.mark.parametrize("way", ["wrap", "forward"])
@pytest.mark.parametrize("name", PLAIN)
def test_each_way_sees_what_hooks_see_and_changes_nothing(way: str, name: str) -> None:
    def run(**options: Any) -> tuple[dict[str, Tensor], list[Tensor], list[Tensor | None]]:
        case = make(name)
        with tt.capture(
            case.model, "*:output", "*:input", "*:grad_output", "*:grad_input", **options
        ) as seen:
            loss = case.loss()
            loss.backward()
        outputs = tensors_of(case.model(*case.args, **case.kwargs))
        return dict(seen), [loss, *outputs], [parameter.grad for parameter in case.model.parameters()]

    hooked, expected, gradients = run()
    seen, outputs, same_gradients = run(way=way)
    assert list(seen) == list(hooked)
    assert all(torch.equal(seen[site], hooked[site]) for site in hooked)
    assert all(map(torch.equal, outputs, expected))
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(gradients, same_gradients, strict=True))


def test_a_wrapped_module_is_the_same_to_whoever_looks() -> None:
    model = GPT()
    linear, keys = model.blocks[0].mlp[0], list(model.state_dict())
    with tt.capture(model, "blocks.**:output", way="wrap"):
        wrapped = model.blocks[0].mlp[0]
        assert wrapped is not linear
        assert isinstance(wrapped, nn.Linear)
        assert wrapped.__class__ is nn.Linear
        assert list(model.state_dict()) == keys
        assert wrapped.weight is linear.weight
        assert wrapped.in_features == 16
        assert len(model.blocks[0].mlp) == 3
        wrapped.note = "set on the wrapper"
        model.eval()
    assert model.blocks[0].mlp[0] is linear
    assert linear.note == "set on the wrapper"
    assert not linear.training


@pytest.mark.parametrize("way", ["wrap", "forward"])
def test_code_that_calls_forward_directly_is_seen_unlike_by_hooks(way: str) -> None:
    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc.forward(x)

    model, x = Direct(), torch.randn(4, 3)
    with tt.capture(model, "fc:output", "fc:input", way=way) as seen:
        model(x)
    assert torch.equal(seen["fc:output"], model(x))
    assert torch.equal(seen["fc:input"], x)


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_or_a_pickle_made_inside_is_of_the_plain_model(way: str) -> None:
    case = make("gpt")
    with tt.capture(case.model, "*:output", way=way) as seen:
        copied = copy.deepcopy(case.model)
        loaded = pickle.loads(pickle.dumps(case.model))
        copied(*case.args)
        loaded(*case.args)
        assert len(seen) == 0
    expected = case.model(*case.args)
    assert torch.equal(copied(*case.args), expected)
    assert torch.equal(loaded(*case.args), expected)
    assert list(copied.state_dict()) == list(case.model.state_dict())
    assert {type(module) for module in copied.modules()} == {type(module) for module in case.model.modules()}


@pytest.mark.parametrize("way", ["wrap", "forward"])
@pytest.mark.parametrize("first_in_first_out", [False, True])
def test_two_sessions_on_one_model_end_in_any_order(way: str, first_in_first_out: bool) -> None:
    model, x = Thrice(), torch.randn(2, 5)
    before = picture(model)
    first, second = (tt.capture(model, "*:output", way=way) for _ in range(2))
    seen = [first.__enter__(), second.__enter__()]
    model(x)
    order = (first, second) if first_in_first_out else (second, first)
    order[0].__exit__(None, None, None)
    model(x)
    order[1].__exit__(None, None, None)
    assert picture(model) == before
    calls = [len([site for site in each if site.startswith("shared")]) for each in seen]
    assert sorted(calls) == [3, 6]


def test_a_module_that_is_exchanged_inside_the_block_stays_exchanged() -> None:
    model, replacement = GPT(), nn.Identity()
    with tt.capture(model, "norm:output", way="wrap"):
        model.norm = replacement
    assert model.norm is replacement


def test_an_own_forward_of_an_instance_comes_back() -> None:
    model = nn.Sequential(nn.Linear(3, 3))

    def own(x: Tensor) -> Tensor:
        return x + 1

    model[0].forward = own  # type: ignore[method-assign]
    for way in WAYS:
        with tt.capture(model, "0:output", way=way) as seen:
            model(torch.zeros(1, 3))
        assert torch.equal(seen["0:output"], torch.ones(1, 3))
        assert model[0].forward is own


def test_an_unknown_way_is_named() -> None:
    with pytest.raises(ValueError, match=r"way='patch': a tap is put on by 'hook', 'wrap', 'forward'"):
        tt.capture(GPT(), "*", way="patch")  # type: ignore[arg-type]


@pytest.mark.parametrize("way", WAYS)
def test_passes_of_training_and_evaluation_are_recorded_apart(way: Any) -> None:
    class Kept:
        def __init__(self) -> None:
            self.shapes: list[tuple[str, tuple[int, ...]]] = []

        def write(self, record: Any) -> None:
            self.shapes += [(record.phase, tuple(item.value.shape)) for item in record.tensors]

        def close(self) -> None: ...

    model, kept = nn.Sequential(nn.Linear(3, 2)), Kept()
    with tt.watch(model, None, tt.tap("0:output", tt.Full()), sinks=[kept], way=way) as watch, watch.step():
        model(torch.randn(4, 3))
        model.eval()
        model(torch.randn(7, 3))
        model.train()
        model(torch.randn(4, 3))
    assert kept.shapes == [("train", (8, 2)), ("eval", (7, 2))]
