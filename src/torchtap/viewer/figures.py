"""Draw runs without the page: matplotlib figures, and static HTML with SVG for notebooks.

The HTML contains no JavaScript and loads nothing, so it survives notebooks, e-mail and version control. Every text that
originates in a file is escaped. `picture_of` chooses sites and statistic for figures, notebooks and the terminal alike.
"""

from __future__ import annotations

import fnmatch
import io
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, final

import numpy as np
import numpy.typing as npt

from torchtap.diagnosis.chart import places
from torchtap.errors import SelectionError, TorchtapError, needing
from torchtap.sanitize import in_html, shown
from torchtap.viewer.arrays import NOT_FINITE, css, extremes, sequential

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from torchtap import Run
    from torchtap.diagnosis.finding import Finding, Findings

__all__ = [
    "Picture", "comparison_html", "findings_html", "map_svg", "matching_sites", "picture_of", "plot",
    "run_html", "seen_html", "series_svg", "usual_statistic",
]  # fmt: skip


_USUAL = ("rms", "std", "l2", "absmax", "mean")
_KINDS = ("output", "grad_output", "param_grad", "param", "input", "grad_input", "value")


@final
@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """One statistic of some sites, in execution order against steps."""

    statistic: str
    sites: list[str]
    steps: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]
    broken: npt.NDArray[np.bool_]  # where NaN or an infinity was recorded


def usual_statistic(names: Sequence[str]) -> str:
    """Return the most informative statistic among ``names``."""
    return next((name for name in _USUAL if name in names), names[0] if names else "std")


def matching_sites(run: Run, patterns: Sequence[str] | None, kind: str | None = None) -> list[str]:
    """Sites in execution order: those that match any pattern (``blocks.*:output``), else those of a kind,
    else those of the first kind that was recorded."""
    listed = places(run)
    if patterns:
        found = [place.name for place in listed if _matches(place.name, patterns)]
        if not found:
            raise SelectionError(f"none of the run's {len(listed)} sites matches {', '.join(patterns)}")
        return found
    there = sorted({place.kind for place in listed})
    if kind and kind not in there:
        raise SelectionError(f"the run has no sites of kind {kind!r}; it has {', '.join(there)}")
    wanted = kind or next((k for k in (*_KINDS, *there) if k in there), "")
    return [place.name for place in listed if place.kind == wanted]


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def picture_of(
    run: Run, statistic: str | None = None, sites: Sequence[str] | None = None, kind: str | None = None
) -> Picture:
    """The numbers of a picture."""
    names = matching_sites(run, sites, kind)
    held = {site: run.statistics(site) for site in names}
    if statistic is None:
        statistic = usual_statistic(next((list(s) for s in held.values() if s), []))
    having = [site for site in names if statistic in held[site]]
    if not having:
        raise SelectionError(f"none of these sites has a statistic {statistic!r}")
    matrix = run.matrix(statistic, sites=having)
    values, steps = np.asarray(matrix.values), np.asarray(matrix.steps)
    return Picture(statistic, list(matrix.sites), steps, values, _broken(run, having, steps, held))


def _broken(
    run: Run, sites: list[str], steps: npt.NDArray[np.int64], held: dict[str, list[str]]
) -> npt.NDArray[np.bool_]:
    """Return True for each step at which a value that is not finite was counted or logged."""
    found = np.zeros((len(sites), len(steps)), dtype=bool)
    for name in ("nans", "infs"):
        rows = [row for row, site in enumerate(sites) if name in held[site]]
        if rows:
            counts = run.matrix(name, [sites[row] for row in rows], steps).values
            found[rows] |= np.nan_to_num(counts) > 0
    for row, site in enumerate(sites):
        if "value" in held[site]:
            series = run.series(site, "value")
            there = np.isin(series.steps, steps) & ~np.isfinite(series.values)
            found[row, np.searchsorted(steps, series.steps[there])] = True
    return found


_MOST_LINES = 8
_MOST_NAMES = 40
_LINEAR = frozenset({"mean", "min", "max", "zeros", "count", "value"})


