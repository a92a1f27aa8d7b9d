"""The refined coordinate check: whenever and however a module's call is taken, the numbers are the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from tests.models import CNN, GPT, Tagger, mlp
from tests.monitors.module_monitoring import watching
from torch import Tensor, nn
from torch.nn import functional

from torchtap import ModuleMonitor, RefinedCoordinateCheck
from torchtap.errors import MonitorError
from torchtap.reduce import row_norms


def checking(model: nn.Module, **options: Any) -> tuple[ModuleMonitor, nn.Module, RefinedCoordinateCheck]:
    options.setdefault("monitor_step_fn", lambda step: True)
    reference = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.2)
    monitor = ModuleMonitor(**options)
    monitor.set_module(model)
    monitor.set_reference_module(reference)
    return monitor, reference, RefinedCoordinateCheck(monitor)


class Writing(nn.Module):
    """Writes into its input, which is the output of the module before it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return self.second(self.first(x))


class Changed(nn.Module):
    """A value is changed in place after the module that gave it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.writing, self.norm = nn.Linear(6, 6), Writing(), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.writing(self.fc(x)))
        y.mul_(2)
        return y


class Pair(NamedTuple):
    value: Tensor
    text: str


class Named(nn.Module):
    """Takes and gives values inside something else than a tuple, a list or a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, pair: Pair) -> Pair:
        return Pair(self.fc(pair.value), pair.text)


