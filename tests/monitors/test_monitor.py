"""`Monitor` on a real training: what it keeps, of which epochs and batches, and what it hands out."""

from __future__ import annotations

import warnings
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.monitors.training import (
    CROSS_ATTENTION,
    FFN,
    MIXED,
    SELF_ATTENTION,
    WEIGHTS,
    outputs_of,
    setting,
    train,
)
from torch import Tensor, nn

from torchtap import Monitor


def test_both_record_types_hold_exactly_what_the_layers_put_out(tmp_path: Path) -> None:
    training = setting()
    monitor = Monitor(training.model, MIXED, [1, 2], tmp_path, batch_indices=[0, 2])
    for epoch in train(
        training,
        2,
        epoch_callback=monitor.create_epoch_callback(),
        batch_callback=monitor.create_batch_callback(),
    ):
        single, full = monitor.get_single_data(), monitor.get_epoch_data()
        assert list(single) == ["attention", "maps"]
        assert list(full) == ["ffn"]
        expected = outputs_of(WEIGHTS, epoch)
        assert list(single["maps"]["data"]) == [(epoch, 0), (epoch, 2)]
        assert all(torch.equal(v, expected[batch]) for (_, batch), v in single["maps"]["data"].items())
        assert single["maps"]["layer"] == WEIGHTS
        assert single["maps"]["alias"] == "maps"
        assert single["maps"]["output_shape"] == [3, 6, 6]
        expected = outputs_of(FFN, epoch)
        assert list(full["ffn"]["data"]) == [(epoch, batch) for batch in range(4)]
        assert all(torch.equal(v, expected[batch]) for (_, batch), v in full["ffn"]["data"].items())
    monitor.remove_hooks()


def test_a_tuple_stays_a_tuple_and_its_shape_is_a_list_of_shapes(tmp_path: Path) -> None:
    training = setting()
    layers = {SELF_ATTENTION: None, CROSS_ATTENTION: {"record_type": "epoch_full"}}
    with Monitor(training.model, layers, [1], tmp_path, [0]) as monitor:
        for _ in train(training, 1, epoch_callback=monitor.set_epoch, batch_callback=monitor.set_batch_idx):
            data = monitor.get_single_data()[SELF_ATTENTION]
            attention, weights = data["data"][1, 0]
            assert data["output_shape"] == [[3, 6, 16], [3, 6, 6]]
            assert attention.shape == (3, 6, 16)
            assert torch.equal(weights, outputs_of(SELF_ATTENTION, 1)[0][1])
            output = monitor.get_epoch_data()[CROSS_ATTENTION]["data"][1, 3]
            assert isinstance(output, tuple)
            assert output[1] is None  # need_weights=False


def test_other_structures_come_back_as_they_were(tmp_path: Path) -> None:
    pair = namedtuple("pair", "left right")

    class Odd(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"both": pair(x, [x + 1, x + 2]), "name": "odd"}

    model = nn.Sequential(nn.Linear(3, 3), Odd())
    with Monitor(model, ["1"], [0], tmp_path, [0]) as monitor:
        monitor.set_epoch(0)
        monitor.set_batch_idx(0)
        expected = model(torch.randn(2, 3))
        output = monitor.get_single_data()["1"]["data"][0, 0]
        assert isinstance(output["both"], pair)
        assert torch.equal(output["both"].right[1], expected["both"].right[1])
        assert output["name"] == "odd"
        (path,) = monitor.save_single_outputs()
    loaded = torch.load(path, weights_only=True)
    assert torch.equal(loaded["output"]["both"][0], expected["both"].left)


def test_what_is_handed_out_is_a_copy(tmp_path: Path) -> None:
    training = setting()
    monitor = Monitor(training.model, MIXED, [1], tmp_path, [0])
    for _ in train(training, 1, epoch_callback=monitor.set_epoch, batch_callback=monitor.set_batch_idx):
        monitor.get_single_data()["maps"]["data"][1, 0].zero_()
        monitor.get_epoch_data()["ffn"]["data"][1, 0].zero_()
        assert monitor.get_single_data(["maps"])["maps"]["data"][1, 0].any()
        assert monitor.get_epoch_data([FFN])["ffn"]["data"][1, 0].any()
    monitor.remove_hooks()


def test_a_new_epoch_lets_go_of_the_one_before_and_clearing_can_be_partial(tmp_path: Path) -> None:
    training = setting()
    monitor = Monitor(training.model, MIXED, [1, 2, 3], tmp_path, [0])
    for epoch in train(training, 2, epoch_callback=monitor.set_epoch, batch_callback=monitor.set_batch_idx):
        assert {key[0] for key in monitor.get_single_data()["maps"]["data"]} == {epoch}
    monitor.clear_epoch_data()
    assert monitor.get_epoch_data() == {}
    assert monitor.get_single_data()["maps"]["data"]
    monitor.clear_current_epoch_data()
    assert monitor.get_single_data() == {}
    monitor.remove_hooks()


def test_a_validation_between_batches_does_not_get_into_them(tmp_path: Path) -> None:
    training = setting()
    monitor = Monitor(training.model, {FFN: {"record_type": "epoch_full"}}, [1], tmp_path)
    for _ in train(training, 1, epoch_callback=monitor.set_epoch, batch_callback=monitor.set_batch_idx):
        training.model.eval()
        training.model(torch.zeros(5, 6, dtype=torch.long))
        training.model.train()
        data = monitor.get_epoch_data()[FFN]["data"]
    assert [value.shape[0] for value in data.values()] == [3, 3, 3, 3]
    monitor.remove_hooks()


def test_a_condition_decides_by_argument_or_by_subclass(tmp_path: Path) -> None:
    class Picky(Monitor):
        def _custom_condition(self, output: Any) -> bool:
            return bool(output.shape[0] == 2)

    def kept(monitor: Monitor, model: nn.Module) -> list[tuple[int, int]]:
        monitor.set_epoch(0)
        for index, rows in enumerate([1, 2, 3]):
            monitor.set_batch_idx(index)
            model(torch.randn(rows, 3))
        with monitor:
            return list(monitor.get_epoch_data()["0"]["data"])

    model, layers = nn.Sequential(nn.Linear(3, 2)), {"0": {"record_type": "epoch_full"}}
    assert kept(Picky(model, layers, [0], tmp_path), model) == [(0, 1)]
    by_argument = Monitor(model, layers, [0], tmp_path, condition=lambda output: output.shape[0] > 1)
    assert kept(by_argument, model) == [(0, 1), (0, 2)]


def test_a_batch_that_is_set_twice_keeps_its_first_outputs(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Identity())
    with Monitor(model, ["0"], [0], tmp_path, [0]) as monitor:
        monitor.set_epoch(0)
        for number in (1.0, 2.0):
            monitor.set_batch_idx(0)
            model(torch.full((1,), number))
        with pytest.warns(RuntimeWarning, match="batch 0 of epoch 0 was set more than once"):
            assert monitor.get_single_data()["0"]["data"][0, 0].item() == 1.0


def test_a_good_training_is_recorded_without_a_warning(tmp_path: Path) -> None:
    training = setting()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Monitor(training.model, MIXED, [1], tmp_path, [0]) as monitor:
            for _ in train(
                training, 2, epoch_callback=monitor.set_epoch, batch_callback=monitor.set_batch_idx
            ):
                monitor.save_single_outputs()
                monitor.save_epoch_outputs()