def plot(
    run: Run | str | os.PathLike[str],
    sites: str | Sequence[str] | None = None,
    statistic: str | None = None,
    *,
    kind: str | None = None,
    log: bool | None = None,
    size: tuple[float, float] = (10.0, 6.0),
) -> Figure:
    """One statistic of ``sites`` (names or patterns such as ``blocks.*:output``) over the steps of a run.

    Up to eight sites are lines; more are a map with the sites in execution order from top to bottom. Without
    ``sites``, all of ``kind``; ``log`` is chosen by the statistic unless given.
    """
    with needing("matplotlib", "plot", who="plot"):
        figure = _shown_figure()(figsize=size, layout="constrained")
    if isinstance(run, (str, os.PathLike)):
        from torchtap import open as open_run

        run = open_run(run)
    picture = picture_of(run, statistic, [sites] if isinstance(sites, str) else sites, kind)
    if log is None:
        log = picture.statistic not in _LINEAR
    log = log and bool((picture.values > 0).any())
    axes = figure.subplots()
    if len(picture.sites) <= _MOST_LINES:
        _lines(axes, picture, log)
    else:
        _map(figure, axes, picture, log)
    axes.set_xlabel("step")
    return figure


@cache
def _shown_figure() -> type[Figure]:
    """Return a figure class that notebooks show as a picture without ``%matplotlib inline``."""
    from matplotlib.figure import Figure

    class ShownFigure(Figure):
        """A matplotlib figure that is a picture at the end of a notebook's cell."""

        def _repr_png_(self) -> bytes:
            file = io.BytesIO()
            self.savefig(file, format="png", dpi=100)
            return file.getvalue()

    return ShownFigure


def _label(name: str) -> str:
    """A name as matplotlib draws it: dollars begin formulas, and an underscore in front hides a line."""
    text = shown(name, 120).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def _lines(axes: Any, picture: Picture, log: bool) -> None:
    for site, values, broken in zip(picture.sites, picture.values, picture.broken, strict=True):
        there = (
            np.isfinite(values) | broken
        )  # a line has a gap at a NaN, not at a step that it has no record of
        shown = np.where(broken, np.nan, values)
        (line,) = axes.plot(picture.steps[there], shown[there], label=_label(site), linewidth=1.4)
        if broken.any():
            edge = {"transform": axes.get_xaxis_transform(), "clip_on": False, "linestyle": ""}
            label = f"{_label(site)}: NaN or inf"
            at = picture.steps[broken]
            axes.plot(at, np.zeros(len(at)), marker="x", color=line.get_color(), label=label, **edge)
    if log:
        axes.set_yscale("log")
    axes.set_ylabel(_label(picture.statistic))
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize="small")


def _map(figure: Any, axes: Any, picture: Picture, log: bool) -> None:
    from matplotlib.colors import ListedColormap, LogNorm, Normalize, to_rgb

    colours = ListedColormap(np.array(sequential()) / 255.0).with_extremes(bad="#e6e9ee")
    values = np.ma.masked_invalid(picture.values)
    finite = values.compressed()
    if log:
        finite = finite[finite > 0]
    low, high = np.quantile(finite, [0.005, 0.995]) if len(finite) else (0.1, 1.0)
    scale = LogNorm(low, max(high, low * 1.01)) if log else Normalize(low, high if high > low else low + 1)
    if log:
        values = np.ma.maximum(values, low / 10)  # an exact zero is less than anything on the scale
    ends = (picture.steps[0] - 0.5, picture.steps[-1] + 0.5, len(picture.sites) - 0.5, -0.5)
    image = axes.imshow(values, aspect="auto", interpolation="nearest", cmap=colours, norm=scale, extent=ends)
    if picture.broken.any():
        red = ListedColormap([to_rgb(NOT_FINITE)])
        bad = np.ma.masked_equal(picture.broken, False)
        axes.imshow(bad, aspect="auto", interpolation="nearest", cmap=red, extent=ends)
        axes.set_title("red: NaN or inf, grey: not recorded", fontsize="small", loc="left")
    shown_rows = np.unique(
        np.linspace(0, len(picture.sites) - 1, min(_MOST_NAMES, len(picture.sites))).astype(int)
    )
    axes.set_yticks(shown_rows, [_label(picture.sites[row]) for row in shown_rows], fontsize="x-small")
    figure.colorbar(image, ax=axes, label=_label(picture.statistic), extend="both")


