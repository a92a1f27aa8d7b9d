"""A watch on a device whose numbers come late: the same records, in the same order, and nobody waits unasked."""

from __future__ import annotations

import io
import traceback
from typing import Any

import numpy as np
import pytest
import torch
from tests.late_device import LateDevice
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchtap as tt
from torchtap.store.record import StepRecord

TAPS = [
    tt.tap("*:output", keep=tt.Stats()),
    tt.tap("*:param_grad", keep=tt.Stats(), every=2),
    tt.tap("0:output", keep=tt.Metric(torch.sum, name="total")),
    tt.tap("2:output", keep=tt.Metric(torch.amax, "max", name="largest")),
    tt.tap("*:output", keep=tt.Quantiles()),
]


class CountsReads(TorchDispatchMode):
    """Counts how often the host asks for a number of a tensor, as ``.item()``, ``float`` and ``bool`` do.

    The statistics have a way of their own for tensors on the host (`moments`), which reads; it is left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            callers = (frame.filename for frame in traceback.extract_stack(limit=12))
            self.reads += not any(name.endswith("reduce/moments.py") for name in callers)
        return func(*args, **(kwargs or {}))


class Kept:
    """A sink that keeps a copy of each record's numbers as they are when it is handed over."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.numbers: list[dict[tuple[str, str], float]] = []

    def write(self, record: StepRecord) -> None:
        self.steps.append(record.step)
        self.numbers.append(
            {
                (site, statistic): float(block.values[i, j])
                for block in record.scalars
                for i, site in enumerate(block.sites)
                if block.present is None or block.present[i]
                for j, statistic in enumerate(block.statistics)
            }
        )

    def close(self) -> None:
        pass


class Far(Tensor):
    """A number that says it is on another device."""

    is_cpu = property(lambda self: False)  # type: ignore[assignment]


def train(steps: int, *, late: LateDevice | None = None, **options: Any) -> Kept:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = Kept()
    with tt.watch(model, None, TAPS, sinks=[kept], strict=True, **options) as watch:
        for step in range(steps):
            with watch.step():
                for _ in range(2):
                    loss = model(torch.randn(3, 4)).square().mean()
                    loss.backward()
                watch.log(loss=loss.detach().as_subclass(Far) if late else loss)
                optimizer.step()
                optimizer.zero_grad()
            assert late is None or kept.steps == list(range(step))
            assert late is None or late.waits == 0 or step
    return kept


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    return LateDevice(monkeypatch)


def test_records_come_a_step_later_with_the_same_numbers_in_the_same_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = train(6)
    late = train(6, late=LateDevice(monkeypatch))
    assert late.steps == plain.steps == list(range(6))
    for one, other in zip(late.numbers, plain.numbers, strict=True):
        assert list(one) == list(other)
        np.testing.assert_allclose(list(one.values()), list(other.values()), rtol=1e-6, atol=1e-12)


def test_no_reduction_reads_a_number_while_the_training_goes_on(late: LateDevice) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = Kept()
    with tt.watch(model, None, TAPS, sinks=[kept], strict=True) as watch:
        for _ in range(3):
            with CountsReads() as counted, watch.step():
                model(torch.randn(3, 4)).square().mean().backward()
                optimizer.step()
            assert counted.reads == 0
    assert kept.steps == [0, 1, 2]
    assert ("2:output", "p50") in kept.numbers[0]


def test_reads_are_noticed() -> None:
    with CountsReads() as counted:
        torch.ones(1).item()
        float(torch.ones(1))
    assert counted.reads == 2


def watched(late: LateDevice, every: int = 1) -> tuple[tt.Watch, nn.Module, Kept]:
    model, kept = nn.Linear(2, 2), Kept()
    return tt.watch(model, None, tt.tap("*:output", every=every), sinks=[kept]), model, kept


def test_the_end_of_a_step_does_not_wait_for_it(late: LateDevice) -> None:
    watch, model, kept = watched(late)
    with watch.step():
        model(torch.ones(1, 2))
    assert (kept.steps, late.waits) == ([], 0)
    with watch.step():
        model(torch.ones(1, 2))
    assert (kept.steps, late.waits) == ([0], 1)
    watch.close()
    assert (kept.steps, late.waits) == ([0, 1], 2)


def test_what_has_arrived_by_the_time_the_next_step_begins_is_handed_on_then(late: LateDevice) -> None:
    watch, model, kept = watched(late)
    with watch.step():
        model(torch.ones(1, 2))
    late.catch_up()
    with watch.step():
        assert (kept.steps, late.waits) == ([0], 0)
    watch.close()


def test_a_step_off_schedule_hands_on_the_one_before(late: LateDevice) -> None:
    watch, model, kept = watched(late, every=2)
    for _ in range(2):
        with watch.step():
            model(torch.ones(1, 2))
    assert kept.steps == [0]
    watch.close()
    assert kept.steps == [0]


@pytest.mark.parametrize("ask", ["latest", "summary", "flush", "end_step"])
def test_whoever_asks_gets_the_step_that_has_just_ended(late: LateDevice, ask: str) -> None:
    watch, model, kept = watched(late)
    with watch.step():
        out = model(torch.ones(1, 2))
    if ask == "latest":
        assert watch.latest(":output", "max") == pytest.approx(out.max().item())
    elif ask == "summary":
        text = io.StringIO()
        watch.summary(text)
        assert ":output" in text.getvalue()
    else:
        getattr(watch, ask)()
    assert kept.steps == [0]
    watch.close()
    assert kept.steps == [0]


def test_a_record_that_holds_no_such_numbers_is_handed_on_at_once(late: LateDevice) -> None:
    model, kept = nn.Linear(2, 2), Kept()
    with tt.watch(model, None, tt.tap("*:output", keep=tt.Full()), sinks=[kept]) as watch:
        with watch.step():
            model(torch.ones(1, 2))
        assert kept.steps == [0]
