"""One site as every rank saw it: ranks down, steps across."""

from __future__ import annotations

import numpy as np

from torchtap.viewer.downsample import extremes
from torchtap.viewer.opened import OpenRun, Refused
from torchtap.viewer.wire import pack

__all__ = ["ranks_of"]

_MOST = 256


def ranks_of(shown: OpenRun, site: str, statistic: str, columns: int = 600) -> bytes:
    """Array low and high: ranks × steps, NaN where a rank recorded nothing."""
    with shown.lock:
        ranks = shown.run.ranks[:_MOST]
        if len(ranks) < 2:
            raise Refused("one rank wrote this run", 404)
        found = {}
        for rank in ranks:
            run = shown.remember(("rank", str(rank)), lambda rank=rank: shown.run.rank(rank))  # type: ignore[misc]
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
    low, high, _, starts = extremes(values, _MOST, columns)
    facts = {"site": site, "statistic": statistic, "ranks": ranks, "total": len(steps), "revision": revision}
    return pack(facts, {"low": low, "high": high, "steps": steps[starts].astype(np.float64)})