_STYLE = "font:13px/1.4 system-ui,sans-serif;max-width:760px"
_DIM = "opacity:.65"


def run_html(run: Run) -> str:
    """A run: its facts, what was found, and its map."""
    steps = run.steps()
    facts = f"{len(steps):,} steps, {len(run.sites()):,} sites, {in_html(str(run.status))}"
    parts = [f"<div style='{_STYLE}'><b>{in_html(str(run.path))}</b> <span style='{_DIM}'>{facts}</span>"]
    parts += _findings(run)
    try:
        picture = picture_of(run)
        caption = f"{in_html(picture.statistic)}, sites in execution order over steps, red: NaN or infinity"
        parts.append(f"<div style='{_DIM};margin-top:6px'>{caption}</div>")
        parts.append(map_svg(picture.values, sites=picture.sites, steps=picture.steps, broken=picture.broken))
    except TorchtapError:
        parts.append(f"<div style='{_DIM}'>no statistics yet</div>")
    parts += [f"<div>{in_html(problem)}</div>" for problem in run.problems[:5]]
    return "".join([*parts, "</div>"])


def _findings(run: Run) -> list[str]:
    from torchtap.diagnosis.diagnose import diagnose

    return [_finding(finding, short=True) for finding in diagnose(run)[:6]]


def _finding(finding: Finding, *, short: bool) -> str:
    colour = {"error": NOT_FINITE, "warning": "#b7791f"}.get(finding.severity, "#2b7bd6")
    style = f"border-left:3px solid {colour};padding-left:8px;margin:3px 0"
    if short:
        return f"<div style='{style}'>{in_html(finding.message)}</div>"
    where = "" if finding.step is None else f" <span style='{_DIM}'>step {finding.step:,}</span>"
    lines = [f"<b>{in_html(finding.kind)}</b>{where}", in_html(finding.message)]
    lines += [f"<span style='{_DIM}'>perhaps: {in_html(cause)}</span>" for cause in finding.causes[:3]]
    lines.append(f"<span style='{_DIM}'>{in_html(finding.advice)}</span>")
    return f"<div style='{style};margin:8px 0'>{''.join(f'<div>{line}</div>' for line in lines)}</div>"


def findings_html(findings: Findings, *, most: int = 20) -> str:
    """Draw findings: each with its message, causes and advice, then what was judged."""
    parts = [_finding(finding, short=False) for finding in findings[:most]]
    more = f"<div style='{_DIM}'>{len(findings) - most} more</div>" if len(findings) > most else ""
    summary = f"<div>{in_html(findings.summary())}</div>"
    return f"<div style='{_STYLE}'>{''.join(parts)}{more}{summary}</div>"


def seen_html(seen: Mapping[str, Any], *, most: int = 60) -> str:
    """Show captured values: shape, type and size of each."""
    rows = []
    for name in list(seen)[:most]:
        value = seen[name]
        cells = _cells_of(value)
        rows.append(
            f"<tr><td><code>{in_html(name)}</code></td>" + "".join(f"<td>{c}</td>" for c in cells) + "</tr>"
        )
    more = f"<div style='{_DIM}'>{len(seen) - most} more</div>" if len(seen) > most else ""
    return f"<div style='{_STYLE}'><b>{len(seen)} sites</b><table>{''.join(rows)}</table>{more}</div>"


