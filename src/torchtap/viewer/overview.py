"""Describe a run: its sites and modules, missing values, findings, comparison.

A run may have been written by a stranger. Texts are cut to a length, shapes to a number of axes, trees to a depth, so
that a hostile run costs no more than a large one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from torchtap import Run
from torchtap.diagnosis.chart import ChartedSite
from torchtap.spi import Name
from torchtap.viewer.arrays import derived_of, encode_json
from torchtap.viewer.open_run import OpenRun
from torchtap.viewer.run_index import Catalog, phases_of, short_text

__all__ = ["about_run", "comparison_of", "coverage_of", "findings_of", "list_runs", "tokens_of"]

_AXES = 16
_DEPTH = 60
_TOKENS = 4096
_text = short_text


def list_runs(catalog: Catalog, since: int = 0, *, managed: bool = False) -> bytes:
    """The runs that changed after ``since``, and the names of all. The page asks this again and again."""
    pending = catalog.survey()
    entries = catalog.entries()
    return encode_json(
        {
            "viewer": catalog.identity,
            "tick": catalog.tick,
            "pending": pending,
            "judging": sum(catalog.may_judge(entry) for entry in entries) if len(entries) > 1 else 0,
            "names": [entry.found.name for entry in entries],
            "runs": [entry.card.line() for entry in entries if entry.tick > since],
            "comparison": catalog.comparison is not None,
            "managed": managed and bool(catalog.shelf.folders),
            "folder": bool(catalog.shelf.folders or catalog.shelf.stores),
        }
    )


def _module(node: Any, depth: int = 0) -> dict[str, Any] | None:
    if not isinstance(node, Mapping) or depth > _DEPTH:
        return None
    children = node.get("children")
    if isinstance(children, Mapping):
        children = list(children.values())
    parameters = node.get("parameters")
    return {
        "name": _text(node.get("name")),
        "path": _text(node.get("path")),
        "class": _text(node.get("class")),
        "source": _text(node.get("source")),
        "parameters": parameters if isinstance(parameters, int) else None,
        "children": [
            child
            for child in (
                _module(entry, depth + 1) for entry in (children if isinstance(children, list) else [])
            )
            if child is not None
        ],
    }


def about_run(shown: OpenRun) -> bytes:
    """Sites in execution order with what is known of each, the tree of modules."""
    with shown.lock:
        run = shown.run
        # Most sites have the same statistics: send each distinct list once.
        lists: dict[tuple[str, ...], int] = {}
        names = set(shown.sites)
        sites = []
        for place in shown.places:
            recorded = list(shown.statistics[place.name])
            statistics = tuple(recorded + derived_of(place.name, recorded, names))
            sites.append({**_site(place), "statistics": lists.setdefault(statistics, len(lists))})
        environment = run.manifest.get("environment")
        return encode_json(
            {
                "name": _text(shown.name),
                "created": _text(run.manifest.get("created")),
                "revision": shown.revision,
                "sites": sites,
                "statistics": [list(names) for names in lists],
                "tensors": _with_tensors(run),
                "model": _module(run.model_tree),
                "environment": {
                    _text(key): _text(value)
                    for key, value in (environment.items() if isinstance(environment, Mapping) else ())
                },
                "ranks": [int(rank) for rank in run.ranks],
                "phases": phases_of(run),
            }
        )


def _site(place: ChartedSite) -> dict[str, object]:
    shape = place.shape
    return {
        "name": place.name,
        "module": _text(place.module),
        "kind": place.kind,
        "class": _text(place.module_class),
        "source": _text(place.source),
        "shape": list(shape) if shape is not None and len(shape) <= _AXES else None,
        "dtype": _text(place.dtype),
    }


def _with_tensors(run: Run) -> dict[str, list[str]]:
    """Return what each site has beside numbers: histograms, tensors, in recorded order."""
    found: dict[str, dict[str, None]] = {}
    for reference in run.tensors():
        what = "histogram" if "histogram" in str(reference.reduction).lower() else "tensor"
        found.setdefault(reference.site, {})[what] = None
    return {site: list(kinds) for site, kinds in found.items()}


def findings_of(catalog: Catalog, name: str) -> bytes:
    """Return the findings, gravest first, and the mark in the tree of each site that a finding names."""
    shown = catalog[name]
    found = shown.findings()
    catalog.note_findings(shown.name, found)
    with shown.lock:
        marks: dict[str, str] = {}
        for finding in found:
            for site in finding.sites:
                if finding.kind == "nonfinite":
                    marks[site] = "nan" if site == finding.site else "spread"
                else:
                    marks.setdefault(site, "warning")
        listed = [finding.to_dict() for finding in found]
        for entry in listed:
            entry["total"] = len(entry["sites"])
            entry["sites"] = entry["sites"][:200]
            for number in entry["evidence"]:
                number["points"] = _points(shown, number["site"], number["statistic"])
        facts = {"verdict": found.verdict, "summary": found.summary(), "revision": shown.revision}
        return encode_json({"findings": listed, "marks": marks, **facts})


def _points(shown: OpenRun, site: str, statistic: str) -> list[float | None]:
    """A recorded series in the space of a word: the values of at most sixty steps, evenly spread."""
    if statistic not in shown.statistics.get(site, ()):
        return []
    values = shown.run.series(site, statistic, partial=True).values
    some = values[np.unique(np.linspace(0, len(values) - 1, min(60, len(values))).round().astype(int))]
    return [float(value) if np.isfinite(value) else None for value in some]


def coverage_of(shown: OpenRun) -> bytes:
    """Return what was selected, what was recorded, and the reason for each missing value."""
    with shown.lock:
        listed = shown.run.manifest.get("sites")
        planned = [
            entry["name"]
            for entry in (listed if isinstance(listed, list) else [])
            if isinstance(entry, Mapping) and isinstance(entry.get("name"), str)
        ]
        noted = shown.run.coverage().get("missing")
        if isinstance(noted, list):
            missing = [
                {"site": _text(entry.get("site")), "reason": _text(entry.get("reason"))}
                for entry in noted
                if isinstance(entry, Mapping)
            ]
        else:  # the session writes the reasons when it ends
            come = set(shown.sites) | {str(Name(place.module, place.kind)) for place in shown.places}
            missing = [{"site": name, "reason": "not arrived yet"} for name in planned if name not in come]
        return encode_json(
            {
                "planned": len(planned),
                "missing": missing[:5000],
                "problems": [_text(problem) for problem in list(shown.run.problems)[:500]],
                "lost": [_text(event.get("message")) for event in shown.run.events("lost")[:500]],
                "revision": shown.revision,
            }
        )


def tokens_of(shown: OpenRun, step: int | None) -> bytes:
    """The token labels of a step: from a `tokens` event of that step, else from the run's labels."""
    with shown.lock:
        labels = shown.run.manifest.get("labels")
        tokens: Any = labels.get("tokens") if isinstance(labels, Mapping) else None
        for event in shown.run.events("tokens"):
            facts = event if isinstance(event, Mapping) else {}
            if step is not None and facts.get("step") == step and "tokens" in facts:
                tokens = facts["tokens"]
    if isinstance(tokens, Mapping):
        tokens = tokens.get(str(step))
    listed = [_text(token)[:40] for token in tokens[:_TOKENS]] if isinstance(tokens, list) else None
    return encode_json({"tokens": listed})


def comparison_of(catalog: Catalog, first: str, second: str) -> bytes:
    """The comparison that the viewer was given, or one of two open runs."""
    if catalog.comparison is not None and not first:
        return encode_json(catalog.comparison)
    return encode_json(catalog.compare(first, second))
