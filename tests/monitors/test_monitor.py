"""`Monitor` on a real training: what it keeps, what it leaves, what it says when it is asked for the wrong thing."""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings
from collections import namedtuple
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.monitors.training import CROSS_ATTENTION, FFN, SELF_ATTENTION, WEIGHTS, setting, train
from torch import Tensor, nn

import torchtap as tt
from torchtap import Monitor

MIXED = {
    SELF_ATTENTION: {"alias": "attention", "record_type": "single"},
    WEIGHTS: {"alias": "maps", "record_type": "single"},
    FFN: {"alias": "ffn", "record_type": "epoch_full"},
}


def reference(layer: str, epoch: int) -> list[Any]:
    """The layer's outputs in that epoch of the same training, by a plain hook."""
    training, found = setting(), []
    handle = training.model.get_submodule(layer).register_forward_hook(lambda *a: found.append(a[2]))
    for done in train(training, epoch):
        if done < epoch:
            found.clear()
    handle.remove()
    return found


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
        expected = reference(WEIGHTS, epoch)
        assert list(single["maps"]["data"]) == [(epoch, 0), (epoch, 2)]
        assert all(torch.equal(v, expected[batch]) for (_, batch), v in single["maps"]["data"].items())
        assert single["maps"]["layer"] == WEIGHTS
        assert single["maps"]["alias"] == "maps"
        assert single["maps"]["output_shape"] == [3, 6, 6]
        expected = reference(FFN, epoch)
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
            assert torch.equal(weights, reference(SELF_ATTENTION, 1)[0][1])
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


@pytest.mark.parametrize("file_format", ["pt", "npz", "safetensors"])
def test_saved_files_hold_the_documented_entries(tmp_path: Path, file_format: str) -> None:
    training = setting()
    monitor = Monitor(training.model, MIXED, [1], tmp_path, [1], format=file_format)
    for _ in train(training, 1, epoch_callback=monitor.set_epoch, batch_callback=monitor.set_batch_idx):
        data = monitor.get_single_data() | monitor.get_epoch_data()
        paths = monitor.save_single_outputs() + monitor.save_epoch_outputs()
        monitor.clear_current_epoch_data()
    monitor.remove_hooks()
    assert tmp_path / f"ffn/epoch_0001/batch_000003.{file_format}" in paths
    items = [Monitor.load_outputs(path) for path in paths if path.stem != "statistics"]
    assert len(items) == 6
    for item in items:
        assert list(item) == ["epoch", "batch_idx", "layer", "alias", "output_shape", "output"]
        kept = data[item["alias"]]
        assert item["layer"] == kept["layer"]
        assert item["output_shape"] == kept["output_shape"]
        expected = kept["data"][item["epoch"], item["batch_idx"]]
        assert type(item["output"]) is type(expected)
        for got, wanted in zip(_tensors(item["output"]), _tensors(expected), strict=True):
            assert torch.equal(got, wanted)


def test_pt_files_load_with_weights_only_and_npz_without_torch_or_pickle(tmp_path: Path) -> None:
    import numpy as np

    model = nn.Sequential(nn.Linear(3, 2))
    for file_format in ("pt", "npz"):
        with Monitor(model, ["0"], [0], tmp_path, [0], format=file_format) as monitor:
            monitor.set_epoch(0)
            monitor.set_batch_idx(0)
            expected = model(torch.ones(1, 3)).detach()
            (path,) = monitor.save_single_outputs()
        if file_format == "pt":
            assert torch.equal(torch.load(path, weights_only=True)["output"], expected)
        else:
            assert np.array_equal(np.load(path, allow_pickle=False)["output"], expected.numpy())


