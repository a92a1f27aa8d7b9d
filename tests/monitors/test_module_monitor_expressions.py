"""Which metrics are recognised, which are only known to be harmless, and that finding out has no effect."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, linalg
from torch.linalg import vector_norm

from torchtap.monitors.module_monitor.expressions import recognise
from torchtap.reduce import kernel
from torchtap.reduce.moments import WIDTH

noted: list[Any] = []
factor = 3.0
counter = 0


def noting(x: Tensor) -> Tensor:
    noted.append(x.shape)
    return x.mean()


def counting(x: Tensor) -> Tensor:
    global counter
    counter = 1
    return x.mean()


def catching(x: Tensor) -> Tensor:
    try:
        return noting(x)
    except:  # noqa: E722 - it would catch that `noting` is out of reach
        return x.std()


def deciding(x: Tensor) -> Tensor:
    if x.dtype == torch.float16:
        return x.float().mean()
    return x.std()


def looping(x: Tensor) -> Tensor:
    total = x.mean()
    for row in x:
        total = total + row.max()
    return total


def with_default(x: Tensor, p: float = 2.0) -> Tensor:
    return x.norm(p)


def in_two_lines(x: Tensor) -> Tensor:
    centred = x.abs()
    return centred.mean() + 1


def caught_up() -> Callable[[Tensor], Tensor]:
    order = 2
    return lambda x: x.norm(order)


class Calling:
    def __call__(self, x: Tensor) -> Tensor:
        return x.mean()


def rows_of(values: Tensor) -> Any:
    import numpy as np

    rows = np.zeros((1, WIDTH))
    assert kernel.native is not None
    assert kernel.measure(kernel.native, rows.ctypes.data, values)
    return rows.T


RECOGNISED = [
    lambda x: x.mean(),
    lambda x: x.std(),
    lambda x: x.std(False),
    lambda x: x.std(correction=0),
    lambda x: x.var(unbiased=False),
    lambda x: x.norm(),
    lambda x: x.norm(2),
    lambda x: x.norm(p=1),
    lambda x: x.norm(p="fro"),
    lambda x: x.norm(p=2, dim=None),
    lambda x: x.view(-1).norm(math.inf),
    lambda x: x.reshape(-1).norm(torch.inf),
    lambda x: x.abs().max(),
    lambda x: x.abs().amax(),
    lambda x: torch.linalg.vector_norm(x, ord=math.inf),
    lambda x: vector_norm(x, 1),
    lambda x: linalg.norm(x),
    lambda x: torch.norm(x, p=2),
    lambda x: torch.abs(x).mean(),
    lambda x: torch.sqrt(torch.mean(torch.square(x))),
    lambda x: x.pow(2).mean().sqrt(),
    lambda x: (x**2).sum(),
    lambda x: (x * x).mean(),
    lambda x: x.square().max(),
    lambda x: x.max() - x.min(),
    lambda x: (x == 0).float().mean(),
    lambda x: (x == 0).sum(),
    lambda x: abs(x).mean(),
    lambda x: 2 * x.detach().float().norm().item() + 1,
    lambda x: -x.mean(),
    lambda x: 1 / x.std(),
    lambda x: x.norm() / x.numel() ** 0.5,
    lambda x: x.detach().cpu().double().clone().contiguous().flatten().sum(),
    lambda x: x.std().log10(),
    lambda x: float(x.sum()),
    torch.mean,
    torch.norm,
    torch.Tensor.std,
    torch.Tensor.norm,
    linalg.vector_norm,
    functools.partial(torch.norm, p=1),
    functools.partial(torch.std, unbiased=False),
    in_two_lines,
]


@pytest.mark.parametrize("metric", RECOGNISED, ids=range(len(RECOGNISED)))
def test_a_plain_metric_has_a_formula_that_gives_what_it_gives(metric: Any) -> None:
    if kernel.native is None:
        pytest.skip("the native kernel is not built")
    x = torch.randn(7, 9, dtype=torch.float64)
    x[0, :3] = 0
    formula = recognise(metric).formula
    assert formula is not None
    assert float(formula(rows_of(x))[0]) == pytest.approx(float(metric(x)), rel=1e-6)


@pytest.mark.parametrize(
    "metric",
    [
        lambda a, b: (a - b).norm(),
        lambda a, b: (a - b).abs().max(),
        lambda a, b: torch.sub(a, b).pow(2).mean(),
        lambda a, b: a.sub(b).mean(),
    ],
)
def test_a_function_of_a_difference_has_a_formula(metric: Any) -> None:
    if kernel.native is None:
        pytest.skip("the native kernel is not built")
    a, b = torch.randn(2, 5, 3, dtype=torch.float64)
    formula = recognise(metric, 2).formula
    assert formula is not None
    assert float(formula(rows_of(a - b))[0]) == pytest.approx(float(metric(a, b)), rel=1e-9)


@pytest.mark.parametrize(
    "metric",
    [
        lambda x: x.norm(dim=-1).mean(),
        lambda x: x[0].mean(),
        lambda x: x.T.mean(),
        lambda x: x.mean() + x.median(),
        lambda x: (x > 0).float().mean(),
        lambda x: (x - 1).abs().mean(),
        lambda x: F.relu(x).mean(),
        lambda x: torch.linalg.norm(x, ord=2),
        lambda x: x.to(torch.float16).norm(),
        lambda x: x.norm(0.5),
        lambda x: x.std(dim=0).max(),
        lambda x: torch.max(x, x),
        lambda x: x.shape[0] * x.mean(),
    ],
)
def test_what_one_pass_cannot_tell_is_called_on_the_value_itself(metric: Any) -> None:
    reading = recognise(metric)
    assert reading.formula is None
    assert reading.safe


@pytest.mark.parametrize(
    "metric",
    [
        noting,
        counting,
        catching,
        deciding,
        looping,
        with_default,
        caught_up(),
        Calling(),
        Calling().__call__,
        lambda x: x.mean() * factor,
        lambda x: (print("seen"), x.mean())[1],
        lambda x: x.mean() if x.max() > 0 else x.std(),
        lambda x: torch.manual_seed(0) and x.mean(),
        lambda x: __import__("os").getpid() + x.mean(),
        lambda x: 3.0,
        lambda *xs: xs[0].mean(),
        functools.partial(lambda p, x: x.norm(p), 2),
    ],
)
def test_a_metric_that_does_or_needs_anything_else_is_called_and_nothing_happens_before(
    metric: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    noted.clear()
    seed = torch.initial_seed()
    reading = recognise(metric)
    assert reading.formula is None
    assert not reading.safe
    assert (noted, counter, capsys.readouterr().out, torch.initial_seed()) == ([], 0, "", seed)


@pytest.mark.parametrize(
    "metric",
    [
        lambda x: x.abs_().max(),
        lambda x: torch.relu_(x).mean(),
        lambda x: F.relu(x, inplace=True).mean(),
        lambda x: F.relu(x, True).mean(),
        lambda x: torch.abs(x, out=x).mean(),
        lambda x: x.__setitem__(0, 1.0) or x.mean(),
        functools.partial(torch.nn.init.zeros_),
    ],
)
def test_a_metric_that_writes_into_its_value_is_not_taken_for_harmless(metric: Any) -> None:
    assert not recognise(metric).safe


def test_a_metric_that_adds_in_place_is_not_taken_for_harmless() -> None:
    def adding(x: Tensor) -> Tensor:
        x += 1
        return x.mean()

    assert not recognise(adding).safe


def test_a_function_of_the_users_that_has_the_name_of_a_builtin_is_not_taken_for_it() -> None:
    names: dict[str, Any] = {"abs": lambda x: x * 0}
    exec("metric = lambda x: abs(x).mean()", names)
    assert recognise(names["metric"]).formula is None


def test_a_global_that_has_the_name_of_a_method_is_in_nobodys_way() -> None:
    names: dict[str, Any] = {"mean": print, "abs": 3}
    exec("metric = lambda x: x.abs().mean()", names)
    assert recognise(names["metric"]).formula is not None
