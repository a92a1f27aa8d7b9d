"""A step with several closure calls or several updates: which of the values is recorded, against plain torch."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from tests.clock.truth import Kept
from torch import Tensor, nn

import torchtap as tt

KINDS = ["*:param", "*:param_grad", "*:update"]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).clone()


def gradients(model: nn.Module) -> Tensor:
    return torch.cat(
        [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    )


def norm(kept: Kept, step: int, kind: str, prefix: str = "") -> float:
    found = [
        values["l2"]
        for (at, _, site), values in kept.numbers().items()
        if at == step and f":{kind}." in site and site.startswith(prefix)
    ]
    return float(torch.tensor(found, dtype=torch.float64).norm())


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_gives_the_gradient_of_its_last_evaluation_and_the_change_of_all_of_them(search: Any) -> None:
    torch.manual_seed(0)
    model, kept = mlp(), Kept()
    x, y = torch.randn(16, 6), torch.randn(16, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn=search)
    truth = []
    with tt.watch(model, None, [*KINDS, ":output"], sinks=[kept], strict=True) as watch:
        watch.follow(optimizer)
        for _ in range(4):
            before, calls = weights(model), 0

            def closure() -> Tensor:
                nonlocal calls
                calls += 1
                optimizer.zero_grad()
                loss = (model(x) - y).pow(2).mean()
                loss.backward()
                return loss

            optimizer.step(closure)
            truth.append((before, gradients(model), weights(model) - before, calls))
    assert truth[0][3] > 1
    for step, (before, gradient, change, calls) in enumerate(truth):
        assert norm(kept, step, "param") == pytest.approx(before.norm().item(), rel=1e-5)
        assert norm(kept, step, "param_grad") == pytest.approx(gradient.norm().item(), rel=1e-5)
        assert norm(kept, step, "update") == pytest.approx(change.norm().item(), rel=1e-5)
        assert kept.records[step].passes == calls


def test_clipping_inside_a_closure_has_the_stages_of_its_last_evaluation() -> None:
    """As SAM and other two-step optimizers do: the second gradient, at another point, makes the update."""

    class TwoLooks(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            closure()
            with torch.no_grad():
                for group in self.param_groups:
                    for parameter in group["params"]:
                        parameter.add_(parameter.grad, alpha=0.5)
            return super().step(closure)

    torch.manual_seed(0)
    model, kept = mlp(), Kept()
    optimizer = TwoLooks(model.parameters(), 0.1)
    unclipped, clipped = [], []
    taps = ["*:param_grad", "*:param_grad_unclipped", "*:param_grad_accumulated"]
    with tt.watch(model, None, taps, sinks=[kept], strict=True) as watch:
        watch.follow(optimizer)
        for _ in range(3):
            x = torch.randn(8, 6)

            def closure(x: Tensor = x) -> Tensor:
                optimizer.zero_grad()
                loss = 10 * model(x).pow(2).mean()
                loss.backward()
                unclipped.append(gradients(model).norm().item())
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                clipped.append(gradients(model).norm().item())
                return loss

            optimizer.step(closure)
    assert [record.step for record in kept.records] == [0, 1, 2]
    for step in range(3):
        last = 2 * step + 1
        assert norm(kept, step, "param_grad") == pytest.approx(clipped[last], rel=1e-5)
        assert norm(kept, step, "param_grad_unclipped") == pytest.approx(unclipped[last], rel=1e-5)
        assert norm(kept, step, "param_grad_accumulated") == pytest.approx(unclipped[last], rel=1e-5)


def test_five_updates_in_a_marked_step_have_the_last_gradient_and_the_whole_change() -> None:
    torch.manual_seed(0)
    models = {"G": mlp(), "D": nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 1))}
    critics, makers = (torch.optim.Adam(models[name].parameters(), 1e-2) for name in ("D", "G"))
    kept, truth = Kept(), []
    with tt.watch(models, None, [*KINDS, "*:optim_state"], sinks=[kept], strict=True) as watch:
        for _ in range(3):
            with watch.step():
                before = weights(models["D"])
                for _ in range(5):
                    critics.zero_grad()
                    fake = models["G"](torch.randn(4, 6)).detach()
                    (models["D"](fake) - models["D"](torch.randn(4, 1))).mean().backward()
                    critics.step()
                truth.append((before, gradients(models["D"]), weights(models["D"]) - before))
                makers.zero_grad()
                models["D"](models["G"](torch.randn(4, 6))).mean().backward()
                makers.step()
    assert [record.step for record in kept.records] == [0, 1, 2]
    numbers = kept.numbers()
    for step, (before, gradient, change) in enumerate(truth):
        assert norm(kept, step, "param", "D.") == pytest.approx(before.norm().item(), rel=1e-5)
        assert norm(kept, step, "param_grad", "D.") == pytest.approx(gradient.norm().item(), rel=1e-5)
        assert norm(kept, step, "update", "D.") == pytest.approx(change.norm().item(), rel=1e-5)
        assert numbers[step, "train", "D.0:optim_state.weight.step"]["mean"] == 5 * (step + 1)
        assert numbers[step, "train", "D.0:param_grad.weight"]["count"] == 4


def steps_of(order: str) -> list[list[str]]:
    """Follow optimizers of separate models, update them in this order; return who updated in each step."""
    torch.manual_seed(0)
    models = {name: nn.Linear(2, 1) for name in sorted(set(order))}
    optimizers = {name: torch.optim.SGD(model.parameters(), 0.1) for name, model in models.items()}
    kept = Kept()
    with tt.watch(models, None, "*:update", sinks=[kept], strict=True) as watch:
        watch.follow(*optimizers.values())
        for name in order:
            optimizers[name].zero_grad()
            models[name](torch.ones(1, 2)).sum().backward()
            optimizers[name].step()
    found: dict[int, list[str]] = {}
    for step, _, site in kept.numbers():
        if site.endswith(":update.weight"):
            found.setdefault(step, []).append(site[0])
    return [sorted(found[step]) for step in sorted(found)]


@pytest.mark.parametrize(
    ("order", "steps"),
    [
        ("DGDGDG", ["DG", "DG", "DG"]),
        ("CCACCA", ["C", "AC", "C", "AC"]),
        ("AAABBB", ["A", "A", "A", "B", "B", "B"]),
        ("AAAA", ["A", "A", "A", "A"]),
        ("ABCABC", ["ABC", "ABC"]),
        ("DGDGGDG", ["DG", "DG", "DG", "G"]),
        ("AABABABB", ["A", "AB", "AB", "AB", "B"]),
    ],
)
def test_optimizers_that_take_turns_share_a_step_and_others_have_their_own(
    order: str, steps: list[str]
) -> None:
    assert ["".join(each) for each in steps_of(order)] == steps


def test_a_block_with_an_evaluation_only_is_told_among_training_steps_and_not_in_inference() -> None:
    model = mlp()
    with tt.watch(model, None, "*:output") as watch:
        for _ in range(2):
            with watch.step():
                model(torch.randn(2, 6)).sum().backward()
        with pytest.warns(RuntimeWarning, match="outside of steps"), watch.step(), torch.no_grad():
            model.eval()(torch.randn(2, 6))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with tt.watch(model, None, "*:output", strict=True) as watch:
            for _ in range(3):
                with watch.step(), torch.no_grad():
                    model(torch.randn(2, 6))


def test_a_subclass_that_calls_its_parent_s_step_makes_one_step_and_a_call_that_raised_none() -> None:
    class Mine(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            return super().step(closure)

    model, kept = mlp(), Kept()
    torch.optim.SGD(model.parameters(), 0.1)  # torch hooks a class once it has been made
    optimizer, fails = Mine(model.parameters(), 0.1), [True, False] * 4
    with tt.watch(model, None, "*:output", sinks=[kept], strict=True) as watch:
        watch.follow(optimizer)
        for _ in range(4):
            loss = model(torch.randn(2, 6)).sum()

            def closure(loss: Tensor = loss) -> Tensor:
                if fails.pop(0):
                    raise ValueError("a bad batch")
                loss.backward()
                return loss

            with pytest.raises(ValueError, match="bad batch"):
                optimizer.step(closure)
            optimizer.step(closure)
    assert [(record.step, record.passes) for record in kept.records] == [(0, 1), (1, 1), (2, 1), (3, 1)]
