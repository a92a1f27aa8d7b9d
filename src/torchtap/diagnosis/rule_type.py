"""Rules: functions over a chart, each with a row of facts about itself.

    @rule("huge", concludes="...", trust="threshold", needs=(Need("output", "absmax"),), ...)
    def huge(rule, chart, *, size=1e3):
        yield from rule.found(hits, "{site}{also} reaches {value:.3g}")

``huge`` is then a `Rule`; ``huge(size=10.0)`` is the same rule with another limit. A rule guarantees, and
``torchtap.testing.RuleContract`` checks:
- without the records that it needs, it finds nothing;
- more history retracts nothing: a finding of the first steps is found again, at the same site and step, over all steps;
- it changes nothing and needs no torch.

Also here: the conditions over windows of records, and the sorts of sites, that several rules use.
"""

from __future__ import annotations

import functools
import tomllib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt

from torchtap.diagnosis.chart import LOSS, PULSE, Chart, ChartedSite, Fact, Numbers
from torchtap.diagnosis.finding import Evidence, Finding, Severity, Trust

__all__ = ["EVERY_STEP", "LAST", "SETUP", "Hit", "Need", "Rule", "built_in", "first_run", "hit_at", "rule"]

Flags = npt.NDArray[np.bool_]
Judging = Callable[..., Iterable[Finding]]


@final
@dataclass(frozen=True, slots=True)
class Need:
    """A record that a rule needs: a statistic of a kind of sites. Without a kind: how the training is set up."""

    kind: str
    statistic: str = ""
    or_kind: str = ""  # another kind that serves as well

    def met(self, chart: Chart) -> bool:
        """Return True if the chart has it."""
        if self.kind == PULSE:
            return bool(chart.pulse.seen)
        if not self.kind:
            return bool(chart.structure.trainable or chart.structure.frozen)
        return any(chart.has(kind, self.statistic) for kind in (self.kind, self.or_kind) if kind)

    @property
    def how(self) -> str:
        """Return how to record it."""
        if self.kind == PULSE:
            return "record with watch.follow(optimizer), a callback, `torchtap run` or tt.doctor"
        if not self.kind:
            return "train under tt.doctor(model, optimizer), or with `torchtap run --doctor`"
        return f"record {self.statistic} of *:{self.kind}, or train under tt.doctor"


EVERY_STEP = Need(PULSE)  # the pulse of the training
SETUP = Need("")  # what a doctor notes of a training: which parameters learn, what the optimizers hold


@final
@dataclass(frozen=True, slots=True)
class Hit:
    """A site at which a rule's condition held, and the first step that proves it."""

    site: str
    step: int
    value: float
    order: int = 0  # of the site, in execution


def hit_at(place: ChartedSite, step: int, value: float) -> Hit:
    """Return a hit at a place."""
    return Hit(place.name, step, float(value), place.index)


@final
@dataclass(frozen=True)
class Rule:
    """A check of a chart. Made by `rule`; call it with limits of your own to get a copy."""

    name: str
    concludes: str  # one sentence: what is wrong
    trust: Trust
    needs: tuple[Need, ...]
    wrong_if: str  # one sentence: when the conclusion does not hold
    causes: tuple[str, ...]  # the likeliest first
    fix: str  # a line of code if there is one
    judging: Judging
    limits: tuple[tuple[str, Any], ...] = ()
    ranks: bool = False  # compares the ranks of a finished run

    def __call__(self, **limits: Any) -> Rule:
        """Return this rule with some of its limits replaced."""
        return replace(self, limits=tuple(sorted({**dict(self.limits), **limits}.items())))

    def judge(self, chart: Chart) -> Iterable[Finding]:
        """Yield what is wrong, as far as the chart shows it."""
        if not self.ranks or len(chart.ranks) > 1:
            yield from self.judging(self, chart, **dict(self.limits))

    def missing(self, chart: Chart) -> str:
        """Return why the rule cannot judge this chart and what to record for it; empty if it can."""
        return "; ".join(dict.fromkeys(need.how for need in self.needs if not need.met(chart)))

    def found(
        self,
        hits: Sequence[Hit],
        message: str,
        *,
        severity: Severity = "warning",
        evidence: Iterable[Evidence] = (),
        causes: tuple[str, ...] = (),
        fix: str = "",
    ) -> Iterable[Finding]:
        """Yield one finding for all hits: the earliest step first, then in order of execution.

        ``message`` may contain {site}, {also}, {value} and {step}.
        """
        if not hits:
            return
        hits = sorted(hits, key=lambda hit: (hit.step, hit.order))
        first = hits[0]
        also = f" (and {len(hits) - 1} more)" if len(hits) > 1 else ""
        text = message.format(site=first.site, also=also, value=first.value, step=first.step)
        sites = tuple(dict.fromkeys(hit.site for hit in hits))
        yield Finding(
            self.name, severity, first.site, first.step, first.value, text, fix or self.fix, sites,
            causes or self.causes, tuple(evidence), self.trust,
        )  # fmt: skip


