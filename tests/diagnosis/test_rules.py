"""The contract, held by rules of each sort; the table of rules in the documentation; rules of other packages."""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import torchtap.registry
from torchtap.diagnosis.chart import EARLY, Block, Chart, Fact, Structure, read_fact, read_structure
from torchtap.diagnosis.rule_type import Rule
from torchtap.diagnosis.rules import RULES, all_rules, stale_gradient
from torchtap.diagnosis.rules.loop import learning_rate_gone, lost_updates
from torchtap.diagnosis.rules.model import constant_input, same_batch
from torchtap.diagnosis.rules.numbers import loss_scale, nonfinite
from torchtap.diagnosis.rules.values import collapsed, dead, exploding, shrinking, vanishing
from torchtap.testing import RuleContract

PAGE = Path(__file__).parents[2] / "docs" / "diagnosis.md"


def block(statistic: str, **sites: float) -> Block:
    names = tuple(name.replace("__", ":").replace("_dot_", ".") for name in sites)
    return names, (statistic,), np.array([[value] for value in sites.values()]), None


class TestNonFinite(RuleContract):
    def rule(self) -> Rule:
        return nonfinite

    def healthy(self, chart: Chart, step: int) -> list[Block]:
        return [block("nans", a__output=0, b__output=0), block("infs", a__output=0, m__input=4)]

    def sick(self, chart: Chart, step: int) -> list[Block]:
        return [block("nans", a__output=0, b__output=float(step >= 37)), block("infs", a__output=0)]


class TestStaleGradient(RuleContract):
    def rule(self) -> Rule:
        return stale_gradient

    def healthy(self, chart: Chart, step: int) -> list[Block]:
        return []

    def sick(self, chart: Chart, step: int) -> list[Block]:
        if step == 3:
            chart.note(Fact("stale-gradient", "a:param_grad.weight", step))
        return []


class TestDeadValues(RuleContract):
    def rule(self) -> Rule:
        return dead

    def healthy(self, chart: Chart, step: int) -> list[Block]:
        return [block("zeros", a__output=0.999 if step % 5 else 0.5)]

    def sick(self, chart: Chart, step: int) -> list[Block]:
        return [block("zeros", a__output=0.999 if step >= 21 else 0.5)]


class TestOutputCollapsed(RuleContract):
    def rule(self) -> Rule:
        return collapsed

    def healthy(self, chart: Chart, step: int) -> list[Block]:
        return [block("between", __output=0.1, __input=0.9)]

    def sick(self, chart: Chart, step: int) -> list[Block]:
        return [block("between", __output=0.1 if step < 17 else 1e-9, __input=0.9)]


class TestExploding(RuleContract):
    def rule(self) -> Rule:
        return exploding

    def healthy(self, chart: Chart, step: int) -> list[Block]:
        return [block("rms", a__output=1.0 + step, b__output=1e-6 * 1.2 ** min(step, 60))]

    def sick(self, chart: Chart, step: int) -> list[Block]:
        return [block("rms", a__output=1.3**step, b__output=1.0)]


class TestVanishing(RuleContract):
    def rule(self) -> Rule:
        return vanishing

    def chart(self) -> Chart:
        return Chart(lambda: {f"l.{i}:grad_output": {"class": "Linear"} for i in range(6)})

    def sizes(self, factor: float) -> list[Block]:
        return [block("rms", **{f"l_dot_{i}__grad_output": factor**i for i in range(6)})]

    def healthy(self, chart: Chart, step: int) -> list[Block]:
        return self.sizes(2.0)

    def sick(self, chart: Chart, step: int) -> list[Block]:
        return self.sizes(10.0 if step > 4 else 2.0)


class TestRateGone(RuleContract):
    def rule(self) -> Rule:
        return learning_rate_gone

    def healthy(self, chart: Chart, step: int) -> list[Block]:
        return [block("value", __lr_dot_0=0.5 * (1 + np.cos(np.pi * step / self.steps)))]

    def sick(self, chart: Chart, step: int) -> list[Block]:
        return [block("value", __lr_dot_0=0.5**step)]


class TestLostUpdates(RuleContract):
    def rule(self) -> Rule:
        return lost_updates

    def record(self, lost: float) -> list[Block]:
        return [
            block("zeros", a__update_dot_weight=lost, a__param_grad_dot_weight=0.1),
            block("rms", a__param_grad_dot_weight=1.0),
        ]

    def healthy(self, chart: Chart, step: int) -> list[Block]:
        return self.record(0.1)

    def sick(self, chart: Chart, step: int) -> list[Block]:
        return self.record(0.9)


