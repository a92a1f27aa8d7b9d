"""Unusual tensors: read rightly, or refused with a word; never read where there is no memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.reduce.references import NAMES, assert_statistics, statistics
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from torchtap.errors import ReductionError
from torchtap.reduce import (
    Full,
    Gram,
    Histogram,
    Metric,
    Quantiles,
    Reduction,
    Sample,
    Stats,
    StatsBlock,
    TopK,
)

EVERY: list[Reduction[Any]] = [
    Stats(),
    Full(),
    Histogram(),
    Quantiles(),
    Sample(),
    TopK(),
    Gram(),
    Metric(lambda x: x.to(torch.float32).sum(), name="total"),
]


class Renamed(Tensor):
    """A subclass that changes nothing."""


class Wrapper(Tensor):
    """A subclass without memory of its own, whose values only its own dispatch can reach."""

    elem: Tensor

    @staticmethod
    def __new__(cls, elem: Tensor) -> Wrapper:
        made = Tensor._make_wrapper_subclass(cls, elem.shape, dtype=elem.dtype)  # type: ignore[attr-defined]
        made.elem = elem
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*(arg.elem if isinstance(arg, Wrapper) else arg for arg in args), **(kwargs or {}))
        return Wrapper(out) if isinstance(out, Tensor) else out


def some() -> Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(0))


def quiet(make: Callable[[], Tensor]) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


READ: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "sparse": lambda: (some().relu().to_sparse(), some().relu()),
    "sparse rows": lambda: (quiet(lambda: some().relu().to_sparse_csr()), some().relu()),
    "mkldnn": lambda: (some().to_mkldnn(), some()),
    "quantized": lambda: (
        quiet(lambda: torch.quantize_per_tensor(some(), 0.5, 0, torch.qint8)),
        (some() * 2).round() / 2,
    ),
    "parameter": lambda: (nn.Parameter(some()), some()),
    "subclass": lambda: (some().as_subclass(Renamed), some()),
    "negated view": lambda: (torch.complex(some(), some()).conj().imag, -some()),
    "conjugated": lambda: (torch.complex(some(), some()).conj(), torch.complex(some(), -some())),
    "half complex": lambda: (
        quiet(lambda: torch.complex(some(), some()).to(torch.complex32)),
        torch.complex(some().half().float(), some().half().float()),
    ),
    "inference": lambda: (torch.inference_mode()(some)(), some()),
    "unsigned": lambda: (torch.arange(30).reshape(6, 5).to(torch.uint64), torch.arange(30).reshape(6, 5)),
    "float8": lambda: (some().to(torch.float8_e4m3fn), some().to(torch.float8_e4m3fn).float()),
    "nested": lambda: (
        quiet(lambda: torch.nested.nested_tensor([some()[:2], some()[2:]], layout=torch.jagged)),
        some(),
    ),
}


@pytest.mark.parametrize("name", sorted(READ))
def test_an_unusual_tensor_has_the_statistics_of_its_values(path: str, name: str) -> None:
    value, plain = READ[name]()
    tolerance = 1e-3 if name in ("quantized", "half complex") else 1e-6
    assert_statistics(Stats().result(Stats().update(None, value)), [plain], rtol=tolerance)  # type: ignore[arg-type]
    block = StatsBlock(2)
    block.measure_into(0, 0, value)
    block.fold(1, 0)
    for row in block.results():
        assert_statistics(dict(zip(NAMES, row.tolist(), strict=True)), [plain], rtol=tolerance)


@pytest.mark.parametrize("name", sorted(READ))
def test_every_reduction_takes_an_unusual_tensor_or_says_why_not(name: str) -> None:
    value, _ = READ[name]()
    for reduction in EVERY:
        if isinstance(reduction, Gram) and value.is_complex():
            with pytest.raises(ReductionError, match="complex"):
                reduction.update(None, value)
        else:
            assert reduction.result(reduction.update(None, value))


def freed() -> Tensor:
    value = some()
    value.untyped_storage().resize_(0)
    return value


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.ones(3, 3)


VALUELESS: dict[str, Callable[[], Tensor]] = {
    "meta": lambda: torch.ones(3, 3, device="meta"),
    "fake": fake,
    "freed": freed,
    "uninitialized": nn.parameter.UninitializedParameter,
}


@pytest.mark.parametrize("name", sorted(VALUELESS))
def test_a_tensor_without_values_is_refused_by_every_reduction(path: str, name: str) -> None:
    for reduction in EVERY:
        with pytest.raises(ReductionError):
            reduction.update(None, VALUELESS[name]())
    block = StatsBlock(1)
    with pytest.raises(ReductionError):
        block.measure_into(0, 0, VALUELESS[name]())
    assert block.results()[0, 0] == 0


def test_a_wrapper_that_cannot_be_opened_is_left_to_a_metric(path: str) -> None:
    for reduction in EVERY[:-1]:
        with pytest.raises(ReductionError, match="Metric"):
            reduction.update(None, Wrapper(some()))
    metric = Metric(lambda x: x.elem.sum(), name="inside")
    assert metric.result(metric.update(None, Wrapper(some())))["inside"] == pytest.approx(float(some().sum()))


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap, "both", "jvp"])
def test_values_inside_of_a_transform_are_those_underneath(path: str, transform: Any) -> None:
    states: list[Any] = []
    block = StatsBlock(1)
    outside = some().double()

    def model(x: Tensor) -> Tensor:
        y = x * 2
        states.extend(reduction.update(None, y) for reduction in EVERY)
        states.append(Stats().update(None, outside))
        block.measure_into(0, 0, y)
        return y.sum()

    base = some()
    if transform == "both":
        torch.func.vmap(torch.func.grad(model))(base)
    elif transform == "jvp":
        torch.func.jvp(model, (base,), (torch.ones_like(base),))
    else:
        transform(model)(base)
    for reduction, state in zip(EVERY, states, strict=False):
        assert reduction.result(state)
    assert_statistics(Stats().result(states[0]), [base * 2])  # type: ignore[arg-type]
    assert_statistics(Stats().result(states[-1]), [outside])  # type: ignore[arg-type]
    assert_statistics(dict(zip(NAMES, block.results()[0].tolist(), strict=True)), [base * 2])


def test_functionalized_values_are_refused(path: str) -> None:
    refused = []

    def model(x: Tensor) -> Tensor:
        for reduction in EVERY:
            with pytest.raises(ReductionError):
                reduction.update(None, x)
            refused.append(reduction)
        return x

    torch.func.functionalize(model)(some())
    assert len(refused) == len(EVERY)


def test_a_sparse_value_is_never_made_dense_for_its_statistics(path: str) -> None:
    places = torch.tensor([[1, 5, 10**9 - 1], [0, 2**20, 3]])
    value = torch.sparse_coo_tensor(
        places, torch.tensor([2.0, -4.0, 6.0]), (10**9, 2**21), check_invariants=True
    )
    result = Stats().result(Stats().update(None, value))
    assert result["count"] == 10**9 * 2**21
    assert result["min"] == -4.0
    assert result["l1"] == 12.0
    assert result["l2"] == pytest.approx(np.sqrt(56.0))
    assert result["zeros"] == pytest.approx(1.0)


def test_a_sparse_value_counts_a_place_that_is_stored_twice_once() -> None:
    value = torch.sparse_coo_tensor(
        torch.tensor([[0, 0]]), torch.tensor([1.0, 2.0]), (3,), check_invariants=True
    )
    found = Stats().result(Stats().update(None, value))
    wanted = statistics([torch.tensor([3.0, 0.0, 0.0])])
    assert found == pytest.approx(wanted)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_a_distributed_tensor_gives_this_ranks_shard(path: str) -> None:
    import torch.distributed as distributed
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    if distributed.is_initialized():
        pytest.skip("a process group is already there")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        value = DTensor.from_local(some(), DeviceMesh("cpu", [0]), [Shard(0)])
        for reduction in EVERY[:-1]:
            assert reduction.result(reduction.update(None, value))
        assert_statistics(Stats().result(Stats().update(None, value)), [some()])  # type: ignore[arg-type]
    finally:
        distributed.destroy_process_group()
