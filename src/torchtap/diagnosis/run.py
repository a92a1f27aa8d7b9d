"""`diagnose`: a run in, its findings out, the gravest first.

Reads through the public reader only and never imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from torchtap.diagnosis.chart import Chart
from torchtap.diagnosis.finding import Findings, Unjudged
from torchtap.diagnosis.judging import Ward
from torchtap.diagnosis.learned.holding import what_no_longer_holds
from torchtap.diagnosis.learned.invariants import Invariants, read_invariants
from torchtap.diagnosis.reading import chart_of, fill
from torchtap.diagnosis.rules.base import Rule
from torchtap.diagnosis.rules.registry import all_rules
from torchtap.errors import RunError

if TYPE_CHECKING:
    from torchtap.placement import Placement
    from torchtap.store.read.reader import Run

__all__ = ["diagnose"]


def diagnose(
    run: Run | str | os.PathLike[str],
    *,
    rules: Sequence[Rule] | None = None,
    against: Invariants | str | os.PathLike[str] | None = None,
) -> Findings:
    """What looks wrong in ``run`` (a run or the path of one): an empty list if nothing does.

    ``rules`` are those to ask, with limits of your own; without it all that are installed. ``unjudged`` of the answer
    names the rules that could not judge this run, and what to record for them. ``against`` is what `learn` has
    learned from good runs, or the file of it: what of it no longer holds is told, too.

    >>> for finding in diagnose("runs/exp1"):  # doctest: +SKIP
    ...     print(finding)
    """
    if isinstance(run, (str, os.PathLike)):
        from torchtap.store.read.reader import open_run

        run = open_run(run, partial=True)
    learned = read_invariants(against) if isinstance(against, (str, os.PathLike)) else against
    failed: dict[str, str] = {}
    if rules is None:
        rules, failed = all_rules()
    ward = Ward(chart_of(run), rules)
    for _ in fill(ward.chart, run):
        ward.look()
    if len(run.ranks) > 1 and run.shown_rank is None:
        ward.chart.ranks = _charts_of_ranks(run)
        ward.chart.ends = {rank: str(status) for rank, status in run.statuses.items()}
        ward.look()
    found = ward.findings()
    broken = Findings() if learned is None else what_no_longer_holds(learned, run)
    unimported = (Unjudged(name, why) for name, why in failed.items())
    return Findings([*found, *broken], (*found.unjudged, *unimported, *broken.unjudged))


def _charts_of_ranks(run: Run) -> dict[int, Chart]:
    """What each rank recorded; of a rank that cannot be read, `Run.problems` tells."""
    charts: dict[int, Chart] = {}
    for rank in run.ranks:
        with suppress(RunError):
            own = run.rank(rank)
            charts[rank] = _whole_chart(own)
            charts[rank].placed = _placements(own)
    return charts


def _placements(run: Run) -> Callable[[str], Placement | None]:
    known = set(run.sites())
    return lambda site: run.placement(site) if site in known else None


def _whole_chart(run: Run) -> Chart:
    chart = chart_of(run)
    for _ in fill(chart, run):
        pass
    return chart
