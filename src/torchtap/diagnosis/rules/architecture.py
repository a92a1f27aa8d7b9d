"""How a model is built: hidden modules, broken ties, equal rows, probabilities for logits, a look at the future."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from torchtap.diagnosis.chart import Chart
from torchtap.diagnosis.facts import Fact
from torchtap.diagnosis.finding import Evidence, Finding, Severity, Trust
from torchtap.diagnosis.rules.attention import is_answer
from torchtap.diagnosis.rules.base import Hit, Need, Rule, hit_at
from torchtap.diagnosis.rules.fact_rules import FactRule
from torchtap.diagnosis.rules.windows import LAST, first_run

__all__ = [
    "EqualRows",
    "HiddenModule",
    "OneForMany",
    "PaddingLearns",
    "Probabilities",
    "SeesTheFuture",
    "Untied",
]


@final
@dataclass(frozen=True)
class HiddenModule(FactRule):
    """A module or tensor that is used in the loss and is in no tree and no optimizer."""

    name: ClassVar[str] = "hidden-module"
    concludes: ClassVar[str] = (
        "A part of the model is not registered: no optimizer sees it and no checkpoint has it."
    )
    wrong_if: ClassVar[str] = "Nobody means it to learn, though it requires a gradient."
    causes: ClassVar[tuple[str, ...]] = (
        "modules in a Python list, tuple or dict",
        "a tensor with requires_grad=True that is no nn.Parameter",
    )
    fix: ClassVar[str] = (
        "self.layers = nn.ModuleList(layers)  # or nn.ModuleDict; nn.Parameter(tensor) for a tensor"
    )
    message: ClassVar[str] = "{site}{also} is used but registered nowhere: it never learns"


@final
@dataclass(frozen=True)
class Untied(FactRule):
    """Weights that began as one and are two."""

    name: ClassVar[str] = "untied"
    concludes: ClassVar[str] = "Two weights that were tied, or equal as if tied, are updated apart."
    wrong_if: ClassVar[str] = "One was only initialised from the other, and is meant to go its own way."
    causes: ClassVar[tuple[str, ...]] = (
        "a copy in place of the same parameter (clone, deepcopy, to, load)",
        "a wrapper or a loader that untied them",
    )
    fix: ClassVar[str] = "model.head.weight = model.embedding.weight  # after loading and moving the model"
    severity: ClassVar[Severity] = "warning"
    message: ClassVar[str] = "{site}{also} was equal to another weight and is updated apart from it"


@final
@dataclass(frozen=True)
class EqualRows(FactRule):
    """Units that are copies of each other."""

    name: ClassVar[str] = "equal-rows"
    concludes: ClassVar[str] = (
        "All rows of a weight are equal, and so are the rows of its gradient: the units stay copies."
    )
    wrong_if: ClassVar[str] = "Never: equal rows with equal gradients stay equal."
    causes: ClassVar[tuple[str, ...]] = (
        "constant initialisation",
        "weights copied from one row",
    )
    fix: ClassVar[str] = "nn.init.kaiming_normal_(layer.weight)"
    message: ClassVar[str] = "all units of {site}{also} are copies of each other, and their gradients too"


@final
@dataclass(frozen=True)
class OneForMany(FactRule):
    """A list of layers that is one layer."""

    name: ClassVar[str] = "one-for-many"
    concludes: ClassVar[str] = "The layers of a list are one and the same layer, several times."
    wrong_if: ClassVar[str] = "The layers are meant to share their weights."
    causes: ClassVar[tuple[str, ...]] = ("[layer] * n, or a layer that is made outside of the loop",)
    fix: ClassVar[str] = "nn.ModuleList(nn.Linear(n, n) for _ in range(depth))"
    severity: ClassVar[Severity] = "info"
    message: ClassVar[str] = "{site}{also} stands in its list more than once"


@final
@dataclass(frozen=True)
class Probabilities(Rule):
    """Softmax or sigmoid before a loss that wants logits."""

    length: int = 2

    name: ClassVar[str] = "probabilities-as-logits"
    concludes: ClassVar[str] = "A loss that wants logits, or logarithms, is given probabilities."
    trust: ClassVar[Trust] = "invariant"
    needs: ClassVar[tuple[Need, ...]] = (Need(""), Need("output", "mean"))
    wrong_if: ClassVar[str] = "The model's logits happen to be probabilities, which no training needs."
    causes: ClassVar[tuple[str, ...]] = (
        "softmax (or sigmoid) at the end of the model and again inside the loss",
        "nll_loss without log_softmax",
    )
    fix: ClassVar[str] = "return logits  # without softmax: cross_entropy has its own"

    def judge(self, chart: Chart) -> Iterable[Finding]:
        facts = chart.facts(self.name)
        message = "the loss is given probabilities where it wants logits ({site})"
        if facts:
            hits = [Hit(fact.site, fact.step, fact.value) for fact in facts]
            yield from self.found(hits, f"{message}: {facts[0].text}", severity="error")
            return
        classes = chart.facts("classes")
        if classes:
            yield from self.found(self._sums(chart, classes[0].value), message, severity="error")

    def _sums(self, chart: Chart, classes: float) -> list[Hit]:
        """Outputs between 0 and 1 whose mean is one over the number of classes: each row sums to one."""
        grids = [chart.grid(name, "output", last=LAST, where=is_answer) for name in ("mean", "min", "max")]
        if not all(grids) or len({grid.values.shape for grid in grids}) > 1:
            return []
        mean, low, high = (grid.values for grid in grids)
        sums = (np.abs(mean * classes - 1) < 1e-4) & (low >= 0) & (high <= 1.001)
        hits = []
        for row, place in enumerate(grids[0].places):
            column = first_run(sums[row], self.length)
            if column is not None and place.shape and place.shape[-1] == classes:
                hits.append(hit_at(place, grids[0].step(column), float(mean[row, column])))
        return hits


@final
@dataclass(frozen=True)
class PaddingLearns(FactRule):
    """Gradient at positions that are padding."""

    name: ClassVar[str] = "padding-learns"
    concludes: ClassVar[str] = (
        "Positions that are padding get gradients: they are in the loss or in what it is made of."
    )
    wrong_if: ClassVar[str] = (
        "Equal tokens at the end of sequences are content, as in images read row by row."
    )
    causes: ClassVar[tuple[str, ...]] = (
        "the loss counts padded positions",
        "no mask in attention or pooling; an unpacked sequence in a recurrent layer",
    )
    fix: ClassVar[str] = (
        "F.cross_entropy(logits, targets, ignore_index=pad); nn.Embedding(..., padding_idx=pad)"
    )
    severity: ClassVar[Severity] = "warning"
    message: ClassVar[str] = "padded positions at {site}{also} get gradients"


@final
@dataclass(frozen=True)
class SeesTheFuture(Rule):
    """Attention above the diagonal in a model that is trained on the next token."""

    share: float = 1e-6  # of the attention above the diagonal; a mask leaves exactly nothing

    name: ClassVar[str] = "sees-the-future"
    concludes: ClassVar[str] = "The model is trained to tell the next token, and its attention sees it."
    trust: ClassVar[Trust] = "invariant"
    needs: ClassVar[tuple[Need, ...]] = (Need(""),)
    wrong_if: ClassVar[str] = "Targets that are the shifted inputs are not what the model is asked for."
    causes: ClassVar[tuple[str, ...]] = ("no causal mask", "a mask with the wrong sign or the wrong diagonal")
    fix: ClassVar[str] = "F.scaled_dot_product_attention(q, k, v, is_causal=True)"

    def judge(self, chart: Chart) -> Iterable[Finding]:
        asked = chart.facts("next-token")
        if not asked:
            return
        seen: list[Fact] = [fact for fact in chart.facts("attention-above") if fact.value > self.share]
        hits = [
            Hit(fact.site, max(fact.step, asked[0].step), fact.value, order)
            for order, fact in enumerate(seen)
        ]
        evidence = [
            Evidence("share of attention above the diagonal", hit.value, hit.site) for hit in hits[:1]
        ]
        message = "{site}{also} attends to later tokens ({value:.0%} of its attention), though these are the targets"
        yield from self.found(hits, message, severity="error", evidence=evidence)