def test_epoch_full_saves_the_statistics_of_the_concatenation(tmp_path: Path) -> None:
    training = setting()
    monitor = Monitor(training.model, MIXED, [2], tmp_path, [0])
    for epoch in train(training, 2, epoch_callback=monitor.set_epoch, batch_callback=monitor.set_batch_idx):
        if epoch == 2:
            whole = torch.cat(list(monitor.get_epoch_data()["ffn"]["data"].values())).double()
            saved = torch.load(monitor.save_epoch_outputs()[-1], weights_only=True)
    monitor.remove_hooks()
    assert saved["output_shape"] == list(whole.shape)
    assert saved["batches"] == [0, 1, 2, 3]
    numbers = saved["statistics"]
    assert numbers["count"] == whole.numel()
    for name in ("mean", "std", "min", "max"):
        assert numbers[name] == pytest.approx(float(getattr(whole, name)()), rel=1e-9)
    over = numbers["over_first_dimension"]
    torch.testing.assert_close(over["mean"], whole.mean(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(over["std"], whole.std(0), rtol=1e-12, atol=1e-12)
    assert torch.equal(over["min"].double(), whole.amin(0))
    assert torch.equal(over["max"].double(), whole.amax(0))


def test_beyond_the_ceiling_outputs_go_to_disk_and_nothing_is_lost(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Identity())
    ceiling = 64 * 4000 * 4 // 4
    monitor = Monitor(
        model, {"0": {"record_type": "epoch_full"}}, [1], tmp_path, memory_ceiling=ceiling, asynchronous=True
    )
    monitor.set_epoch(1)
    torch.manual_seed(0)
    values = [torch.randn(64, 1000) * 10 ** (index % 5) for index in range(12)]
    for index, value in enumerate(values):
        monitor.set_batch_idx(index)
        model(value)
    data = monitor.get_epoch_data()["0"]["data"]
    assert all(torch.equal(data[1, index], value) for index, value in enumerate(values))
    spilled = list(tmp_path.glob(".spilled-*/0/*/*.pt"))
    assert len(spilled) >= 12 - 1 - ceiling // (64 * 4000)
    data[1, 11].zero_()
    assert torch.equal(monitor.get_epoch_data()["0"]["data"][1, 11], values[11])
    del data
    paths = monitor.save_epoch_outputs()
    monitor.clear_current_epoch_data()
    monitor.remove_hooks()
    assert not list(tmp_path.glob(".spilled-*"))
    assert all(
        torch.equal(torch.load(p, weights_only=True)["output"], v)
        for p, v in zip(paths, values, strict=False)
    )
    whole = torch.cat(values).double()
    statistics = torch.load(paths[-1], weights_only=True)["statistics"]
    assert statistics["mean"] == pytest.approx(float(whole.mean()), rel=1e-9)
    assert statistics["std"] == pytest.approx(float(whole.std()), rel=1e-9)


def test_a_new_epoch_lets_go_of_the_one_before_and_clearing_can_be_partial(tmp_path: Path) -> None:
    training = setting()
    monitor = Monitor(training.model, MIXED, [1, 2, 3], tmp_path, [0])
    for epoch in train(training, 2, epoch_callback=monitor.set_epoch, batch_callback=monitor.set_batch_idx):
        assert {key[0] for key in monitor.get_single_data()["maps"]["data"]} == {epoch}
    monitor.clear_epoch_data()
    assert not monitor.get_epoch_data()["ffn"]["data"]
    assert monitor.get_single_data()["maps"]["data"]
    monitor.clear_current_epoch_data()
    assert not monitor.get_single_data()["maps"]["data"]
    monitor.remove_hooks()


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


def test_results_of_ones_own_are_saved_beside(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    with Monitor(model, ["0"], [0], tmp_path, [0]) as monitor:
        tensor = torch.arange(3.0)
        assert torch.equal(torch.load(monitor.save_custom_output(tensor, "a.pt"), weights_only=True), tensor)
        path = monitor.save_custom_output({"x": tensor, "n": 3, "names": ["a"]}, "deep/er.safetensors")
        assert torch.equal(Monitor.load_outputs(path)["x"], tensor)
        assert Monitor.load_outputs(path)["names"] == ["a"]
        assert monitor.save_custom_output(tensor, "custom_blocks.0").name == "custom_blocks.0.pt"
        with pytest.raises(ValueError, match=r"'../out.pt' leads out of"):
            monitor.save_custom_output(tensor, "../out.pt")
        with pytest.raises(ValueError, match="a Linear cannot be saved: give tensors"):
            monitor.save_custom_output({"model": model[0]}, "model.pt")


@pytest.mark.parametrize("via", ["hook", "wrap", "forward"])
@pytest.mark.parametrize("raises", [False, True])
def test_removing_the_hooks_leaves_the_model_exactly_as_before(
    tmp_path: Path, via: Any, raises: bool
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
        Monitor(training.model, [FFN, SELF_ATTENTION, WEIGHTS], [1], tmp_path, [0], via=via) as monitor,
    ):
        monitor.set_epoch(1)
        monitor.set_batch_idx(0)
        training.model(tokens)
        if raises:
            raise KeyError("the body's own")
    assert picture() == before
    assert torch.equal(training.model(tokens), expected)


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


def test_the_model_is_bit_identical_under_a_monitor_and_after_it(tmp_path: Path) -> None:
    plain, watched = setting(), setting()
    list(train(plain, 2))
    with Monitor(watched.model, MIXED, [1, 2], tmp_path, [0, 1, 2, 3]) as monitor:
        list(train(watched, 2, epoch_callback=monitor.set_epoch, batch_callback=monitor.set_batch_idx))
    for (name, a), b in zip(
        plain.model.state_dict().items(), watched.model.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b), name


# -- the wrong thing ---------------------------------------------------------------------------------------


def make(
    tmp_path: Path, layers: Any = ("fc",), epochs: Any = (1,), batches: Any = (0,), **options: Any
) -> Monitor:
    model = nn.Module()
    model.fc, model.blocks = nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2)])
    return Monitor(model, layers, epochs, options.pop("output_dir", tmp_path), batches, **options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"layers": ["fc", "fd"]},
            r"The following layers specified in 'layers_to_monitor' do not exist in the model: \['fd'\]. "
            r"Did you mean 'fc'\? Available layers: \['fc', 'blocks', 'blocks.0'\]",
        ),
        (
            {"layers": {"fc": {"alias": "a"}, "blocks.0": {"alias": "a"}}},
            r"^Duplicate alias 'a' in layers_to_monitor\.$",
        ),
        ({"layers": {"fc": {"alias": "blocks.0"}, "blocks.0": None}}, r"Duplicate alias 'blocks.0'"),
        ({"layers": []}, "layers_to_monitor is empty"),
        ({"layers": "fc"}, "layers_to_monitor is 'fc': give a list of layer names"),
        ({"layers": {"fc": {"alias": "a/b"}}}, "alias 'a/b' of layer 'fc' cannot name a folder"),
        ({"layers": {"fc": {"record_type": "all"}}}, "record_type 'all' of layer 'fc': it is 'single'"),
        ({"layers": {"fc": {"aliass": "x"}}}, r"layers_to_monitor\['fc'\] has \['aliass'\]"),
        ({"epochs": []}, "epochs_to_record must not be empty"),
        ({"epochs": [1, -2]}, "epochs_to_record has -2: it lists whole numbers from 0 on"),
        ({"epochs": 3}, "epochs_to_record is 3: give a list of whole numbers"),
        ({"batches": None}, r"batch_indices must be specified and non-empty .* 'single'; these do: \['fc'\]"),
        ({"batches": []}, "batch_indices must be specified and non-empty"),
        ({"format": "h5"}, "format 'h5': outputs are saved as 'pt', 'npz', 'safetensors'"),
        ({"memory_ceiling": -1}, "memory_ceiling has -1"),
    ],
)
def test_a_bad_setting_is_a_value_error_that_names_it(tmp_path: Path, arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(tmp_path, **arguments)


def test_a_folder_that_cannot_be_written_is_an_os_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"output_dir '.*file/inside' cannot be written to \(Not a directory\)"):
        make(tmp_path, output_dir=tmp_path / "file" / "inside")


