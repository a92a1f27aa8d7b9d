"""StatsBlock: what the receiver relies on."""

from __future__ import annotations

import numpy as np
import torch

from torchtap.reduce import Stats, StatsBlock
from torchtap.reduce.moments import STATISTICS


def reference(*values: torch.Tensor) -> np.ndarray:
    state = None
    for value in values:
        state = Stats().update(state, value)
    result = Stats().result(state)
    return np.array([result[name] for name in STATISTICS])


def test_a_value_measured_once_can_be_folded_into_several_rows(path: str) -> None:
    block = StatsBlock(3)
    first, second = torch.randn(7, 5), torch.randn(11)
    block.measure_into(0, 0, first)
    block.fold(2, 0)
    block.measure_into(2, 1, second)
    results = block.results()
    np.testing.assert_allclose(results[0], reference(first), rtol=1e-12)
    np.testing.assert_allclose(results[2], reference(first, second), rtol=1e-12)


def test_an_untouched_row_has_seen_nothing(path: str) -> None:
    row = dict(zip(STATISTICS, StatsBlock(1).results()[0], strict=True))
    assert row["count"] == 0
    assert row["l1"] == 0
    assert np.isnan(row["mean"])


def test_growing_keeps_the_rows_there_are(path: str) -> None:
    block = StatsBlock(1)
    value = torch.randn(9)
    block.measure_into(0, 0, value)
    block.grow(100)
    block.measure_into(99, 0, value)
    results = block.results()
    assert results.shape == (100, 12)
    np.testing.assert_array_equal(results[0], results[99])


def test_reset_forgets_only_the_chosen_rows(path: str) -> None:
    block = StatsBlock(3)
    for row in range(3):
        block.measure_into(row, 0, torch.ones(4))
    block.reset(slice(1, 2))
    assert block.results()[:, 0].tolist() == [4, 0, 4]
    block.reset()
    assert block.results()[:, 0].tolist() == [0, 0, 0]


def test_a_scratch_slot_survives_the_reading_of_results(path: str) -> None:
    block = StatsBlock(2)
    block.measure_into(0, 3, torch.arange(5.0))
    block.results()
    block.fold(1, 3)
    results = block.results()
    np.testing.assert_array_equal(results[0], results[1])


def test_states_of_two_blocks_merge_into_rows(path: str) -> None:
    here, there = StatsBlock(1), StatsBlock(1)
    first, second = torch.randn(6), torch.randn(8)
    here.measure_into(0, 0, first)
    there.measure_into(0, 0, second)
    both = StatsBlock(2)
    for block in (here, there):
        both.fold_state(0, torch.from_numpy(block.states()[0]))
    np.testing.assert_allclose(both.results()[0], reference(first, second), rtol=1e-12)


def test_more_folds_than_a_piece_of_slots_holds(path: str) -> None:
    block = StatsBlock(2)
    for index in range(2500):
        block.measure_into(index % 2, index % 8, torch.tensor([float(index)]))
    results = block.results()
    assert results[:, 0].tolist() == [1250, 1250]
    np.testing.assert_allclose(results[:, 1], [1249, 1250], rtol=1e-12)
