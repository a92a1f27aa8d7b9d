"""A finished or growing run into a chart, in portions, as a training would have filled it. No torch."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, final

import numpy as np
import numpy.typing as npt

from torchtap.diagnosis.chart import Block, Chart
from torchtap.diagnosis.facts import FACT, STRUCTURE, read_fact, read_structure
from torchtap.plan.names import kind_of
from torchtap.store.read.lookup import TRAINING

if TYPE_CHECKING:
    from torchtap.store.read.reader import Run

__all__ = ["LEARNED", "chart_of", "chosen", "fill"]

LOSS = ":value.loss"
PORTION = 8  # columns between two looks
_MOST = 2400  # of a longer run, this many steps are looked at: the first ones, and others evenly spread
_FIRST = 400
LEARNED = frozenset(("param_grad", "update"))  # kinds that only a phase that learns has


def chart_of(run: Run) -> Chart:
    """An empty chart for a run."""
    return Chart(run.site_facts)


def fill(chart: Chart, run: Run, only: frozenset[str] | None = None) -> Iterator[None]:
    """Put the run into the chart, a few columns at a time; what was told by a step is there with it.

    ``only`` are the statistics that are wanted.
    """
    structures = [found for event in run.events(STRUCTURE) if (found := read_structure(event)) is not None]
    if structures:
        chart.structure = structures[-1]
    passes, skipped = _by_step(run.clock())
    recorded = np.asarray(run.steps(), np.int64)
    steps = chosen(np.array([step for step in recorded.tolist() if passes.get(step)], np.int64))
    told = _Told(run)
    tables = _tables(run, steps, only)
    for begin in range(0, len(steps), PORTION):
        for column in range(begin, min(begin + PORTION, len(steps))):
            step = int(steps[column])
            blocks = [_block(sites, statistic, values[:, column]) for sites, statistic, values in tables]
            chart.add(step, blocks, passes=passes.get(step, 1), skipped=skipped.get(step, False))
            told.put_into(chart, step)
        yield
    told.put_into(chart, math.inf)
    yield


@final
class _Told:
    """Losses and facts of a run that are still to come, in the order of their steps."""

    def __init__(self, run: Run) -> None:
        facts = [fact for event in run.events(FACT) if (fact := read_fact(event)) is not None]
        self._facts = deque(sorted(facts, key=lambda fact: fact.step))
        self._losses = deque(_losses(run))

    def put_into(self, chart: Chart, last: float) -> None:
        """What was told up to and with a step."""
        while self._losses and self._losses[0][0] <= last:
            chart.add_loss(*self._losses.popleft())
        while self._facts and self._facts[0].step <= last:
            chart.note(self._facts.popleft())


def _losses(run: Run) -> list[tuple[int, float]]:
    """The losses of all steps."""
    if LOSS not in run.sites():
        return []
    found = run.series(LOSS, "value", partial=True)
    return list(zip(found.steps.tolist(), found.values.tolist(), strict=True))


def _block(sites: tuple[str, ...], statistic: tuple[str], values: np.ndarray) -> Block:
    return sites, statistic, values[:, None], ~np.isnan(values)


def _tables(
    run: Run, steps: npt.NDArray[np.int64], only: frozenset[str] | None
) -> list[tuple[tuple[str, ...], tuple[str], np.ndarray]]:
    """Each statistic of all sites, from the phases that learn; training comes last and counts."""
    found = []
    statistics_of = {site: run.statistics(site) for site in run.sites()}
    phases = {phase: _learning(run, phase, steps, statistics_of) for phase in run.phases}
    in_order = sorted(phases.items(), key=lambda item: item[0] == TRAINING)
    for statistic in run.statistics():
        if only is not None and statistic not in only:
            continue
        sites = [site for site, has in statistics_of.items() if statistic in has]
        for phase, learns in in_order:
            if learns.any():
                names, _, values = run.matrix(statistic, sites=sites, steps=steps, phase=phase, partial=True)
                kept = np.where(learns, np.asarray(values), np.nan)
                found.append((tuple(names), (statistic,), kept))
    return found


def _learning(
    run: Run, phase: str, steps: npt.NDArray[np.int64], statistics_of: dict[str, list[str]]
) -> npt.NDArray[np.bool_]:
    """The steps at which a phase learned."""
    if phase == TRAINING:
        return np.ones(len(steps), np.bool_)
    learns = np.zeros(len(steps), np.bool_)
    for site, statistics in statistics_of.items():
        if kind_of(site) in LEARNED:
            seen = run.series(site, statistics[0], phase, partial=True).steps
            learns |= np.isin(steps, seen)
            if learns.any():
                break
    return learns


def chosen(steps: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The steps of a run that are looked at: all, or of a very long run the first ones and others evenly spread."""
    if len(steps) <= _MOST:
        return steps
    spread = np.linspace(_FIRST, len(steps) - 1, _MOST - _FIRST).round().astype(np.int64)
    return np.asarray(steps[np.unique(np.r_[np.arange(_FIRST), spread])], np.int64)


def _by_step(clock: Any) -> tuple[dict[int, int], dict[int, bool]]:
    passes: dict[int, int] = {}
    skipped: dict[int, bool] = {}
    for step, phase, count, left_out in zip(
        clock.step.tolist(), clock.phase.tolist(), clock.passes.tolist(), clock.skipped.tolist(), strict=True
    ):
        passes[step] = (
            max(int(count), passes.get(step, 0)) if phase == TRAINING else passes.get(step) or int(count)
        )
        skipped[step] = skipped.get(step, False) or bool(left_out)
    return passes, skipped
