"""The README of torch-module-monitor, section by section; then its notebooks as scripts beside the package itself.

Numbers are within 1e-5 of the package's.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.optional import need
from torch import Tensor, nn
from torchtap.monitors.torch_module_monitor.utils import extract_activation_tensor

import torchtap as tt
from torchtap.monitors import torch_module_monitor as ours
from torchtap.monitors.torch_module_monitor import MonitorMixin, RefinedCoordinateCheck, StorageManager

criterion = nn.CrossEntropyLoss()


def batches(steps: int, *shape: int, classes: int = 2) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield (
            torch.randn(*shape, generator=generator),
            torch.randint(0, classes, (shape[0],), generator=generator),
        )


def sequential() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 2))


# -- the README -----------------------------------------------------------------------------------------------


def test_quick_start() -> None:
    model = sequential()
    monitor = ours.ModuleMonitor(monitor_step_fn=lambda step: step % 10 == 0)
    monitor.set_module(model)
    monitor.add_activation_metric("mean", lambda x: x.mean())
    monitor.add_activation_metric("std", lambda x: x.std())
    monitor.add_parameter_metric("norm", lambda x: x.norm())
    monitor.add_gradient_metric("norm", lambda x: x.norm())
    optimizer = torch.optim.Adam(model.parameters())
    logged = []
    for step, (inputs, targets) in enumerate(batches(21, 4, 10)):
        monitor.begin_step(step)
        outputs = model(inputs)
        loss = criterion(outputs, targets)
        loss.backward()
        monitor.monitor_parameters()
        monitor.monitor_gradients()
        norms = {name: parameter.grad.norm().item() for name, parameter in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        monitor.end_step()
        if monitor.is_step_monitored(step):
            metrics = monitor.get_step_metrics()
            logged.append(metrics)
            assert metrics["activation/[root module]/mean"] == pytest.approx(outputs.mean().item())
            for name, norm in norms.items():
                assert metrics[f"gradient/{name}/norm"] == pytest.approx(norm, rel=1e-5)
    assert len(logged) == 3
    assert set(monitor.get_all_metrics()) == {0, 10, 20}


def test_documented_keys_stand_in_tensorboard(tmp_path: Path) -> None:
    need("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model = sequential()
    monitor = ours.ModuleMonitor(lambda step: True, sinks=[tt.TensorBoardSink(tmp_path)])
    monitor.set_module(model)
    monitor.add_activation_metric("mean", lambda x: x.mean())
    monitor.add_parameter_metric("norm", lambda x: x.norm())
    for step, (inputs, _) in enumerate(batches(2, 4, 10)):
        monitor.begin_step(step)
        model(inputs)
        monitor.monitor_parameters()
        monitor.log_scalar("training/loss", 0.5)
        monitor.end_step()
    monitor.close()
    tags = EventAccumulator(str(tmp_path)).Reload().Tags()["scalars"]
    assert set(tags) == set(monitor.get_all_metrics()[1])
    assert {
        "activation/0/mean",
        "activation/[root module]/mean",
        "parameter/2.weight/norm",
        "training/loss",
    } <= set(tags)


def test_metrics_of_layers_that_a_regex_picks() -> None:
    model = nn.Sequential()
    model.add_module("attention", nn.Linear(4, 4))
    model.add_module("mlp", nn.Linear(4, 4))
    monitor = ours.ModuleMonitor(None)
    monitor.set_module(model)
    monitor.add_activation_metric("l2_norm", lambda x: x.norm(dim=-1).mean())
    monitor.add_activation_metric("attention_mean", lambda x: x.mean(), metric_regex=r".*attention.*")
    monitor.begin_step(0)
    x = torch.randn(3, 4)
    model(x)
    monitor.end_step()
    metrics = monitor.get_step_metrics()
    assert metrics["activation/mlp/l2_norm"] == pytest.approx(model(x).norm(dim=-1).mean().item(), rel=1e-5)
    assert [key for key in metrics if key.endswith("attention_mean")] == [
        "activation/attention/attention_mean"
    ]


def test_a_reference_module_and_the_refined_coordinate_check() -> None:
    model = sequential()
    monitor = ours.ModuleMonitor(None)
    monitor.set_module(model)
    reference_model = copy.deepcopy(model)
    monitor.set_reference_module(reference_model)
    monitor.add_activation_difference_metric(
        "l2_distance", lambda act, ref_act: (act - ref_act).norm(dim=-1).mean()
    )
    monitor.add_parameter_difference_metric(
        "l2_distance", lambda param, ref_param: (param - ref_param).norm()
    )
    rcc = RefinedCoordinateCheck(monitor, rms_norms=True)
    with torch.no_grad():
        model[0].weight.add_(0.1)
    x = torch.randn(5, 10)
    monitor.begin_step(0)
    with monitor.no_monitor():
        _ = reference_model(x)
    outputs = model(x)
    rcc.refined_coordinate_check()
    monitor.monitor_parameters()
    monitor.end_step()
    metrics = monitor.get_step_metrics()
    with torch.no_grad():
        distance = (outputs - reference_model(x)).norm(dim=-1).mean().item()
        own = (model[0](x) - reference_model[0](x)).norm(dim=-1).mean().item()
    assert metrics["activation_difference/[root module]/l2_distance"] == pytest.approx(distance, rel=1e-5)
    assert metrics["parameter_difference/0.weight/l2_distance"] == pytest.approx(0.1 * 200**0.5, rel=1e-5)
    assert metrics["RCC (W_t-W_0)x_t/0/l2norm"] == pytest.approx(own, rel=1e-5)
    norms = {key: value for key, value in metrics.items() if key.endswith("/l2norm")}
    assert metrics["RCC (W_t-W_0)x_t/0/rmsnorm"] == pytest.approx(own / 20**0.5, rel=1e-5)
    assert {f"{key.removesuffix('/l2norm')}/rmsnorm" for key in norms} == {
        k for k in metrics if k.endswith("/rmsnorm")
    }
    assert metrics["RCC x_t/0/rmsnorm"] == pytest.approx(x.norm(dim=-1).mean().item() / 10**0.5, rel=1e-5)


def test_micro_batches_are_aggregated() -> None:
    model = sequential()
    monitor = ours.ModuleMonitor(None)
    monitor.set_module(model)
    monitor.add_activation_metric("mean", lambda x: x.mean())
    monitor.begin_step(0)
    means = []
    for micro_batch, targets in batches(3, 4, 10):
        outputs = model(micro_batch)
        loss = criterion(outputs, targets)
        loss.backward()
        means.append(outputs.mean().item())
        monitor.after_micro_batch()
    monitor.monitor_gradients()
    monitor.end_step()
    assert monitor.get_step_metrics()["activation/[root module]/mean"] == pytest.approx(sum(means) / 3)


def test_attention_and_values_of_a_module_s_own() -> None:
    class MyAttention(nn.Module, MonitorMixin):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def get_qkv(self, x: Tensor) -> tuple[Tensor, ...]:
            return tuple(part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.get_qkv(x)
            output = F.scaled_dot_product_attention(q, k, v)
            if self.is_monitoring:
                ours.monitor_scaled_dot_product_attention(
                    self.get_module_monitor(), module=self, query=q, key=k, value=v, activation=output
                )
                self.get_module_monitor().log_tensor("custom_metric/my_layer/intermediate", q)
            return output

    torch.manual_seed(0)
    model = MyAttention()
    monitor = ours.ModuleMonitor(None)
    monitor.set_module(model)
    monitor.add_activation_metric("mean", lambda x: x.mean())
    monitor.begin_step(0)
    x = torch.randn(2, 5, 8)
    model(x)
    monitor.end_step()
    metrics = monitor.get_step_metrics()
    assert metrics["custom_metric/my_layer/intermediate"] == pytest.approx(
        model.get_qkv(x)[0].mean().item(), abs=1e-6
    )
    assert any("attention" in key for key in metrics)


def test_export_to_hdf5(tmp_path: Path) -> None:
    need("h5py")
    model = sequential()
    monitor = ours.ModuleMonitor(None)
    monitor.set_module(model)
    monitor.add_activation_metric("mean", lambda x: x.mean())
    monitor.begin_step(0)
    model(torch.randn(2, 10))
    monitor.end_step()
    monitor.storage.save_hdf5(str(tmp_path / "training_metrics.h5"))
    metrics = StorageManager.load_hdf5(str(tmp_path / "training_metrics.h5"))
    assert metrics == {key: {0: pytest.approx(value)} for key, value in monitor.get_all_metrics()[0].items()}


# -- what its fork added --------------------------------------------------------------------------------------


def test_modules_are_included_by_a_regex_and_exclusion_wins() -> None:
    monitor = ours.ModuleMonitor(None, excluded_modules_regex=r"2", included_modules_regex=r"[012]$")
    model = sequential()
    monitor.set_module(model)
    monitor.add_activation_metric("mean", lambda x: x.mean())
    monitor.begin_step(0)
    model(torch.randn(2, 10))
    monitor.end_step()
    assert set(monitor.get_step_metrics()) == {"activation/0/mean", "activation/1/mean"}


def test_a_second_activation_in_a_micro_batch_is_an_error_if_asked_for() -> None:
    model = sequential()
    monitor = ours.ModuleMonitor(None, error_on_duplicates=True)
    monitor.set_module(model)
    monitor.add_activation_metric("mean", lambda x: x.mean())
    monitor.begin_step(0)
    model(torch.randn(2, 10))
    with monitor.no_monitor():
        model(torch.randn(2, 10))
    with pytest.raises(ValueError, match="have already been stored in this micro-batch"):
        model(torch.randn(2, 10))
    monitor.after_micro_batch()
    model(torch.randn(2, 10))
    monitor.end_step()


def test_scalars_are_forced_into_steps_that_are_not_monitored() -> None:
    monitor = ours.ModuleMonitor(lambda step: False)
    monitor.set_module(sequential())
    monitor.begin_step(3)
    monitor.log_scalar("loss", 1.5, force=True)
    monitor.log_scalar("rate", 0.1)
    monitor.end_step()
    assert monitor.get_all_metrics()[3]["loss"] in (1.5, [1.5])
    assert "rate" not in monitor.get_all_metrics()[3]


def test_the_tensor_of_an_output_with_a_cache() -> None:
    x = torch.randn(2)
    assert extract_activation_tensor(x) is x
    assert extract_activation_tensor((x, None)) is x
    assert extract_activation_tensor({"a": x}) == {"a": x}


# -- its notebooks --------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Of the CIFAR-10 tutorial that the notebooks follow."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = torch.flatten(x, 1)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x)


def notebook(
    package: ModuleType, *, reference: bool = False, rcc: bool = False
) -> dict[Any, dict[str, float]]:
    """Two epochs over images of CIFAR's size, in batches of four."""
    torch.manual_seed(0)
    net = Net()
    # Copied before anything is put on it: a copy would carry the package's hooks along.
    initial = copy.deepcopy(net) if reference or rcc else None
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    # The package keeps one activation of a reference's module, and the pooling is called twice.
    excluded = r"pool" if reference or rcc else r"$.^"
    monitor = package.ModuleMonitor(
        monitor_step_fn=lambda step: step % 3 == 0, excluded_modules_regex=excluded
    )
    monitor.set_module(net)
    monitor.add_activation_metric("l2_norm", lambda x: torch.linalg.vector_norm(x, ord=2, dim=-1))
    monitor.add_activation_metric("mean", torch.mean)
    monitor.add_activation_metric("std", torch.std, metric_regex=r".*fc.*")
    monitor.add_parameter_metric("l2_norm", torch.norm)
    monitor.add_gradient_metric("l2_norm", torch.norm)
    check = None
    if initial is not None:
        monitor.set_reference_module(initial)
        monitor.add_activation_difference_metric(
            "l2_norm", lambda x, y: torch.linalg.vector_norm(x - y, ord=2, dim=-1)
        )
        monitor.add_parameter_difference_metric("l2_norm", lambda x, y: torch.norm(x - y))
    if rcc:
        check = package.RefinedCoordinateCheck(monitor)
    step = 0
    for _ in range(2):
        for inputs, labels in batches(5, 4, 3, 32, 32, classes=10):
            monitor.begin_step(step)
            optimizer.zero_grad()
            if initial is not None:
                with torch.no_grad():
                    initial(inputs)
            loss = criterion(net(inputs), labels)
            if check is not None:
                check.refined_coordinate_check()
            loss.backward()
            monitor.monitor_parameters()
            monitor.monitor_gradients()
            monitor.log_scalar("training/loss", loss.item())
            optimizer.step()
            monitor.end_step()
            step += 1
    metrics: dict[Any, dict[str, float]] = monitor.get_all_metrics()
    return metrics


@pytest.mark.parametrize(
    "options",
    [{}, {"reference": True}, {"rcc": True}],
    ids=["metrics", "reference-model", "refined-coordinate-check"],
)
def test_its_notebooks_give_the_same_numbers(options: dict[str, bool]) -> None:
    peer = need("torch_module_monitor")
    theirs, mine = notebook(peer, **options), notebook(ours, **options)
    assert mine.keys() == theirs.keys()
    for step, metrics in theirs.items():
        assert set(mine[step]) == set(metrics)
        for key, value in metrics.items():
            assert mine[step][key] == pytest.approx(value, rel=1e-5, abs=1e-7), (step, key)
