"""Every reason that coverage gives is from one list, and each of that list is provoked here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchtap as tt
from torchtap.receive import reasons
from torchtap.session.coverage import Missing

X = torch.randn(3, 4)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.list = nn.ModuleList([nn.Linear(4, 4)])
        self.used, self.never, self.counts = nn.Linear(4, 4), nn.Linear(4, 4), Counts()

    def forward(self, x: Tensor) -> Tensor:
        self.counts(3)
        return self.used(self.list[0](x))


class Counts(nn.Module):
    def forward(self, number: int) -> int:
        return number + 1


class Pair(nn.Module):
    def __init__(self, shows_second: bool = True) -> None:
        super().__init__()
        self.made, self.shows_second, self.passed = Made(), shows_second, nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.made(self.passed(x))
        return a - b if self.shows_second else a.cos()


class Made(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        b = x * 2
        return x + 1, b


class Again(nn.Module):
    """Returns what nothing uses in its first call, and what is used in its second."""

    def __init__(self) -> None:
        super().__init__()
        self.made = Made()

    def forward(self, x: Tensor) -> Tensor:
        a, _ = self.made(x)
        return a + self.made(x * 3)[1]


def eager(model: nn.Module, *selectors: Any, given: Tensor = X, back: bool = False) -> list[Missing]:
    with tt.capture(model, *selectors) as seen:
        output = model(given)
        if back:
            output.sum().backward()
    return seen.coverage()


def in_form(form: Any, *selectors: Any, **options: Any) -> list[Missing]:
    with tt.capture(form, *selectors, **options) as seen:
        form(X)
    return seen.coverage()


def off_schedule() -> list[Missing]:
    model = Two()
    with tt.watch(model, None, tt.tap("used:output", every=5, offset=3)) as watch:
        model(X)
        watch.step()
    return watch.coverage()


def replaced() -> list[Missing]:
    model = Two()
    with tt.capture(model, "used:output") as seen:
        model.used = nn.Linear(4, 4)
        model(X)
    return seen.coverage()


def frozen_parameter() -> list[Missing]:
    model = Two()
    model.used.weight.requires_grad_(False)
    return eager(model, "used:param_grad.weight", back=True)


def folded() -> list[Missing]:
    tapped = tt.instrument(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), "0:output")
    frozen = torch.jit.freeze(torch.jit.trace(tapped, X))
    return in_form(frozen, "*:output", "*:input")


def scripted_without_tensors() -> list[Missing]:
    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.counts = Counts()

        def forward(self, x: Tensor) -> Tensor:
            return x * self.counts(2)

    return in_form(torch.jit.script(Holds()), "counts:output")


def exported(model: nn.Module) -> Any:
    return torch.export.export(model, (X,)).module()


def like(model: nn.Module) -> list[Missing]:
    # A trace has dropped what nothing uses.
    return in_form(torch.jit.trace(model, X), "*:output", like=model, inputs=(X,))


def not_put_in() -> list[Missing]:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    extra = tt.extra_outputs(model, "0:output", "1:output", args=(X,))
    return in_form(extra.wrap(extra.module), "0:output", "0:input")


def tap_for_another_phase() -> list[Missing]:
    model = Two()
    watch = tt.watch(model, None, ["used:output", tt.tap("used:output", keep=tt.Full(), phase="valid")])
    with watch, watch.step():
        model(X)
    return watch.coverage()


PROVOKED: dict[str, Any] = {
    "OFF_SCHEDULE": off_schedule,
    "IDLE_TAP": tap_for_another_phase,
    "NOT_CALLED": lambda: eager(Two(), "never:output"),
    "NO_FORWARD": lambda: eager(Two(), "list:output"),
    "REPLACED": replaced,
    "NO_BACKWARD": lambda: eager(Two(), "used:grad_output"),
    "NO_GRADIENT": lambda: eager(Two(), ":grad_input"),
    "NO_PARAMETER_GRADIENT": frozen_parameter,
    "NO_LEAF": lambda: eager(Pair(), "made:output.7"),
    "NO_TENSOR": lambda: eager(Two(), "counts:output"),
    "NO_ARGUMENT": lambda: eager(Two(), "counts:input"),
    "NO_ATTENTION": lambda: eager(Two(), "*:attention"),
    "NO_FUNCTION_CALL": lambda: eager(Two(), "used/softmax:output"),
    "NO_VALUE": lambda: eager(Two(), "*:value.nothing"),
    "FOLDED": folded,
    "NOT_IN_A_GRAPH": lambda: in_form(exported(Two()), "*:attention"),
    "NO_TENSOR_TYPE": scripted_without_tensors,
    "NO_OPERATION": lambda: in_form(torch.jit.trace(Pair(), X), "passed:output"),
    "UNPLACED": lambda: in_form(exported(Pair()), "made:output"),
    "UNMARKED": lambda: in_form(exported(exported(Two())), "*:output"),
    "FORGOTTEN": lambda: in_form(exported(Two()), "*:output"),
    "NO_EQUAL": lambda: like(Pair(shows_second=False)),
    "NOT_PUT_IN": not_put_in,
}
# Provoked where the compiler, the optimizer, several ranks and nested tensors are tested.
ELSEWHERE = {
    "SEVERAL_UPDATES",
    "IN_A_BRANCH",
    "SHARED_MEMORY",
    "NO_KIND",
    "NO_EQUAL_GRADIENT",
    "ACROSS_GRAPHS",
    "NOT_CALLED_OR_COMPILED",
    "NO_STEP_ENDED",
    "NO_OPTIMIZER_STATE",
    "NO_OPTIMIZER_STEP",
    "NESTED_ATTENTION",
    "NO_ELEMENT",
    "NO_LOCAL_GRADIENT",
}


@pytest.mark.parametrize("name", PROVOKED)
def test_a_reason_is_given_where_it_is_true(name: str) -> None:
    told = PROVOKED[name]()
    reason = getattr(reasons, name)
    assert any(reason.partition("{")[0] in missing.reason for missing in told), [str(each) for each in told]
    assert all(reasons.is_known(missing.reason) for missing in told)


def test_every_reason_of_the_list_is_provoked() -> None:
    listed = {name for name, value in vars(reasons).items() if name.isupper() and isinstance(value, str)}
    assert listed == PROVOKED.keys() | ELSEWHERE
    assert not reasons.is_known("because")


def test_a_leaf_that_nothing_uses_is_listed_by_its_own_name() -> None:
    assert [each.site for each in like(Pair(shows_second=False))] == ["made:output.1"]