class TestSameBatch(RuleContract):
    def rule(self) -> Rule:
        return same_batch

    def record(self, value: float) -> list[Block]:
        return [block(name, __input=value) for name in ("mean", "std", "min", "max", "l1", "l2")]

    def healthy(self, chart: Chart, step: int) -> list[Block]:
        return self.record(1.0 + step)

    def sick(self, chart: Chart, step: int) -> list[Block]:
        return self.record(1.0)


class TestLossScale(RuleContract):
    def rule(self) -> Rule:
        return loss_scale

    def healthy(self, chart: Chart, step: int) -> list[Block]:
        chart.add(step, [], skipped=step < 8)
        return []

    def sick(self, chart: Chart, step: int) -> list[Block]:
        chart.add(step, [], skipped=step > 5)
        return []


class TestConstantInput(RuleContract):
    def rule(self) -> Rule:
        return constant_input

    def healthy(self, chart: Chart, step: int) -> list[Block]:
        # A mask of ones beside an input that differs, and a batch of too few numbers to tell.
        return [
            block("std", __input_dot_0=1.0, __input_dot_1=0.0),
            block("count", __input_dot_0=64, __input_dot_1=64),
        ]

    def sick(self, chart: Chart, step: int) -> list[Block]:
        return [
            block("std", __input_dot_0=0.0, __input_dot_1=0.0),
            block("count", __input_dot_0=64, __input_dot_1=64),
        ]


class TestShrinking(RuleContract):
    def rule(self) -> Rule:
        return shrinking

    def chart(self) -> Chart:
        known = {"class": "Linear", "shape": [8, 8]}
        return Chart(lambda: {"a:param.weight": known, "b:param.weight": known})

    def healthy(self, chart: Chart, step: int) -> list[Block]:
        return [block("rms", a__param_dot_weight=1.0 - step / 400, b__param_dot_weight=1.0)]

    def sick(self, chart: Chart, step: int) -> list[Block]:
        return [block("rms", a__param_dot_weight=0.9**step, b__param_dot_weight=0.9**step)]


# -- all rules ------------------------------------------------------------------------------------------------


def test_every_rule_can_be_had_and_has_its_own_name() -> None:
    rules, failed = all_rules()
    assert failed == {}
    assert [rule.name for rule in rules] == list(RULES.built_in)
    for rule in rules:
        assert list(rule.judge(Chart(dict))) == []
        assert rule.causes
        assert rule.wrong_if
        assert rule.fix


def test_the_page_has_every_rule_with_what_it_concludes() -> None:
    rows = dict(re.findall(r"^\| `([a-z-]+)` \| \w+ \| (.+?) \|", PAGE.read_text(), re.MULTILINE))
    rules, _ = all_rules()
    assert {rule.name: rule.concludes for rule in rules} == rows


def test_a_package_adds_a_rule_by_an_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = EntryPoint("mine", f"{__name__}:mine", "torchtap.rules")
    bad = EntryPoint("bad", "no.such.module:Rule", "torchtap.rules")

    def entry_points(*, group: str, name: str | None = None) -> list[EntryPoint]:
        found = [mine, bad] if group == "torchtap.rules" else []
        return [each for each in found if name in (None, each.name)]

    monkeypatch.setattr(torchtap.registry, "entry_points", entry_points)
    rules, failed = all_rules()
    assert rules[-1] is dead
    assert "no.such.module" in failed["bad"]


mine = dead


# -- charts and facts -----------------------------------------------------------------------------------------


def test_a_chart_keeps_the_first_and_the_last_columns_and_no_more() -> None:
    chart = Chart(dict)
    for step in range(5000):
        chart.add(step, [block("rms", a__output=float(step))])
        chart.add_loss(step, 1.0)
    found = chart.grid("rms", "output")
    assert found.values.shape[1] <= 320
    assert found.steps[:EARLY].tolist() == list(range(EARLY))
    assert found.steps[-100:].tolist() == list(range(4900, 5000))
    assert (found.values[0] == found.steps).all()
    assert len(chart.losses()[0]) == 512


@pytest.mark.parametrize(
    "event",
    [
        {},
        {"name": "x"},
        {"name": "x", "site": "y", "step": "soon"},
        {"name": "x", "site": "y", "step": 1e400},
    ],
)
def test_a_fact_that_is_none_is_left_out(event: dict[str, Any]) -> None:
    assert read_fact(event) is None
    assert read_structure(event) is None


def test_a_structure_comes_back_from_plain_data() -> None:
    made = Structure(
        frozenset({"a:param.w"}), frozenset(), frozenset({"a:param.w"}), ("SGD",), True, {"a:param.w": 3}
    )
    assert read_structure(made.to_dict()) == made
