"""torch.compile: nothing is ignored, nothing breaks, nothing is compiled twice, the user's own code stays as it was."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models import GPT, make
from tests.taps.forms.structures import Repeated, UsesTensor, UsesTuple
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.utils import counters

import torchtap as tt
from torchtap.forms.op import channel, fused, op
from torchtap.receive import by_name


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def test_statistics_of_every_module_of_a_gpt_take_two_graphs_and_no_break_over_100_steps() -> None:
    torch.manual_seed(0)
    model = GPT(layers=1)
    reference = GPT(layers=1)
    reference.load_state_dict(model.state_dict())
    tokens = torch.randint(0, 11, (2, 6))
    compiled = torch.compile(model, fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watch = tt.watch(compiled, None, [tt.tap("*:output", keep=tt.Stats(), every=10)])
    for _ in range(100):
        with watch.step():
            optimizer.zero_grad()
            compiled(tokens).square().mean().backward()
            optimizer.step()
    assert not counters["graph_break"]
    assert graphs() <= 2
    assert [missing.site for missing in watch.coverage()] == ["blocks:output"]  # a list is never called
    # The statistics are those of the eager model, which has trained along.
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.01)
    eager = tt.watch(reference, None, [tt.tap("*:output", keep=tt.Stats(), every=10)])
    for _ in range(100):
        with eager.step():
            optimizer.zero_grad()
            reference(tokens).square().mean().backward()
            optimizer.step()
    for site in ("blocks.0.attn:output", "blocks.0:output", ":output"):
        for statistic in ("mean", "std", "min", "max", "l2"):
            assert watch.latest(site, statistic) == pytest.approx(eager.latest(site, statistic), rel=1e-3)
    watch.close()
    eager.close()


@pytest.mark.parametrize("moment", ["before torch.compile", "after torch.compile", "after the first call"])
def test_taps_are_never_ignored_whenever_they_come(moment: str) -> None:
    model, x = UsesTensor().eval(), torch.randn(3, 4)
    if moment == "before torch.compile":
        with tt.capture(model, "*:output") as seen:
            torch.compile(model, backend="aot_eager", fullgraph=True)(x)
        assert ":output" in seen
        return
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    if moment == "after the first call":
        compiled(x)
    with tt.capture(compiled, "*:output") as seen:
        compiled(x)
    assert torch.equal(seen["made.linear:output"], model.made.linear(x))


def test_the_compiled_code_of_the_user_is_not_touched() -> None:
    compiled = torch.compile(UsesTensor(), backend="aot_eager", fullgraph=True)
    x = torch.randn(3, 4)
    compiled(x)
    own = compiled.__dict__["forward"]
    watch = tt.watch(compiled, None, [tt.tap("*:output", every=2)])
    for step in range(4):
        with watch.step():
            assert (compiled.__dict__["forward"] is own) == (step % 2 == 1)
            compiled(x)
    watch.close()
    assert compiled.__dict__["forward"] is own
    assert graphs() == 2
    assert not any(module._forward_hooks for module in compiled.modules())


@pytest.mark.parametrize("in_place", [False, True])
def test_the_users_choice_of_guards_holds_for_the_tapped_compilation_too(in_place: bool) -> None:
    """Without guards on attributes a changed one changes nothing, with taps as without."""

    class Scaled(nn.Module):
        factor = 2.0

        def forward(self, x: Tensor) -> Tensor:
            return x * self.factor

    asked = 0

    def none_on_attributes(guards: Sequence[Any]) -> list[bool]:
        nonlocal asked
        asked += 1
        return [not guard.name.endswith(".factor") for guard in guards]

    model: Any = Scaled()
    options = {"guard_filter_fn": none_on_attributes}
    if in_place:
        model.compile(backend="aot_eager", options=options)
    compiled = model if in_place else torch.compile(model, backend="aot_eager", options=options)
    compiled(torch.ones(2))
    before = asked
    with tt.watch(compiled, None, "*:output") as watch:
        for factor in (2.0, 3.0):
            model.factor = factor
            with watch.step():
                compiled(torch.ones(2))
            assert watch.latest(":output", "mean") == 2.0
    assert asked > before
    assert graphs() == 2


def test_on_an_off_step_no_code_of_torchtap_runs_in_a_compiled_model() -> None:
    compiled = torch.compile(UsesTensor(), backend="aot_eager", fullgraph=True)
    x = torch.randn(3, 4)
    compiled(x)
    ran: dict[bool, set[str]] = {}
    with tt.watch(compiled, None, [tt.tap("*:output", every=2)]) as watch:
        for step in range(4):
            with watch.step():
                with Files() as files:
                    compiled(x)
                ran[step % 2 == 0] = {
                    name for name in files.seen if Path(tt.__file__).parent in Path(name).parents
                }
    assert ran[True], "a live step is noticed"
    assert ran[False] == set()


class Files:
    """Notes the files whose functions are called in a block."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def __enter__(self) -> Files:
        sys.setprofile(lambda frame, event, argument: self.seen.add(frame.f_code.co_filename))
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)


