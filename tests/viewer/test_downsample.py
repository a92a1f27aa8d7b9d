from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from torchtap.viewer.arrays import block_extremes, buckets, extremes, keep_points


def test_one_spike_among_ten_thousand_steps_survives_both_ways_up_and_down() -> None:
    values = np.ones((50, 10_000), dtype=np.float32)
    values[17, 4321] = 900.0
    values[31, 77] = -5.0
    low, high, _, _ = extremes(values, 10, 300)
    assert high.shape == (10, 300)
    assert high.max() == 900.0
    assert low.min() == -5.0


def test_what_fits_is_returned_unchanged() -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    low, high, rows, columns = extremes(values, 100, 100)
    np.testing.assert_array_equal(low, values)
    np.testing.assert_array_equal(high, values)
    assert rows.tolist() == [0, 1, 2]
    assert columns.tolist() == [0, 1, 2, 3]


def test_a_cell_is_empty_only_if_nothing_under_it_was_recorded() -> None:
    values = np.full((1, 8), np.nan, dtype=np.float32)
    values[0, 5] = 2.0
    low, high, _, _ = extremes(values, 1, 2)
    assert np.isnan(low[0, 0])
    assert low[0, 1] == high[0, 1] == 2.0


@given(st.integers(1, 5000), st.integers(1, 400))
def test_buckets_cover_everything_once(length: int, most: int) -> None:
    starts = buckets(length, most)
    assert starts[0] == 0
    assert len(starts) == min(length, most)
    assert (np.diff(starts) > 0).all()


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=600), st.integers(2, 50))
def test_a_thinned_series_keeps_its_ends_and_its_extremes(numbers: list[float], points: int) -> None:
    values = np.array(numbers)
    kept = keep_points([values], points)
    assert kept[0] == 0
    assert kept[-1] == len(values) - 1
    assert values[kept].min() == values.min()
    assert values[kept].max() == values.max()


def test_the_step_where_a_series_stops_being_finite_is_kept() -> None:
    values = np.ones(5000)
    values[3333:] = np.nan
    kept = keep_points([values], 40)
    assert 3333 in kept.tolist()


def test_blocks_hold_the_extremes_of_their_columns_also_where_they_do_not_divide() -> None:
    values = np.random.default_rng(0).standard_normal((3, 11)).astype(np.float32)
    values[1, 4:8] = np.nan
    low, high = block_extremes(values, 4)
    assert low.shape == (3, 3)
    assert low[0, 1] == values[0, 4:8].min()
    assert high[2, 2] == values[2, 8:].max()
    assert np.isnan(low[1, 1])
