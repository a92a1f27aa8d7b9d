"""Numbers on their way from a device: nobody reads them early, nobody writes over them."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from tests.late_device import LateDevice
from torch import Tensor

from torchtap.reduce import StatsBlock, crossing, stats_block
from torchtap.reduce.crossing import Crossing
from torchtap.reduce.stats_block import StatsArrival


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    return LateDevice(monkeypatch)


def means(results: np.ndarray) -> list[float]:
    return results[:, 1].tolist()


def test_a_device_without_known_streams_copies_at_once() -> None:
    source = torch.arange(3.0)
    sent = Crossing([source])
    source.zero_()
    assert sent.done()
    assert sent.wait()[0].tolist() == [0, 1, 2]


def test_the_host_waits_only_when_it_asks(late: LateDevice) -> None:
    sent = Crossing([torch.arange(3.0), torch.ones(1)])
    assert not sent.done()
    assert late.waits == 0
    assert [host.tolist() for host in sent.wait()] == [[0, 1, 2], [1]]
    assert late.waits == 1
    assert sent.done()


def test_a_side_stream_waits_for_the_current_one_and_is_told_apart_by_its_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []

    class Stream:
        def __init__(self, name: Any) -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            done.append(f"{self.name} waits for {other.name}")

        def record_event(self) -> str:
            done.append(f"event on {self.name}")
            return "event"

        @contextmanager
        def _current(self) -> Any:
            done.append(f"on {self.name}")
            yield
            done.append(f"off {self.name}")

        def __enter__(self) -> None:
            self._context = self._current()
            self._context.__enter__()

        def __exit__(self, *_: object) -> None:
            self._context.__exit__(None, None, None)

    def pinned(like: Tensor, *, device: str, pin_memory: bool) -> Tensor:
        assert device == "cpu"
        assert pin_memory
        done.append("pinned")
        return torch.zeros(like.shape, dtype=like.dtype)

    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: Stream(f"current of {device}"))
    monkeypatch.setattr(torch, "empty_like", pinned)
    hosts, event = crossing._SideStream(torch.device("cuda:1")).copy([torch.ones(2)])
    assert event == "event"
    assert hosts[0].tolist() == [1, 1]
    assert done == [
        "cuda:1 waits for current of cuda:1",
        "on cuda:1",
        "pinned",
        "off cuda:1",
        "event on cuda:1",
    ]


def test_a_hand_over_does_not_wait_and_the_next_step_does_not_reach_into_it(late: LateDevice) -> None:
    block = StatsBlock(2)

    def step(number: float) -> StatsArrival:
        block.measure_into(0, 0, torch.full((3,), number))
        block.measure_into(1, 1, torch.full((3,), 10 + number))
        arriving = block.hand_over()
        block.reset()
        assert arriving is not None
        assert not arriving.done()
        return arriving

    before = step(0)
    assert late.waits == 0
    for number in range(1, 5):
        block.measure(2, torch.ones(1))  # the next step is under way
        assert means(before.results()) == [number - 1, number + 9]
        assert late.waits == number
        before = step(number)
    assert means(before.results()) == [4, 14]
    assert block.hand_over() is None


def test_a_hand_over_that_nobody_reads_is_not_overwritten(late: LateDevice) -> None:
    block = StatsBlock(1)
    handed = []
    for step in range(6):
        block.measure_into(0, 0, torch.full((2,), float(step)))
        handed.append(block.hand_over())
        block.reset()
    assert [means(arriving.results()) for arriving in handed if arriving] == [[step] for step in range(6)]


def test_a_value_measured_before_a_hand_over_can_be_folded_after_it(late: LateDevice) -> None:
    block = StatsBlock(1)
    block.measure_into(0, 3, torch.full((2,), 5.0))
    first = block.hand_over()
    block.reset()
    block.fold(0, 3)
    assert late.waits == 0
    second = block.hand_over()
    block.reset()
    assert first is not None
    assert second is not None
    assert means(first.results()) == means(second.results()) == [5]
    block.fold(0, 3)  # long since on the host
    assert means(block.results()) == [5]


def test_results_hold_what_is_still_on_the_device(late: LateDevice) -> None:
    block = StatsBlock(1)
    block.measure_into(0, 0, torch.ones(2))
    assert means(block.results()) == [1]
    block.measure_into(0, 0, torch.full((2,), 3.0))
    assert block.results()[0, :2].tolist() == [4, 2]


def test_a_step_of_more_values_than_a_piece_of_slots_holds_comes_over_whole(late: LateDevice) -> None:
    block = StatsBlock(2)
    for number in range(2048 + 5):
        block.measure_into(number % 2, number % 8, torch.tensor([float(number)]))
    arriving = block.hand_over()
    assert arriving is not None
    results = arriving.results()
    assert results[:, 0].tolist() == [1027, 1026]
    np.testing.assert_allclose(results[:, 1], [1026, 1026], rtol=1e-12)


def test_a_step_without_end_waits_now_and_then_and_holds_only_so_many_slots(
    late: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stats_block, "_MOST_SLOTS", 4)
    block = StatsBlock(1)
    for number in range(11):
        block.measure_into(0, number % 3, torch.tensor([float(number)]))
    block.fold(0, 10 % 3)
    assert late.waits == 2
    assert block.results()[0, :2].tolist() == [12, 65 / 12]


def test_slots_that_were_made_in_inference_mode_serve_outside_of_it(late: LateDevice) -> None:
    block = StatsBlock(1)
    with torch.inference_mode():
        block.measure_into(0, 0, torch.ones(2))
    block.measure_into(0, 0, torch.full((2,), 3.0))
    assert block.results()[0, :2].tolist() == [4, 2]
