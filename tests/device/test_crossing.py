"""Numbers on their way from a device: none is read early, none is overwritten, nobody waits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.device import lag
from torch import Tensor, nn

import torchtap as tt
from torchtap.reduce import device_copy
from torchtap.reduce.device_copy import Crossing
from torchtap.reduce.stats import StatsArrival, StatsBlock

NAN, INF = float("nan"), float("inf")


def awkward() -> list[Tensor]:
    return [
        torch.randn(7, 5),
        torch.randn(3000) + 1,
        torch.full((10,), 3.3),
        torch.randn(1100, 1000) * 1e3 + 1e5,  # more than a stage holds
        torch.randint(0, 50, (4, 9)),
        torch.randn(100, dtype=torch.float64) * 1e-3 + 7,
        torch.tensor([1.0, NAN, INF, -2, 0, 0, -INF]),
        torch.tensor([NAN] * 3),
        torch.empty(0),
        torch.tensor(5.0),
        torch.randn(64, 64).t() + 1,
        torch.randn(50).bfloat16() + 1,
        torch.rand(33) > 0.5,
        torch.randn(9, dtype=torch.complex64),
        torch.arange(5, dtype=torch.int8),
        torch.randn(10, 10)[:, ::2] + 1,
        torch.full((4096,), -3e38),
        torch.tensor([3e38, -3e38, 1e38]),
        torch.tensor([1, 2, 2**40]),
        torch.zeros(2048),
    ]


def assert_same(found: np.ndarray, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=0)


def test_statistics_of_awkward_values_are_those_of_the_cpu() -> None:
    values = awkward()
    moved = [value.to("lag") for value in values]
    block, wanted = StatsBlock(len(values)), StatsBlock(len(values))
    for _ in range(3):
        wanted.reset()
        before = lag.counts()["waits"]
        with lag.held():
            for row, (value, there) in enumerate(zip(values, moved, strict=True)):
                wanted.measure_into(row, row % 8, value)
                block.measure_into(row, row % 8, there)
                if row % 3 == 0:  # seen at a second site of the same row
                    wanted.fold(row, row % 8)
                    block.fold(row, row % 8)
            arriving = block.hand_over()
            block.reset()
            assert arriving is not None
            assert not arriving.done()
            assert lag.counts()["waits"] == before
        assert_same(arriving.results(), wanted.results())
    assert lag.counts()["races"] == lag.counts()["faults"] == 0


def test_the_host_may_run_ahead_by_any_number_of_steps() -> None:
    block, sent = StatsBlock(1), list[StatsArrival | None]()
    values = [torch.full((3,), float(step), device="lag") for step in range(20)]
    lag.reset()
    with lag.held():
        for value in values:
            block.measure_into(0, 0, value)
            sent.append(block.hand_over())
            block.reset()
        assert lag.counts()["waits"] == 0
    assert [each.results()[0, 1] for each in sent if each is not None] == list(range(20))


def test_a_value_measured_before_a_hand_over_can_be_folded_after_it() -> None:
    block = StatsBlock(1)
    block.measure_into(0, 3, torch.full((2,), 5.0, device="lag"))
    first = block.hand_over()
    block.reset()
    block.fold(0, 3)
    second = block.hand_over()
    block.reset()
    assert first is not None
    assert second is not None
    assert first.results()[0, 1] == second.results()[0, 1] == 5
    block.fold(0, 3)  # long since on the host
    assert block.results()[0, 1] == 5


def test_a_step_of_more_values_than_a_device_holds_is_sent_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchtap.reduce import slots

    monkeypatch.setattr(slots, "_ROWS", 4)
    monkeypatch.setattr(slots, "_MOST", 64)
    block = StatsBlock(2)
    values = [torch.tensor([float(number)], device="lag") for number in range(101)]
    lag.reset()
    with lag.held():
        for number, value in enumerate(values):
            block.measure_into(number % 2, number % 8, value)
        arriving = block.hand_over()
        assert lag.counts()["waits"] == 0
    assert arriving is not None
    results = arriving.results()
    assert results[:, 0].tolist() == [51, 50]
    np.testing.assert_allclose(results[:, 1], [50, 50], rtol=1e-12)


def test_slots_that_were_made_in_inference_mode_serve_outside_of_it() -> None:
    block = StatsBlock(1)
    with torch.inference_mode():
        block.measure_into(0, 0, torch.ones(2, device="lag"))
    block.measure_into(0, 0, torch.full((2,), 3.0, device="lag"))
    assert block.results()[0, :2].tolist() == [4, 2]


def test_values_of_two_devices_and_of_several_streams_arrive() -> None:
    block, side = StatsBlock(3), torch.Stream("lag:0")
    here = torch.accelerator.current_stream(torch.device("lag:0"))
    for _ in range(3):
        value = torch.full((4,), 2.0, device="lag:0")
        block.measure_into(0, 0, value)
        block.measure_into(1, 1, torch.full((4,), 3.0, device="lag:1"))
        side.wait_stream(here)
        with side:
            other = value + 5
            block.measure_into(2, 2, other)
        arriving = block.hand_over()
        block.reset()
        assert arriving is not None
        assert arriving.results()[:, 1].tolist() == [2, 3, 7]
    assert lag.counts()["races"] == lag.counts()["faults"] == 0


def test_memory_that_slots_release_is_not_reused_before_its_last_stream_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, side = torch.device("lag", 0), torch.Stream("lag:0")
    block = StatsBlock(1, device=device)
    small, large = torch.ones(2, device=device), torch.randn(600 * 2048, device=device)
    side.wait_stream(torch.accelerator.current_stream(device))
    lag.reset()
    block.measure_into(0, 0, small)
    with lag.held():
        with side:
            block.measure_into(0, 1, large)  # the numbers move to more memory
            arriving = block.hand_over()
        again = [torch.zeros(size, device=device) for size in (4096, 4096 * 2, 2**20) for _ in range(3)]
    assert arriving is not None
    assert arriving.results()[0, 0] == 2 + large.numel()
    assert again
    del block, arriving  # the stage goes, with what was sent
    torch.zeros(512, 2048, device=device)
    assert lag.counts()["races"] == 0


def test_whole_tensors_cross_beside_the_computation() -> None:
    value = torch.randn(100, device="lag")
    wanted = value.cpu()
    lag.reset()
    with lag.held():
        sent = Crossing([value.clone()])
        value.zero_()
        assert not sent.done()
        assert lag.counts()["waits"] == 0
    assert torch.equal(sent.wait()[0], wanted)
    assert sent.done()
    assert lag.counts()["races"] == lag.counts()["faults"] == 0


def test_a_device_without_events_copies_at_once_and_its_waits_are_counted() -> None:
    device_copy.line_to.cache_clear()
    try:
        with lag.capable_of_streams(False):
            model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).to("lag")
            data = torch.randn(5, 3, device="lag")
            lag.reset()
            with tt.watch(model, None, ["*:output"]) as watching:
                for _ in range(3):
                    with watching.step():
                        output = model(data)
                counts, found = lag.counts(), watching.latest("2:output", "mean")
            assert counts["waits"] == counts["to_host"] == 3
            assert found == pytest.approx(output.mean().item(), rel=1e-5)
    finally:
        device_copy.line_to.cache_clear()
