"""The arithmetic of states, and that the path for other devices never reads back to the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.reduce.references import NAMES, assert_statistics
from torch.utils._python_dispatch import TorchDispatchMode

from torchtap.reduce import moments
from torchtap.reduce.histogram import LogBins
from torchtap.reduce.moments import STATISTICS, blank_states, finish, merge_states

HOST_READS = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::bincount",
    "aten::is_nonzero",
    "aten::equal",
}


class NoHostReads(TorchDispatchMode):
    """Fails at every op that would make the host wait for a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func._schema.name not in HOST_READS, f"{func._schema.name} waits for the device"
        return func(*args, **(kwargs or {}))


def test_the_names_are_in_the_agreed_order() -> None:
    assert STATISTICS == NAMES


def test_measuring_and_merging_on_a_device_never_wait_for_it() -> None:
    value = torch.randn(5000, dtype=torch.float64)
    value[3], value[7], value[11] = torch.nan, torch.inf, 0.0
    with NoHostReads():
        halves = [moments.measure_masked(half) for half in (value[:2000], value[2000:])]
        state = merge_states(*halves)
        LogBins(-8, 8, 2).places(value)
    found = finish(state.numpy().reshape(1, -1))[0]
    assert_statistics(dict(zip(NAMES, found.tolist(), strict=True)), [value])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_compiler_fuses_to_the_same_statistics(dtype: torch.dtype) -> None:
    fused: Any = torch.compile(lambda x: moments.measure_masked((x * 2).reshape(-1).double()), fullgraph=True)
    torch.manual_seed(0)
    plain = torch.randn(40, 37).to(dtype)
    strange = plain.clone()
    strange[0, :5] = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0])
    strange[7:9] = torch.nan
    for value in (plain, strange, plain + 100, torch.full_like(plain, torch.nan), torch.zeros_like(plain)):
        found = finish(fused(value).numpy().reshape(1, -1))[0]
        assert_statistics(dict(zip(NAMES, found.tolist(), strict=True)), [value * 2])


def test_nothing_merges_without_a_trace() -> None:
    nothing = torch.from_numpy(blank_states(1))
    something = torch.from_numpy(np.array([[3.0, 0, 1, 1, 5.0, 2.0, 4.0, 6.0, 10.0, 0.0]]))
    assert torch.equal(merge_states(nothing, something), something)
    assert torch.equal(merge_states(something, nothing), something)
    assert torch.equal(merge_states(nothing, nothing), nothing)


def test_values_that_are_all_strange_leave_the_moments_of_others_alone() -> None:
    strange = torch.from_numpy(blank_states(1))
    strange[0, :3] = torch.tensor([4.0, 3.0, 1.0])
    something = torch.from_numpy(np.array([[2.0, 0, 0, 0, 5.0, 2.0, 4.0, 6.0, 10.0, 0.0]]))
    merged = merge_states(strange, something)[0]
    assert merged.tolist() == [6.0, 3.0, 1.0, 0.0, 5.0, 2.0, 4.0, 6.0, 10.0, 0.0]
