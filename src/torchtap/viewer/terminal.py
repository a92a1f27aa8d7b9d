"""A run in a terminal: sparklines, tables, findings. Built of rich; imports no torch.

Everything that comes from a file is shown as plain text, never as markup.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from torchtap.diagnosis.finding import Finding
from torchtap.viewer.chosen import matching_sites
from torchtap.viewer.downsample import extremes

if TYPE_CHECKING:
    from torchtap.store.read.reader import Run

__all__ = ["findings_text", "live_view", "sparkline", "statistics_table"]

_BARS = "▁▂▃▄▅▆▇█"
_COLUMNS = ("mean", "std", "absmax", "l2", "zeros")
_COLOURS = {"error": "bold red", "warning": "yellow"}


def sparkline(values: npt.ArrayLike, width: int = 24) -> str:
    """A series in ``width`` characters; each shows what is furthest from the middle, ``×`` what is not finite."""
    numbers = np.asarray(values, dtype=np.float64).reshape(1, -1)
    if not numbers.size:
        return ""
    low, high, _, starts = extremes(np.where(np.isfinite(numbers), numbers, np.nan), 1, width)
    broken = np.add.reduceat(~np.isfinite(numbers[0]), starts) > 0
    finite = numbers[np.isfinite(numbers)]
    if not len(finite):
        return "×" * len(starts)
    middle = float(np.median(finite))
    shown = np.where(np.abs(high[0] - middle) >= np.abs(low[0] - middle), high[0], low[0]).astype(np.float64)
    least, span = float(finite.min()), float(np.ptp(finite)) or 1.0
    marks = []
    for value, bad in zip(shown, broken, strict=True):
        if bad:
            marks.append("×")
        elif np.isnan(value):
            marks.append(" ")
        else:
            marks.append(_BARS[min(7, max(0, int((value - least) / span * 7.999)))])
    return "".join(marks)


def _number(name: str, value: float) -> str:
    return f"{value:.0%}" if name == "zeros" else f"{value:.3g}"


def statistics_table(
    run: Run,
    sites: Sequence[str],
    statistic: str | None = None,
    *,
    width: int = 12,
    findings: Sequence[Finding] = (),
) -> Table:
    """The newest statistics of each site, and one of them over time."""
    marks = {site: finding.severity for finding in reversed(findings) for site in finding.sites}
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("site", overflow="ellipsis")  # the one that gives way where it is narrow
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column(statistic or "rms", no_wrap=True, min_width=width)
    for site in sites:
        names = run.statistics(site)
        followed = next((n for n in (statistic, "rms", "std", "value") if n in names), None)
        if followed is None:
            continue
        cells = []
        for name in _COLUMNS:
            values = run.series(site, name).values if name in names else None
            cells.append(_number(name, float(values[-1])) if values is not None and len(values) else "")
        if followed == "value":  # a number of the training's own
            cells[0] = _number("value", float(run.series(site, followed).values[-1]))
        style = _COLOURS.get(marks.get(site, ""), "")
        table.add_row(Text(site, style=style), *cells, sparkline(run.series(site, followed).values, width))
    return table


def findings_text(findings: Sequence[Finding], most: int = 6) -> Text:
    """Findings as lines, the gravest first."""
    text = Text()
    for finding in findings[:most]:
        text.append("● ", style=_COLOURS[finding.severity])
        text.append(f"{finding.message}\n")
    if len(findings) > most:
        text.append(f"{len(findings) - most} more findings\n", style="dim")
    return text


def live_view(
    run: Run,
    *,
    patterns: Sequence[str] = (),
    statistic: str | None = None,
    rows: int = 20,
    findings: Sequence[Finding] = (),
) -> RenderableType:
    """One screen of a training that is being written: how far, how fast, how it looks."""
    steps = run.steps()
    head = Text()
    head.append(str(run.path), style="bold")
    head.append(f"  {run.status}", style="green" if run.status == "recording" else "dim")
    if len(steps):
        head.append(f"  step {int(steps[-1]):,}  ({len(steps):,} recorded{_pace(run)})")
    names = matching_sites(run, list(patterns) or None) if run.sites() else []
    logged = [site for site in run.sites() if site.startswith(":value.") and site not in names]
    chosen = names if len(names) <= rows else _spread(names, rows)
    parts: list[Any] = [head, ""]
    if logged or chosen:
        parts.append(statistics_table(run, [*logged, *chosen], statistic, findings=findings))
    if len(names) > len(chosen):
        parts.append(
            Text(f"{len(names) - len(chosen)} further sites; --site chooses among them", style="dim")
        )
    if findings:
        parts += ["", findings_text(findings)]
    parts += [Text(f"problem: {problem}", style="red") for problem in run.problems[:3]]
    return Group(*parts)


def _pace(run: Run) -> str:
    """Steps in a second over the last minute, and how long ago the last one was."""
    clock = run.clock()
    if len(clock) < 2:
        return ""
    times = np.asarray(clock["time"], dtype=np.float64)
    recent = times >= times[-1] - 60
    spent = float(times[-1] - times[recent][0])
    pace = f", {(int(recent.sum()) - 1) / spent:.3g}/s" if spent > 0 else ""
    quiet = time.time() - float(times[-1])
    return pace + (f", last {quiet:.0f} s ago" if run.status == "recording" and quiet > 5 else "")


def _spread(names: Sequence[str], most: int) -> list[str]:
    """Some of ``names``, from the first to the last."""
    return [names[i] for i in np.unique(np.linspace(0, len(names) - 1, most).round().astype(int))]
