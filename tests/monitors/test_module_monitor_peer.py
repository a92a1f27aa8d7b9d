"""The same script against torch-module-monitor 0.1.0 and against torchtap: every key and every number."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.models import CNN, GPT, mlp
from tests.optional import need
from torch import Tensor, nn
from torch.nn import functional

from torchtap.monitors import torch_module_monitor as ours

peer = need("torch_module_monitor")

Script = Callable[[ModuleType], Any]


def compare(script: Script) -> dict[Any, dict[str, float]]:
    """Run a script with both packages and hold their metrics against each other."""
    torch.manual_seed(0)
    theirs = script(peer).get_all_metrics()
    torch.manual_seed(0)
    got = script(ours).get_all_metrics()
    assert got.keys() == theirs.keys()
    compared = 0
    for step, metrics in theirs.items():
        assert set(got[step]) == set(metrics)
        for key, value in metrics.items():
            assert got[step][key] == pytest.approx(value, rel=1e-5, abs=1e-7), (step, key)
            compared += 1
    assert compared > 10
    return got


def monitored(package: ModuleType, model: nn.Module, every: int = 1, **options: Any) -> Any:
    """A monitor with the usual metrics."""
    monitor = package.ModuleMonitor(monitor_step_fn=lambda step: step % every == 0, **options)
    monitor.set_module(model)
    monitor.add_activation_metric("mean", lambda x: x.mean())
    monitor.add_activation_metric("std", lambda x: x.std())
    monitor.add_activation_metric("norm", lambda x: x.norm())
    monitor.add_activation_metric("absmax", lambda x: x.abs().max())
    monitor.add_activation_metric("rows", lambda x: x.norm(dim=-1).mean())
    monitor.add_activation_metric("spread", lambda x: x.std(dim=-1), metric_regex=r".*(fc|mlp|head|0)")
    monitor.add_parameter_metric("norm", lambda p: p.norm())
    monitor.add_parameter_metric("largest", lambda p: p.abs().max().item(), metric_regex=r".*weight")
    monitor.add_gradient_metric("norm", lambda g: g.norm())
    monitor.add_gradient_metric("mean", torch.mean)
    return monitor


def train(
    monitor: Any,
    model: nn.Module,
    batches: Iterator[Tensor],
    *,
    before: Callable[[Tensor], None] = lambda x: None,
    after: Callable[[], None] = lambda: None,
    micro_batches: int = 1,
) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step, batch in enumerate(batches):
        monitor.begin_step(step)
        for part in batch.chunk(micro_batches):
            before(part)
            model(part).float().square().mean().backward()
            after()
            monitor.after_micro_batch()
        monitor.monitor_parameters()
        monitor.monitor_gradients(before_clip=True)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        monitor.monitor_gradients()
        monitor.log_scalar("training/rate", 0.05)
        optimizer.step()
        optimizer.zero_grad()
        monitor.end_step()
    return monitor


def numbers(*shape: int, steps: int = 3) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield torch.randn(*shape, generator=generator)


def tokens(*shape: int, steps: int = 3) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield torch.randint(0, 11, shape, generator=generator)


def test_an_mlp() -> None:
    def script(package: ModuleType) -> Any:
        model = mlp()
        return train(monitored(package, model), model, numbers(6, 7))

    compare(script)


def test_a_cnn() -> None:
    def script(package: ModuleType) -> Any:
        model = CNN()
        return train(monitored(package, model), model, numbers(2, 3, 16, 16))

    compare(script)


def test_a_gpt_with_one_step_of_two() -> None:
    def script(package: ModuleType) -> Any:
        model = GPT()
        return train(monitored(package, model, every=2), model, tokens(2, 8))

    compare(script)


class Shared(nn.Module):
    """A module called twice in a pass, and registered under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(7, 7)
        self.again = self.fc
        self.out = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.again(torch.tanh(self.fc(x))))


def test_shared_modules() -> None:
    def script(package: ModuleType) -> Any:
        model = Shared()
        return train(monitored(package, model), model, numbers(6, 7))

    compare(script)


def test_micro_batches_with_aggregations_of_their_own() -> None:
    def script(package: ModuleType) -> Any:
        model = mlp()
        monitor = monitored(package, model)
        monitor.add_activation_metric(
            "peak", lambda x: x.abs().max(), metric_aggregation_fn=lambda values: values.max().item()
        )
        monitor.add_activation_metric(
            "both",
            lambda x: x.mean(dim=-1),
            metric_aggregation_fn=lambda values: {"[mean]": values.mean().item(), "": values.std().item()},
        )
        monitor.add_activation_metric(
            "renamed", lambda x: x.std(), metric_aggregation_fn=lambda values: {"/least": values.min().item()}
        )
        return train(monitor, model, numbers(10, 7), micro_batches=4)

    compare(script)


def with_reference(package: ModuleType, model: nn.Module) -> tuple[Any, nn.Module]:
    reference = copy.deepcopy(model)
    monitor = monitored(package, model)
    monitor.set_reference_module(reference)
    monitor.add_activation_difference_metric("rows", lambda a, b: (a - b).norm(dim=-1).mean())
    monitor.add_activation_difference_metric("norm", lambda a, b: (a - b).norm())
    monitor.add_activation_difference_metric("cosine", lambda a, b: functional.cosine_similarity(a, b, -1))
    monitor.add_parameter_difference_metric("norm", lambda a, b: (a - b).norm())
    monitor.add_parameter_difference_metric("ratio", lambda a, b: (a - b).norm() / b.norm())
    return monitor, reference