def _cells_of(value: Any) -> tuple[str, str, str]:
    """Return shape, dtype and size of a captured value; what is not finite is counted."""
    shape = getattr(value, "shape", None)
    if shape is None:
        return "", "", in_html(", ".join(map(str, value)) if isinstance(value, Mapping) else str(value)[:80])
    numbers = value.detach().double().abs().cpu().numpy() if hasattr(value, "detach") else np.abs(value)
    finite = numbers[np.isfinite(numbers)]
    top = f"largest magnitude {_number(float(finite.max()))}" if len(finite) else "no finite value"
    lost = numbers.size - len(finite)
    bad = f" <span style='color:{NOT_FINITE}'>{lost:,} NaN or inf</span>" if lost else ""
    text = top + bad if numbers.size else "empty"
    return "×".join(map(str, shape)) or "scalar", str(value.dtype).removeprefix("torch."), text


def _number(value: float) -> str:
    if math.isfinite(value):
        return f"{value:.4g}"
    return "NaN" if math.isnan(value) else "inf" if value > 0 else "−inf"


def comparison_html(comparison: Any) -> str:
    """A comparison: the verdict and the error along depth, the first divergence marked."""
    rows = [row for row in comparison.rows if isinstance(row.error, (int, float))]
    errors = np.array([float(row.error) for row in rows])
    first = next(
        (i for i, row in enumerate(rows) if comparison.first and row.site == comparison.first.site), None
    )
    return (
        f"<div style='{_STYLE}'><b>{in_html(str(comparison.verdict))}</b>"
        f"<div style='{_DIM}'>error along depth, {len(rows)} sites, logarithmic</div>"
        f"{series_svg(errors, width=700, height=120, log=True, mark=first)}</div>"
    )


