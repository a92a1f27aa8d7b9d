"""The refined coordinate check on a part of each batch, against numbers that plain torch gives by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchtap import ModuleMonitor, RefinedCoordinateCheck


class Twice(nn.Module):
    """Calls a module twice: what counts is its last call."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(6, 6), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.act(self.fc(x)))


class Parts(nn.Module):
    """Gives a tuple, of which one tensor is changed in place afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.split, self.fc = Split(), nn.Linear(3, 6)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.split(x)
        left.mul_(2)
        return self.fc(left + right)


class Split(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.fc(x)
        return y[:, :3].clone(), y[:, 3:]


class Turned(nn.Module):
    """Values that lie in another order, and with gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.turn, self.fc = Turn(), nn.Linear(3, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.turn(x)[..., ::2])


class Turn(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.t().contiguous().t()


class Named(nn.Module):
    """Calls a module with a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.add, self.fc = Add(), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.add(x, other=x * 2))


class Add(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return x * self.scale + other


class Repeated(nn.Module):
    """A checkpoint repeats a part in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Sequential(nn.Linear(6, 6), nn.ReLU()), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.inner, x, use_reentrant=False))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "blocks": lambda: nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.ReLU()) for _ in range(3))),
    "in place": lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6, bias=False)),
    "norm": lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 2)),
    "wide": lambda: nn.Sequential(nn.Linear(6, 300), nn.Linear(300, 300), nn.GELU(), nn.Linear(300, 6)),
    "called twice": Twice,
    "tuple": Parts,
    "turned": Turned,
    "keyword": Named,
    "checkpoint": Repeated,
}

Calls = dict[str, tuple[tuple[Any, ...], dict[str, Any], Any]]


def calls_of(model: nn.Module, x: Tensor) -> Calls:
    """The last call of each module, as copies of what it was given and gave."""
    found: Calls = {}

    def copied(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().clone()
        if isinstance(value, tuple):
            return tuple(map(copied, value))
        return {key: copied(each) for key, each in value.items()}

    def hook_for(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            found[name] = copied(args), copied(kwargs), copied(output)

        return hook

    handles = [
        module.register_forward_hook(hook_for(name), with_kwargs=True)
        for name, module in model.named_modules()
    ]
    model(x)
    for handle in handles:
        handle.remove()
    return found


def norms(value: Tensor) -> Tensor:
    return torch.linalg.vector_norm(value.double(), dim=-1).flatten()


def by_hand(model: nn.Module, reference: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The norm of each row, by key, as the formulas say it."""
    found: dict[str, Tensor] = {}
    now, start = calls_of(model, x), calls_of(reference, x)
    for name in now:
        if not name:
            continue
        args, kwargs, output = now[name]
        start_args, _, start_output = start[name]
        part = copy.deepcopy(reference.get_submodule(name))
        with torch.no_grad():
            between = part(*(each.clone() for each in args), **kwargs)
        parts = [("", output, between, start_output)]
        if isinstance(output, tuple):
            parts = [(f"[{i}]", output[i], between[i], start_output[i]) for i in range(len(output))]
        for leaf, after, middle, before in parts:
            found[f"RCC (W_t-W_0)x_t/{name}{leaf}/l2norm"] = norms(after - middle)
            found[f"RCC W_0(x_t-x_0)/{name}{leaf}/l2norm"] = norms(middle - before)
        found[f"RCC x_t/{name}/l2norm"] = norms(args[0])
        found[f"RCC (x_t-x_0)/{name}/l2norm"] = norms(args[0] - start_args[0])
        if isinstance(part, nn.Linear):
            weight = model.get_submodule(name).weight.detach()
            found[f"RCC (W_t-W_0)x_t/{name}.weight/l2norm"] = norms(
                args[0] @ (weight - part.weight.detach()).t()
            )
            found[f"RCC (W_t-W_0)x_t/{name}.weight/W_t x_t/l2norm"] = norms(args[0] @ weight.t())
    return found


def moved(model: nn.Module) -> nn.Module:
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return other


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("batch", [32, 8, 5])  # an eighth of which is four rows, one row, and one row
@pytest.mark.parametrize("quiet", [True, False])
def test_an_eighth_of_a_batch_gives_the_numbers_of_the_formulas(name: str, batch: int, quiet: bool) -> None:
    torch.manual_seed(0)
    reference = MODELS[name]()
    model = moved(reference)
    monitor = ModuleMonitor(monitor_step_fn=lambda step: True)
    monitor.set_module(model)
    monitor.set_reference_module(reference)
    check = RefinedCoordinateCheck(monitor, share=1 / 8)
    micro_batches = [torch.randn(batch, 6) for _ in range(2)]
    for step in range(3):
        monitor.begin_step(step)
        for x in micro_batches:
            if quiet:
                with monitor.no_monitor():
                    reference(check.part(x))
            else:
                reference(check.part(x))
            y = model(x)
            check.refined_coordinate_check()
            y.sum().backward()
            monitor.after_micro_batch()
        monitor.end_step()
    everything = [
        {key: value for key, value in each.items() if key.startswith("RCC")}
        for each in monitor.get_all_metrics().values()
    ]
    monitor.close()
    expected: dict[str, list[Tensor]] = {}
    for x in micro_batches:
        part = x[: max(1, -(-batch // 8))]
        for key, rows in by_hand(model, reference, part).items():
            expected.setdefault(key, []).append(rows)
    for metrics in everything:
        for key, rows in expected.items():
            assert metrics[key] == pytest.approx(torch.cat(rows).mean().item(), rel=1e-4, abs=1e-6), key
        assert metrics == pytest.approx(everything[0], rel=1e-5, abs=1e-6)


class Marked(Tensor):
    """A subclass of Tensor."""


def test_values_of_another_kind_than_the_references_are_cut_like_others() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    reference = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    inputs = torch.randn(16, 6)
    found = []
    for given in (inputs, inputs.as_subclass(Marked)):
        monitor = ModuleMonitor(monitor_step_fn=None)
        monitor.set_module(model)
        monitor.set_reference_module(reference)
        check = RefinedCoordinateCheck(monitor, share=1 / 8)
        for step in range(2):
            monitor.begin_step(step)
            with torch.no_grad():
                reference(check.part(inputs))
            model(given)
            check.refined_coordinate_check()
            monitor.end_step()
        found.append(monitor.get_all_metrics())
        monitor.close()
    plain, marked = found
    assert plain.keys() == marked.keys() == {0, 1}
    for step, metrics in plain.items():
        assert marked[step] == pytest.approx(metrics)