class ChangedInside(nn.Module):
    """Such a value is changed in place afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Named(), Named()

    def forward(self, x: Tensor) -> Tensor:
        pair = self.second(self.first(Pair(x * 1, "text")))
        pair.value.mul_(2)
        return pair.value


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (mlp, lambda: torch.randn(5, 7)),
    "nested": (
        lambda: nn.Sequential(mlp(), nn.Sequential(nn.ReLU(), nn.Linear(3, 2))),
        lambda: torch.randn(5, 7),
    ),
    "cnn in place": (lambda: CNN(inplace=True), lambda: torch.randn(2, 3, 8, 8)),
    "gpt": (GPT, lambda: torch.randint(0, 11, (2, 6))),
    "tuples": (Tagger, lambda: torch.randn(2, 5, 8)),
    "changed in place": (Changed, lambda: torch.randn(4, 6)),
    "changed inside": (ChangedInside, lambda: torch.randn(4, 6)),
    "half": (lambda: mlp().bfloat16(), lambda: torch.randn(5, 7).bfloat16()),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_call_that_is_taken_where_it_happens_gives_what_a_kept_one_gives(name: str) -> None:
    build, batch = MODELS[name]
    torch.manual_seed(0)
    monitor, reference, check = checking(build().eval())
    x = batch()
    for step in range(3):
        monitor.begin_step(step)
        reference(x)
        monitor.module(x)
        # The first check was not expected, so its calls were kept; later only the second call of a module is.
        assert (len(check.module_inputs) <= 1) == (step > 0)
        check.refined_coordinate_check()
        monitor.end_step()
    kept, *taken = monitor.get_all_metrics().values()
    assert any(key.startswith("RCC") for key in kept)
    for metrics in taken:
        assert metrics == pytest.approx(kept, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_without_the_kernel_the_numbers_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, batch = MODELS[name]
    torch.manual_seed(0)
    monitor, reference, check = checking(build().eval())
    x = batch()
    for step, native in enumerate((row_norms.native, row_norms.native, None)):
        monkeypatch.setattr(row_norms, "native", native)
        monitor.begin_step(step)
        reference(x)
        monitor.module(x)
        check.refined_coordinate_check()
        monitor.end_step()
    everything = monitor.get_all_metrics()
    assert everything[2] == pytest.approx(everything[1], rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("name", ["cnn in place", "changed in place", "gpt"])
def test_the_model_gives_and_learns_the_same_with_the_check(name: str) -> None:
    build, batch = MODELS[name]
    torch.manual_seed(0)
    model, x = build(), batch()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.2)
    monitor, reference, check = checking(model)
    for step in range(3):
        monitor.begin_step(step)
        reference(x)
        y = model(x)
        check.refined_coordinate_check()
        assert torch.equal(y, twin(x))
        y.sum().backward()
        monitor.end_step()
    twin.zero_grad()
    model.zero_grad()
    twin(x).sum().backward()
    model(x).sum().backward()
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)


def test_a_reference_that_runs_after_the_model_is_compared_with() -> None:
    monitor, reference, check = checking(mlp())
    x = torch.randn(5, 7)
    for step, reference_first in enumerate([True, True, False]):
        monitor.begin_step(step)
        for part in [reference, monitor.module] if reference_first else [monitor.module, reference]:
            part(x)
        check.refined_coordinate_check()
        monitor.end_step()
    everything = monitor.get_all_metrics()
    assert everything[2] == pytest.approx(everything[1], rel=1e-6)


def test_a_pass_of_the_reference_is_compared_with_one_pass_of_the_model() -> None:
    monitor, reference, check = checking(mlp())
    first, second = torch.randn(5, 7), torch.randn(5, 7)
    for step in range(2):
        monitor.begin_step(step)
        with monitor.no_monitor():
            reference(first)
        monitor.module(first)
        monitor.module(second)  # the last pass counts, and its reference comes later
        with monitor.no_monitor():
            reference(second)
        check.refined_coordinate_check()
        monitor.end_step()
    assert monitor.get_all_metrics()[1] == pytest.approx(monitor.get_all_metrics()[0], rel=1e-6)


def test_micro_batches_are_averaged_over_all_their_rows() -> None:
    monitor, reference, check = checking(mlp())
    x = torch.randn(6, 7)
    for step, sizes in enumerate([[6], [2, 4], [3, 3]]):
        monitor.begin_step(step)
        for part in x.split(sizes):
            reference(part)
            monitor.module(part)
            check.refined_coordinate_check()
            monitor.after_micro_batch()
        monitor.end_step()
    whole, *parts = monitor.get_all_metrics().values()
    for metrics in parts:
        assert metrics == pytest.approx(whole, rel=1e-5)


def counted(module: nn.Module) -> list[int]:
    calls: list[int] = []
    forward = type(module).forward

    class Counted(type(module)):  # type: ignore[misc]
        def forward(self, *args: Any) -> Any:
            calls.append(1)
            return forward(self, *args)

    module.__class__ = Counted
    return calls


def test_nothing_is_computed_for_a_check_that_is_not_asked_for() -> None:
    monitor, reference, check = checking(mlp())
    x = torch.randn(5, 7)
    calls = counted(reference[0])
    asked = [True, False, False, True]
    ran = []
    for step, ask in enumerate(asked):
        monitor.begin_step(step)
        reference(x)
        monitor.module(x)
        if ask:
            check.refined_coordinate_check()
        monitor.end_step()
        ran.append(len(calls))
        calls.clear()
    # The second step could not know; the third does.
    assert ran == [2, 2, 1, 2]


def test_a_first_child_runs_once_for_itself_and_its_container() -> None:
    monitor, reference, check = checking(nn.Sequential(nn.Sequential(nn.Linear(7, 4), nn.ReLU())))
    calls = counted(reference[0][0])
    x = torch.randn(5, 7)
    for step in range(3):
        monitor.begin_step(step)
        reference(x)
        calls.clear()
        monitor.module(x)
        check.refined_coordinate_check()
        monitor.end_step()
        assert len(calls) == 1


def test_an_activation_function_is_not_run_again_and_has_no_share_of_its_own() -> None:
    monitor, reference, check = checking(nn.Sequential(nn.Linear(7, 4), nn.Tanh()))
    calls = counted(reference[1])
    other = RefinedCoordinateCheck(monitor)  # made after the class was changed: it runs the function
    x = torch.randn(5, 7)
    monitor.begin_step(0)
    reference(x)
    monitor.module(x)
    calls.clear()
    check.refined_coordinate_check()
    assert not calls
    other.refined_coordinate_check()
    assert calls
    monitor.end_step()
    got = monitor.get_step_metrics()
    assert got["RCC (W_t-W_0)x_t/1/l2norm"] == 0
    assert got["RCC W_0(x_t-x_0)/1/l2norm"] > 0


@pytest.mark.parametrize("part", [0, 1])
def test_a_hook_that_changes_what_the_reference_gives_is_heard(part: int) -> None:
    monitor, reference, check = checking(nn.Sequential(nn.Linear(7, 4), nn.Tanh()))
    reference[part].register_forward_hook(lambda module, args, output: output * 3)
    x = torch.randn(5, 7)
    inputs = [x, monitor.module[0](x)]
    expected = monitor.module[part](inputs[part]) - reference[part](inputs[part])
    for step in range(2):
        monitor.begin_step(step)
        reference(x)
        monitor.module(x)
        check.refined_coordinate_check()
        monitor.end_step()
        assert monitor.get_step_metrics()[f"RCC (W_t-W_0)x_t/{part}/l2norm"] == pytest.approx(
            expected.norm(dim=-1).mean().item(), rel=1e-5
        )


def test_a_check_where_it_happens_uses_up_no_random_numbers() -> None:
    model = nn.Sequential(nn.Linear(7, 7), nn.Sequential(nn.Dropout(0.5), nn.Linear(7, 3)))
    monitor, reference, check = checking(model)
    x, states = torch.randn(4, 7), []
    for step in range(2):
        monitor.begin_step(step)
        reference(x)
        torch.manual_seed(5)
        model(x)
        check.refined_coordinate_check()
        monitor.end_step()
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    assert not any("forward" in module.__dict__ for module in reference.modules())


def test_an_unmonitored_step_gives_the_memory_back() -> None:
    monitor, reference, check = checking(mlp(), monitor_step_fn=lambda step: step % 2 == 0)
    x = torch.randn(9000, 7)
    monitor.begin_step(0)
    reference(x)
    monitor.module(x)
    check.refined_coordinate_check()
    monitor.end_step()
    pools = (check._copies, monitor._reference.copies)
    assert all(copies._pool.nbytes for copies in pools)
    monitor.begin_step(1)
    assert not any(copies._pool.nbytes for copies in pools)


def test_a_copy_that_is_held_on_to_is_not_written_over() -> None:
    monitor, reference, _ = checking(nn.Sequential(nn.Linear(256, 256)))
    kept = []
    for step in range(3):
        monitor.begin_step(step)
        x = torch.full((256, 256), float(step))
        with torch.no_grad():
            y = reference(x)
        kept.append((monitor.reference_module_activations["0"], y))
        monitor.end_step()
    for copied, value in kept:
        assert torch.equal(copied, value)


def test_the_terms_without_a_bias_are_those_of_the_weight() -> None:
    model = nn.Sequential(nn.Linear(7, 4), nn.Linear(4, 3, bias=False))
    monitor, reference, check = checking(model)
    x, z = torch.randn(5, 7), torch.randn(5, 7)
    monitor.begin_step(0)
    reference(z)
    model(x)
    check.refined_coordinate_check()
    monitor.end_step()
    got = monitor.get_step_metrics()
    now, before = model[0].weight, reference[0].weight
    expected = {
        "RCC (W_t-W_0)x_t/0.weight/l2norm": functional.linear(x, now - before),
        "RCC W_0(x_t-x_0)/0.weight/l2norm": functional.linear(x - z, before),
        "RCC (W_t-W_0)x_t/0.weight/W_t x_t/l2norm": functional.linear(x, now),
        "RCC W_0(x_t-x_0)/0.weight/W_0 x_0/l2norm": functional.linear(z, before),
        "RCC (x_t-x_0)/0/l2norm": x - z,
        "RCC x_t/1/l2norm": model[0](x),
    }
    for key, value in expected.items():
        assert got[key] == pytest.approx(value.norm(dim=-1).mean().item(), rel=1e-5), key
    assert got["RCC (W_t-W_0)x_t/1.weight/l2norm"] == got["RCC (W_t-W_0)x_t/1/l2norm"]


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


class BatchSecond(nn.Module):
    """Positions first, then samples, as transformers of torch have it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention = nn.Linear(8, 8), nn.MultiheadAttention(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).transpose(0, 1)
        mixed: Tensor = self.attention(y, y, y, need_weights=False)[0]
        return mixed.flatten(0, 1)


