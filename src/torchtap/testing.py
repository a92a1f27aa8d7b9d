"""Contracts for extensions. Subclass one in your tests; the built-in extensions pass the same tests.

    class TestMyReduction(ReductionContract):
        def reduction(self):
            return MyReduction()

        def reference(self, values):
            return {"total": sum(float(value.double().sum()) for value in values)}

pytest then runs every test of the contract. There is one for each extension point: `ReductionContract`, `SinkContract`,
`RuleContract`, `ScheduleContract`, `FormContract`, `VisitorContract` and `StepListenerContract`. Nothing here imports
pytest.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchtap import Every, MemorySink, Moment, Schedule, capture, tap, watch
from torchtap.diagnosis.chart import Block, Chart
from torchtap.diagnosis.diagnose import RuleRunner
from torchtap.diagnosis.finding import Finding
from torchtap.diagnosis.rule_type import Rule
from torchtap.receive import training
from torchtap.reduce import AnyReduction, Result, reduction_from_spec
from torchtap.spi import Call, StepListener, Stop, Visiting, Visitor, leaves, places
from torchtap.store.record import Consumer, ScalarBlock, StepRecord, TensorItem

__all__ = [
    "FormContract",
    "ReductionContract",
    "RuleContract",
    "ScheduleContract",
    "SinkContract",
    "StepListenerContract",
    "VisitorContract",
]


class ReductionContract:
    """Test a reduction. Fill in ``reduction`` and ``reference``, override what does not fit."""

    rtol: float = 1e-9
    """How far, relatively, numbers and float tensors may be from the reference."""

    atol: float = 1e-12

    def reduction(self) -> AnyReduction:
        """The reduction under test."""
        raise NotImplementedError

    def reference(self, values: Sequence[Tensor]) -> Result:
        """What the result has to be when these values came in this order: plain code, no folding."""
        raise NotImplementedError

    def streams(self) -> Iterable[list[Tensor]]:
        """Streams of values to try: of several dtypes and layouts, some with values that are not finite."""
        make = torch.Generator().manual_seed(0)
        plain = torch.randn(64, 6, generator=make, dtype=torch.float64)
        yield [plain.float()]
        yield list(torch.split(plain.float(), [1, 30, 2, 31]))
        yield [plain.to(torch.bfloat16)[:32], plain.to(torch.bfloat16)[32:]]
        yield [plain[:, ::2].t().contiguous().t(), plain[::3, ::2]]
        yield [(plain * 10).to(torch.int64), (plain * 20).to(torch.int64)]
        strange = plain.clone()
        strange[3, 2], strange[5, 0], strange[40, 1] = torch.nan, torch.inf, -torch.inf
        yield list(torch.split(strange, 20))

    def fold(self, values: Iterable[Tensor]) -> object:
        """The state after all values."""
        reduction, state = self.reduction(), None
        for value in values:
            state = reduction.update(state, value)
        return state

    def check(self, found: Result, wanted: Result) -> None:
        """Assert that two results agree: names, shapes, and numbers within the tolerances."""
        assert set(found) == set(wanted), f"the result has {sorted(found)}, the reference {sorted(wanted)}"
        for name, expected in wanted.items():
            actual = found[name]
            # A float is wide already; torch would make float32 of it.
            one, other = (
                torch.as_tensor(side, dtype=torch.float64 if isinstance(side, float) else None).to("cpu")
                for side in (actual, expected)
            )
            if one.is_floating_point() or other.is_floating_point():
                one, other = one.double(), other.double()
            torch.testing.assert_close(
                one,
                other,
                rtol=self.rtol,
                atol=self.atol,
                equal_nan=True,
                msg=lambda text, name=name: f"{name}: {text}",  # type: ignore[misc]
            )

    def test_the_result_equals_the_reference(self) -> None:
        for values in self.streams():
            self.check(self.reduction().result(self.fold(values)), self.reference(values))

    def test_every_split_merges_to_the_same_result(self) -> None:
        for values in self.streams():
            wanted = self.reference(values)
            for cut in range(1, len(values)):
                left, right = self.fold(values[:cut]), self.fold(values[cut:])
                reduction = self.reduction()
                self.check(reduction.result(reduction.merge(left, right)), wanted)

    def test_a_value_that_comes_in_pieces_is_one_value(self) -> None:
        for values in self.streams():
            reduction, state = self.reduction(), None
            for value in values:
                state = reduction.update_pieces(state, torch.split(value, 2, 1))
            assert state is not None, "update returned None"
            self.check(reduction.result(state), self.reference(values))

    def test_the_values_are_left_as_they_were(self) -> None:
        for values in self.streams():
            before = [value.clone() for value in values]
            self.fold(values)
            for value, was in zip(values, before, strict=True):
                assert torch.equal(torch.nan_to_num(value), torch.nan_to_num(was)), "update changed its value"

    def test_what_happens_to_a_value_later_does_not_reach_the_state(self) -> None:
        for values in self.streams():
            wanted = self.reference(values)
            reduction, state = self.reduction(), None
            for value in values:
                passing = value.clone()
                state = reduction.update(state, passing)
                passing.zero_()
            assert state is not None, "update returned None"
            self.check(reduction.result(state), wanted)

    def test_reading_the_result_does_not_end_the_fold(self) -> None:
        for values in self.streams():
            reduction, state = self.reduction(), None
            for value in values:
                state = reduction.update(state, value)
                reduction.result(state)
            assert state is not None, "update returned None"
            self.check(reduction.result(state), self.reference(values))

    def test_a_value_that_requires_grad_is_reduced_without_it(self) -> None:
        value = torch.linspace(-2, 3, 24).reshape(6, 4).requires_grad_()
        reduction = self.reduction()
        result = reduction.result(reduction.update(None, value * 1))
        for name, number in result.items():
            assert not (isinstance(number, Tensor) and number.requires_grad), f"{name} drags the graph along"
        self.check(result, self.reference([value.detach()]))

    def test_the_result_is_named_numbers_and_tensors_on_the_host(self) -> None:
        result = self.reduction().result(self.fold([torch.linspace(-2, 3, 24).reshape(6, 4)]))
        assert result, "the result is empty"
        for name, number in result.items():
            assert isinstance(name, str), f"the result has a name that is no text: {name!r}"
            assert isinstance(number, float | Tensor), f"{name} is a {type(number).__name__}"
            assert not isinstance(number, Tensor) or number.device.type == "cpu", f"{name} is not on the host"

    def test_the_spec_is_json_and_says_which_reduction_it_is(self) -> None:
        reduction = self.reduction()
        spec = reduction.spec()
        assert json.loads(json.dumps(spec)) == spec, "the spec does not survive JSON"
        assert spec["reduction"] == reduction.name, (
            f"the spec names {spec['reduction']!r}, not {reduction.name!r}"
        )

    def test_the_spec_brings_the_reduction_back(self) -> None:
        reduction = self.reduction()
        found = reduction_from_spec(reduction.spec())
        assert found == reduction, f"the spec gives {found!r}, not {reduction!r}: is it a frozen dataclass?"

    def test_equal_reductions_are_equal_and_hash_equal(self) -> None:
        one, other = self.reduction(), copy.copy(self.reduction())
        assert one == other, f"{one!r} is not equal to its copy: make it a frozen dataclass"
        assert hash(one) == hash(other), f"{one!r} and its copy have different hashes"


class SinkContract:
    """Test a sink. Fill in ``sink``; fill in ``kept`` if the sink can say what it has."""

    def sink(self, folder: Path) -> Consumer:
        """A fresh sink that writes, if it writes, into ``folder``."""
        raise NotImplementedError

    def kept(self, folder: Path, sink: Consumer) -> set[tuple[int, str]] | None:
        """The steps and sites that a closed sink has numbers of; ``None`` when that cannot be told."""
        return None

    sites = ("blocks.0:output", "blocks.0.norm:param.weight", "blocks.0.attn:attention")

    def record(self, step: int, *, absent: bool = False) -> StepRecord:
        """A step with numbers, a histogram, attention maps and tensors of awkward types and shapes."""
        values = np.arange(6.0).reshape(3, 2) + step
        values[1, 1] = np.nan
        present = np.array([True, not absent, True])
        block = ScalarBlock(self.sites, ("mean", "std"), values, present if absent else None)
        logged = ScalarBlock((":value.loss",), ("value",), np.array([[np.inf if step == 1 else 0.5]]))
        tensors = (
            TensorItem("blocks.0:output", "counts", "histogram", torch.tensor([0, 3, 1, 0])),
            TensorItem("blocks.0:output", "edges", "histogram", torch.tensor([-1.0, 0.0, 0.5, 1.0, 2.0])),
            TensorItem("blocks.0.attn:attention", "value", "full", torch.rand(2, 3, 8, 8)),
            TensorItem("blocks.0:output.1#2", "value", "full", torch.ones(2, dtype=torch.bfloat16)),
            TensorItem("blocks.0:output.2", "value", "full", torch.empty(0)),
            TensorItem("blocks.0:output.3", "value", "full", torch.tensor(True)),
        )
        return StepRecord(step, None, step, "train", 1000.0 + step, (block, logged), tensors)

    def fill(self, sink: Consumer) -> set[tuple[int, str]]:
        """Write three steps; returns the steps and sites that have numbers."""
        for step in range(3):
            sink.write(self.record(step, absent=step == 2))
        wanted = {(step, site) for step in range(3) for site in (*self.sites, ":value.loss")}
        return wanted - {(2, self.sites[1])}

    def test_a_sink_takes_records_and_closes(self, tmp_path: Path) -> None:
        sink = self.sink(tmp_path)
        self.fill(sink)
        sink.close()

    def test_a_sink_keeps_every_number_of_every_site_that_arrived(self, tmp_path: Path) -> None:
        sink = self.sink(tmp_path)
        wanted = self.fill(sink)
        sink.close()
        kept = self.kept(tmp_path, sink)
        assert kept is None or kept == wanted, f"lost: {wanted - kept}; never written: {kept - wanted}"

    def test_a_sink_leaves_the_record_as_it_was(self, tmp_path: Path) -> None:
        sink, record = self.sink(tmp_path), self.record(0)
        numbers = [block.values.copy() for block in record.scalars]
        tensors = [item.value.clone() for item in record.tensors]
        sink.write(record)
        sink.close()
        for block, was in zip(record.scalars, numbers, strict=True):
            np.testing.assert_array_equal(block.values, was)
        for item, before in zip(record.tensors, tensors, strict=True):
            assert torch.equal(item.value, before), f"the sink changed {item.site}"

    def test_a_sink_takes_a_record_with_nothing_in_it(self, tmp_path: Path) -> None:
        sink = self.sink(tmp_path)
        sink.write(StepRecord(0, None, None, "eval", 0.0, (), ()))
        sink.close()

    def test_a_sink_that_saw_nothing_closes(self, tmp_path: Path) -> None:
        self.sink(tmp_path).close()

    def test_a_grid_that_changes_between_steps_is_taken(self, tmp_path: Path) -> None:
        sink = self.sink(tmp_path)
        for step, sites in enumerate((("a:output",), ("a:output", "b:output"), ("b:output",))):
            block = ScalarBlock(sites, ("mean",), np.full((len(sites), 1), float(step)))
            sink.write(StepRecord(step, None, None, "train", 0.0, (block,), ()))
        sink.close()
        kept = self.kept(tmp_path, sink)
        wanted = {(0, "a:output"), (1, "a:output"), (1, "b:output"), (2, "b:output")}
        assert kept is None or kept == wanted, f"lost: {wanted - kept}; never written: {kept - wanted}"


class RuleContract:
    """Test a rule. Fill in ``rule``, ``healthy`` and ``sick``."""

    steps = 60

    def rule(self) -> Rule:
        """The rule under test."""
        raise NotImplementedError

    def healthy(self, chart: Chart, step: int) -> list[Block]:
        """What is recorded at a step of a healthy training; facts are noted in the chart."""
        raise NotImplementedError

    def sick(self, chart: Chart, step: int) -> list[Block]:
        """The same of a training with the fault."""
        raise NotImplementedError

    def chart(self) -> Chart:
        """An empty chart; override it to say what is known of the sites, or how the training is set up."""
        return Chart(dict)

    def found(self, sick: bool, portion: int = 1) -> list[Finding]:
        """What the rule finds if it is asked after every ``portion`` records."""
        chart = self.chart()
        runner = RuleRunner(chart, [self.rule()])
        for step in range(self.steps):
            chart.add(step, (self.sick if sick else self.healthy)(chart, step))
            if step % portion == portion - 1 or step == self.steps - 1:
                runner.look()
        found = runner.findings()
        assert not [each for each in found.unjudged if "raised" in each.reason], found.unjudged
        return list(found)

    def test_a_healthy_training_has_no_warning(self) -> None:
        warned = [each for each in self.found(sick=False) if each.severity != "info"]
        assert not warned, f"a healthy training has findings: {warned}"

    def test_the_fault_is_found_and_says_why_and_what_to_do(self) -> None:
        found = self.found(sick=True)
        assert found, "the fault was not found"
        for each in found:
            assert each.kind == self.rule().name, f"a finding of kind {each.kind!r}, not {self.rule().name!r}"
            assert each.site in each.sites, f"{each.site!r} is not among the finding's sites {each.sites}"
            assert each.message, "a finding has no message"
            assert each.advice, "a finding has no advice"
            assert each.causes, "a finding has no causes"
            assert "{" not in each.message, "a place in the message was not filled"
            json.dumps(each.to_dict())

    def test_how_often_it_is_asked_changes_nothing(self) -> None:
        often = [(each.kind, each.severity, each.site, each.step) for each in self.found(sick=True)]
        seldom = [
            (each.kind, each.severity, each.site, each.step) for each in self.found(sick=True, portion=8)
        ]
        assert often == seldom, "more history took something back, or moved it"

    def test_an_empty_chart_has_no_finding(self) -> None:
        found = list(self.rule().judge(Chart(dict)))
        assert not found, f"without records the rule finds {found}"

    def test_the_rule_says_what_it_is(self) -> None:
        rule = self.rule()
        for name in ("name", "concludes", "wrong_if", "fix"):
            text = getattr(rule, name)
            assert isinstance(text, str) and text, f"the rule's {name} is empty"  # noqa: PT018
        assert rule.causes, "the rule has no causes"
        known = ("invariant", "history", "limit", "threshold")
        assert rule.trust in known, f"the rule's trust is {rule.trust!r}, which is none of {known}"
        assert rule == copy.copy(rule), "the rule is not equal to its copy: make it a frozen dataclass"
        assert hash(rule) == hash(copy.copy(rule)), "the rule and its copy have different hashes"


class ScheduleContract:
    """Test a schedule. Fill in ``schedule``."""

    def schedule(self) -> Schedule:
        """Return the schedule under test."""
        raise NotImplementedError

    def moments(self) -> Iterable[Moment]:
        """Return moments to try, step by step."""
        for step in range(60):
            yield from (Moment(step, step // 10, step % 10, phase) for phase in ("train", "eval"))

    def test_the_answer_is_a_bool_and_the_same_when_asked_again(self) -> None:
        schedule = self.schedule()
        for moment in self.moments():
            answers = [schedule.live(moment) for _ in range(3)]
            assert answers in ([True] * 3, [False] * 3), f"live({moment}) gave {answers}"

    def test_no_step_before_the_earliest_is_live(self) -> None:
        schedule = self.schedule()
        for moment in self.moments():
            until = min(schedule.earliest(moment), moment.step + 200)
            assert until >= moment.step, f"earliest({moment}) is {until}, before the step itself"
            for step in range(moment.step, until):
                later = replace(moment, step=step)
                assert not schedule.live(later), f"earliest({moment}) is {until}, but {later} is live"

    def test_phases_have_one_answer_unless_it_says_otherwise(self) -> None:
        schedule = self.schedule()
        if schedule.by_phase:
            return
        for moment in self.moments():
            answers = {
                phase: schedule.live(replace(moment, phase=phase)) for phase in ("train", "eval", "mine")
            }
            assert len(set(answers.values())) == 1, f"by_phase is False, but step {moment.step} has {answers}"

    def test_combinations_follow_logic(self) -> None:
        schedule, other = self.schedule(), Every(3)
        for moment in self.moments():
            one, two = schedule.live(moment), other.live(moment)
            assert (schedule & other).live(moment) == (one and two), f"& is wrong at {moment}"
            assert (schedule | other).live(moment) == (one or two), f"| is wrong at {moment}"
            assert (~schedule).live(moment) == (not one), f"~ is wrong at {moment}"

    def test_the_spec_is_json(self) -> None:
        spec = self.schedule().spec()
        assert json.loads(json.dumps(spec)) == spec, f"the spec {spec!r} does not survive JSON"

    def test_a_watch_records_the_steps_that_are_live(self) -> None:
        model, kept, schedule = nn.Sequential(nn.Linear(2, 2)), MemorySink(), self.schedule()
        with watch(model, None, tap("0:output", when=schedule), sinks=[kept]) as session:
            for _ in range(12):
                with session.step():
                    model(torch.ones(1, 2)).sum().backward()
        found = [record.step for record in kept.records if record.scalars]
        wanted = [step for step in range(12) if schedule.live(Moment(step))]
        assert found == wanted, f"recorded steps {found}, live steps {wanted}"


class VisitorContract:
    """Test a visitor. Fill in ``visitor``; set ``changes`` if it replaces values."""

    changes: bool = False

    def visitor(self) -> Visitor:
        """Return a fresh visitor."""
        raise NotImplementedError

    def model(self) -> nn.Module:
        """Return the model to visit."""
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))

    def inputs(self) -> tuple[Any, ...]:
        """Return the arguments of a call."""
        return (torch.linspace(-1, 1, 12).reshape(3, 4),)

    def visited(self, model: nn.Module) -> Visiting:
        return Visiting(model, self.visitor(), [Stop(place.path, place.module) for place in places(model)])

    def test_the_model_runs_and_keeps_its_output_unless_the_visitor_replaces_it(self) -> None:
        model = self.model().eval()
        plain = model(*self.inputs())
        with self.visited(model):
            found = model(*self.inputs())
        if not self.changes:
            assert _equal(plain, found), (
                "the visitor changed the output: set `changes = True` if it is meant to"
            )

    def test_leaving_removes_every_hook_also_after_an_error(self) -> None:
        model = self.model()
        before = _hooks_on(model)
        for fails in (False, True):
            try:
                with self.visited(model):
                    assert _hooks_on(model) > before, "no hook was registered"
                    model("no tensor" if fails else self.inputs()[0], *self.inputs()[1:])
            except Exception:  # noqa: BLE001 (whatever a model raises)
                assert fails, "the model raised with the visitor on it"
            assert _hooks_on(model) == before, "hooks are left on the model"

    def test_a_second_pass_counts_calls_from_zero(self) -> None:
        model, numbers = self.model(), list[int]()
        visitor = self.visitor()
        plain = visitor.after

        def after(call: Call, output: object) -> Any:
            numbers.append(call.number)
            return plain(call, output)

        visitor.after = after  # type: ignore[method-assign]
        stops = [Stop(place.path, place.module) for place in places(model)]
        with Visiting(model, visitor, stops):
            for _ in range(2):
                model(*self.inputs())
        half = len(numbers) // 2
        assert numbers[:half] == numbers[half:], f"the calls of two passes were numbered {numbers}"


class FormContract:
    """Test that a form of a model has the same sites and values as the eager model. Fill in ``form``."""

    rtol: float = 1e-4
    atol: float = 1e-5
    taps: tuple[str, ...] = ("*:output",)

    def form(self, model: nn.Module) -> Any:
        """Return the model in the form under test."""
        raise NotImplementedError

    def model(self) -> nn.Module:
        """Return the eager model."""
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))

    def inputs(self) -> tuple[Any, ...]:
        """Return the arguments of a call."""
        return (torch.linspace(-1, 1, 12).reshape(3, 4),)

    def seen(self, model: Any) -> dict[str, Tensor]:
        with capture(model, *self.taps) as seen:
            model(*self.inputs())
        self.missing = seen.coverage()
        return dict(seen)

    def test_sites_and_values_are_those_of_the_eager_model(self) -> None:
        model = self.model().eval()
        eager, found = self.seen(model), self.seen(self.form(model))
        told = {missing.site for missing in self.missing}
        assert not set(found) - set(eager), f"names that the eager model has not: {set(found) - set(eager)}"
        silent = set(eager) - set(found) - told
        assert not silent, f"values that are missing without a reason: {silent}"
        for name, value in found.items():
            close = torch.allclose(value, eager[name], self.rtol, self.atol, equal_nan=True)
            assert close, f"{name} is another value than in the eager model"

    def test_a_capture_changes_no_output_and_leaves_nothing_behind(self) -> None:
        form = self.form(self.model().eval())
        before = form(*self.inputs())
        first = self.seen(form)
        assert _equal(before, form(*self.inputs())), "the output is another one after a capture"
        assert list(self.seen(form)) == list(first), "a second capture has other sites"


class StepListenerContract:
    """Test a step listener. Fill in ``listener``."""

    def listener(self) -> StepListener:
        """Return a fresh listener."""
        raise NotImplementedError

    def trained(self, listener: StepListener | None, optimizer: type[torch.optim.Optimizer]) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        stepper = optimizer(model.parameters(), lr=0.1)  # type: ignore[call-arg]
        if listener is not None:
            training.listen(listener)
        try:
            for _ in range(3):
                model(torch.randn(8, 3)).square().mean().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                stepper.step()
                stepper.zero_grad()
        finally:
            if listener is not None:
                training.stop_listening(listener)
        return [parameter.detach() for parameter in model.parameters()]

    def test_training_is_bit_identical_with_and_without_it(self) -> None:
        for optimizer in (torch.optim.SGD, torch.optim.Adam):
            plain, found = self.trained(None, optimizer), self.trained(self.listener(), optimizer)
            for number, (one, other) in enumerate(zip(plain, found, strict=True)):
                assert torch.equal(one, other), (
                    f"parameter {number} differs after three steps of {optimizer.__name__}"
                )

    def test_it_gets_no_event_after_it_was_removed(self) -> None:
        listener, events = self.listener(), list[str]()
        for name in ("ready", "updated"):
            plain = getattr(listener, name)

            def noted(optimizer: Any, plain: Any = plain, name: str = name) -> None:
                events.append(name)
                plain(optimizer)

            setattr(listener, name, noted)
        self.trained(listener, torch.optim.SGD)
        assert events == ["ready", "updated"] * 3, f"three updates gave {events}"
        self.trained(None, torch.optim.SGD)
        assert len(events) == 6, "a removed listener still gets events"


def _equal(one: Any, other: Any) -> bool:
    pairs = zip(leaves(one), leaves(other), strict=True)
    return all(a == b and torch.equal(x.nan_to_num(), y.nan_to_num()) for (a, x), (b, y) in pairs)


def _hooks_on(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
