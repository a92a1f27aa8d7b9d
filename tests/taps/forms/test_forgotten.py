"""Modules, calls and tensors that a form has forgotten: no name moves to another value, and the coverage tells all.

What the coverage says is not believed: `benchmarks.explained` runs the eager model to see whether it is true.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.architectures import is_at_home, judge, other_names, reference
from benchmarks.explained import Truth, is_explained
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

import torchtap as tt
from torchtap.receive import reasons
from torchtap.session.coverage import Missing

Args = tuple[Any, ...]


class DropPath(nn.Module):
    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        return x if self.share == 0 or not self.training else x * torch.rand(())


class Listed(nn.Module):
    """Modules that hand on in a list, under two names, and behind an operation that is no module's."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.list = nn.ModuleList([nn.Identity(), nn.Linear(4, 4), DropPath(0.3)])
        self.a = self.b = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        for each in self.list:
            x = each(x * 2)
        return self.fc(self.b(self.a(x + 1) * 3))


class Shortcut(nn.Module):
    """What the first residual networks had in the place of a shortcut: a sequence of nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.path = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.ReLU(), DropPath(0.0))
        self.shortcut = nn.Sequential()

    def forward(self, x: Tensor) -> Tensor:
        return self.path(x) + self.shortcut(x * 2)


class Both(nn.Module):
    """Hands on two tensors."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return y, x


class HandsOnTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.both = nn.Linear(4, 4), Both()

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.both(self.fc(x), x.sin())
        return a - b


class Sometimes(nn.Module):
    def forward(self, x: Tensor, on: bool) -> Tensor:
        return x * 2 if on else x


class LaterCall(nn.Module):
    """The first call hands on, the second computes: the second must not have the name of the first."""

    def __init__(self, *on: bool) -> None:
        super().__init__()
        self.fc, self.s, self.on = nn.Linear(4, 4), Sometimes(), on

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        for on in self.on:
            x = self.s(x + 1, on).cos()
        return x


class Wasted(nn.Module):
    """Nothing uses what the first call returns."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(4, 4), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        self.fc(self.act(x))
        return self.fc(x + 1).sin() + self.act(x * 3)


class Acts(nn.Module):
    """One activation under two names, between them one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.one, self.other = nn.Linear(4, 4), nn.ReLU(), nn.ReLU()
        self.again = self.one

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.other(self.one(self.fc(x)) - 0.1) - 0.1)


class Answer(nn.Module):
    """Returns a structure that its code does not show to be one; nothing uses the second tensor."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made = (x * 2, x + 1)
        return made  # noqa: RET504


class UsesFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.answer, self.fc = Answer(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.answer(x)[0].tanh())


class Sized(nn.Module):
    """Asks for a size, which a loaded trace shows as code of no file, and returns first what it makes last."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        last = x * 2 + x.new_zeros(x.size(0), 4)
        return x + 1, last