def rule(
    name: str,
    *,
    concludes: str,
    wrong_if: str,
    causes: tuple[str, ...],
    fix: str,
    trust: Trust = "threshold",
    needs: tuple[Need, ...] = (),
    ranks: bool = False,
) -> Callable[[Judging], Rule]:
    """Make a rule of a function ``(rule, chart, **limits)`` that yields findings.

    Args:
        name: the kind of its findings.
        concludes: one sentence that says what is wrong.
        wrong_if: one sentence that says when the conclusion does not hold.
        causes: the likely causes, the likeliest first.
        fix: what to change, a line of code if there is one.
        trust: how the rule knows: "invariant", "history", "limit" or "threshold".
        needs: the records without which the rule cannot judge.
        ranks: the rule compares the ranks of a finished run.
    """

    def make(judging: Judging) -> Rule:
        return Rule(name, concludes, trust, needs, wrong_if, causes, fix, judging, ranks=ranks)

    return make


@functools.cache
def _table() -> dict[str, dict[str, Any]]:
    return tomllib.loads((Path(__file__).parent / "rules" / "table.toml").read_text(encoding="utf-8"))


def built_in(name: str) -> Callable[[Judging], Rule]:
    """Make a rule of a function, with the facts of its row in ``rules/table.toml``."""
    row = dict(_table()[name])
    needs = tuple(_need(text) for text in row.pop("needs"))
    return rule(name, needs=needs, **{**row, "causes": tuple(row["causes"])})


def _need(text: str) -> Need:
    if text in ("setup", "pulse"):
        return SETUP if text == "setup" else EVERY_STEP
    kind, statistic, *other = text.split()
    return Need(kind, statistic, other[-1] if other else "")


def table_rules(functions: Mapping[str, Rule]) -> dict[str, Rule]:
    """Return every row of the table as a rule: by its function, or by its message for a row of facts."""
    return {
        name: functions[name] if name in functions else _fact_rule(name, row)
        for name, row in _table().items()
    }


def _fact_rule(name: str, row: dict[str, Any]) -> Rule:
    def judging(own: Rule, chart: Chart) -> Iterable[Finding]:
        yield from of_facts(own, chart, row["message"], row["severity"])

    return Rule(
        name,
        row["concludes"],
        "invariant",
        (SETUP,),
        row["wrong_if"],
        tuple(row["causes"]),
        row["fix"],
        judging,
    )


def of_facts(rule: Rule, chart: Chart, message: str, severity: Severity) -> Iterable[Finding]:
    """Yield a finding for the facts of a rule's own name: exact invariants that a probe saw broken."""
    facts = chart.facts(rule.name)
    if facts:
        hits = [Hit(fact.site, fact.step, fact.value, order) for order, fact in enumerate(facts)]
        yield from rule.found(hits, message + detail(facts[0]), severity=severity)


def detail(fact: Fact) -> str:
    """Return what a fact adds to a message."""
    text = fact.text.replace("{", "(").replace("}", ")")
    return f": {text}" if text else ""