def series_svg(
    values: npt.NDArray[np.floating] | Sequence[float],
    *,
    width: int = 320,
    height: int = 34,
    log: bool = False,
    mark: int | None = None,
) -> str:
    """A series as a small line that keeps every extreme."""
    numbers = np.asarray(values, dtype=np.float64).reshape(1, -1)
    count = numbers.shape[1]
    bad = [2 + (at + 0.5) * (width - 4) / count for at in np.flatnonzero(~np.isfinite(numbers[0]))[:2000]]
    red = "".join(
        f"<rect x='{x - 1:.1f}' y='{height - 6}' width='2' height='6' fill='{NOT_FINITE}'/>" for x in bad
    )
    numbers = np.where(np.isfinite(numbers), numbers, np.nan)
    low, high, _, _ = extremes(numbers, 1, max(1, width // 2))
    ends = np.stack([low[0], high[0]]).astype(np.float64)
    if log:
        ends = np.log10(np.where(ends > 0, ends, np.nan))
    finite = ends[np.isfinite(ends)]
    if not len(finite):
        return f"<svg width='{width}' height='{height}' role='img' aria-label='no finite value'>{red}</svg>"
    least, most = float(finite.min()), float(finite.max())
    span = most - least or 1.0
    columns = ends.shape[1]
    points = [
        f"{2 + (column + 0.5) * (width - 4) / columns:.1f},{3 + (most - end) / span * (height - 6):.1f}"
        for column in range(columns)
        for end in ends[:, column]
        if np.isfinite(end)
    ]
    line = f"<polyline points='{' '.join(points)}' fill='none' stroke='#2b7bd6' stroke-width='1.3'/>"
    flag = ""
    if mark is not None and count:
        x = 2 + (mark + 0.5) * (width - 4) / count
        flag = f"<line x1='{x:.1f}' x2='{x:.1f}' y1='0' y2='{height}' stroke='{NOT_FINITE}' stroke-dasharray='4 3'/>"
    return f"<svg width='{width}' height='{height}' role='img' aria-label='series'>{line}{red}{flag}</svg>"


def map_svg(
    values: npt.NDArray[np.floating],
    *,
    sites: Sequence[str] = (),
    steps: Sequence[int] | npt.NDArray[np.int64] = (),
    broken: npt.NDArray[np.bool_] | None = None,
    width: int = 720,
    height: int = 240,
) -> str:
    """Depth against time in at most 48 × 120 cells; each shows the largest value under it, red what is not finite.

    ``sites`` are written at the left, ``steps`` below.
    """
    rows, columns = min(48, values.shape[0]), min(120, values.shape[1])
    if not rows or not columns:
        return ""
    _, high, row_starts, column_starts = extremes(
        np.where(np.isfinite(values), values, np.nan), rows, columns
    )
    bad = np.isinf(values) if broken is None else broken | np.isinf(values)
    bad = np.add.reduceat(np.add.reduceat(bad.astype(int), column_starts, axis=1), row_starts, axis=0) > 0
    with np.errstate(divide="ignore", invalid="ignore"):
        shown = np.log10(high) if (high[np.isfinite(high)] > 0).all() else high.astype(np.float64)
    finite = shown[np.isfinite(shown)]
    low, top = np.quantile(finite, [0.01, 0.99]) if len(finite) else (0.0, 1.0)
    left = _gutter(sites)
    bottom = 18 if len(steps) else 0
    across, down = (width - left) / columns, height / rows
    cells = []
    for row in range(rows):
        colours = [
            NOT_FINITE if bad[row, column] else _colour(float(shown[row, column]), float(low), float(top))
            for column in range(columns)
        ]
        cells += _stretches(colours, left, row * down, across, down)
    labels = _names(sites, row_starts, left, down) + _ticks(steps, column_starts, left, across, height)
    shape = f"width='{width}' height='{height + bottom}' role='img' aria-label='depth by time map'"
    return f"<svg {shape}><g shape-rendering='crispEdges'>{''.join(cells)}</g>{''.join(labels)}</svg>"


def _stretches(colours: list[str], left: float, y: float, across: float, down: float) -> list[str]:
    """One row as rectangles; equal neighbours are one."""
    found, start = [], 0
    for column in range(1, len(colours) + 1):
        if column == len(colours) or colours[column] != colours[start]:
            place = f"x='{left + start * across:.1f}' y='{y:.1f}'"
            extent = f"width='{(column - start) * across + 0.3:.1f}' height='{down + 0.3:.1f}'"
            found.append(f"<rect {place} {extent} fill='{colours[start]}'/>")
            start = column
    return found


def _gutter(sites: Sequence[str]) -> float:
    """The room that names need at the left."""
    return min(190.0, 10 + 5.6 * max(len(site) for site in sites)) if sites else 0.0


def _names(sites: Sequence[str], starts: npt.NDArray[np.int64], left: float, down: float) -> list[str]:
    """A name at every row that has room for one."""
    if not sites:
        return []
    stride = max(1, math.ceil(11 / down))
    most = int((left - 10) / 5.6)
    found = []
    for row in range(0, len(starts), stride):
        name = sites[int(starts[row])]
        text = name if len(name) <= most else f"…{name[-(most - 1) :]}"
        at = f"x='{left - 6:.1f}' y='{(row + 0.5) * down + 3.5:.1f}'"
        found.append(
            f"<text {at} font-size='10' text-anchor='end' fill='currentColor'>{in_html(text)}</text>"
        )
    return found


def _ticks(
    steps: Sequence[int] | npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
    left: float,
    across: float,
    height: int,
) -> list[str]:
    """A few steps below the cells."""
    if not len(steps):
        return []
    found = []
    for column in np.unique(np.linspace(0, len(starts) - 1, 6).astype(int)).tolist():
        anchor = "start" if column == 0 else "end" if column == len(starts) - 1 else "middle"
        at = f"x='{left + (column + 0.5) * across:.1f}' y='{height + 13}'"
        text = f"{'step ' if column == 0 else ''}{int(steps[int(starts[column])]):,}"
        found.append(f"<text {at} font-size='10' text-anchor='{anchor}' fill='currentColor'>{text}</text>")
    return found


def _colour(value: float, low: float, high: float) -> str:
    if not math.isfinite(value):
        return "#8884"
    # Twenty-four steps are enough for a small picture and let neighbours merge.
    place = (value - low) / (high - low) if high > low else 0.5
    return css(round(min(1.0, max(0.0, place)) * 23) / 23)
