"""A run in a terminal: sparklines, tables, findings. Built of rich; imports no torch.

Every text that originates in a file is shown as plain text, never as markup.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from torchtap.diagnosis.finding import Finding
from torchtap.viewer.arrays import EMPTY_SUMS, extremes, without_empty_sums
from torchtap.viewer.figures import matching_sites

if TYPE_CHECKING:
    from torchtap import Run

__all__ = [
    "cut_in_the_middle",
    "findings_text",
    "is_logged",
    "live_view",
    "logged_first",
    "newest",
    "site_word",
    "spark_width",
    "sparkline",
    "statistics_table",
]  # fmt: skip

LOGGED = ":value."
_BARS = "▁▂▃▄▅▆▇█"
_COLUMNS = ("mean", "std", "absmax", "l2", "zeros")
_COLOURS = {"error": "bold red", "warning": "yellow", "info": "blue"}


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


def site_word(site: str) -> str:
    """Return a short label: the name of a logged value, or the kind for a site of the model itself."""
    if is_logged(site):
        return site.removeprefix(LOGGED)
    return f"(model) {site[1:]}" if site.startswith(":") else site


def cut_in_the_middle(text: str, width: int) -> str:
    """``text`` in at most ``width`` characters; the end of a site's name matters as much as its start."""
    if len(text) <= width:
        return text
    tail = width // 2
    return f"{text[: width - tail - 1]}…{text[-tail:]}"


def is_logged(site: str) -> bool:
    """Return True if a site is a value that the training logged."""
    return site.startswith(LOGGED)


def logged_first(sites: Sequence[str]) -> list[str]:
    """``sites`` with the logged values in front: everybody looks at the loss first."""
    return sorted(sites, key=lambda site: not is_logged(site))


def newest(run: Run, site: str, name: str) -> float | None:
    """The newest value of a statistic; NaN for a norm of nothing but NaN."""
    values = np.asarray(run.series(site, name).values, dtype=np.float64)
    if name in EMPTY_SUMS and "nans" in run.statistics(site):
        values = without_empty_sums(name, values, run.series(site, "nans").values)
    return float(values[-1]) if len(values) else None


def _number(name: str, value: float | None) -> str:
    if value is None:
        return ""
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
        if followed is not None:
            style = _COLOURS.get(marks.get(site, ""), "")
            line = sparkline(run.series(site, followed).values, width)
            table.add_row(Text(site_word(site), style=style), *_cells(run, site, names, followed), line)
    return table


def _cells(run: Run, site: str, names: Sequence[str], followed: str) -> list[str]:
    cells = [_number(name, newest(run, site, name)) if name in names else "" for name in _COLUMNS]
    if followed == "value":  # a number of the training's own
        cells[0] = _number("value", newest(run, site, followed))
    return cells


def spark_width(width: int, names: int, columns: int) -> int:
    """The room that names and numbers leave to a sparkline, on a terminal of ``width``."""
    return min(120, max(12, width - min(names, width // 3) - 9 * columns - 6))


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
    width: int = 80,
    findings: Sequence[Finding] = (),
) -> RenderableType:
    """One screen of a training that is being written: how far, how fast, how it looks."""
    names = matching_sites(run, patterns) if run.sites() else []
    logged = [site for site in run.sites() if is_logged(site) and site not in names]
    chosen = names if len(names) <= rows else _spread(names, rows)
    parts: list[RenderableType] = [_how_far(run), ""]
    shown = [*logged, *chosen]
    if shown:
        wide = spark_width(width, max(len(site_word(site)) for site in shown), len(_COLUMNS))
        parts.append(statistics_table(run, shown, statistic, width=wide, findings=findings))
    if len(names) > len(chosen):
        parts.append(
            Text(f"{len(names) - len(chosen)} further sites; --site chooses among them", style="dim")
        )
    if findings:
        parts += ["", findings_text(findings)]
    parts += [Text(f"problem: {problem}", style="red") for problem in run.problems[:3]]
    return Group(*parts)


def _how_far(run: Run) -> Text:
    steps = run.steps()
    head = Text()
    head.append(str(run.path), style="bold")
    head.append(f"  {run.status}", style="green" if run.status == "recording" else "dim")
    if len(steps):
        head.append(f"  step {int(steps[-1]):,}  ({len(steps):,} recorded{_pace(run)})")
    return head


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
