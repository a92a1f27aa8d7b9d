"""ModuleMonitor where its peer ends: each limit of torch-module-monitor 0.1.0, gone."""

from __future__ import annotations

import copy
import functools
import io
import math
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.models import CNN, GPT, Dataclassed, Structured, Tagger, Thrice, mlp
from torch import Tensor, nn
from torch.nn import functional

import torchtap as tt
from torchtap import ModuleMonitor, MonitorMixin, RefinedCoordinateCheck, StorageManager
from torchtap.monitors.module_monitor import ledger
from torchtap.monitors.module_monitor.expressions import recognise
from torchtap.monitors.module_monitor.records import key_of, site_of


def watching(model: nn.Module, **options: Any) -> ModuleMonitor:
    options.setdefault("monitor_step_fn", lambda step: True)
    monitor = ModuleMonitor(**options)
    monitor.set_module(model)
    monitor.add_activation_metric("mean", lambda x: x.mean())
    monitor.add_activation_metric("norm", lambda x: x.norm())
    return monitor


def hooks_on(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


# -- outputs of any structure --------------------------------------------------------------------------------


def test_the_tensors_of_tuple_outputs_are_monitored_one_by_one() -> None:
    model, x = Tagger(), torch.randn(2, 5, 8)
    monitor = watching(model)
    monitor.begin_step(0)
    model(x)
    monitor.end_step()
    output, (hidden, cell) = model.lstm(x)
    got = monitor.get_step_metrics()
    for key, value in {"lstm[0]": output, "lstm[1.0]": hidden, "lstm[1.1]": cell}.items():
        assert got[f"activation/{key}/norm"] == pytest.approx(value.norm().item(), rel=1e-5)


def test_the_tensors_of_dict_and_dataclass_outputs_are_monitored() -> None:
    model = nn.ModuleDict({"whole": Structured(), "part": Dataclassed()})
    monitor = watching(model)
    monitor.begin_step(0)
    model["whole"]({"x": torch.randn(2, 6), "mask": torch.ones(2, 6)})
    out = model["part"](torch.randn(2, 6))
    monitor.end_step()
    got = monitor.get_step_metrics()
    assert got["activation/part[logits]/mean"] == pytest.approx(out.logits.mean().item(), rel=1e-5)
    assert "activation/part[hidden.1]/mean" in got
    assert "activation/whole[logits]/norm" in got


def test_multihead_attention_is_not_skipped() -> None:
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    monitor = watching(model)
    monitor.begin_step(0)
    x = torch.randn(2, 3, 8)
    model(x, x, x)
    monitor.end_step()
    assert {"activation/[root module][0]/mean", "activation/[root module][1]/mean"} <= set(
        monitor.get_step_metrics()
    )


# -- copies, pickles, wrappers -------------------------------------------------------------------------------


class Scaled(nn.Module, MonitorMixin):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0]))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.scale
        if self.is_monitoring:
            monitor = self.get_module_monitor()
            assert monitor is not None
            monitor.log_tensor("custom/scaled", y)
        return y