def test_tickets_of_gradients_are_forgotten_when_nobody_listens() -> None:
    x = torch.randn(3, 4)
    for _ in range(3):
        torch._dynamo.reset()
        compiled = torch.compile(Repeated(), backend="aot_eager", fullgraph=True)
        with tt.capture(compiled, "made:grad_output") as seen:
            compiled(x).square().sum().backward()
            assert channel.tickets
        assert len(seen) == 3
        assert channel.tickets == {}


def test_asking_again_for_the_same_sites_compiles_nothing() -> None:
    compiled = torch.compile(UsesTensor(), backend="aot_eager", fullgraph=True)
    x = torch.randn(3, 4)
    for _ in range(3):
        with tt.capture(compiled, "*:output"):
            compiled(x)
    assert graphs() == 1


def test_two_sessions_at_once_each_get_their_own_values() -> None:
    compiled = torch.compile(UsesTuple(), backend="aot_eager", fullgraph=True)
    x = torch.randn(3, 4)
    with tt.capture(compiled, "made:output") as outer:
        with tt.capture(compiled, "head:output") as inner:
            compiled(x)
        compiled(x)
    assert list(outer) == ["made:output.0", "made:output.1", "made:output.0#1", "made:output.1#1"]
    assert list(inner) == ["head:output"]


def test_a_compiled_part_of_an_eager_model_is_tapped_with_the_rest() -> None:
    model, x = UsesTensor(), torch.randn(3, 4, requires_grad=True)
    with tt.capture(model, "*:output", "*:grad_output") as eager:
        model(x).sum().backward()
    model.made.compile(backend="aot_eager")
    with tt.capture(model, "*:output", "*:grad_output") as seen:
        model(x).sum().backward()
    assert set(seen) == set(eager)
    model.made = torch.compile(model.made, backend="aot_eager")  # and the other way to compile a part
    with tt.capture(model, "*:output") as seen:
        model(x)
    assert "made.linear:output" in seen


def test_a_gradient_of_a_module_that_is_called_again_belongs_to_its_own_call() -> None:
    model = Repeated()
    x = torch.randn(3, 4)
    with tt.capture(model, "made:grad_output") as eager:
        model(x).square().sum().backward()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with tt.capture(compiled, "made:grad_output") as seen:
        compiled(x).square().sum().backward()
    assert set(seen) == {"made:grad_output", "made:grad_output#1", "made:grad_output#2"}
    for name in eager:
        assert torch.equal(seen[name], eager[name])


