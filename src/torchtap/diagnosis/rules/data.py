"""Data and windows: the same batch again and again, a loss at the level of chance, sums over windows of batches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
import numpy.typing as npt

from torchtap.diagnosis.chart import Chart
from torchtap.diagnosis.facts import Fact
from torchtap.diagnosis.finding import Evidence, Finding, Severity, Trust
from torchtap.diagnosis.places import ChartedSite
from torchtap.diagnosis.rules.base import Hit, Need, Rule, hit_at
from torchtap.diagnosis.rules.progress import LOSS
from torchtap.diagnosis.rules.steps import is_weight
from torchtap.diagnosis.rules.windows import LAST, first_run, median_of_columns

__all__ = ["AtChance", "ConstantInput", "SameBatch", "WindowScale"]

_PRINT = ("mean", "std", "min", "max", "l1", "l2")  # of two different batches, all of these never agree


def is_model_input(place: ChartedSite) -> bool:
    """Whether a site is an argument of the model itself."""
    return not place.module


@final
@dataclass(frozen=True)
class SameBatch(Rule):
    """The model's input is the same in each of several steps, bit by bit."""

    length: int = 3

    name: ClassVar[str] = "same-batch"
    concludes: ClassVar[str] = "Each step is given the same batch."
    trust: ClassVar[Trust] = "invariant"
    needs: ClassVar[tuple[Need, ...]] = (Need("input", "l2"), Need("input", "l1"))
    wrong_if: ClassVar[str] = (
        "The whole data set is one batch, or one batch is to be learned by heart; it is a warning only where a data "
        "loader has more than one batch."
    )
    causes: ClassVar[tuple[str, ...]] = (
        "next(iter(loader)) in the loop: the first batch of a new pass each time",
        "the loop uses a batch from before it",
    )
    fix: ClassVar[str] = "for x, y in loader:"

    def judge(self, chart: Chart) -> Iterable[Finding]:
        grids = [chart.grid(statistic, "input", last=LAST, where=is_model_input) for statistic in _PRINT]
        if not all(grids) or len({grid.values.shape for grid in grids}) > 1 or grids[0].values.shape[1] < 2:
            return
        prints = np.stack([grid.values for grid in grids])  # statistic, site, step
        steps = grids[0].steps
        equal = (prints[:, :, 1:] == prints[:, :, :-1]).all(axis=0)
        varied = prints[1] > 0  # a constant input says nothing
        here = np.isfinite(prints).all(axis=0)
        same = np.concatenate([np.zeros((equal.shape[0], 1), np.bool_), equal], axis=1)
        telling = varied & here
        all_same = np.where(telling, same, True).all(axis=0) & telling.any(axis=0)
        column = first_run(all_same, self.length - 1)
        if column is None:
            return
        place = grids[0].places[int(np.argmax(telling[:, column]))]
        loader = chart.facts("several-batches")
        severity: Severity = "warning" if loader else "info"
        evidence = [
            Evidence("mean of the input", float(prints[0, 0, column]), place.name, "mean", int(steps[column]))
        ]
        message = "every step is given the same batch ({site})" + (f": {loader[0].text}" if loader else "")
        hits = [hit_at(place, int(steps[column]), float(self.length))]
        yield from self.found(hits, message, severity=severity, evidence=evidence)


@final
@dataclass(frozen=True)
class ConstantInput(Rule):
    """Everything that the model is given is one and the same number."""

    length: int = 3
    elements: int = 16

    name: ClassVar[str] = "constant-input"
    concludes: ClassVar[str] = (
        "The model is given one and the same number everywhere: there is nothing in its input."
    )
    trust: ClassVar[Trust] = "invariant"
    needs: ClassVar[tuple[Need, ...]] = (Need("input", "std"), Need("input", "count"))
    wrong_if: ClassVar[str] = "The model needs no input."
    causes: ClassVar[tuple[str, ...]] = (
        "samples that could not be read and became zeros",
        "a normalisation, a cast or a mask that leaves nothing",
    )
    fix: ClassVar[str] = "Look at a batch as the model gets it: print(x.std(), x.unique())"

    def judge(self, chart: Chart) -> Iterable[Finding]:
        spread, counts = (
            chart.grid(statistic, "input", last=LAST, where=is_model_input) for statistic in ("std", "count")
        )
        if not spread or spread.values.shape != counts.values.shape:
            return
        large = counts.values >= self.elements
        empty = np.where(large, spread.values == 0, True).all(axis=0) & large.any(axis=0)
        column = first_run(np.asarray(empty), self.length)
        if column is None:
            return
        place = spread.places[int(np.argmax(large[:, column]))]
        hits = [hit_at(place, spread.step(column), 0.0)]
        evidence = [Evidence("spread of the input", 0.0, place.name, "std", spread.step(column))]
        message = "every value of the model's input is the same ({site})"
        yield from self.found(hits, message, severity="error", evidence=evidence)


