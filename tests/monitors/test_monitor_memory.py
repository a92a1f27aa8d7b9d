"""``epoch_full`` far beyond its ceiling: memory stays down and the statistics are those of all outputs."""

from __future__ import annotations

import torch
from benchmarks.monitor import run

from torchtap.monitors.monitor_outputs import EpochStatistics


def test_an_epoch_of_eight_times_the_ceiling_stays_near_it_and_is_exact() -> None:
    """The measurement of benchmarks/monitor.py, made small: 128 MiB of outputs under 16 MiB."""
    measured = run(outputs_mib=128, ceiling_mib=16)
    assert measured["files"] == 64
    # The ceiling, one batch, and what torch needs to work on a batch.
    assert measured["peak growth MiB"] < 96
    assert measured["worst relative error"] < 1e-12


def test_statistics_of_batches_equal_those_of_their_concatenation() -> None:
    torch.manual_seed(0)
    batches = [torch.randn(rows, 3, 700) * 10**power for rows, power in ((5, 0), (1, 3), (7, -3), (2, 1))]
    statistics = EpochStatistics()
    for batch in batches:
        statistics.add(batch)
    whole = torch.cat(batches).double()
    result = statistics.result()
    assert statistics.shape == [15, 3, 700]
    assert abs(result["std"] / whole.std().item() - 1) < 1e-12
    over = result["over_first_dimension"]
    torch.testing.assert_close(over["mean"], whole.mean(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(over["std"], whole.std(0), rtol=1e-10, atol=1e-12)


def test_batches_of_several_shapes_have_numbers_but_none_by_position() -> None:
    statistics = EpochStatistics()
    for length in (3, 5):
        statistics.add(torch.full((2, length), float(length)))
    result = statistics.result()
    assert result["count"] == 16
    assert result["mean"] == (6 * 3 + 10 * 5) / 16
    assert result["over_first_dimension"] is None


def test_booleans_integers_and_numbers_without_a_dimension_are_measured_too() -> None:
    for value in (torch.tensor([True, False]), torch.tensor([1, 0]), torch.tensor(0.5)):
        statistics = EpochStatistics()
        statistics.add(value)
        assert statistics.result()["mean"] == 0.5