class UsesSized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sized, self.fc = Sized(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        first, last = self.sized(x)
        return self.fc(last.sin() - first)


class Branch(nn.Module):
    """Modules with and without parameters in a branch for compilers."""

    def __init__(self) -> None:
        super().__init__()
        self.yes, self.act, self.no = nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return torch.cond(x.sum() > -100, self._yes, self._no, (x,))  # type: ignore[no-any-return]
        return self._yes(x) if x.sum() > -100 else self._no(x)

    def _yes(self, x: Tensor) -> Tensor:
        return self.act(self.yes(x)) * 2

    def _no(self, x: Tensor) -> Tensor:
        return self.no(x).relu()


class Nested(nn.Module):
    """Around a model that was exported before."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.export.export(Shortcut().eval(), (torch.randn(3, 4),)).module()
        self.fc, self.d = nn.Linear(4, 4), nn.Dropout().eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.d(self.inner(x) * 2))


def program(model: nn.Module, args: Args) -> ExportedProgram:
    return torch.export.export(model, args)


def reloaded(made: ExportedProgram) -> ExportedProgram:
    buffer = io.BytesIO()
    torch.export.save(made, buffer)
    buffer.seek(0)
    return torch.export.load(buffer)


def traced(model: nn.Module, args: Args) -> Any:
    return torch.jit.trace(model, args, check_trace=False)


def loaded_trace(model: nn.Module, args: Args) -> Any:
    buffer = io.BytesIO()
    torch.jit.save(traced(model, args), buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)


FORMS: dict[str, Callable[[nn.Module, Args], Any]] = {
    "export": lambda model, args: program(model, args).module(),
    "export, strict": lambda model, args: torch.export.export(model, args, strict=True).module(),
    "export, loaded": lambda model, args: reloaded(program(model, args)).module(),
    "export, decomposed": lambda model, args: program(model, args).run_decompositions().module(),
    "export of an export": lambda model, args: program(program(model, args).module(), args).module(),
    "export of an export, loaded": lambda model, args: reloaded(
        program(reloaded(program(model, args)).module(), args)
    ).module(),
    "trace": traced,
    "trace, loaded": loaded_trace,
    "FX": lambda model, args: fx.symbolic_trace(model),
    "FX of FX": lambda model, args: fx.symbolic_trace(fx.symbolic_trace(model)),
}


MODELS: dict[str, Callable[[], nn.Module]] = {
    "in a list and under two names": lambda: Listed().eval(),
    "an empty sequence": lambda: Shortcut().eval(),
    "two tensors handed on": lambda: HandsOnTwo().eval(),
    "the first call hands on": lambda: LaterCall(False, True, True),
    "the middle call hands on": lambda: LaterCall(True, False, True),
    "the last call hands on": lambda: LaterCall(True, True, False),
    "a call for nothing": lambda: Wasted(),
    "an activation under two names": lambda: Acts(),
    "a tensor for nothing": lambda: UsesFirst(),
    "sizes in a trace": UsesSized,
    "a branch": Branch,
    "around an exported model": Nested,
}
# What FX does not take: a branch that depends on a value.
PAIRS = [
    (form, name) for form in FORMS for name in MODELS if (form.partition(" ")[0], name) != ("FX", "a branch")
]


def made(name: str) -> tuple[nn.Module, Args]:
    torch.manual_seed(0)
    return MODELS[name](), (torch.randn(3, 4),)


def unexplained(
    model: nn.Module,
    args: Args,
    found: dict[str, Tensor],
    coverage: list[Missing],
    traced_before: bool = False,
) -> list[str]:
    expected = reference(model, args, {})
    aliases = other_names(model)
    count = judge(expected, found, aliases=aliases)
    assert count.wrong == 0, count.details
    truth = Truth(model, args, {}, expected)
    left = []
    for what, site in count.others():
        at_home = what == "renamed" and is_at_home(site, expected, found, aliases=aliases)
        if not is_explained(site, at_home, coverage, truth, traced_before):
            left.append(site)
    return left


@pytest.mark.parametrize(("form", "name"), PAIRS)
def test_no_name_moves_and_everything_that_is_gone_is_explained(form: str, name: str) -> None:
    model, args = made(name)
    subject = FORMS[form](model, args)
    with tt.capture(subject, "*:output") as seen:
        subject(*args)
    assert all(reasons.is_known(each.reason) for each in seen.coverage())
    before = " of " in form or name == "around an exported model"
    assert unexplained(model, args, dict(seen.items()), seen.coverage(), before) == []


@pytest.mark.parametrize(("form", "name"), PAIRS)
def test_with_the_model_at_hand_nothing_is_gone_but_what_nothing_uses(form: str, name: str) -> None:
    model, args = made(name)
    subject = FORMS[form](model, args)
    with tt.capture(subject, "*:output", like=model, inputs=args) as seen:
        subject(*args)
    told = seen.coverage()
    assert not any("does not know it" in each.reason for each in told)
    assert unexplained(model, args, dict(seen.items()), told) == []


def test_one_entry_stands_for_all_that_a_graph_has_forgotten() -> None:
    model, args = made("in a list and under two names")
    call = FORMS["export"](model, args)
    with tt.capture(call, "*:output", "*:input", "*:param") as seen:
        call(*args)
    (entry,) = [each for each in seen.coverage() if "does not know it" in each.reason]
    assert entry.site == "*:output"
    assert "modules that hand on what they are given" in entry.reason
    with pytest.raises(tt.SelectionError, match="may have forgotten it"):
        seen["list.0:output"]


def test_a_form_that_was_asked_for_modules_by_name_says_nothing_of_others() -> None:
    model, args = made("in a list and under two names")
    for form in ("export", "trace"):
        call = FORMS[form](model, args)
        with tt.capture(call, "fc:output", "*:param") as seen:
            call(*args)
        assert seen.coverage() == []


def test_a_program_and_a_file_of_one_list_the_modules_that_handed_on(tmp_path: Path) -> None:
    model, args = made("in a list and under two names")
    exported = program(model, args)
    torch.export.save(exported, tmp_path / "model.pt2")
    for given, call in (
        (exported, lambda: exported.module()(*args)),
        (loaded := tt.load(tmp_path / "model.pt2"), lambda: loaded(*args)),
    ):
        with tt.capture(given, "*:output") as seen:
            call()
        told = {each.site: each.reason for each in seen.coverage()}
        for path in ("list.0", "list.2", "a", "b"):
            assert told[f"{path}:output"] == reasons.NO_OPERATION
        assert told["list:output"] == reasons.UNMARKED
        assert "calls that hand on" in told["*:output"]
        assert unexplained(model, args, dict(seen.items()), seen.coverage()) == []


def test_sites_that_were_put_in_before_leave_nothing_to_forget() -> None:
    model, args = made("in a list and under two names")
    for form in ("export", "export, loaded", "trace", "trace, loaded", "FX"):
        call = FORMS[form](tt.instrument(model, "*:output"), args)
        with tt.capture(call, "*:output") as seen:
            call(*args)
        assert {"list.0:output", "list.2:output", "a:output", "a:output#1"} <= set(dict(seen.items()))
        assert not any("does not know it" in each.reason for each in seen.coverage())


@pytest.mark.parametrize("form", ["export", "export, strict", "export, loaded", "FX of FX"])
def test_operations_that_were_exported_before_are_not_said_to_be_gone(form: str) -> None:
    model, args = made("around an exported model")
    call = FORMS[form](model, args)
    with tt.capture(call, "*:output") as seen:
        call(*args)
    told = {each.site: each.reason for each in seen.coverage()}
    for path in ("inner", "inner.path", "inner.path.0"):
        assert told[f"{path}:output"] == reasons.UNMARKED


def test_an_explanation_that_is_not_true_is_not_counted_as_one() -> None:
    model, args = made("in a list and under two names")
    truth = Truth(model, args, {}, reference(model, args, {}))
    general = [Missing("*:output", reasons.FORGOTTEN.format(what="modules"))]
    assert is_explained("list.0:output", False, general, truth)
    assert not is_explained("list.0:output", False, [], truth)
    assert not is_explained("list.1:output", False, general, truth)  # it computes, and its value is used
    assert not is_explained("list.1:output", False, [Missing("list.1:output", reasons.NO_OPERATION)], truth)
    assert not is_explained("list.1:output", False, [Missing("list.1:output", "because")], truth)
