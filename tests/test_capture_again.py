"""Further captures of one model, also after the model has changed."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import torchtap as tt
from torchtap.errors import SelectionError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.again = self.blocks[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.blocks(x))


def names(model: nn.Module, *selectors: str, **options: object) -> list[str]:
    with tt.capture(model, *selectors, **options) as seen:  # type: ignore[arg-type]
        model(torch.ones(2, 4))
    for name, value in seen.items():
        assert isinstance(value, Tensor) or "keep" in options, name
    return list(seen)


def test_the_second_look_is_the_first_again() -> None:
    model = Net()
    first = names(model, "**:output")
    assert names(model, "**:output") == first
    assert names(model, "**:output") == first
    assert "blocks.0:output#1" in first


def test_what_else_is_asked_has_its_own_memory() -> None:
    model = Net()
    for _ in range(2):
        assert names(model, "blocks.0:output") == ["blocks.0:output", "blocks.0:output#1"]
        assert names(model, "blocks:output", "blocks.1:input") == ["blocks.1:input", "blocks:output"]
        assert names(model, "blocks:output", keep=tt.Stats()) == ["blocks:output"]
        assert names(model) == names(model, "*:output")


def add(model: Net) -> None:
    model.blocks.append(nn.Tanh())


def replace(model: Net) -> None:
    model.blocks[1] = nn.Tanh()


def rename(model: Net) -> None:
    model.other = model.blocks
    del model.blocks
    model.forward = lambda x: model.other(x)  # type: ignore[method-assign]


def remove(model: Net) -> None:
    del model.blocks[2]


def empty(model: Net) -> None:
    model.blocks[1] = None  # type: ignore[assignment]
    model.forward = lambda x: model.blocks[0](x)  # type: ignore[method-assign]


def change_class(model: Net) -> None:
    model.blocks[1].__class__ = nn.Tanh


def swap(model: Net) -> None:
    model.blocks[0], model.blocks[2] = model.blocks[2], model.blocks[0]


def name_twice(model: Net) -> None:
    model.blocks[1].inner = nn.Identity()


def share(model: Net) -> None:
    model.blocks[2] = model.blocks[0]


@pytest.mark.parametrize(
    "change", [add, replace, rename, remove, empty, change_class, swap, name_twice, share]
)
def test_a_model_that_has_changed_is_bound_anew(change: Callable[[Net], None]) -> None:
    model = Net()
    names(model, "**:output")
    change(model)
    fresh = copy.deepcopy(model) if "forward" not in vars(model) else None
    found = names(model, "**:output")
    if fresh is not None:
        assert found == names(fresh, "**:output")


def test_a_selector_that_picks_nothing_any_more_is_an_error_again() -> None:
    model = Net()
    names(model, "blocks.2:output")
    del model.blocks[2]
    with pytest.raises(SelectionError):
        names(model, "blocks.2:output")


def test_a_model_that_was_compiled_meanwhile_is_no_eager_one() -> None:
    model = Net()
    names(model, "blocks.0:output")
    model.blocks.compile(backend="eager")
    assert names(model, "blocks.0:output")


def test_parameters_are_bound_each_time() -> None:
    model = Net()
    for _ in range(2):
        with tt.capture(model, "blocks.0:param.weight") as seen:
            pass
        assert torch.equal(seen["blocks.0:param.weight"], model.blocks[0].weight)  # type: ignore[arg-type]
        model.blocks[0].weight = nn.Parameter(torch.zeros(4, 4))  # type: ignore[union-attr]


def test_what_is_no_text_is_asked_each_time() -> None:
    model = Net()
    for _ in range(2):
        names(model, nn.ReLU)  # type: ignore[arg-type]
        names(model, lambda site: site.path == "blocks.0")  # type: ignore[arg-type]


def test_coverage_and_other_names_are_those_of_the_first_look() -> None:
    model = Net()
    for _ in range(2):
        with tt.capture(model, "**:output", "blocks.1:input") as seen:
            model.blocks[0](torch.ones(2, 4))
        assert {missing.site for missing in seen.coverage()} >= {"blocks.1:output", "blocks.1:input"}
        with tt.capture(model, "again:output") as seen:
            model(torch.ones(2, 4))
        assert torch.equal(seen["again:output"], seen["blocks.0:output"])
        assert torch.equal(seen[model.again], seen["blocks.0:output"])


def test_a_memory_does_not_keep_a_model() -> None:
    model = Net()
    for _ in range(2):
        names(model, "**:output")
    gone = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        del model
        assert gone() is None  # at once: a model's memory is not to wait for a collection
    finally:
        gc.enable()


def test_a_memory_leaves_no_trace_in_copies_and_pickles() -> None:
    model = Net()
    plain = pickle.dumps(model)
    names(model, "**:output")
    names(model, "**:output")
    assert pickle.dumps(model) == plain
    assert vars(copy.deepcopy(model)).keys() == vars(Net()).keys()


def test_what_does_not_change_a_models_modules_does_not_matter() -> None:
    """Only names, modules and their classes are remembered: all else is found when it passes."""
    model = Net()
    names(model, "**:output")
    model.blocks[0].weight = nn.Parameter(torch.zeros(4, 4))  # type: ignore[union-attr]
    model.register_buffer("more", torch.ones(1))
    model.eval().double()
    hook = model.blocks[1].register_forward_hook(lambda module, args, output: output + 1)
    with tt.capture(model, "**:output") as seen:
        result = model(torch.ones(2, 4, dtype=torch.float64))
    hook.remove()
    assert torch.equal(seen[":output"], result)
    assert seen["blocks.1:output"].dtype == torch.float64
    assert torch.equal(seen["blocks.1:output"], seen["blocks.0:output"].relu() + 1)


def test_a_child_that_is_none_is_known_again() -> None:
    model = Net()
    model.register_module("nothing", None)
    for _ in range(3):
        names(model, "**:output")
    model.nothing = nn.Identity()
    names(model, "blocks:output")
    names(model, "blocks:output")


def test_what_was_seen_outlives_the_model() -> None:
    model = Net()
    names(model, "**:output")
    with tt.capture(model, "**:output", "blocks.1:output") as seen:
        model.blocks(torch.ones(2, 4))
    del model
    gc.collect()
    assert "blocks.2:output" in seen
    assert {missing.site for missing in seen.coverage()} == {":output"}


def test_a_module_that_was_replaced_inside_the_look_is_told() -> None:
    model = Net()
    names(model, "**:output")
    with tt.capture(model, "**:output") as seen:
        model.blocks[1] = nn.Tanh()
        gc.collect()
        model(torch.ones(2, 4))
    assert "blocks.1:output" in {missing.site for missing in seen.coverage()}


class Plus:
    """A function that says of itself what another one says, too."""

    def __init__(self, number: float) -> None:
        self.number = number

    def __call__(self, value: Tensor) -> Tensor:
        return value.sum() * 0 + self.number

    def __repr__(self) -> str:
        return "Plus"


def test_metrics_are_told_apart_by_what_they_are_and_not_by_what_they_say() -> None:
    model, found = Net(), []
    for number in (1.0, 2.0):
        with tt.capture(model, ":output", keep=tt.Metric(Plus(number), name="plus")) as seen:
            model(torch.ones(2, 4))
        found.append(seen[":output"]["plus"])
    assert found == [1.0, 2.0]


def test_a_metric_that_holds_the_model_does_not_keep_it() -> None:
    model = Net()
    for _ in range(2):
        metric = tt.Metric(lambda value, model=model: value.sum() * len(model.blocks), name="held")
        with tt.capture(model, ":output", keep=metric):
            model(torch.ones(2, 4))
    gone = weakref.ref(model)
    del model, metric
    gc.collect()
    assert gone() is None


def test_reductions_with_other_settings_are_other_captures() -> None:
    model = Net()
    kept: list[set[str]] = []
    for bins in (4, 8, 4):
        with tt.capture(model, ":output", keep=[tt.Stats(), tt.Histogram(bins=bins, range=(-1, 1))]) as seen:
            model(torch.ones(2, 4))
        kept.append({str(len(seen[":output"]["histogram"]["counts"]))})
    assert kept[0] == kept[2] != kept[1]