def test_a_clock_used_wrongly_says_how_to_use_it(tmp_path: Path) -> None:
    monitor = make(tmp_path)
    with pytest.raises(RuntimeError, match=r"set_batch_idx\(0\) before set_epoch: say which epoch"):
        monitor.set_batch_idx(0)
    with pytest.raises(ValueError, match=r"set_epoch\(-1\): an epoch is a whole number from 0 on"):
        monitor.set_epoch(-1)
    monitor.set_epoch(1)
    with pytest.raises(ValueError, match=r"set_batch_idx\('0'\): a batch index is a whole number"):
        monitor.set_batch_idx("0")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"layers \['x'\] are not monitored; these are: \['fc'\]"):
        monitor.get_single_data(["x"])
    monitor.remove_hooks()
    monitor.remove_hooks()
    with pytest.raises(RuntimeError, match="hooks were removed; make a new Monitor"):
        monitor.set_epoch(2)


def test_a_container_that_is_never_called_is_warned_of(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match=r"'blocks' is a ModuleList: a container .* 'blocks.0' … instead"):
        make(tmp_path, layers=["blocks"]).remove_hooks()


def test_a_layer_that_is_never_called_is_warned_of_when_its_epoch_is_over(tmp_path: Path) -> None:
    from tests.models import Thrice

    model = Thrice()
    monitor = Monitor(model, ["never", "shared"], [1], tmp_path, [0])
    monitor.set_epoch(1)
    monitor.set_batch_idx(0)
    expected = model(torch.randn(2, 5))
    with pytest.warns(RuntimeWarning) as caught:
        monitor.set_epoch(2)
        monitor.remove_hooks()
    texts = [str(warning.message) for warning in caught]
    assert "nothing was recorded for layer 'never': module not called" in texts
    assert "layer 'shared' is called 3 times in a pass; the last call's output is kept" in texts
    assert expected.shape == (2, 5)


