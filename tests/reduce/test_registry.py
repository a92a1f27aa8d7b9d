"""Reductions by name, and those of other packages."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from torchtap import registry
from torchtap.errors import ReductionError
from torchtap.reduce import Histogram, Reduction, Result, reduction_from_spec
from torchtap.reduce.reduction import REDUCTIONS, reduction_class


class Product(Reduction[Tensor]):
    name: ClassVar[str] = "product"

    def update(self, state: Tensor | None, value: Tensor) -> Tensor:
        return value.prod() if state is None else state * value.prod()

    def merge(self, left: Tensor, right: Tensor) -> Tensor:
        return left * right

    def result(self, state: Tensor) -> Result:
        return {"product": float(state)}

    def spec(self) -> dict[str, Any]:
        return {"reduction": self.name}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    points = EntryPoints(
        [
            EntryPoint("product", f"{__name__}:Product", REDUCTIONS.group),
            EntryPoint("gone", "no_such_package_anywhere:Thing", REDUCTIONS.group),
            EntryPoint("odd", "math:pi", REDUCTIONS.group),
        ]
    )
    monkeypatch.setattr(registry, "entry_points", lambda **asked: points.select(**asked))
    monkeypatch.setitem(
        __import__("sys").modules, __name__, __import__("types").SimpleNamespace(Product=Product)
    )


@pytest.mark.usefixtures("installed")
def test_a_reduction_of_another_package_is_found_by_its_entry_point() -> None:
    assert "product" in REDUCTIONS.names()
    made = reduction_from_spec({"reduction": "product"})
    assert made.result(made.update(None, torch.tensor([2.0, 3.0]))) == {"product": 6.0}


@pytest.mark.usefixtures("installed")
def test_an_entry_point_that_fails_is_named_only_when_it_is_asked_for() -> None:
    assert "gone" in REDUCTIONS.names()
    with pytest.raises(ReductionError, match="no_such_package_anywhere"):
        reduction_class("gone")
    with pytest.raises(ReductionError, match="no Reduction"):
        reduction_class("odd")


def test_every_built_in_is_found_under_its_own_name() -> None:
    for name in REDUCTIONS.names():
        assert reduction_class(name).name == name


def test_an_unknown_name_names_the_nearest() -> None:
    with pytest.raises(ReductionError, match=r"'histogrm'.*histogram"):
        reduction_from_spec({"reduction": "histogrm"})


def test_a_spec_that_is_none_is_refused() -> None:
    with pytest.raises(ReductionError, match="describes no reduction"):
        reduction_from_spec({"bins": 3})
    with pytest.raises(ReductionError, match="cannot be made"):
        reduction_from_spec({"reduction": "histogram", "bims": 3})


def test_lists_from_json_give_the_same_reduction() -> None:
    made = reduction_from_spec({"reduction": "histogram", "bins": 4, "range": [0, 1]})
    assert made == Histogram(bins=4, range=(0, 1))
    assert hash(made) == hash(Histogram(bins=4, range=(0.0, 1.0)))