def test_a_reference_module_with_micro_batches() -> None:
    def script(package: ModuleType) -> Any:
        model = mlp()
        monitor, reference = with_reference(package, model)
        return train(monitor, model, numbers(6, 7), before=lambda x: (reference(x), None)[1], micro_batches=2)

    compare(script)


@pytest.mark.parametrize("build", ["mlp", "cnn", "gpt"])
def test_the_refined_coordinate_check(build: str) -> None:
    def script(package: ModuleType) -> Any:
        if build == "gpt":
            model, batches = GPT(), tokens(2, 8)
        elif build == "cnn":
            model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3))
            batches = numbers(2, 3, 16, 16)
        else:
            model, batches = mlp(), numbers(6, 7)
        reference = copy.deepcopy(model)
        # Far from each other, so that no number is the difference of two nearly equal ones.
        for parameter in reference.parameters():
            parameter.data.mul_(1.3)
        monitor = monitored(package, model)
        monitor.set_reference_module(reference)
        check = package.RefinedCoordinateCheck(monitor)
        return train(
            monitor,
            model,
            batches,
            before=lambda x: (reference(x), None)[1],
            after=check.refined_coordinate_check,
        )

    got = compare(script)
    assert any(key.startswith("RCC (W_t-W_0)x_t/") for key in got[0])


def attention_script(package: ModuleType, **options: Any) -> Any:
    class Attention(nn.Module, package.MonitorMixin):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.q, self.kv, self.o = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            batch, length, _ = x.shape
            q = self.q(x).view(batch, length, 4, 4).transpose(1, 2)
            kv = self.kv(x).view(batch, length, 4, 4).transpose(1, 2)
            k = v = kv[:, :2] if options.get("enable_gqa") else kv
            y = functional.scaled_dot_product_attention(q, k, v, **options)
            if self.is_monitoring:
                package.monitor_scaled_dot_product_attention(
                    self.get_module_monitor(), module=self, query=q, key=k, value=v, activation=y, **options
                )
            return self.o(y.transpose(1, 2).reshape(batch, length, 16))

    model = nn.Sequential(nn.Linear(16, 16), Attention())
    return train(monitored(package, model), model, numbers(2, 6, 16))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.1},
        {"enable_gqa": True},
        {"attn_mask": torch.ones(6, 6, dtype=torch.bool).tril(1)},
        {"attn_mask": torch.linspace(-1, 1, 36).reshape(6, 6)},
    ],
    ids=["plain", "causal", "scaled", "grouped", "hidden", "biased"],
)
def test_attention_from_inside_a_module(options: dict[str, Any]) -> None:
    got = compare(lambda package: attention_script(package, **options))
    assert {f"attention_entropy/1.head_{head}" for head in range(4)} <= got[0].keys()


def test_a_file_written_by_either_is_read_by_both(tmp_path: Path) -> None:
    model = mlp()
    files = {}
    for package in (peer, ours):
        torch.manual_seed(3)
        monitor = train(monitored(package, copy.deepcopy(model)), copy.deepcopy(model), numbers(6, 7))
        monitor.log_scalar("loss", 1.5, force=True)
        files[package] = tmp_path / f"{len(files)}.h5"
        monitor.storage.save_hdf5(files[package])
    key = "parameter/0.weight/norm"
    for file in files.values():
        for package in (peer, ours):
            steps, values = package.StorageManager.read_hdf5_entry(file, key)
            assert steps.tolist() == [0, 1, 2]
            assert values.tolist() == pytest.approx(
                peer.StorageManager.read_hdf5_entry(files[peer], key)[1].tolist()
            )
    loaded = ours.StorageManager.load_hdf5(files[peer])
    assert loaded.keys() == ours.StorageManager.load_hdf5(files[ours]).keys()
    assert loaded["loss"] == {2: 1.5}


def test_a_flat_file_is_loaded_whole_by_the_peer(tmp_path: Path) -> None:
    storage = ours.StorageManager()
    storage.log_scalar(3, "activation/fc/mean", 0.25)
    storage.save_hdf5(tmp_path / "flat.h5", flat=True)
    ((key, series),) = peer.StorageManager.load_hdf5(tmp_path / "flat.h5").items()
    assert series == {3: 0.25}
    assert key.replace("∕", "/") == "activation/fc/mean"
    assert ours.StorageManager.load_hdf5(tmp_path / "flat.h5") == {"activation/fc/mean": {3: 0.25}}


def test_values_that_are_not_finite_come_out_as_torch_has_them() -> None:
    def script(package: ModuleType) -> Any:
        model = nn.Identity()
        monitor = monitored(package, model)
        monitor.add_activation_metric("least", lambda x: x.min())
        for step, odd in enumerate((math.nan, math.inf, -math.inf)):
            monitor.begin_step(step)
            model(torch.tensor([[1.0, odd, 2.0], [0.5, 3.0, -4.0]]))
            monitor.end_step()
        return monitor

    torch.manual_seed(0)
    theirs, got = script(peer).get_all_metrics(), script(ours).get_all_metrics()
    for step in range(3):
        assert got[step] == pytest.approx(theirs[step], nan_ok=True)


def test_every_import_name_of_the_peer_is_there() -> None:
    for submodule in ("attention", "hooks", "monitor", "refined_coordinate_check", "storage"):
        theirs = __import__(f"torch_module_monitor.{submodule}", fromlist=["x"])
        mine = __import__(f"torchtap.monitors.torch_module_monitor.{submodule}", fromlist=["x"])
        defined = [
            n for n, v in vars(theirs).items() if getattr(v, "__module__", "").startswith("torch_module_")
        ]
        assert set(defined) <= set(vars(mine))
