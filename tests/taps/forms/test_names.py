"""A name is a proof: no form has the name of one value on another, and what has no name is told."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.torch_limits import (
    EXPORT_OF_KEPT_TENSORS,
    STRICT_EXPORT_OF_INSTRUMENTED,
    TRACE_OF_CHECKPOINTS,
    Limit,
)
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import torchtap as tt
from torchtap.forms.match.site_map import SiteMap
from torchtap.plan.names import read_name
from torchtap.receive import reasons

Form = Callable[[nn.Module, tuple[Any, ...]], Any]


def loaded(model: nn.Module, args: tuple[Any, ...]) -> Any:
    buffer = io.BytesIO()
    torch.export.save(torch.export.export(model, args), buffer)
    buffer.seek(0)
    return torch.export.load(buffer).module()


FORMS: dict[str, Form] = {
    "export": lambda model, args: torch.export.export(model, args).module(),
    "export, strict": lambda model, args: torch.export.export(model, args, strict=True).module(),
    "export, loaded": loaded,
    "trace": lambda model, args: torch.jit.trace(model, args, check_trace=False),
    "FX": lambda model, args: fx.symbolic_trace(model),
}


def hooked(model: nn.Module, args: tuple[Any, ...]) -> dict[str, Tensor]:
    """Every output, by hooks that know nothing of torchtap."""
    found: dict[str, Tensor] = {}
    calls: dict[str, int] = {}

    def hook(path: str) -> Callable[..., None]:
        def keep(_module: nn.Module, _args: Any, output: Any) -> None:
            number = calls[path] = calls.get(path, -1) + 1
            for leaf, tensor in parts(output):
                name = f"{path}:output" + (f".{leaf}" if leaf else "") + (f"#{number}" if number else "")
                found[name] = tensor.detach().clone()

        return keep

    inner = model.module if isinstance(model, nn.DataParallel) else model
    handles = [module.register_forward_hook(hook(path)) for path, module in inner.named_modules()]
    model(*args)
    for handle in handles:
        handle.remove()
    return found


def parts(tree: Any, prefix: str = "") -> list[tuple[str, Tensor]]:
    if isinstance(tree, Tensor):
        return [(prefix, tree)]
    items = (
        tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, (list, tuple)) else ()
    )
    return [each for key, value in items for each in parts(value, f"{prefix}.{key}" if prefix else str(key))]


def seen_in(form: Any, args: tuple[Any, ...], **options: Any) -> tuple[dict[str, Tensor], set[str], Any]:
    with tt.capture(form, "*:output", **options) as seen:
        form(*args)
    return dict(seen.items()), {missing.site for missing in seen.coverage()}, seen


def assert_no_name_lies(expected: dict[str, Tensor], seen: Any) -> None:
    for site, value in expected.items():
        if site in seen:  # also by the spellings that a lookup takes
            assert torch.equal(seen[site], value), site


class Reversed(nn.Module):
    """Returns first what it makes last."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        b = x * 2
        a = x + 1
        return a, b


class UsesReversed(nn.Module):
    def __init__(self, last_only: bool = False) -> None:
        super().__init__()
        self.p, self.last_only = Reversed(), last_only

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.p(x)
        return b.sin() if self.last_only else b.sin() - a