# -- windows of records -------------------------------------------------------------------------------------

LAST = 24  # columns that a rule looks back; a chart is judged at least every eight


def first_run(holds: Flags, length: int) -> int | None:
    """Return the first column at which a condition has held ``length`` times in a row."""
    if len(holds) < length:
        return None
    run = np.convolve(holds.astype(np.int64), np.ones(length, np.int64), "valid")
    ends = np.flatnonzero(run == length)
    return int(ends[0]) + length - 1 if len(ends) else None


def first_run_of(holds: Flags, there: Flags, length: int) -> int | None:
    """Return the same over the columns that ``there`` marks as recorded."""
    columns = np.flatnonzero(there)
    at = first_run(holds[columns], length)
    return None if at is None else int(columns[at])


def last_known(values: Numbers) -> Numbers:
    """Replace each missing number by the last one before it."""
    there = ~np.isnan(values)
    before = np.maximum.accumulate(np.where(there, np.arange(len(values)), 0))
    return np.asarray(values[before], np.float64)


def median_of_columns(values: Numbers) -> Numbers:
    """Return the median of each column's finite numbers; NaN for a column without any."""
    if not values.shape[0]:
        return np.full(values.shape[1], np.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return np.asarray(np.nanmedian(np.where(np.isfinite(values), values, np.nan), axis=0), np.float64)


def rises_steadily(values: Numbers, share: float = 0.75) -> bool:
    """Return True if most ninths of a window lie above the ninth before."""
    if len(values) < 9:
        return False
    means = np.array([part.mean() for part in np.array_split(values, 9)])
    return bool((np.diff(means) > 0).mean() >= share)


def has_improved(chart: Chart, step: int, share: float = 0.75) -> bool:
    """Return True if by this step the loss had fallen below a share of its first values. Unknown is False."""
    steps, loss = chart.series(LOSS)
    loss = loss[steps <= step]
    if len(loss) < 16:
        return False
    first, last = float(np.median(loss[:8])), float(np.median(loss[-8:]))
    return first > 0 and last < share * first


# -- sorts of sites -----------------------------------------------------------------------------------------

_LAYERS = ("Linear", "Conv")
_NORMS = ("BatchNorm", "LayerNorm", "GroupNorm", "InstanceNorm", "RMSNorm")


def is_layer(place: ChartedSite) -> bool:
    """Return True for a site of a linear layer or a convolution."""
    return any(word in place.module_class for word in _LAYERS)


def is_norm(place: ChartedSite) -> bool:
    """Return True for a site of a normalisation layer."""
    return any(word in place.module_class for word in _NORMS)


def is_whole(place: ChartedSite) -> bool:
    """Return True if the site is all that its module returns."""
    return not place.leaf


def of_the_model(place: ChartedSite) -> bool:
    """Return True for a site of the model itself: its inputs, its answer."""
    return not place.module


def is_layer_weight(place: ChartedSite) -> bool:
    """Return True for a weight of a linear layer or a convolution."""
    return is_layer(place) and place.leaf.endswith("weight")


def is_main_weight(place: ChartedSite) -> bool:
    """Return True for a matrix of weights of a linear layer or a convolution."""
    return is_layer_weight(place) and place.shape is not None and len(place.shape) >= 2


def is_main_layer(place: ChartedSite) -> bool:
    """Return True for the output, or its gradient, of the first call of a linear layer or a convolution."""
    return is_layer(place) and not place.call and not place.leaf


def is_weight(place: ChartedSite) -> bool:
    """Return True for a matrix of weights: no bias, no norm, no embedding."""
    return (
        place.leaf.endswith("weight")
        and not is_norm(place)
        and "Embedding" not in place.module_class
        and (place.shape is None or len(place.shape) >= 2)
    )


def rows_of(places: Sequence[ChartedSite]) -> Mapping[str, int]:
    """Return the row of each site by its name."""
    return {place.name: row for row, place in enumerate(places)}
