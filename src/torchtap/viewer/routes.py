"""The questions that a page may ask, each a path and parameters, and who answers.

The server and the report use the same table, so that a report holds exactly what the server would have said.
Parameters are parsed here and nowhere else; anything malformed is `Refused`, never an exception from below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torchtap.viewer.attention import entropy_of
from torchtap.viewer.catalog import Catalog
from torchtap.viewer.differences import changes_between, difference_grid
from torchtap.viewer.heatmap import MapWindow, heat_map
from torchtap.viewer.histograms import histograms_of
from torchtap.viewer.opened import OpenRun, Refused
from torchtap.viewer.overview import (
    about_run,
    comparison_of,
    coverage_of,
    findings_of,
    list_runs,
    tokens_of,
)
from torchtap.viewer.ranks import ranks_at, ranks_of
from torchtap.viewer.scalars import scalars_of
from torchtap.viewer.series import series_of
from torchtap.viewer.tensors import SliceWindow, slice_of, span_of, tensors_of

__all__ = ["BINARY", "QUESTIONS", "answer"]

Parameters = Mapping[str, str]
BINARY = frozenset(
    {"map", "series", "scalars", "changes", "ranks", "ranksat", "histograms", "slice", "entropy"}
)


def _whole(parameters: Parameters, name: str, *, least: int = -(2**62), most: int = 2**62) -> int | None:
    text = parameters.get(name)
    if text is None or text == "":
        return None
    try:
        number = int(text[:24])
    except ValueError:
        raise Refused(f"{name}={text[:40]!r} is not a whole number") from None
    if not least <= number <= most:
        raise Refused(f"{name}={number} is not between {least} and {most}")
    return number


def _number(parameters: Parameters, name: str, default: int, least: int, most: int) -> int:
    found = _whole(parameters, name, least=least, most=most)
    return default if found is None else found


def _site(catalog: Catalog, parameters: Parameters) -> str:
    site = parameters.get("site")
    if not site:
        raise Refused("which site? the address has no 'site'")
    return catalog[_run(parameters)].asked(site)


def _map(catalog: Catalog, parameters: Parameters) -> bytes:
    window = MapWindow(
        statistic=catalog[_run(parameters)].asked(parameters.get("statistic", "std")),
        kind=parameters.get("kind", ""),
        under=parameters.get("under", ""),
        first_step=_whole(parameters, "from"),
        last_step=_whole(parameters, "to"),
        first_row=_number(parameters, "top", 0, 0, 2**31),
        last_row=_whole(parameters, "bottom", least=0),
        rows=_number(parameters, "rows", 700, 1, 4096),
        columns=_number(parameters, "columns", 1200, 1, 8192),
        fold=_whole(parameters, "fold", least=1, most=64),
    )
    shown = _shown(catalog, parameters)
    against = parameters.get("against", "")
    if not against or window.statistic == "nonfinite":
        return heat_map(shown, window)
    relative = parameters.get("change") == "relative"
    return heat_map(
        shown,
        window,
        difference_grid(
            shown, catalog[against].in_phase(parameters.get("phase", "")), window.statistic, relative=relative
        ),
    )


def _run(parameters: Parameters) -> str:
    return parameters.get("run", "")


def _shown(catalog: Catalog, parameters: Parameters) -> OpenRun:
    """The run that is asked about, in the phase that is asked for."""
    return catalog[_run(parameters)].in_phase(parameters.get("phase", ""))


def _scalars(catalog: Catalog, parameters: Parameters) -> bytes:
    return scalars_of(
        catalog[_run(parameters)],
        _site(catalog, parameters),
        phase=parameters.get("phase") or None,
        smooth=_number(parameters, "smooth", 0, 0, 999) / 1000,
        points=_number(parameters, "points", 2000, 2, 100_000),
    )


def _changes(catalog: Catalog, parameters: Parameters) -> bytes:
    run = _shown(catalog, parameters)
    against = parameters.get("against", "")
    return changes_between(
        run,
        catalog[against].in_phase(parameters.get("phase", "")) if against else run,
        run.asked(parameters.get("statistic", "rms")),
        parameters.get("kind", ""),
        _whole(parameters, "before"),
        _whole(parameters, "after"),
    )


def _series(catalog: Catalog, parameters: Parameters) -> bytes:
    shown = _shown(catalog, parameters)
    statistics = [shown.asked(name) for name in parameters.get("statistics", "").split(",")[:40] if name]
    return series_of(
        shown,
        _site(catalog, parameters),
        statistics,
        _whole(parameters, "from"),
        _whole(parameters, "to"),
        _number(parameters, "points", 1600, 2, 100_000),
    )


def _slice(catalog: Catalog, parameters: Parameters) -> bytes:
    try:
        index = tuple(int(part[:24]) for part in parameters.get("index", "").split(",")[:32] if part != "")
    except ValueError:
        raise Refused("index is a list of whole numbers, one for each axis") from None
    window = SliceWindow(
        step=_whole(parameters, "step"),
        field=parameters.get("field", "value"),
        down=_whole(parameters, "down"),
        across=_whole(parameters, "across"),
        stack=_whole(parameters, "stack"),
        index=index,
        first_row=_number(parameters, "top", 0, 0, 2**40),
        last_row=_whole(parameters, "bottom", least=1),
        first_column=_number(parameters, "left", 0, 0, 2**40),
        last_column=_whole(parameters, "right", least=1),
        size=_number(parameters, "size", 512, 1, 2048),
    )
    shown = _shown(catalog, parameters)
    minus_run, minus_step = parameters.get("minusRun", ""), _whole(parameters, "minusStep")
    if not minus_run and minus_step is None:
        return slice_of(shown, _site(catalog, parameters), window)
    other = catalog[minus_run] if minus_run else shown
    return slice_of(
        shown, _site(catalog, parameters), window, (other, window.step if minus_step is None else minus_step)
    )


def _ranks(catalog: Catalog, parameters: Parameters) -> bytes:
    shown = _shown(catalog, parameters)
    statistic = shown.asked(parameters.get("statistic", "rms"))
    return ranks_of(shown, _site(catalog, parameters), statistic)


def _ranks_at(catalog: Catalog, parameters: Parameters) -> bytes:
    shown = _shown(catalog, parameters)
    statistic = shown.asked(parameters.get("statistic", "rms"))
    return ranks_at(shown, statistic, parameters.get("kind", ""), _whole(parameters, "step"))


QUESTIONS: dict[str, Callable[[Catalog, Parameters], bytes]] = {
    "runs": lambda catalog, p: list_runs(catalog, _number(p, "since", 0, 0, 2**53)),
    "about": lambda catalog, p: about_run(catalog[_run(p)]),
    "findings": lambda catalog, p: findings_of(catalog, _run(p)),
    "coverage": lambda catalog, p: coverage_of(catalog[_run(p)]),
    "tokens": lambda catalog, p: tokens_of(catalog[_run(p)], _whole(p, "step")),
    "map": _map,
    "series": _series,
    "scalars": _scalars,
    "changes": _changes,
    "ranks": _ranks,
    "ranksat": _ranks_at,
    "histograms": lambda catalog, p: histograms_of(
        _shown(catalog, p), _site(catalog, p), linear=p.get("axis") != "recorded"
    ),
    "entropy": lambda catalog, p: entropy_of(_shown(catalog, p), _site(catalog, p)),
    "tensors": lambda catalog, p: tensors_of(_shown(catalog, p), _site(catalog, p)),
    "span": lambda catalog, p: span_of(_shown(catalog, p), _site(catalog, p), p.get("field", "value")),
    "slice": _slice,
    "comparison": lambda catalog, p: comparison_of(catalog, p.get("a", ""), p.get("b", "")),
}


def answer(catalog: Catalog, question: str, parameters: Parameters) -> bytes:
    """The body for one question."""
    asked = QUESTIONS.get(question)
    if asked is None:
        raise Refused(f"unknown question {question[:40]!r}", 404)
    return asked(catalog, parameters)