def test_a_disk_that_fails_costs_the_file_and_not_the_training(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    monitor = Monitor(model, ["0"], [0], tmp_path / "out", [0])
    monitor.set_epoch(0)
    monitor.set_batch_idx(0)
    model(torch.randn(1, 3))
    (tmp_path / "out" / "0").write_text("in the way of a folder")
    with pytest.warns(RuntimeWarning, match="could not save an output and goes on: OutputError"):
        monitor.save_single_outputs()
    assert len(monitor.lost) == 1
    monitor.remove_hooks()


def test_files_are_written_even_if_a_script_ends_without_waiting(tmp_path: Path) -> None:
    program = f"""
import torch
from torchtap import Monitor
model = torch.nn.Sequential(torch.nn.Identity())
monitor = Monitor(model, ["0"], [0], {str(tmp_path)!r}, [0], asynchronous=True)
monitor.set_epoch(0)
monitor.set_batch_idx(0)
model(torch.zeros(4 << 20))
monitor.save_single_outputs()
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    assert torch.load(tmp_path / "0/epoch_0000/batch_000000.pt")["output"].numel() == 4 << 20


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


@pytest.mark.parametrize("via", ["hook", "wrap", "forward"])
def test_every_way_of_putting_taps_on_gives_the_same(tmp_path: Path, via: Any) -> None:
    training = setting()
    with Monitor(training.model, MIXED, [1], tmp_path, [0], via=via) as monitor:
        for _ in train(training, 1, epoch_callback=monitor.set_epoch, batch_callback=monitor.set_batch_idx):
            found = monitor.get_single_data()["maps"]["data"][1, 0]
    assert torch.equal(found, reference(WEIGHTS, 1)[0])
    assert tt.Monitor is Monitor


def _tensors(tree: Any) -> list[Tensor]:
    return [tree] if isinstance(tree, Tensor) else [tensor for tensor in tree if tensor is not None]
