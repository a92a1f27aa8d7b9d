"""The first call of a model is heard before it runs, whatever wraps it, and nothing stays behind."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from torchtap.integrations.first_call import FirstCall
from torchtap.integrations.zero_code.discovery import Discovery


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def left_behind(model: nn.Module) -> int:
    return sum("_compiled_call_impl" in each.__dict__ for each in model.modules())


@pytest.fixture
def called() -> Iterator[list[nn.Module]]:
    before = nn.Module.compile
    found: list[nn.Module] = []
    yield found
    assert nn.Module.compile is before


def test_the_outermost_module_that_is_called_is_told_once(called: list[nn.Module]) -> None:
    model = net()
    FirstCall(called.append).wait_for(model)
    model(torch.ones(1, 3))
    model(torch.ones(1, 3))
    assert called == [model]
    assert left_behind(model) == 0


def test_a_root_that_is_never_called_gives_way_to_the_part_that_is(called: list[nn.Module]) -> None:
    holder = nn.ModuleDict({"net": net()})
    FirstCall(called.append).wait_for(holder)
    holder["net"](torch.ones(1, 3))
    assert called == [holder["net"]]


def test_other_models_are_not_told_of(called: list[nn.Module]) -> None:
    first = FirstCall(called.append)
    first.wait_for(net())
    net()(torch.ones(1, 3))
    first.stop()
    assert called == []


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_compiled_wrapper_is_told_without_a_warning_of_torchs(called: list[nn.Module], when: str) -> None:
    model = net()
    first = FirstCall(called.append)
    if when == "after":
        first.wait_for(model)
    compiled: Any = torch.compile(model, backend="eager")
    if when == "before":
        first.wait_for(compiled)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(torch.ones(1, 3))
    assert called == [compiled]
    assert left_behind(compiled) == 0


def test_a_model_compiled_in_place_is_told(called: list[nn.Module]) -> None:
    model = net()
    FirstCall(called.append).wait_for(model)
    model.compile(backend="eager")
    model(torch.ones(1, 3))
    assert called == [model]
    assert left_behind(model) == 1  # what torch made is back
    model(torch.ones(1, 3))


def test_hooks_that_are_put_on_when_it_is_told_see_the_whole_call() -> None:
    model, seen = net(), []

    def put_on(module: nn.Module) -> None:
        module.register_forward_pre_hook(lambda *given: seen.append(given[2]), with_kwargs=True)

    FirstCall(put_on).wait_for(model)
    model(input=torch.ones(1, 3))
    assert list(seen[0]) == ["input"]


def test_a_model_that_waits_is_pickled_without_a_trace(called: list[nn.Module]) -> None:
    model = net()
    plain = pickle.dumps(model)
    first = FirstCall(called.append)
    first.wait_for(model)
    assert pickle.dumps(model) == plain
    first.stop()


def search() -> tuple[Discovery, list[Any]]:
    found: list[Any] = []
    return Discovery(lambda models, optimizers: found.append((models, optimizers))), found


def test_the_model_of_an_optimizer_is_found() -> None:
    discovery, found = search()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    net()(torch.ones(1, 3))  # some other model
    assert found == []
    model(torch.ones(1, 3))
    assert found == [({"": model}, [optimizer])]
    assert torch.optim.Optimizer.__init__.__qualname__ == "Optimizer.__init__"
    discovery.stop()


def test_two_models_with_an_optimizer_each_are_found_together() -> None:
    _, found = search()
    first, second = net(), net()
    optimizers = {torch.optim.SGD(first.parameters(), lr=0.1), torch.optim.Adam(second.parameters())}
    first(torch.ones(1, 3))
    ((models, heard),) = found
    assert list(models.values()) == [first, second]
    assert list(models) == ["first", "second"]
    assert set(heard) == optimizers


def test_a_copy_that_no_optimizer_knows_is_left_out() -> None:
    import copy

    discovery, found = search()
    model = net()
    copied = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    copied(torch.ones(1, 3))
    assert found == []
    model(torch.ones(1, 3))
    assert found == [({"": model}, [optimizer])]
    discovery.stop()


def test_parts_of_a_root_that_is_never_called_are_found_under_their_names() -> None:
    _, found = search()
    holder = nn.ModuleDict({"generator": net(), "critic": net(), "noise": nn.Dropout()})
    optimizer = torch.optim.SGD(holder.parameters(), lr=0.1)
    holder["critic"](torch.ones(1, 3))
    ((models, heard),) = found
    assert heard == [optimizer]
    assert models == {"generator": holder["generator"], "critic": holder["critic"]}
