"""A run of several ranks: one site as every rank saw it over time, and every site by ranks at one step."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from torchtap.plan.names import kind_of
from torchtap.sanitize import browser_text
from torchtap.store.read.reader import Run
from torchtap.viewer.downsample import extremes
from torchtap.viewer.opened import OpenRun, Refused
from torchtap.viewer.wire import pack

__all__ = ["ranks_at", "ranks_of"]

_MOST = 4096  # ranks
_ROWS = 256  # of a map; further ranks share one
_CELLS = 100_000  # of a map of a site
_MOST_SITES = 4000
_NUMBERS = 2_000_000  # of a map of a step


def ranks_of(shown: OpenRun, site: str, statistic: str, columns: int = 600) -> bytes:
    """Array low and high: ranks × steps, NaN where a rank recorded nothing; of many ranks, neighbours share a row."""
    with shown.lock:
        ranks = _ranks(shown)
        found = {}
        for rank in ranks:
            run = _rank(shown, rank)
            if site in run.sites() and statistic in run.statistics(site):
                found[rank] = run.series(site, statistic)
        revision = shown.revision
    if not found:
        raise Refused(f"no rank has the statistic {statistic!r} of {site!r}", 404)
    steps = np.unique(np.concatenate([series.steps for series in found.values()]))
    values = np.full((len(ranks), len(steps)), np.nan)
    for row, rank in enumerate(ranks):
        if rank in found:
            values[row, np.searchsorted(steps, found[rank].steps)] = found[rank].values
    rows = min(len(ranks), _ROWS)
    low, high, first, starts = extremes(values, rows, min(columns, _CELLS // rows))
    shown_ranks = [ranks[row] for row in first.tolist()]
    facts = {
        "site": site,
        "statistic": statistic,
        "ranks": shown_ranks,
        "total": len(steps),
        "revision": revision,
    }
    return pack(facts, {"low": low, "high": high, "steps": steps[starts].astype(np.float64)})


def ranks_at(shown: OpenRun, statistic: str, kind: str, step: int | None) -> bytes:
    """Array values: sites × ranks at one step (None: the last that was recorded), NaN where a rank has nothing.

    ``shares`` says for each site what its ranks hold: the same, or parts. Ranks that hold the same and have
    other numbers have gone different ways.
    """
    with shown.lock:
        ranks = _ranks(shown)
        sites = _sites_with(shown, statistic, kind)[: min(_MOST_SITES, _NUMBERS // len(ranks))]
        steps = shown.run.steps()
        if not sites or not len(steps):
            raise Refused("no site of this kind has this statistic", 404)
        at = int(steps[-1]) if step is None else step
        columns = [_column(_rank(shown, rank), statistic, sites, at) for rank in ranks]
        facts = {
            "statistic": statistic,
            "step": at,
            "ranks": ranks,
            "statuses": [str(shown.run.statuses.get(rank, "")) for rank in ranks],
            "sites": [browser_text(site) for site in sites],
            "shares": [_share(shown.run, site) for site in sites],
            "revision": shown.revision,
        }
    return pack(facts, {"values": np.stack(columns, axis=1)})


def _sites_with(shown: OpenRun, statistic: str, kind: str) -> list[str]:
    """The sites of a kind, or of any where none is named, that have a statistic."""
    found = [site for site in shown.sites if statistic in shown.statistics[site]]
    return [site for site in found if kind_of(site) == kind] if kind else found


def _column(run: Run, statistic: str, sites: list[str], step: int) -> npt.NDArray[np.float64]:
    """A statistic of these sites at a step, as one rank recorded it; NaN where it has nothing."""
    values = np.full(len(sites), np.nan)
    there = set(run.sites())
    rows = [row for row, site in enumerate(sites) if site in there]
    if rows:
        chosen = [sites[row] for row in rows]
        values[rows] = run.matrix(statistic, chosen, [step], partial=True).values[:, 0]
    return values


def _ranks(shown: OpenRun) -> list[int]:
    ranks = shown.run.ranks[:_MOST]
    if len(ranks) < 2:
        raise Refused("one rank wrote this run", 404)
    return ranks


def _rank(shown: OpenRun, rank: int) -> Run:
    return shown.remember(("rank", str(rank)), lambda: shown.run.rank(rank))


def _share(run: Run, site: str) -> str:
    """What the ranks of a site hold: ``same``, ``parts``, or nothing where nobody said."""
    placement = run.placement(site)
    if placement is None or not placement.known:
        return ""
    shared = any(axis.size > 1 and axis.share.kind != "replicate" for axis in placement.axes)
    return "parts" if shared else "same"
