"""Marks that other torches leave on the nodes of an exported graph: the same modules, written otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchtap as tt
from torchtap.plan.names import path_of_source

Marks = dict[str, tuple[str, type[nn.Module]]]


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(self.a(x).tanh())  # type: ignore[no-any-return]


def marked(model: nn.Module, x: Tensor, *marks: Marks) -> Any:
    """An export whose operations have these marks, in turn, and nothing else has any."""
    made = torch.export.export(model, (x,)).module()
    for node in made.graph.nodes:
        node.meta.pop("nn_module_stack", None)
    operations = [node for node in made.graph.nodes if node.op == "call_function"]
    for node, mark in zip(operations, marks, strict=True):
        node.meta["nn_module_stack"] = mark
    return made


def seen_in(form: Any, x: Tensor) -> dict[str, Tensor]:
    with tt.capture(form, "*:output") as seen:
        form(x)
    return dict(seen.items())


def test_one_module_under_two_names_is_one_module_also_where_it_is_told_by_its_first_name() -> None:
    """As a strict export of torch 2.9 marks it: the key is that of the name that was called first."""
    model, x = Twice(), torch.randn(3, 4)
    root: Marks = {"L__self__": ("", Twice)}
    form = marked(
        model,
        x,
        {**root, "L__self___b": ("b", nn.Linear)},
        root,
        {**root, "L__self___b": ("a", nn.Linear)},
    )
    found = seen_in(form, x)
    # Nothing claims to be the first call of ``a``, which in the eager model it would be.
    assert found.keys() == {"b:output", "b:output#1", ":output"}
    assert torch.equal(found["b:output"], model.a(x))
    assert torch.equal(found["b:output#1"], model(x))


def test_a_model_that_dynamo_met_under_a_name_of_its_own_is_the_model() -> None:
    """A strict export of torch 2.9 wraps models of classes of torch's own."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(3, 4)
    root: Marks = {"L__self__": ("", nn.Sequential), "L__fn": ("L['fn']", nn.Sequential)}
    form = marked(
        model,
        x,
        {**root, "L__fn_0": ("L['fn']._modules['0']", nn.Linear)},
        {**root, "L__fn_1": ("L['fn'][1]", nn.Tanh)},
        {**root, "L__fn_2": ("L['fn'].2", nn.Linear)},
    )
    with tt.capture(model, "*:output") as eager:
        model(x)
    found = seen_in(form, x)
    assert found.keys() == dict(eager.items()).keys()
    for site, value in eager.items():
        assert torch.equal(found[site], value), site


def test_a_module_that_is_not_on_the_model_has_no_sites() -> None:
    model, x = Twice(), torch.randn(3, 4)
    root: Marks = {"L__self__": ("", Twice)}
    elsewhere: Marks = {**root, "G__other": ("G['other']", nn.Linear)}
    assert seen_in(marked(model, x, elsewhere, root, elsewhere), x).keys() == {":output"}


@pytest.mark.parametrize(
    ("written", "path"),
    [
        ("", ""),
        ("layers.0", "layers.0"),
        ("L['self']", ""),
        ("L['fn'].layers[0].a", "layers.0.a"),
        ("L['fn']._modules['layers']._modules['0']._modules['a-b']", "layers.0.a-b"),
        ("G['model'].layers", None),
        ("L['self'].layers.__getitem__(0)", None),
        ("list(L['self'].layers)[0]", None),
    ],
)
def test_what_dynamo_writes_is_read_as_a_path(written: str, path: str | None) -> None:
    assert path_of_source(written) == path