def test_a_copy_of_a_monitored_model_is_not_monitored() -> None:
    model = nn.Sequential(nn.Linear(4, 2), Scaled())
    monitor = watching(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[0].weight.zero_()
        twin[0].bias.zero_()
    monitor.begin_step(0)
    y = model(torch.ones(3, 4))
    twin(torch.ones(3, 4))
    monitor.end_step()
    got = monitor.get_step_metrics()
    assert got["activation/1/norm"] == pytest.approx(y.norm().item(), rel=1e-5)
    assert got["custom/scaled"] == pytest.approx(y.mean().item(), rel=1e-5)


def test_a_monitored_model_can_be_pickled_and_saved_whole() -> None:
    model = nn.Sequential(nn.Linear(4, 2), Scaled())
    monitor = watching(model)
    monitor.begin_step(0)
    for restored in (pickle.loads(pickle.dumps(model)), _saved_and_loaded(model)):
        assert not restored[1].is_monitoring
        assert torch.equal(restored(torch.ones(1, 4)), model(torch.ones(1, 4)))
    monitor.end_step()


def _saved_and_loaded(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_a_pickle_of_a_monitored_model_needs_no_torchtap_to_be_read(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.ReLU())
    monitor = watching(model)
    monitor.begin_step(0)
    (tmp_path / "model.pickle").write_bytes(pickle.dumps(model))
    program = """
import pickle, sys, torch
sys.modules["torchtap"] = None
model = pickle.load(open(sys.argv[1], "rb"))
assert model(torch.ones(1, 4)).shape == (1, 2)
"""
    command = [sys.executable, "-c", program, str(tmp_path / "model.pickle")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_names_of_a_wrapped_model_have_no_trace_of_the_wrapper() -> None:
    model = mlp()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(model)
        monitor = watching(wrapped)
        monitor.add_gradient_metric("norm", lambda g: g.norm(), metric_regex=r"0\.weight$")
        monitor.begin_step(0)
        wrapped(torch.randn(2, 7)).sum().backward()
        monitor.monitor_gradients()
        monitor.end_step()
    finally:
        dist.destroy_process_group()
    got = monitor.get_step_metrics()
    assert {"activation/[root module]/mean", "activation/0/mean", "gradient/0.weight/norm"} <= set(got)
    assert not any("module." in key for key in got)


def test_a_compiled_model_is_monitored_and_not_broken_up() -> None:
    torch._dynamo.reset()
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = mlp()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    monitor = watching(compiled, monitor_step_fn=lambda step: step % 2 == 0)
    x = torch.randn(3, 7)
    for step in range(5):
        monitor.begin_step(step)
        y = compiled(x)
        y.sum().backward()
        monitor.monitor_parameters()
        monitor.end_step()
    assert len(graphs) == 1
    assert sorted(monitor.get_all_metrics()) == [0, 2, 4]
    for metrics in monitor.get_all_metrics().values():
        assert metrics["activation/2/norm"] == pytest.approx(model(x).norm().item(), rel=1e-5)
    torch._dynamo.reset()


# -- what is counted, and how often --------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["reentrant", "plain"])
def test_a_checkpointed_module_counts_once(how: str) -> None:
    calls: list[int] = []

    def counted(x: Tensor) -> Tensor:
        calls.append(1)
        return x.mean()

    model = GPT(layers=1, checkpointed=how)
    monitor = ModuleMonitor(monitor_step_fn=lambda step: True)
    monitor.set_module(model)
    monitor.add_activation_metric("mean", counted, metric_regex=r"blocks\.0\.ln1")
    monitor.begin_step(0)
    model(torch.randint(0, 11, (2, 4))).sum().backward()
    monitor.end_step()
    assert len(calls) == 1


def test_a_module_that_is_called_several_times_is_compared_call_by_call() -> None:
    model = Thrice()
    reference = copy.deepcopy(model)
    monitor = watching(model)
    monitor.set_reference_module(reference)
    monitor.add_activation_difference_metric("norm", lambda a, b: (a - b).norm())
    with torch.no_grad():
        model.shared.weight.add_(0.3)
    x = torch.randn(2, 5)
    monitor.begin_step(0)
    reference(x)
    model(x)
    monitor.end_step()
    expected, y, z = [], x, x
    for _ in range(3):
        y, z = model.shared(y), reference.shared(z)
        expected.append((y - z).norm().item())
        y, z = torch.tanh(y), torch.tanh(z)
    got = monitor.get_step_metrics()["activation_difference/shared/norm"]
    assert got == pytest.approx(sum(expected) / 3, rel=1e-5)


def test_a_reference_run_under_no_monitor_is_compared_with() -> None:
    model = mlp()
    reference = copy.deepcopy(model)
    monitor = watching(model)
    monitor.set_reference_module(reference)
    monitor.add_activation_difference_metric("norm", lambda a, b: (a - b).norm())
    check = RefinedCoordinateCheck(monitor)
    with torch.no_grad():
        model[0].weight.add_(0.1)
    x = torch.randn(2, 7)
    monitor.begin_step(0)
    with monitor.no_monitor():
        reference(torch.randn(2, 7))
        reference(x)
    model(x)
    check.refined_coordinate_check()
    monitor.end_step()
    got = monitor.get_step_metrics()
    assert got["activation_difference/0/norm"] == pytest.approx(
        (model[0](x) - reference[0](x)).norm().item(), rel=1e-5
    )
    assert got["RCC (W_t-W_0)x_t/0/l2norm"] > 0
    assert got["RCC W_0(x_t-x_0)/0/l2norm"] == 0


def test_a_no_monitor_inside_another_does_not_end_it() -> None:
    monitor = watching(mlp())
    monitor.begin_step(0)
    with monitor.no_monitor():
        with monitor.no_monitor():
            pass
        assert not monitor.is_monitoring()
    assert monitor.is_monitoring()


def test_a_mixin_without_a_monitor_is_not_monitoring() -> None:
    class First(MonitorMixin, nn.Linear):
        pass

    assert First(3, 2)(torch.ones(3)).shape == (2,)
    assert not First(3, 2).is_monitoring
    assert Scaled()(torch.ones(2)).tolist() == [1.0, 2.0]
    assert Scaled().get_module_monitor() is None
    assert not Scaled().is_monitoring


# -- numbers -------------------------------------------------------------------------------------------------


def test_several_scalars_are_logged_at_once() -> None:
    monitor = watching(mlp())
    monitor.begin_step(0)
    monitor.log_scalars({"loss": torch.tensor(1.5), "rate": 0.1})
    monitor.end_step()
    monitor.log_scalars({"late": 2}, force=True)
    assert monitor.get_step_metrics() == {"loss": 1.5, "rate": 0.1, "late": 2}


def test_gradients_are_monitored_though_the_first_parameter_misses_the_pattern() -> None:
    model = mlp()
    monitor = watching(model)
    monitor.add_gradient_metric("norm", lambda g: g.norm(), metric_regex=r"2\.bias")
    monitor.begin_step(0)
    model(torch.randn(2, 7)).sum().backward()
    monitor.monitor_gradients()
    monitor.end_step()
    assert [key for key in monitor.get_step_metrics() if key.startswith("gradient/")] == [
        "gradient/2.bias/norm"
    ]


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        (lambda x: x.numel() > 3, 1.0),
        (lambda x: int(x.argmax()), 1.0),
        (lambda x: x.mean().item(), 2.5),
        (lambda x: (x > 2).sum(), 2.0),
        (lambda x: float(x.sum()), 10.0),
    ],
    ids=["bool", "int", "item", "count", "float"],
)
def test_a_metric_may_give_any_number(metric: Any, expected: float) -> None:
    model = nn.Identity()
    monitor = ModuleMonitor(monitor_step_fn=lambda step: True)
    monitor.set_module(model)
    monitor.add_activation_metric("m", metric)
    monitor.begin_step(0)
    model(torch.tensor([1.0, 4.0, 2.0, 3.0]))
    monitor.end_step()
    assert monitor.get_step_metrics() == {"activation/[root module]/m": expected}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_norm_in_half_precision_does_not_overflow(dtype: torch.dtype) -> None:
    model = nn.Identity()
    monitor = watching(model)
    monitor.begin_step(0)
    x = torch.full((40, 50), 3000.0, dtype=dtype)
    model(x)
    monitor.end_step()
    assert monitor.get_step_metrics()["activation/[root module]/norm"] == pytest.approx(
        x.double().norm().item()
    )


def test_parameter_norms_in_half_precision_do_not_overflow() -> None:
    model = nn.Linear(50, 40).half()
    with torch.no_grad():
        model.weight.fill_(3000.0)
    monitor = watching(model)
    monitor.add_parameter_metric("norm", lambda p: p.norm())
    monitor.begin_step(0)
    monitor.monitor_parameters()
    monitor.end_step()
    assert monitor.get_step_metrics()["parameter/weight/norm"] == pytest.approx(
        3000 * math.sqrt(2000), rel=1e-5
    )


def test_autocast_gives_the_numbers_of_what_the_model_computed() -> None:
    model, x = mlp(), torch.randn(4, 7)
    monitor = watching(model)
    monitor.begin_step(0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(x)
    monitor.end_step()
    assert y.dtype == torch.bfloat16
    assert monitor.get_step_metrics()["activation/2/norm"] == pytest.approx(
        y.double().norm().item(), rel=1e-5
    )


def test_a_value_that_is_changed_in_place_afterwards_counts_as_it_was() -> None:
    model = CNN(inplace=True)
    monitor = watching(model)
    monitor.add_activation_metric("sum of rows", lambda x: x.sum(dim=-1))
    monitor.begin_step(0)
    x = torch.randn(2, 3, 8, 8)
    model(x)
    monitor.end_step()
    model.eval()
    twin = copy.deepcopy(model).train()
    expected = twin.bn1(twin.conv1(x))
    assert monitor.get_step_metrics()["activation/bn1/norm"] == pytest.approx(
        expected.norm().item(), rel=1e-4
    )


def test_a_metric_that_changes_its_argument_does_not_change_the_model() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4)
    expected = model(x)
    monitor = ModuleMonitor(monitor_step_fn=lambda step: True)
    monitor.set_module(model)
    monitor.add_activation_metric("peak", lambda y: y.abs_().max())
    monitor.begin_step(0)
    assert torch.equal(model(x), expected)
    monitor.end_step()


# -- cost ----------------------------------------------------------------------------------------------------


def test_a_step_that_is_not_monitored_carries_no_hook() -> None:
    model = mlp()
    reference = copy.deepcopy(model)
    monitor = watching(model, monitor_step_fn=lambda step: step == 1)
    monitor.set_reference_module(reference)
    RefinedCoordinateCheck(monitor)
    monitor.remove_reference_module()
    assert not monitor.begin_step(0)
    assert hooks_on(model) == 0
    assert monitor.begin_step(1)
    assert hooks_on(model) > 0
    monitor.end_step()
    monitor.begin_step(2)
    assert hooks_on(model) == hooks_on(reference) == 0


def test_plain_metrics_share_one_pass_over_each_value(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[tuple[int, ...]] = []
    measure = ledger.kernel.measure
    if ledger.kernel.native is None:
        pytest.skip("the native kernel is not built")

    def counted(native: Any, address: int, value: Tensor) -> bool:
        passes.append(tuple(value.shape))
        return measure(native, address, value)

    monkeypatch.setattr(ledger.kernel, "measure", counted)
    model = mlp()
    monitor = watching(model)
    monitor.add_activation_metric("std", torch.std)
    monitor.add_activation_metric("peak", lambda x: x.abs().max())
    monitor.begin_step(0)
    model(torch.randn(5, 7))
    monitor.end_step()
    # The model's output is that of its last layer: three values, four modules, four metrics.
    assert passes == [(5, 9), (5, 9), (5, 3)]
    assert len(monitor.get_step_metrics()) == 16


def test_no_value_is_read_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("a number was read by itself")

    model, x = mlp(), torch.randn(5, 7)
    monitor = watching(model)
    monitor.add_activation_metric("rows", lambda y: y.norm(dim=-1).mean())
    monitor.add_parameter_metric("norm", lambda p: p.norm())
    monitor.add_parameter_metric("median", lambda p: p.median())
    monitor.add_gradient_metric("norm", lambda g: g.norm())
    monitor.begin_step(0)
    model(x).sum().backward()
    monkeypatch.setattr(Tensor, "item", refuse)
    monkeypatch.setattr(Tensor, "__float__", refuse)
    monitor.monitor_parameters()
    monitor.monitor_gradients()
    monitor.end_step()
    monkeypatch.undo()
    assert monitor.get_step_metrics()["parameter/0.weight/norm"] == pytest.approx(
        model[0].weight.norm().item()
    )


def test_a_metric_with_effects_is_called_and_not_read() -> None:
    seen: list[Any] = []

    def noting(x: Tensor) -> Tensor:
        seen.append(x.shape)
        return x.mean()

    order = 2
    assert recognise(noting).formula is None
    assert recognise(lambda x: x.norm(order)).formula is None
    assert seen == []
    assert recognise(lambda x: x.norm(2)).formula is not None
    assert recognise(functools.partial(torch.norm, p=1)).formula is not None


@pytest.mark.parametrize(
    "metric",
    [
        lambda x: x.mean(),
        lambda x: x.std(),
        lambda x: x.var(unbiased=False),
        lambda x: x.norm(),
        lambda x: x.norm(p=1),
        lambda x: x.abs().max(),
        lambda x: torch.linalg.vector_norm(x, ord=math.inf),
        lambda x: x.pow(2).mean().sqrt(),
        lambda x: (x**2).sum(),
        lambda x: (x * x).mean(),
        lambda x: x.max() - x.min(),
        lambda x: (x == 0).float().mean(),
        lambda x: abs(x).mean(),
        lambda x: 2 * x.detach().float().norm().item() + 1,
        lambda x: x.norm() / x.numel() ** 0.5,
        torch.mean,
        torch.Tensor.std,
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_formula_gives_what_the_expression_gives(metric: Any, dtype: torch.dtype) -> None:
    x = torch.randn(7, 9, dtype=dtype)
    x[0, :3] = 0
    model = nn.Identity()
    monitor = ModuleMonitor(monitor_step_fn=lambda step: True)
    monitor.set_module(model)
    monitor.add_activation_metric("m", metric)
    monitor.begin_step(0)
    model(x)
    monitor.end_step()
    assert monitor.get_step_metrics()["activation/[root module]/m"] == pytest.approx(
        float(metric(x)), rel=1e-6
    )


def test_memory_does_not_grow_with_steps_when_a_run_is_given(tmp_path: Path) -> None:
    model = Tagger()
    monitor = watching(model, run=tmp_path / "run")
    monitor.add_parameter_metric("norm", lambda p: p.norm())
    means = []
    for step in range(4):
        x = torch.randn(2, 3, 8)
        monitor.begin_step(step)
        means.append(model(x).mean().item())
        monitor.monitor_parameters()
        monitor.log_scalar("odd/key:with#all", step)
        monitor.end_step()
        assert list(monitor.storage.log_dict) == [step]
    everything = monitor.get_all_metrics()
    assert [everything[step]["activation/fc/mean"] for step in range(4)] == pytest.approx(means, rel=1e-5)
    assert [everything[step]["odd/key:with#all"] for step in range(4)] == [0, 1, 2, 3]
    assert everything[0].keys() == everything[3].keys() == monitor.get_step_metrics().keys()
    monitor.close()
    run = tt.open(tmp_path / "run")
    assert run.series("fc:output", "mean").values.tolist() == pytest.approx(means, rel=1e-5)
    assert "lstm:output.1.0" in run.sites()
    assert "fc:param.weight" in run.sites()
    assert hooks_on(model) == 0


def test_a_sink_is_called_with_each_step_and_its_failure_costs_only_itself() -> None:
    model, seen = mlp(), {}

    def failing(step: int, metrics: dict[str, Any]) -> None:
        raise OSError("no network")

    monitor = watching(model, sinks=[failing, lambda step, metrics: seen.update({step: metrics})])
    with pytest.warns(RuntimeWarning, match="failing.*no network"):
        for step in range(2):
            monitor.begin_step(step)
            model(torch.randn(2, 7))
            monitor.end_step()
    assert seen == monitor.get_all_metrics()


@pytest.mark.parametrize(
    "key",
    [
        "activation/[root module]/mean",
        "activation/[root module][0]/mean",
        "activation/blocks.0.attn.head_1.query/norm",
        "activation/lstm[1.0]/std",
        "parameter/fc.weight/norm",
        "parameter/weight/norm",
        "gradient/fc.bias/norm",
        "gradient_before_clip/fc.bias/norm",
        "RCC (W_t-W_0)x_t/fc/l2norm",
        "loss",
        "activation/odd:name#/mean",
    ],
)
def test_every_key_comes_back_from_its_site(key: str) -> None:
    assert key_of(*site_of(key)) == key


# -- storage -------------------------------------------------------------------------------------------------


def test_every_key_comes_back_from_hdf5_as_it_went_in(tmp_path: Path) -> None:
    storage = StorageManager()
    keys = ["activation/fc/mean", "plain", "a", "a/values", "a/keys/b", "b//c", "/d", "e/../f", "g∕h"]
    for place, key in enumerate(keys):
        storage.log_scalar(7, key, place)
        storage.log_scalar(9, key, place + 0.5)
    storage.save_hdf5(tmp_path / "x.h5")
    expected = {key: {7: place, 9: place + 0.5} for place, key in enumerate(keys)}
    assert StorageManager.load_hdf5(tmp_path / "x.h5") == expected
    assert sorted(StorageManager.read_hdf5_entry_keys(tmp_path / "x.h5")) == sorted(keys)
    assert StorageManager.read_hdf5_entry(tmp_path / "x.h5", "no such key") is None
    storage.save_hdf5(tmp_path / "y.h5", condensed=False)
    assert StorageManager.load_hdf5(tmp_path / "y.h5")["9"] == {
        key: place + 0.5 for place, key in enumerate(keys)
    }


def test_a_value_in_the_middle_of_a_step_can_be_looked_at() -> None:
    model = mlp()
    monitor = watching(model)
    monitor.begin_step(0)
    model(torch.randn(2, 7))
    (value,) = monitor.get_step_metrics()["activation/0/mean"]
    model(torch.randn(2, 7))
    assert len(monitor.storage.log_dict[0]["activation/0/mean"]) == 2
    monitor.end_step()
    assert isinstance(monitor.get_step_metrics()["activation/0/mean"], float)
    assert value.shape == (1,)


# -- bad input -----------------------------------------------------------------------------------------------


def test_a_metric_is_added_once() -> None:
    monitor = ModuleMonitor()
    for add in (
        monitor.add_activation_metric,
        monitor.add_activation_difference_metric,
        monitor.add_parameter_metric,
        monitor.add_parameter_difference_metric,
        monitor.add_gradient_metric,
    ):
        add("m", lambda *x: x[0].mean())
        with pytest.raises(ValueError, match="metric m already exists"):
            add("m", lambda *x: x[0].mean())


def test_a_monitored_step_needs_a_module() -> None:
    with pytest.raises(ValueError, match="No module to monitor"):
        ModuleMonitor(monitor_step_fn=lambda step: True).begin_step(0)


def test_steps_only_grow() -> None:
    monitor = watching(mlp())
    monitor.begin_step(5)
    with pytest.raises(ValueError, match="Step 4 cannot be smaller than the current step 5"):
        monitor.begin_step(4)


def test_a_metric_that_raises_is_named_with_its_module() -> None:
    model = mlp()
    monitor = ModuleMonitor(monitor_step_fn=lambda step: True)
    monitor.set_module(model)
    monitor.add_activation_metric("broken", lambda x: x.no_such_thing(), metric_regex="2")
    monitor.add_parameter_metric("broken", lambda p: p / "x", metric_regex=r"0\.weight")
    monitor.begin_step(0)
    with pytest.raises(tt.MetricError, match=r"activations of module 2.*metric broken") as caught:
        model(torch.randn(2, 7))
    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value.__cause__, AttributeError)
    with pytest.raises(RuntimeError, match=r"parameter 0\.weight.*metric broken"):
        monitor.monitor_parameters()


def test_a_metric_that_gives_no_number_is_named_with_its_module() -> None:
    model = mlp()
    monitor = ModuleMonitor(monitor_step_fn=lambda step: True)
    monitor.set_module(model)
    monitor.add_activation_metric("text", lambda x: "large", metric_regex="1")
    monitor.add_gradient_metric("rows", lambda g: g.sum(-1), metric_regex=r"0\.weight")
    monitor.begin_step(0)
    with pytest.raises(tt.MetricError, match=r"metric text .* of module 1 .*str"):
        model(torch.randn(2, 7))
    with monitor.no_monitor():
        model(torch.randn(2, 7)).sum().backward()
    with pytest.raises(RuntimeError, match=r"0\.weight.*metric rows.*shape \(9,\)"):
        monitor.monitor_gradients()


def test_a_reference_of_another_structure_is_refused_by_name() -> None:
    monitor = watching(mlp())
    with pytest.raises(ValueError, match=r"same structure.*'3' \(only in the reference\)"):
        monitor.set_reference_module(nn.Sequential(*mlp(), nn.ReLU()))
    assert not monitor.has_reference_module()
    with pytest.raises(ValueError, match="set the monitored module before"):
        ModuleMonitor().set_reference_module(mlp())


def test_a_second_module_and_no_module_are_refused() -> None:
    monitor = watching(mlp())
    with pytest.raises(ValueError, match="already been set"):
        monitor.set_module(mlp())
    with pytest.raises(ValueError, match="cannot be None"):
        ModuleMonitor().set_module(None)  # type: ignore[arg-type]


def test_a_reference_called_twice_in_a_micro_batch_is_an_error() -> None:
    model = mlp()
    reference = copy.deepcopy(model)
    monitor = watching(model)
    monitor.set_reference_module(reference)
    monitor.begin_step(0)
    reference(torch.randn(2, 7))
    with pytest.raises(RuntimeError, match="already stored"):
        reference(torch.randn(2, 7))
    monitor.after_micro_batch()
    reference(torch.randn(2, 7))


def test_the_coordinate_check_needs_both_models_and_both_passes() -> None:
    with pytest.raises(ValueError, match="Set the module"):
        RefinedCoordinateCheck(ModuleMonitor())
    model = mlp()
    monitor = watching(model)
    with pytest.raises(ValueError, match="Set the reference"):
        RefinedCoordinateCheck(monitor)
    monitor.set_reference_module(copy.deepcopy(model))
    check = RefinedCoordinateCheck(monitor)
    monitor.begin_step(0)
    with pytest.raises(ValueError, match="No inputs found"):
        check.refined_coordinate_check()
    model(torch.randn(2, 7))
    with pytest.raises(ValueError, match="module 0 ran, but the reference's did not"):
        check.refined_coordinate_check()


def test_the_coordinate_check_uses_up_no_random_numbers_and_leaves_the_reference_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(7, 7), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(7, 3))
    reference = copy.deepcopy(model)
    monitor = watching(model)
    monitor.set_reference_module(reference)
    check = RefinedCoordinateCheck(monitor)
    x = torch.randn(4, 7)
    monitor.begin_step(0)
    reference(x)
    model(x)
    before = torch.get_rng_state()
    check.refined_coordinate_check()
    assert torch.equal(torch.get_rng_state(), before)
    monitor.end_step()
    assert not any("forward" in module.__dict__ for module in reference.modules())
    got = monitor.get_step_metrics()
    hidden = functional.linear(x, model[0].weight).norm(dim=-1).mean().item()
    assert got["RCC (W_t-W_0)x_t/0.weight/W_t x_t/l2norm"] == pytest.approx(hidden, rel=1e-5)
    assert got["RCC (W_t-W_0)x_t/0/l2norm"] == got["RCC W_0(x_t-x_0)/0/l2norm"] == 0


def test_the_coordinate_check_covers_what_the_peer_cannot_run() -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.lstm = nn.LSTM(8, 8, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            y, _ = self.attention(x, x, x, need_weights=False)
            return self.lstm(y)[0]

    model = Attending()
    reference = copy.deepcopy(model)
    with torch.no_grad():
        model.attention.in_proj_weight[:8].add_(0.1)
    monitor = watching(model)
    monitor.set_reference_module(reference)
    check = RefinedCoordinateCheck(monitor)
    x = torch.randn(2, 3, 8)
    monitor.begin_step(0)
    reference(x)
    model(x)
    check.refined_coordinate_check()
    monitor.end_step()
    got = monitor.get_step_metrics()
    moved = functional.linear(x, torch.full((8, 8), 0.1)).norm(dim=-1).mean().item()
    assert got["RCC (W_t-W_0)x_t/attention.q_proj.weight/l2norm"] == pytest.approx(moved, rel=1e-4)
    assert got["RCC (W_t-W_0)x_t/attention.k_proj.weight/l2norm"] == 0
    assert got["RCC W_0(x_t-x_0)/lstm[0]/l2norm"] > 0


# -- sinks and import names ----------------------------------------------------------------------------------


def test_the_projects_own_sinks_take_a_monitors_steps(tmp_path: Path) -> None:
    from torchtap.sinks.json_lines import JsonLinesSink
    from torchtap.sinks.tensorboard import TensorBoardSink

    model = mlp()
    sinks = [TensorBoardSink(tmp_path / "board"), JsonLinesSink(tmp_path / "lines.jsonl")]
    monitor = watching(model, sinks=sinks)
    monitor.begin_step(3)
    model(torch.randn(2, 7))
    monitor.end_step()
    monitor.close()
    assert "2:output" in (tmp_path / "lines.jsonl").read_text()
    assert any(file.stat().st_size > 100 for file in (tmp_path / "board").rglob("events*"))


def test_weights_and_biases_works_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    from torchtap.sinks.wandb import WandbSink

    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    model = mlp()
    monitor = watching(model, sinks=[WandbSink("torchtap-test", mode="offline")])
    monitor.begin_step(0)
    model(torch.randn(2, 7))
    monitor.end_step()
    monitor.close()
    assert list(tmp_path.rglob("*.wandb"))


def test_torchtap_stands_in_for_the_peers_import_names() -> None:
    program = """
from torchtap.monitors.torch_module_monitor import stand_in
stand_in()
import torch_module_monitor, torchtap
from torch_module_monitor import ModuleMonitor, MonitorMixin, RefinedCoordinateCheck
from torch_module_monitor.hooks import HooksManager
from torch_module_monitor.monitor import ModuleMonitor as Same, default_format_module_name_fn
from torch_module_monitor.refined_coordinate_check import l2_norm
from torch_module_monitor.storage import StorageManager
from torch_module_monitor.attention import monitor_scaled_dot_product_attention
assert Same is ModuleMonitor is torchtap.ModuleMonitor
assert isinstance(ModuleMonitor().storage, StorageManager)
assert isinstance(ModuleMonitor().activation_hooks, HooksManager)
assert default_format_module_name_fn("_orig_mod.fc") == "fc"
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
