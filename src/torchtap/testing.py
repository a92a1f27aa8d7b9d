"""Contracts that an extension's tests subclass, to be held to what the built-in ones are held to.

    class TestMyReduction(ReductionContract):
        def reduction(self):
            return MyReduction()

        def reference(self, values):
            return {"total": sum(float(value.double().sum()) for value in values)}

pytest then runs every test of the contract. Nothing here imports pytest.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from torchtap.diagnosis.chart import Block, Chart
from torchtap.diagnosis.diagnose import RuleRunner
from torchtap.diagnosis.finding import Finding
from torchtap.diagnosis.rule_type import Rule
from torchtap.reduce import AnyReduction, Result, reduction_from_spec
from torchtap.store.record import Consumer, ScalarBlock, StepRecord, TensorItem

__all__ = ["ReductionContract", "RuleContract", "SinkContract"]


class ReductionContract:
    """What every reduction keeps to. Fill in ``reduction`` and ``reference``, override what does not fit."""

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
            assert state is not None
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
            assert state is not None
            self.check(reduction.result(state), wanted)

    def test_reading_the_result_does_not_end_the_fold(self) -> None:
        for values in self.streams():
            reduction, state = self.reduction(), None
            for value in values:
                state = reduction.update(state, value)
                reduction.result(state)
            assert state is not None
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
            assert isinstance(name, str)
            assert isinstance(number, float | Tensor), f"{name} is a {type(number).__name__}"
            assert not isinstance(number, Tensor) or number.device.type == "cpu", f"{name} is not on the host"

    def test_the_spec_is_json_and_says_which_reduction_it_is(self) -> None:
        reduction = self.reduction()
        spec = reduction.spec()
        assert json.loads(json.dumps(spec)) == spec, "the spec does not survive JSON"
        assert spec["reduction"] == reduction.name

    def test_the_spec_brings_the_reduction_back(self) -> None:
        reduction = self.reduction()
        assert reduction_from_spec(reduction.spec()) == reduction

    def test_equal_reductions_are_equal_and_hash_equal(self) -> None:
        one, other = self.reduction(), copy.copy(self.reduction())
        assert one == other
        assert hash(one) == hash(other)


class SinkContract:
    """What every sink keeps to. Fill in ``sink``; fill in ``kept`` if the sink can say what it has."""

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
        assert kept is None or kept == wanted

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
        assert kept is None or kept == {(0, "a:output"), (1, "a:output"), (1, "b:output"), (2, "b:output")}


class RuleContract:
    """What every rule keeps to. Fill in ``rule``, ``healthy`` and ``sick``."""

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
        assert [each for each in self.found(sick=False) if each.severity != "info"] == []

    def test_the_fault_is_found_and_says_why_and_what_to_do(self) -> None:
        found = self.found(sick=True)
        assert found, "the fault was not found"
        for each in found:
            assert each.kind == self.rule().name
            assert each.site in each.sites
            assert each.message
            assert each.advice
            assert each.causes
            assert "{" not in each.message, "a place in the message was not filled"
            json.dumps(each.to_dict())

    def test_how_often_it_is_asked_changes_nothing(self) -> None:
        often = [(each.kind, each.severity, each.site, each.step) for each in self.found(sick=True)]
        seldom = [
            (each.kind, each.severity, each.site, each.step) for each in self.found(sick=True, portion=8)
        ]
        assert often == seldom, "more history took something back, or moved it"

    def test_an_empty_chart_has_no_finding(self) -> None:
        assert list(self.rule().judge(Chart(dict))) == []

    def test_the_rule_says_what_it_is(self) -> None:
        rule = self.rule()
        for text in (rule.name, rule.concludes, rule.wrong_if, rule.fix):
            assert isinstance(text, str)
            assert text
        assert rule.causes
        assert rule.trust in ("invariant", "history", "limit", "threshold")
        assert rule == copy.copy(rule)
        assert hash(rule) == hash(copy.copy(rule))
