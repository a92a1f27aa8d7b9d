"""`diagnose`: judge a run by every rule and return the findings.

`RuleRunner` judges a growing chart: a rule that raises costs itself only, and a finding stays as it was first made. The
same object judges a finished run portion by portion, so both give the same findings. Never imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, final

from torchtap.diagnosis.chart import Chart, chart_of, fill
from torchtap.diagnosis.finding import Coverage, Finding, Findings, Unjudged
from torchtap.diagnosis.learned import Invariants, read_invariants, what_no_longer_holds
from torchtap.diagnosis.rule_type import EVERY_STEP, Rule
from torchtap.diagnosis.rules import all_rules
from torchtap.errors import RunError
from torchtap.progress import Listener, showing, tracked

if TYPE_CHECKING:
    from torchtap.placement import Placement
    from torchtap.store.read.reader import Run

__all__ = ["RuleRunner", "diagnose"]


@final
class RuleRunner:
    """The findings of one training so far."""

    def __init__(self, chart: Chart, rules: Sequence[Rule]) -> None:
        self.chart = chart
        self._rules = list(rules)
        self._found: dict[tuple[str, str], Finding] = {}
        self._failed: dict[str, str] = {}

    def look(self, *, pulse: bool = False) -> list[Finding]:
        """Judge by every rule, or by those of the pulse alone; return what is new."""
        new: list[Finding] = []
        for rule in self._rules:
            if rule.name in self._failed or (pulse and EVERY_STEP not in rule.needs):
                continue
            try:
                for finding in rule.judge(self.chart):
                    key = (finding.kind, finding.severity)
                    if key not in self._found:
                        self._found[key] = finding
                        new.append(finding)
            except Exception as error:
                self._failed[rule.name] = f"it raised {type(error).__name__}: {error}"
        return sorted(new, key=lambda finding: finding.rank)

    def findings(self) -> Findings:
        """Everything that was found, and which rules could not judge."""
        unjudged = [Unjudged(name, reason) for name, reason in self._failed.items()]
        unjudged += [
            Unjudged(rule.name, reason)
            for rule in self._rules
            if (not rule.ranks or len(self.chart.ranks) > 1)
            and rule.name not in self._failed
            and (reason := rule.missing(self.chart))
        ]
        apply = [rule for rule in self._rules if not rule.ranks or len(self.chart.ranks) > 1]
        left = {each.rule for each in unjudged}
        return Findings(self._found.values(), unjudged, self._coverage(apply, left))

    def _coverage(self, rules: list[Rule], left: set[str]) -> Coverage:
        seen = max(self.chart.seen, self.chart.pulse.seen)
        newest = [int(each.steps[-1]) for each in (self.chart, self.chart.pulse) if len(each.steps)]
        steps = max([seen, *(step + 1 - self.first for step in newest)])
        return Coverage(sum(rule.name not in left for rule in rules), len(rules), seen, steps)

    @property
    def first(self) -> int:
        """Return the first step that was seen."""
        return min(
            (int(each.steps[0]) for each in (self.chart, self.chart.pulse) if len(each.steps)), default=0
        )


_BESIDE = frozenset(
    ("mean", "l1", "l2", "absmax", "fingerprint", "projection", "value")
)  # what tells ranks apart
_BYTES = 2 * 320 * 8  # of a number's columns in a chart, which has room for as many again
_MOST_RANKS = 512  # compared with each other: about half a minute
_MEMORY = 4 << 30


def diagnose(
    run: Run | str | os.PathLike[str],
    *,
    rules: Sequence[Rule] | None = None,
    against: Invariants | str | os.PathLike[str] | None = None,
    progress: bool | Listener | None = None,
) -> Findings:
    """What looks wrong in ``run`` (a run or the path of one): an empty list if nothing does.

    ``rules`` are those to ask, with limits of your own; without it all that are installed. ``unjudged`` of the answer
    names the rules that could not judge this run, and what to record for them. ``against`` is what `learn` has
    learned from good runs, or the file of it: what of it no longer holds is told, too. ``progress=True`` shows a bar; a
    function is called with what is done, how many parts, and of how many.

    >>> for finding in diagnose("runs/exp1"):  # doctest: +SKIP
    ...     print(finding)
    """
    with showing(progress):
        return _diagnose(run, rules, against)


def _diagnose(
    run: Run | str | os.PathLike[str],
    rules: Sequence[Rule] | None,
    against: Invariants | str | os.PathLike[str] | None,
) -> Findings:
    if isinstance(run, (str, os.PathLike)):
        from torchtap.store.read.reader import open_run

        run = open_run(run, partial=True)
    learned = read_invariants(against) if isinstance(against, (str, os.PathLike)) else against
    failed: dict[str, str] = {}
    if rules is None:
        rules, failed = all_rules()
    runner = RuleRunner(chart_of(run), rules)
    for _ in tracked(fill(runner.chart, run), "judging steps"):
        runner.look()
    unjudged = [Unjudged(name, why) for name, why in failed.items()]
    if len(run.ranks) > 1 and run.shown_rank is None:
        unjudged += _look_at_ranks(runner, run)
    found = runner.findings()
    broken = Findings() if learned is None else what_no_longer_holds(learned, run)
    return Findings([*found, *broken], (*found.unjudged, *unjudged, *broken.unjudged), found.coverage)


def _look_at_ranks(runner: RuleRunner, run: Run) -> list[Unjudged]:
    """Ask the rules that compare ranks; what is left out of it is told."""
    ranks = run.ranks[: _most_ranks(run)]
    runner.chart.ranks = _charts_of_ranks(run, ranks)
    runner.chart.ends = {rank: str(status) for rank, status in run.statuses.items()}
    runner.look()
    if not runner.chart.ranks or len(ranks) == len(run.ranks):
        return []
    why = f"of {len(run.ranks):,} ranks the first {len(ranks):,} are compared with each other"
    return [Unjudged("ranks", why)]


def _most_ranks(run: Run) -> int:
    """Return how many ranks' charts are made: as many as fit, of a run with many sites."""
    first = run.rank(run.ranks[0])
    held = sum(len(_BESIDE.intersection(first.statistics(site))) for site in first.sites())
    return max(2, min(_MOST_RANKS, _MEMORY // max(1, held * _BYTES)))


def _charts_of_ranks(run: Run, ranks: Sequence[int]) -> dict[int, Chart]:
    """What ranks recorded, as far as rules on ranks look; of a rank that cannot be read, `Run.problems` tells."""
    charts: dict[int, Chart] = {}
    for rank in tracked(ranks, "reading ranks"):
        with suppress(RunError):
            own = run.rank(rank)
            charts[rank] = chart_of(own)
            for _ in fill(charts[rank], own, _BESIDE):
                pass
            charts[rank].placed = _placements(own)
    return charts


def _placements(run: Run) -> Callable[[str], Placement | None]:
    known = set(run.sites())
    return lambda site: run.placement(site) if site in known else None