class Broken(nn.Module):
    """The compiler cannot take this in one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(x)
        torch._dynamo.graph_break()
        return self.shared(x)


def test_calls_are_counted_over_a_graph_break() -> None:
    model = Broken()
    x = torch.randn(2, 4)
    with tt.capture(model, "*:output", "*:grad_output") as eager:
        model(x).square().sum().backward()
    compiled = torch.compile(model, backend="aot_eager")
    with tt.capture(compiled, "*:output", "*:grad_output") as seen:
        compiled(x).square().sum().backward()
    assert set(seen) == set(eager)
    for name in eager:
        torch.testing.assert_close(seen[name], eager[name])


@pytest.mark.parametrize("ran_before", [True, False])
def test_a_model_with_graph_breaks_has_taps_in_its_live_steps_and_in_no_others(ran_before: bool) -> None:
    x = torch.randn(2, 4)
    compiled = torch.compile(Broken(), backend="aot_eager")
    if ran_before:
        compiled(x)
    for _ in range(2):
        with tt.capture(compiled, "*:output") as seen:
            compiled(x)
        assert list(seen) == ["shared:output", "shared:output#1", ":output"]
    compiled(x)
    known = graphs()
    with torch.autograd.profiler.profile() as profile:
        compiled(x)
    assert not [event.name for event in profile.function_events if "torchtap" in event.name]
    assert graphs() == known


def test_between_two_graphs_nothing_of_torchtap_is_compiled() -> None:
    case = make("lstm")  # the compiler leaves an LSTM to eager mode
    compiled = torch.compile(case.model, backend="eager")
    with tt.capture(compiled, "*:output") as seen:
        compiled(*case.args, **case.kwargs)
    assert seen
    assert not _debug_get_cache_entry_list(op._on_value.__code__)
    assert not _debug_get_cache_entry_list(by_name.take.__code__)


def test_dynamic_shapes_do_not_recompile_for_each_shape() -> None:
    compiled = torch.compile(UsesTensor(), backend="aot_eager", dynamic=True, fullgraph=True)
    with tt.capture(compiled, "*:output") as seen:
        for rows in (3, 5, 7, 9):
            compiled(torch.randn(rows, 4))
    assert seen["head:output#3"].shape == (9, 2)
    assert graphs() == 1


def test_taps_that_come_after_a_compiled_function_are_told_why_they_get_nothing() -> None:
    model, x = UsesTensor(), torch.randn(3, 4)
    step = torch.compile(lambda value: model(value).sum(), backend="eager")
    step(x)
    with tt.capture(model, "head:output") as seen:
        step(x)
    assert "torch.compile made before these taps" in seen.coverage()[0].reason
    torch.compiler.reset()
    with tt.capture(model, "head:output") as seen:
        step(x)
    assert list(seen) == ["head:output"]


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return tt.emit("logits", self.linear(x)).softmax(-1)


def test_emitted_values_and_attention_maps_leave_a_compiled_graph_without_a_break() -> None:
    model, x = nn.Sequential(Router(), Router()), torch.randn(2, 4)
    with tt.capture(model, "*:value") as eager:
        model(x)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled(x)
    with tt.capture(compiled, "*:value") as seen:
        compiled(x)
    assert list(seen) == ["0:value.logits", "1:value.logits"]
    assert torch.equal(seen["1:value.logits"], eager["1:value.logits"])

    case = make("gpt")
    with tt.capture(case.model, "*:attention") as eager:
        case.model(*case.args)
    compiled = torch.compile(case.model, backend="aot_eager", fullgraph=True)
    with tt.capture(compiled, "*:attention") as seen:
        compiled(*case.args)
    assert set(seen) == set(eager)
    for name in eager:
        torch.testing.assert_close(seen[name], eager[name])
    assert not counters["graph_break"]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_statistics_computed_inside_the_graph_are_those_of_the_values(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "everywhere", True)
    model, x = Repeated(), torch.randn(3, 4)
    kinds = ("made:output", "made:grad_output", "head:input")
    with tt.capture(model, *kinds, keep=tt.Stats()) as eager:
        model(x).square().sum().backward()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    compiled(x)
    with tt.capture(compiled, *kinds, keep=tt.Stats()) as seen:
        compiled(x).square().sum().backward()
    assert set(seen) == set(eager)
    for site in eager:
        assert seen[site] == pytest.approx(eager[site], rel=1e-5, abs=1e-7, nan_ok=True), site
    assert graphs() == 2
    assert not counters["graph_break"]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_forward_that_was_compiled_and_put_back_is_tapped_after_its_first_call(backend: str) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)))
    x = torch.randn(3, 4)
    with tt.capture(model) as eager:
        model(x)
    model.forward = torch.compile(model.forward, backend=backend)  # type: ignore[method-assign]
    mine = model.__dict__["forward"]
    model(x)
    with tt.capture(model) as seen:
        model(x)
    assert set(seen) == set(eager)
    assert not seen.coverage()
    for site in eager:
        torch.testing.assert_close(seen[site], eager[site])
    assert model.__dict__["forward"] is mine


class _InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.l(x).mul_(2)


class _Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.l(x)
        return y.t(), y


def _gradients(model: nn.Module, called: nn.Module, x: Tensor, used: tuple[int, ...]) -> dict[str, Tensor]:
    with tt.capture(called, "*:grad_output", "*:grad_input") as seen:
        output = called(x.clone().requires_grad_())
        results = output if isinstance(output, tuple) else (output,)
        torch.stack([results[n].square().sum() for n in used]).sum().backward()
    return dict(seen.items())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    ("make", "shape", "used"),
    [(_InPlace, (2, 3, 4), (0,)), (_InPlace, (3, 4), (0,)), (_Views, (3, 4), (0, 1)), (_Views, (3, 4), (0,))],
)
def test_a_compiled_model_has_the_gradients_that_eager_has(
    backend: str, make: type[nn.Module], shape: tuple[int, ...], used: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    model, x = make(), torch.randn(*shape)
    expected = _gradients(model, model, x, used)
    found = _gradients(model, torch.compile(model, backend=backend), x, used)
    assert expected.keys() <= found.keys()
    for site, gradient in expected.items():
        torch.testing.assert_close(found[site], gradient, msg=site)


def test_a_view_that_nothing_used_has_no_gradient_though_its_base_has() -> None:
    model, x = _Views(), torch.randn(3, 4)
    assert set(_gradients(model, model, x, (1,))) == {
        ":grad_input",
        "l:grad_input",
        "l:grad_output",
        ":grad_output.1",
    }
