"""What `Monitor` leaves alone: the model, its numbers, and other monitors in other threads."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.monitors.training import FFN, MIXED, SELF_ATTENTION, WEIGHTS, outputs_of, setting, train
from torch import nn

import torchtap as tt
from torchtap import Monitor


def test_epochs_and_batches_that_were_not_asked_for_leave_the_model_without_hooks(tmp_path: Path) -> None:
    training = setting()
    monitor = Monitor(training.model, [FFN], [2], tmp_path, [1])
    layer = training.model.get_submodule(FFN)
    monitor.set_epoch(1)
    monitor.set_batch_idx(1)
    assert not layer._forward_hooks
    monitor.set_epoch(2)
    monitor.set_batch_idx(0)
    assert not layer._forward_hooks
    monitor.set_batch_idx(1)
    assert layer._forward_hooks
    monitor.remove_hooks()
    assert not layer._forward_hooks


@pytest.mark.parametrize("way", ["hook", "wrap", "forward"])
@pytest.mark.parametrize("raises", [False, True])
def test_removing_the_hooks_leaves_the_model_exactly_as_before(
    tmp_path: Path, way: Any, raises: bool
) -> None:
    def picture() -> list[Any]:
        modules = dict(training.model.named_modules())
        return [
            {name: id(module) for name, module in modules.items()},
            [sorted(vars(module)) for module in modules.values()],
            [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules.values()],
            list(training.model.state_dict()),
        ]

    training = setting()
    tokens = torch.zeros(2, 6, dtype=torch.long)
    before, expected = picture(), training.model(tokens)
    with (
        pytest.raises(KeyError) if raises else nullcontext(),
        Monitor(training.model, [FFN, SELF_ATTENTION, WEIGHTS], [1], tmp_path, [0], way=way) as monitor,
    ):
        monitor.set_epoch(1)
        monitor.set_batch_idx(0)
        training.model(tokens)
        if raises:
            raise KeyError("the body's own")
    assert picture() == before
    assert torch.equal(training.model(tokens), expected)


def test_the_model_is_bit_identical_under_a_monitor_and_after_it(tmp_path: Path) -> None:
    plain, watched = setting(), setting()
    list(train(plain, 2))
    with Monitor(watched.model, MIXED, [1, 2], tmp_path, [0, 1, 2, 3]) as monitor:
        list(train(watched, 2, epoch_callback=monitor.set_epoch, batch_callback=monitor.set_batch_idx))
    for (name, a), b in zip(
        plain.model.state_dict().items(), watched.model.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("way", ["hook", "wrap", "forward"])
def test_every_way_of_putting_taps_on_gives_the_same(tmp_path: Path, way: Any) -> None:
    training = setting()
    with Monitor(training.model, MIXED, [1], tmp_path, [0], way=way) as monitor:
        for _ in train(training, 1, epoch_callback=monitor.set_epoch, batch_callback=monitor.set_batch_idx):
            found = monitor.get_single_data()["maps"]["data"][1, 0]
    assert torch.equal(found, outputs_of(WEIGHTS, 1)[0])
    assert tt.Monitor is Monitor


def test_two_monitors_in_two_threads_do_not_mix(tmp_path: Path) -> None:
    def work(number: int, failures: list[BaseException]) -> None:
        try:
            model = nn.Sequential(nn.Linear(3, 3), nn.Identity())
            folder = tmp_path / str(number)
            with Monitor(model, {"1": {"record_type": "epoch_full"}}, [1, 2], folder) as monitor:
                for epoch in (1, 2):
                    monitor.set_epoch(epoch)
                    for batch in range(40):
                        monitor.set_batch_idx(batch)
                        model[1](torch.full((2, 3), 1000.0 * number + batch))
                    data = monitor.get_epoch_data()["1"]["data"]
                    assert len(data) == 40
                    for (_, batch), value in data.items():
                        assert torch.equal(value, torch.full((2, 3), 1000.0 * number + batch))
                    monitor.save_epoch_outputs()
        except BaseException as error:
            failures.append(error)

    failures: list[BaseException] = []
    threads = [threading.Thread(target=work, args=(number, failures)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_one_model_under_two_monitors_in_two_threads_gives_each_its_own(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Identity())
    monitors = [Monitor(model, ["0"], [0], tmp_path / str(n), [0]) for n in (0, 1)]
    barrier = threading.Barrier(2)

    def work(number: int) -> None:
        monitors[number].set_epoch(0)
        monitors[number].set_batch_idx(0)
        barrier.wait()
        model(torch.full((1,), float(number)))
        barrier.wait()

    threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, monitor in enumerate(monitors):
        assert monitor.get_single_data()["0"]["data"][0, 0].tolist() == [number]
        monitor.remove_hooks()