@final
@dataclass(frozen=True)
class AtChance(Rule):
    """Cross-entropy stays at ln C though the weights move."""

    steps: int = 80  # records
    near: float = 0.05  # of ln C
    moved: float = 0.05  # sum of the updates over the weights

    name: ClassVar[str] = "at-chance"
    concludes: ClassVar[str] = (
        "The weights move, but the loss stays where guessing has it: nothing is learned."
    )
    trust: ClassVar[Trust] = "history"
    needs: ClassVar[tuple[Need, ...]] = (Need(""), Need("value", "value"), Need("update", "ratio"))
    wrong_if: ClassVar[str] = "The task takes longer than this to begin to be learned."
    causes: ClassVar[tuple[str, ...]] = (
        "labels that do not belong to their inputs (shuffled apart, off by one)",
        "inputs that do not reach the model's answer",
        "a loss of other outputs or targets than was meant",
    )
    fix: ClassVar[str] = "Look at a few samples with their labels as the loss gets them."

    def judge(self, chart: Chart) -> Iterable[Finding]:
        told = chart.facts("classes")
        steps, loss = chart.losses()
        if not told or len(loss) < self.steps:
            return
        chance = float(np.log(told[0].value))
        flat = self._flat(loss, chance)
        for end in np.flatnonzero(flat):
            last = int(end) + self.steps - 1
            if self._moves(chart, int(steps[end]), int(steps[last])):
                yield from self._say(told[0], int(steps[last]), float(loss[end : last + 1].mean()), chance)
                return

    def _flat(self, loss: npt.NDArray[np.float64], chance: float) -> npt.NDArray[np.bool_]:
        """Of each window of losses, whether it stays at chance and does not fall."""
        half = self.steps // 2
        windows = np.lib.stride_tricks.sliding_window_view(loss, self.steps)
        early, late = windows[:, :half].mean(axis=1), windows[:, half:].mean(axis=1)
        noise = windows.std(axis=1) * np.sqrt(4.0 / self.steps)
        at_chance = np.abs(windows.mean(axis=1) - chance) <= self.near * chance
        falls = early - late > np.maximum(2 * noise, 0.004 * chance)
        return np.asarray(at_chance & ~falls & (late >= 0.97 * chance), np.bool_)

    def _moves(self, chart: Chart, begin: int, end: int) -> bool:
        ratios = chart.grid("ratio", "update", where=is_weight)
        if not ratios:
            return False
        within = (ratios.steps >= begin) & (ratios.steps <= end)
        middle = median_of_columns(ratios.values[:, within])
        middle = middle[np.isfinite(middle)]
        return bool(len(middle)) and float(middle.mean()) * self.steps > self.moved

    def _say(self, told: Fact, step: int, loss: float, chance: float) -> Iterable[Finding]:
        evidence = [Evidence("loss", loss, LOSS, "value", step), Evidence("loss of guessing, ln C", chance)]
        message = (
            f"the loss stays at {loss:.3g}, as guessing one of {told.value:.0f} would have it ({{site}})"
        )
        yield from self.found([Hit(told.site, step, loss)], message, evidence=evidence)


@final
@dataclass(frozen=True)
class WindowScale(Rule):
    """Gradients in proportion to the number of micro-batches of their step."""

    slack: float = 0.45  # of the way from the proportion to one
    windows: int = 2  # short ones that were recorded

    name: ClassVar[str] = "window-scale"
    concludes: ClassVar[str] = "A step of fewer micro-batches has a gradient that is smaller in proportion."
    trust: ClassVar[Trust] = "history"
    needs: ClassVar[tuple[Need, ...]] = (Need("param_grad", "l2"),)
    wrong_if: ClassVar[str] = "Short windows are meant to count less."
    causes: ClassVar[tuple[str, ...]] = (
        "the loss is divided by a fixed number of micro-batches, and the last window of an epoch has fewer",
        "the loss is not divided at all",
    )
    fix: ClassVar[str] = "loss = loss / micro_batches_of_this_window"

    def judge(self, chart: Chart) -> Iterable[Finding]:
        passes = chart.passes
        full = int(passes.max()) if len(passes) else 0
        if full < 2:
            return
        found = chart.grid("l2", "param_grad")
        if not found:
            return
        norms = np.sqrt(np.nansum(found.values**2, axis=0))
        columns = self._short(passes, norms, full)
        if len(columns) < self.windows:
            return
        ratios = np.array([norms[at] / _around(norms, passes == full, at) for at in columns])
        expected = np.array([passes[at] / full for at in columns])
        # In proportion, not gone: a training that has converged has no gradient in any window.
        small = (ratios <= expected + self.slack * (1 - expected)) & (ratios > 0.5 * expected)
        # Decided by the first windows alone, so that later ones change nothing.
        if not small[: self.windows].all() or (expected[: self.windows] > 0.67).any():
            return
        at = columns[self.windows - 1]
        step = int(chart.steps[at])
        place = found.places[0]
        evidence = [
            Evidence(
                "gradient of a short window over that of a full one", float(ratios[0]), place.name, "l2", step
            ),
            Evidence("micro-batches of the short window over the full one", float(expected[0])),
        ]
        message = (
            f"gradients go with the number of micro-batches: {passes[at]} instead of {full} give "
            "{value:.2f} of the gradient ({site})"
        )
        yield from self.found([hit_at(place, step, float(ratios[0]))], message, evidence=evidence)

    def _short(self, passes: npt.NDArray[np.int64], norms: npt.NDArray[np.float64], full: int) -> list[int]:
        there = (passes > 0) & (norms > 0) & np.isfinite(norms)
        return [int(at) for at in np.flatnonzero(there & (passes < full)) if at > 0]


def _around(norms: npt.NDArray[np.float64], full: npt.NDArray[np.bool_], at: int) -> float:
    """The usual norm of the full windows next to a short one, those before it."""
    near = np.flatnonzero(full[:at])[-4:]
    return float(np.median(norms[near])) if len(near) else float("nan")
