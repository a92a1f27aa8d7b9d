"""Metric: any function, and what goes wrong in one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from torchtap.errors import ReductionError
from torchtap.reduce import Metric, Reduction, Result, reduction_from_spec
from torchtap.testing import ReductionContract


def spread(value: Tensor) -> Tensor:
    return (
        value.double().nan_to_num(posinf=9, neginf=-9).amax()
        - value.double().nan_to_num(posinf=9, neginf=-9).amin()
    )


class TestMetric(ReductionContract):
    def reduction(self) -> Reduction[Any]:
        return Metric(spread)

    def reference(self, values: Sequence[Tensor]) -> Result:
        return {"spread": sum(float(spread(value)) for value in values) / len(values)}

    def test_the_spec_brings_the_reduction_back(self) -> None:
        with pytest.raises(ReductionError, match=r"'spread'.*is code"):
            reduction_from_spec(self.reduction().spec())


def row_means(value: Tensor) -> Tensor:
    return value.double().nan_to_num(posinf=9, neginf=-9).mean(0)


class TestMetricOfTensors(TestMetric):
    def reduction(self) -> Reduction[Any]:
        return Metric(row_means, aggregate="max", name="spread")

    def streams(self) -> list[list[Tensor]]:
        return [values for values in super().streams() if len({value.shape[1:] for value in values}) == 1]

    def reference(self, values: Sequence[Tensor]) -> Result:
        return {"spread": torch.stack([row_means(value) for value in values]).amax(0)}


def asked(metric: Metric, *values: Tensor) -> Any:
    state = None
    for value in values:
        state = metric.update(state, value)
    assert state is not None
    return metric.result(state)[metric.label]


@pytest.mark.parametrize(
    ("aggregate", "wanted"),
    [("mean", 2.0), ("sum", 6.0), ("min", 1.0), ("max", 3.0), ("last", 2.0), (np.median, 2.0), (len, 3.0)],
)
@pytest.mark.parametrize(
    "fn", [lambda x: x.item(), lambda x: x, lambda x: np.float32(x.item()), lambda x: int(x)]
)
def test_answers_combine_as_asked(
    fn: Callable[[Tensor], Any], aggregate: str | Callable[[list[Any]], Any], wanted: float
) -> None:
    values = [torch.tensor(1.0), torch.tensor(3.0), torch.tensor(2.0)]
    assert asked(Metric(fn, aggregate, name="m"), *values) == wanted


def test_an_answer_that_is_the_value_itself_is_copied() -> None:
    metric = Metric(lambda x: x, aggregate="last", name="same")
    value = torch.ones(3, dtype=torch.float64)
    state = metric.update(None, value)
    value.zero_()
    assert metric.result(state)["same"].tolist() == [1, 1, 1]  # type: ignore[union-attr]


def test_the_function_runs_without_autograd() -> None:
    value = torch.ones(3, requires_grad=True)
    assert (
        asked(Metric(lambda x: float(torch.is_grad_enabled() or (x * 2).requires_grad), name="grad"), value)
        == 0.0
    )


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (lambda x: 1 / 0, "ZeroDivisionError"),
        (lambda x: "much", "'much'"),
        (lambda x: None, "None"),
        (lambda x: {"a": 1}, "'a'"),
        (lambda x: 1j, "1j"),
        (lambda x: torch.ones(2, dtype=torch.complex64), "complex64"),
        (lambda x: x.add_(1).sum(), "in place"),
    ],
)
def test_a_function_that_fails_is_named(fn: Callable[[Tensor], Any], said: str) -> None:
    with pytest.raises(ReductionError, match="'loudness'.*" + said):
        Metric(fn, name="loudness").update(None, torch.ones(3))


def test_answers_that_do_not_combine_are_named() -> None:
    metric = Metric(lambda x: x * 2, name="double")
    with pytest.raises(ReductionError, match=r"'double'.*\(2,\).*\(3,\)"):
        asked(metric, torch.ones(2), torch.ones(3))

    def broken(answers: list[Any]) -> float:
        raise KeyError("k")

    with pytest.raises(ReductionError, match=r"'total' could not be aggregated.*KeyError"):
        asked(Metric(torch.sum, broken, name="total"), torch.ones(2))


def test_what_is_no_metric_is_refused_at_once() -> None:
    with pytest.raises(ReductionError, match="aggregate"):
        Metric(torch.sum, aggregate="median")
    with pytest.raises(ReductionError, match="function"):
        Metric("sum")  # type: ignore[arg-type]


def test_the_name_is_the_functions_own_unless_given() -> None:
    assert Metric(spread).label == "spread"
    assert Metric(spread, name="range").spec()["name"] == "range"
