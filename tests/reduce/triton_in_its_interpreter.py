"""The Triton kernel at its own block size. Run by `test_triton_kernel` in a process with TRITON_INTERPRET=1."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tests.reduce.references import NAMES, assert_statistics
from torch import Tensor

from torchtap.reduce import device_kernel, kernel, triton_kernel
from torchtap.reduce.moments import WIDTH, finish, merge_states
from torchtap.reduce.stats import StatsBlock, measure

BLOCK = triton_kernel._BLOCK
PROGRAM = BLOCK * triton_kernel._LEAST_TILES


def by_triton(value: Tensor) -> Tensor:
    state = torch.full((WIDTH,), torch.nan, dtype=torch.float64)
    triton_kernel.measure(state, value)
    return state


def statistics_of(state: Tensor) -> dict[str, float]:
    return dict(zip(NAMES, finish(state.numpy().reshape(1, -1))[0].tolist(), strict=True))


def values() -> Iterator[Tensor]:
    torch.manual_seed(0)
    for dtype in kernel.DTYPE_CODES:
        for size in (0, 1, BLOCK + 1, 2 * PROGRAM + 3):
            value = torch.randn(size, dtype=torch.float64) * 30 + 1
            yield (value.abs() if dtype is torch.uint8 else value).to(dtype)
    strange = torch.randn(2 * PROGRAM)
    strange[: PROGRAM + BLOCK] = torch.nan  # a whole program, and the first block of the next
    strange[-7:] = torch.tensor([math.inf, -math.inf, 0.0, -0.0, math.nan, math.inf, 0.0])
    yield strange
    yield torch.full((BLOCK + 5,), torch.nan)
    yield torch.randn(PROGRAM + 9) * 1e-2 + 1e4
    yield torch.randn(PROGRAM + 9, dtype=torch.float64) * 1e-3 + 1e6
    base = torch.randn(6, 5, 20, 11)
    yield base.permute(2, 0, 3, 1)
    yield base[:, 1:, ::3, :-2]
    yield base[:1].expand(4, 5, 20, 11)
    yield base[2:4].transpose(2, 3)


@pytest.mark.parametrize("value", list(values()), ids=lambda value: f"{value.dtype}-{tuple(value.shape)}")
def test_the_state_is_that_of_the_definition_and_of_the_native_kernel(value: Tensor) -> None:
    before = value.clone()
    state = by_triton(value)
    assert_statistics(statistics_of(state), [value])
    assert torch.equal(value.nan_to_num(7), before.nan_to_num(7))
    if kernel.native is not None:
        native = measure(value)
        np.testing.assert_array_equal(state[:4].numpy(), native[:4].numpy())
        np.testing.assert_array_equal(state[6:8].numpy(), native[6:8].numpy())
        assert_statistics(statistics_of(native), [value])


def test_micro_batches_fold_into_one_row_without_a_copy_into_the_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernel, "native", None)
    monkeypatch.setattr(device_kernel, "_DEVICES", frozenset({"cpu"}))
    copies: list[Tensor] = []
    real_copy = Tensor.copy_
    monkeypatch.setattr(
        Tensor, "copy_", lambda self, *a, **k: copies.append(self) or real_copy(self, *a, **k)
    )
    batches = [torch.randn(BLOCK + n) for n in range(3)]
    block = StatsBlock(2)
    for batch in batches:
        block.measure_into(1, 0, batch)
    assert not [copied for copied in copies if copied.shape == (WIDTH,)]
    state = torch.from_numpy(block.states()[1])
    assert_statistics(statistics_of(state), batches)
    joined = merge_states(merge_states(by_triton(batches[0]), by_triton(batches[1])), by_triton(batches[2]))
    torch.testing.assert_close(state, joined, rtol=1e-12, atol=0)
