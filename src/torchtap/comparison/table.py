"""A comparison as a table for the terminal."""

from __future__ import annotations

import io
import math
import re
from typing import final

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from torchtap.comparison.result import COMPARED, Comparison, Row
from torchtap.terminal import Terminal

__all__ = ["PrintedTable", "draw", "explained", "number"]

_COLOURS = {
    "equal": "dim",
    "within": "green",
    "diverged": "red",
    "compensated": "cyan",
    "missing": "yellow",
    "other shape": "red",
    "unreadable": "yellow",
    "not comparable": "yellow",
    "unknown part": "yellow",
}
_MOST_ROWS = 40


def number(value: float | None) -> str:
    """A number as a person reads it."""
    if value is None or value != value:
        return "–"
    if value == 0:
        return "0"
    return f"{value:.1e}" if abs(value) < 1e-2 or abs(value) >= 1e4 else f"{value:.3g}"


def draw(result: Comparison, *, every: bool = False) -> Table:
    """One line for each site; long tables are cut around the first divergence unless ``every`` is set."""
    table = PrintedTable(
        title=Text(f"{result.reference}  against  {result.target}"), caption=Text(result.verdict)
    )
    # Where it is narrow, names and status go over several lines and the numbers stay whole.
    table.add_column("site", min_width=16)
    for heading in ("error", "floor", "alone", "cosine"):
        table.add_column(heading, justify="right", no_wrap=True, min_width=7)
    table.add_column("status", overflow="fold", min_width=9)
    previous = -1
    for at in _chosen(result, every):
        if at != previous + 1:
            table.add_row(Text(f"... {at - previous - 1} more", style="dim"))
        _add(table, result.rows[at], result)
        previous = at
    if previous + 1 < len(result.rows):
        table.add_row(Text(f"... {len(result.rows) - previous - 1} more", style="dim"))
    return table


class PrintedTable(Table):
    """A table that plain ``print`` shows as well."""

    def __str__(self) -> str:
        console = Terminal(file=io.StringIO(), record=True)
        console.print(self)
        return console.export_text().rstrip("\n")


@final
class SiteName:
    """A site's name that goes over several lines where a part of it ends, never in the middle of a word."""

    def __init__(self, name: str) -> None:
        self.parts = re.findall(r"[^.: ]*[.: ]?", name)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        least = min(24, max((len(part) for part in self.parts), default=1))
        return Measurement(min(least, options.max_width), min(sum(map(len, self.parts)), options.max_width))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = ""
        for part in self.parts:
            if line and len(line) + len(part.rstrip()) > options.max_width:
                yield Text(line.rstrip(" "))
                line = "  " if len(part) + 2 <= options.max_width else ""
            line += part
            while len(line) > options.max_width:  # one word that is wider than the column
                yield Text(line[: options.max_width])
                line = line[options.max_width :]
        yield Text(line)


def _chosen(result: Comparison, every: bool) -> list[int]:
    total = len(result.rows)
    if every or total <= _MOST_ROWS:
        return list(range(total))
    chosen = {0, total - 1, total - 2, *_around_first(result)}
    local = [n for n, row in enumerate(result.rows) if row.origin == "local"]
    odd = [n for n, row in enumerate(result.rows) if row.status not in COMPARED]
    excess = [0.0 if math.isnan(row.excess) else row.excess for row in result.rows]
    worst = sorted(range(total), key=lambda n: -excess[n])
    for n in (*local, *odd, *worst):
        if len(chosen) >= _MOST_ROWS:
            break
        chosen.add(n)
    return sorted(chosen)


def _around_first(result: Comparison) -> range:
    """The rows before and after the first that differs."""
    if result.first is None:
        return range(0)
    at = next((n for n, row in enumerate(result.rows) if row.site == result.first.site), 0)
    return range(max(0, at - 8), min(len(result.rows), at + 9))


def _add(table: Table, row: Row, result: Comparison) -> None:
    status = row.status if row.origin is None else f"{row.status}, {row.origin}"
    if result.first is not None and row.site == result.first.site:
        status = f"{status}  <- first"
    measures = row.measures
    style = _COLOURS[row.status]
    table.add_row(
        SiteName(row.site if row.site == row.target_site else f"{row.site} = {row.target_site}"),
        number(row.error),
        number(row.floor),
        number(row.local_error),
        f"{measures.cosine:.5f}" if measures is not None else "–",
        Text(status + (f" ({row.note})" if row.note else "")),
        style=style,
    )


def explained(result: Comparison) -> str:
    """Which site was taken for which, one line each, with what that rests on; then what is left over."""
    absent = {row.site for row in result.rows if row.status == "missing"}
    lines = [
        f"{pair.reference} = {pair.target}: {pair.how}"
        for pair in result.pairing
        if pair.reference not in absent
    ]
    lines += [f"{row.site}: {row.note}" for row in result.rows if row.status == "missing"]
    lines += [f"{each.site} ({each.side}): {each.why}" for each in result.unaligned]
    return "\n".join(lines)
