"""Answer an assistant's questions about runs with plain data, short enough to be read as text.

Runs are known by their names in the catalog, never by a path. Everything goes through the viewer's gates: foreign text
is cut, and what would move a cursor or hide is spelled out; a NaN or an infinity is null and counted; a large answer is
cut and states its full length. Nothing is written and nothing of a run is executed.

Not here: the protocol (`server`), what the answers are made of (`torchtap.viewer`).
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from torchtap.sanitize import browser_text, shown
from torchtap.viewer.arrays import encode_json
from torchtap.viewer.open_run import OpenRun, Refused
from torchtap.viewer.overview import about_run, comparison_of, coverage_of, findings_of, list_runs
from torchtap.viewer.run_index import Catalog

__all__ = ["QUESTIONS", "compare", "coverage", "findings", "list_all", "series", "sites"]

Answer = dict[str, Any]
_MOST = 500
_POINTS = 24
_LONGEST = 2000


def _facts(encoded: bytes) -> Answer:
    """Return the answer that the page would get, with every text made safe to print."""
    facts: Answer = _spelled(json.loads(encoded))
    return facts


def _spelled(value: object) -> Any:
    if isinstance(value, str):
        return shown(value, _LONGEST)
    if isinstance(value, dict):
        return {shown(key, _LONGEST): _spelled(each) for key, each in value.items()}
    return [_spelled(each) for each in value] if isinstance(value, list) else value


def _meant(given: str, names: Iterable[str]) -> str:
    """Return the run's own spelling of a name that was shown sanitized."""
    names = list(names)
    return given if given in names else next((name for name in names if _told(name) == given), given)


def _told(name: str) -> str:
    return shown(browser_text(name), _LONGEST)


def _cut(entries: list[Any], limit: int) -> Answer:
    """The first entries, and how many there are."""
    limit = max(1, min(limit, _MOST))
    return {"total": len(entries), "shown": entries[:limit]}


def list_all(catalog: Catalog) -> Answer:
    """List the runs: their names, status, number of steps and sites, last loss, and how many findings each has."""
    while catalog.survey():  # each look spends a bounded time
        continue
    return {"runs": _facts(list_runs(catalog))["runs"]}


def findings(catalog: Catalog, run: str, limit: int = 50) -> Answer:
    """Say what looks wrong in a run: the rule, where it begins, since which step, the evidence, and what to do."""
    opened = _fresh(catalog, run)
    found = _facts(findings_of(catalog, opened.name))["findings"]
    return {"run": _told(opened.name), "findings": _cut(found, limit)}


def sites(catalog: Catalog, run: str, pattern: str = "*", limit: int = 200) -> Answer:
    """List the sites of a run that match a pattern such as `blocks.*:output`, with what was recorded of each."""
    about = _facts(about_run(_fresh(catalog, run)))
    statistics = about["statistics"]
    chosen = [
        {
            **site,
            "statistics": statistics[site["statistics"]],
            "tensors": about["tensors"].get(site["name"], []),
        }
        for site in about["sites"]
        if fnmatch.fnmatchcase(site["name"], pattern) or (pattern and pattern in site["name"])
    ]
    return {"run": about["name"], "sites": _cut(chosen, limit)}


def series(catalog: Catalog, run: str, site: str, statistic: str = "", phase: str = "") -> Answer:
    """Sum up one statistic of one site over the steps: range, trend, where it is not finite, and a few points of it."""
    opened = _fresh(catalog, run)
    with opened.lock:
        name = _meant(site, opened.sites)
        recorded = opened.statistics.get(name)
        if not recorded:
            near = [_told(each) for each in opened.sites if site in each][:5]
            hint = f"near it: {', '.join(near)}" if near else "`sites` lists them"
            raise Refused(f"the run has no statistics at a site {site[:200]!r}; {hint}", 404)
        wanted = _meant(statistic, recorded) if statistic else _usual(recorded)
        if wanted not in recorded:
            raise Refused(
                f"{site[:200]!r} has no statistic {statistic[:80]!r}; it has {', '.join(recorded)}", 404
            )
        steps, values = opened.series(name, wanted, phase or None)
    summed = {"run": opened.name, "site": name, "statistic": wanted, "phase": phase or None}
    return _facts(encode_json({**summed, **_summary(steps, values)}))


def coverage(catalog: Catalog, run: str, limit: int = 200) -> Answer:
    """Say what a run was asked to record and did not get, each with the reason; and what was lost or damaged."""
    opened = _fresh(catalog, run)
    facts = _facts(coverage_of(opened))
    return {
        "run": _told(opened.name),
        "planned": facts["planned"],
        "missing": _cut(facts["missing"], limit),
        "problems": _cut(facts["problems"], limit),
        "lost": _cut(facts["lost"], limit),
    }


def compare(catalog: Catalog, reference: str, target: str, limit: int = 40) -> Answer:
    """Compare two runs site by site: the outcome, the first site that differs, and the sites around it."""
    facts = _facts(comparison_of(catalog, _fresh(catalog, reference).name, _fresh(catalog, target).name))
    for name, entries in facts.items():
        if isinstance(entries, list):
            facts[name] = _cut(entries, limit)
    return facts


def _fresh(catalog: Catalog, run: str) -> OpenRun:
    """Return the run after a refresh."""
    catalog.look()
    opened = catalog[_meant(run, catalog.names())]
    opened.refresh()
    return opened


def _usual(recorded: tuple[str, ...]) -> str:
    return next((name for name in ("value", "rms", "std", "l2", "mean") if name in recorded), recorded[0])


def _summary(steps: npt.NDArray[np.int64], values: npt.NDArray[np.float64]) -> Answer:
    finite = np.isfinite(values)
    summary: Answer = {"count": len(values), "not_finite": int((~finite).sum())}
    if not finite.all():
        summary["first_step_not_finite"] = int(steps[~finite][0])
    if not finite.any():
        return summary
    at, numbers = steps[finite], values[finite]
    tenth = max(1, len(numbers) // 10)
    picked = np.unique(np.linspace(0, len(values) - 1, min(_POINTS, len(values))).astype(int))
    return {
        **summary,
        "first": {"step": int(at[0]), "value": float(numbers[0])},
        "last": {"step": int(at[-1]), "value": float(numbers[-1])},
        "least": {"step": int(at[numbers.argmin()]), "value": float(numbers.min())},
        "greatest": {"step": int(at[numbers.argmax()]), "value": float(numbers.max())},
        "median": float(np.median(numbers)),
        "median_of_first_tenth": float(np.median(numbers[:tenth])),
        "median_of_last_tenth": float(np.median(numbers[-tenth:])),
        "points": [[int(steps[index]), float(values[index])] for index in picked],
    }


# Name of the tool, and who answers; each takes the catalog first.
QUESTIONS: dict[str, Callable[..., Answer]] = {
    "list_runs": list_all,
    "findings": findings,
    "sites": sites,
    "series": series,
    "coverage": coverage,
    "compare": compare,
}