class Keeps(nn.Module):
    """Leaves a value lying about that something outside uses."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = x * 3
        return x + 1


class UsesKept(nn.Module):
    def __init__(self, returned: bool) -> None:
        super().__init__()
        self.k, self.returned = Keeps(), returned

    def forward(self, x: Tensor) -> Tensor:
        y = self.k(x)
        kept = self.k.kept
        del self.k.kept
        return y - kept if self.returned else kept.cos()


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4) + 0.5)

    def forward(self, h: Tensor) -> Tensor:
        h = h.to(torch.float32)
        return self.weight * h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n, self.fc = Norm(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc(self.n(x))


class Changes(nn.Module):
    """Changes its input in place and returns something else, or nothing of its own."""

    def forward(self, x: Tensor) -> Tensor:
        x.add_(1)
        return x


class UsesChanges(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.c = nn.Linear(4, 4), Changes()

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        self.c(y)
        return y.sin()


class Shared(nn.Module):
    def __init__(self, swapped: bool = False) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = self.a
        self.swapped = swapped

    def forward(self, x: Tensor) -> Tensor:
        first, second = (self.b, self.a) if self.swapped else (self.a, self.b)
        return second(first(x).tanh())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight, self.b.bias = self.a.weight, self.a.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.a(self.b(x).tanh())


class DropPath(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class PassesOn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.i, self.d, self.p = nn.Linear(4, 4), nn.Identity(), nn.Dropout(), DropPath()
        self.s = nn.Sequential(nn.Identity(), nn.Linear(4, 4), nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        return self.s(self.p(self.d(self.i(self.fc(x))) + 1)) - x


class Blocks(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.b, self.how = nn.Linear(4, 4), how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "no_grad":
            with torch.no_grad():
                y = self.a(x) + 1
        elif self.how == "autocast":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = self.a(x)
        elif self.how == "both":
            with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
                y = self.a(x)
        else:
            y = checkpoint(self.a, x, use_reentrant=self.how == "reentrant")
        return self.b(y.float())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "the last is returned first": UsesReversed,
    "only the second leaf is used": lambda: UsesReversed(last_only=True),
    "a value kept on self": lambda: UsesKept(returned=True),
    "only a value kept on self": lambda: UsesKept(returned=False),
    "a cast without effect": Normed,
    "a change in place": UsesChanges,
    "a module under two names": Shared,
    "a module under two names, the second first": lambda: Shared(swapped=True),
    "two modules with the same parameters": Tied,
    "modules that pass on": PassesOn,
    "no_grad": lambda: Blocks("no_grad"),
    "autocast": lambda: Blocks("autocast"),
    "no_grad and autocast": lambda: Blocks("both"),
    "a checkpoint": lambda: Blocks("checkpoint"),
    "a reentrant checkpoint": lambda: Blocks("reentrant"),
    "a recurrent layer": lambda: nn.GRU(4, 4, num_layers=2),
    "attention": lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
    "data parallel": lambda: nn.DataParallel(UsesReversed()),
}


def made(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return MODELS[name]().eval(), (torch.randn(3, 2, 4),)


# What torch itself does not take, or takes as something else.
NOT_MADE = {
    ("FX", "autocast"), ("FX", "no_grad and autocast"), ("FX", "data parallel"), ("FX", "a recurrent layer"),
    ("FX", "attention"), ("trace", "a reentrant checkpoint"), ("export, strict", "data parallel"),
    ("export", "a value kept on self"), ("export", "only a value kept on self"),
    ("export, loaded", "a value kept on self"), ("export, loaded", "only a value kept on self"),
    ("export, strict", "autocast"), ("export, strict", "no_grad and autocast"), ("export, strict", "a checkpoint"),
    ("export, strict", "a reentrant checkpoint"), ("export, strict", "a value kept on self"),
    ("export, strict", "only a value kept on self"),
}  # fmt: skip
# What older torches do not take.
LIMITS: dict[tuple[str, str], Limit] = {
    ("export", "a recurrent layer"): EXPORT_OF_KEPT_TENSORS,
    ("export, loaded", "a recurrent layer"): EXPORT_OF_KEPT_TENSORS,
    ("trace", "a checkpoint"): TRACE_OF_CHECKPOINTS,
}
PAIRS = [
    pytest.param(
        form, name, marks=LIMITS[form, name].skip if (form, name) in LIMITS else (), id=f"{form}-{name}"
    )
    for form in FORMS
    for name in MODELS
    if (form, name) not in NOT_MADE
]


@pytest.mark.parametrize(("form", "name"), PAIRS)
def test_no_form_has_the_name_of_one_value_on_another(form: str, name: str) -> None:
    model, args = made(name)
    expected = hooked(model, args)
    subject = FORMS[form](model, args)
    values, _, seen = seen_in(subject, args)
    assert_no_name_lies(expected, seen)
    paths = {read_name(site).path for site in expected} | {
        path for path, _ in model.named_modules(remove_duplicate=False)
    }
    assert {read_name(site).path for site in values} <= paths, "a site of a module that does not exist"
    assert values


@pytest.mark.parametrize(("form", "name"), PAIRS)
def test_with_the_model_at_hand_every_value_has_its_eager_name(form: str, name: str) -> None:
    model, args = made(name)
    expected = hooked(model, args)
    subject = FORMS[form](model, args)
    values, told, seen = seen_in(subject, args, like=model, inputs=args)
    assert_no_name_lies(expected, seen)
    for site in expected:
        assert site in values or site in told, site
    unused = {site for site in expected if site not in values}
    assert unused <= {"p:output.0", "k:output", "c:output"}, "only what nothing uses may be gone"


def test_leaves_without_a_position_are_numbered_and_the_coverage_says_so() -> None:
    model, args = made("the last is returned first")
    for form in ("export", "trace", "FX"):
        values, _, seen = seen_in(FORMS[form](model, args), args)
        assert {"p:output.@0", "p:output.@1"} <= set(values)
        (missing,) = [each for each in seen.coverage() if each.site == "p:output"]
        assert "p:output.@0, p:output.@1" in missing.reason
        assert "like=" in missing.reason


def test_a_compared_form_that_is_faithful_is_the_same() -> None:
    for name in ("the last is returned first", "a module under two names", "no_grad", "modules that pass on"):
        model, args = made(name)
        for form in ("export", "trace"):
            result = tt.compare(model, FORMS[form](model, args), inputs=args)
            assert result.first is None, (name, form, result.verdict)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.yes, self.no = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        return torch.cond(y.sum() > 0, lambda t: self.yes(t).relu(), lambda t: self.no(t), (y,))  # type: ignore[no-any-return]


def branched(model: Branching) -> Iterator[tuple[Tensor, str, str, Tensor]]:
    """An input, the branch that it takes, the other one, and what comes out of the layer in the one that it takes."""
    for seed in range(4):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
        taken, other = ("yes", "no") if model.fc(x).sum() > 0 else ("no", "yes")
        yield x, taken, other, getattr(model, taken)(model.fc(x))


def test_a_branch_is_walked_into() -> None:
    """Without ``strict``, torch leaves no mark of the modules inside a branch."""
    torch.manual_seed(0)
    model = Branching()
    call = torch.export.export(model, (torch.randn(3, 4),), strict=True).module()
    for x, taken, other, expected in branched(model):
        values, told, _ = seen_in(call, (x,))
        assert torch.equal(values[f"{taken}:output"], expected)
        assert f"{other}:output" in told
        assert not any("graph" in site for site in values)


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=STRICT_EXPORT_OF_INSTRUMENTED.skip)])
def test_an_instrumented_branch_is_walked_into(strict: bool) -> None:
    torch.manual_seed(0)
    model = Branching()
    program = torch.export.export(tt.instrument(model, "*:output"), (torch.randn(3, 4),), strict=strict)
    tapped = program.module()
    for x, taken, other, expected in branched(model):
        values, _, _ = seen_in(tapped, (x,))
        assert torch.equal(values[f"{taken}:output"], expected)
        assert f"{other}:output" not in values


def test_gradients_have_the_places_of_their_values() -> None:
    model, args = made("the last is returned first")
    x = args[0].clone().requires_grad_()
    with tt.capture(model, "*:grad_output", "*:grad_input") as eager:
        model(x).square().sum().backward()
    for form in ("export", "trace", "FX"):
        subject = FORMS[form](model, args)
        given = args[0].clone().requires_grad_()
        with tt.capture(subject, "*:grad_output", "*:grad_input", like=model, inputs=args) as seen:
            subject(given).square().sum().backward()
        assert set(seen) == set(eager)
        for site in eager:
            assert torch.equal(seen[site], eager[site]), (form, site)


def test_a_map_is_saved_beside_the_artefact_and_serves_where_only_the_file_is(tmp_path: Path) -> None:
    model, args = made("the last is returned first")
    expected = hooked(model, args)
    for form in ("export", "trace"):
        subject = FORMS[form](model, args)
        if form == "trace":
            torch.jit.save(subject, str(tmp_path / "form.pt"))
            again = torch.jit.load(str(tmp_path / "form.pt"))
        else:
            torch.export.save(torch.export.export(model, args), tmp_path / "form.pt2")
            again = tt.load(tmp_path / "form.pt2")
        tt.match(subject, model, args).save(tmp_path / "form.sites.json")
        other = (torch.randn(3, 2, 4),)
        values, _, _ = seen_in(again, other, like=tmp_path / "form.sites.json")
        wanted = hooked(model, other)
        assert set(values) == set(expected)
        for site in wanted:
            assert torch.equal(values[site], wanted[site])


def test_a_map_of_another_artefact_is_refused(tmp_path: Path) -> None:
    model, args = made("the last is returned first")
    site_map = tt.match(FORMS["export"](model, args), model, args)
    other, _ = made("a cast without effect")
    with pytest.raises(tt.FormError, match="another artefact"):
        tt.capture(FORMS["export"](other, args), like=site_map)
    (tmp_path / "no.json").write_text('{"format": "something"}')
    with pytest.raises(tt.FormError, match="no map of sites"):
        SiteMap.load(tmp_path / "no.json")
    with pytest.raises(tt.PlanError, match="inputs="):
        tt.capture(FORMS["export"](model, args), like=model)


def test_equal_values_are_said_to_be_ambiguous() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x * 0, x * 0

    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.t = Twice()

        def forward(self, x: Tensor) -> Tensor:
            a, b = self.t(x)
            return a + b  # the gradients of both are equal too

    model, x = Uses(), torch.randn(3)
    site_map = tt.match(torch.export.export(model, (x,)).module(), model, (x,))
    assert "t:output.0" in site_map.ambiguous
    assert len(site_map.ambiguous["t:output.0"]) == 2
    assert "equal values" in str(site_map)


def test_a_form_with_other_weights_still_has_its_names() -> None:
    """No value is equal: places in the graph tell."""
    model, args = made("a cast without effect")
    with torch.no_grad():
        call = torch.export.export(model, args).module()
        model.n.weight.mul_(1.5)  # type: ignore[union-attr, operator]
        call.n.weight = nn.Parameter(model.n.weight / 1.5)  # type: ignore[union-attr, operator]
    values, _, _ = seen_in(call, args, like=model, inputs=args)
    assert {"n:output", "fc:output"} <= set(values)
    result = tt.compare(model, call, inputs=args)
    assert result.first is not None
    assert result.first.site.startswith("n:output")


def test_comparing_with_an_instrumented_trace_counts_the_calls_of_a_module_once() -> None:
    """Its own sites and those of the map are the same values: a call must not be counted twice."""
    torch.manual_seed(0)
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.ReLU(), shared).eval()
    x = torch.randn(3, 4)
    trace = torch.jit.trace(tt.instrument(model, "*:output"), (x,))
    assert tt.compare(model, trace, inputs=(x,)).outcome == "same"


def test_a_scripted_model_that_differs_is_told_by_its_site() -> None:
    torch.manual_seed(0)
    model, other = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    found = tt.compare(model, torch.jit.script(other), inputs=(torch.randn(3, 4),))
    assert found.outcome == "differs"
    assert found.first is not None
    assert found.first.module == "0"


def test_the_modules_inside_one_that_an_fx_graph_calls_are_known() -> None:
    """FX keeps a whole attention, encoder layer or parametrized layer as one call; what is in it runs as ever."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model, x = nn.Sequential(nn.Linear(8, 8), layer).eval(), torch.randn(2, 3, 8)
    with tt.capture(model, "*:output") as eager:
        model(x)
    graph = fx.symbolic_trace(model)
    with tt.capture(graph, "*:output") as seen:
        graph(x)
    assert set(dict(seen.items())) == set(dict(eager.items())) >= {"1.linear1:output", "1.norm2:output"}
    for site, value in eager.items():
        assert torch.equal(seen[site], value), site


def test_an_exported_program_lists_the_modules_that_left_nothing_in_its_graph() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.Dropout(0.5), nn.Linear(4, 2)).eval()
    x = torch.randn(3, 4)
    program = torch.export.export(model, (x,))
    with tt.capture(program, "*:output") as seen:
        program.module()(x)
    assert set(dict(seen.items())) >= {"0:output", "3:output", ":output"}
    missing = {each.site: each.reason for each in seen.coverage()}
    assert missing["1:output"] == reasons.NO_OPERATION