PARTS = {
    **{
        name: MODELS[name]
        for name in ("mlp", "nested", "tuples", "changed in place", "changed inside", "half")
    },
    "gpt": (GPT, lambda: torch.randint(0, 11, (8, 6))),
    "batch second": (BatchSecond, lambda: torch.randn(8, 5, 8)),
}


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("at_once", [True, False])
def test_a_part_of_a_batch_gives_exactly_what_that_part_alone_gives(name: str, at_once: bool) -> None:
    build, batch = PARTS[name]
    torch.manual_seed(0)
    monitor, reference, _ = checking(build().eval())
    model = monitor.module
    x = batch()
    monitor.remove_reference_module()
    found = []
    for share, given in ((0.4, lambda: x), (1.0, lambda: x[: -(-len(x) * 4 // 10)])):
        monitor = ModuleMonitor(monitor_step_fn=lambda step: True)
        monitor.set_module(model)
        monitor.set_reference_module(reference)
        check = RefinedCoordinateCheck(monitor, share=share)
        for step in range(2 if at_once else 1):
            monitor.begin_step(step)
            with monitor.no_monitor():
                reference(check.part(given()))
            model(given())
            check.refined_coordinate_check()
            monitor.end_step()
            metrics = monitor.get_step_metrics()
        found.append({key: value for key, value in metrics.items() if key.startswith("RCC")})
        monitor.remove_reference_module()
        monitor.activation_hooks.remove_all_hooks()
        check.rcc_forward_hooks.remove_all_hooks()
    part, alone = found
    assert part.keys() == alone.keys()
    assert part
    for key, value in part.items():
        # What a layer makes of some rows may differ in the last bits from what it makes of them among others.
        assert value == pytest.approx(alone[key], rel=2e-2 if name == "half" else 1e-4, abs=1e-5), key


def test_a_part_of_a_batch_is_refused_where_it_tells_nothing_of_the_whole() -> None:
    with pytest.raises(MonitorError, match="share=0"):
        RefinedCoordinateCheck(checking(mlp())[0], share=0)
    monitor, reference, _ = checking(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    check = RefinedCoordinateCheck(monitor, share=0.5)
    with pytest.raises(MonitorError, match=r"1 \(BatchNorm1d\) trains on the statistics"):
        monitor.begin_step(0)
    monitor.module.eval()
    monitor.begin_step(0)
    reference.eval()(check.part(torch.randn(4, 3)))
    with pytest.raises(MonitorError, match="has no part of shape"):
        monitor.module(torch.randn(1, 3))


def test_the_part_of_a_batch_is_its_first_rows() -> None:
    check = RefinedCoordinateCheck(checking(mlp())[0], share=1 / 8)
    batch = {"x": torch.arange(20), "pair": (torch.ones(3, 2), "text"), "none": None}
    part = check.part(batch)
    assert part["x"].tolist() == [0, 1, 2]
    assert part["pair"][0].shape == (1, 2)
    assert part["pair"][1] == "text"
    assert part["none"] is None
    whole = RefinedCoordinateCheck(checking(mlp())[0])
    assert whole.part(batch) is batch
