"""The newest statistics of a watched training as a table in the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import IO

from rich.table import Table

from torchtap.session.coverage import Missing
from torchtap.store.read.lookup import compact
from torchtap.store.record import ScalarBlock
from torchtap.terminal import Terminal

__all__ = ["print_summary"]

_COLUMNS = ("mean", "std", "absmax", "l2", "zeros")


def print_summary(
    blocks: Iterable[ScalarBlock],
    missing: Sequence[Missing],
    lost: Sequence[str],
    file: IO[str] | None = None,
) -> None:
    """Print a row for each site, then other numbers, what is missing and what was lost."""
    console = Terminal(file=file)
    for table in _tables(blocks):
        if table.row_count:
            console.print(table)
    if missing:
        console.print(f"{len(missing)} {'site' if len(missing) == 1 else 'sites'} did not arrive:")
        for entry in missing[:10]:
            console.print(f"  {entry}")
    if lost:
        console.print(f"{len(lost)} losses; the first: {lost[0]}")


def _tables(blocks: Iterable[ScalarBlock]) -> tuple[Table, Table]:
    table = Table(title="newest statistics", title_justify="left")
    table.add_column("site", no_wrap=True, overflow="ellipsis")
    for name in (*_COLUMNS, "nan/inf"):
        table.add_column(name, justify="right", no_wrap=True, min_width=7)
    others = Table("site", "number", "value", title="other numbers", title_justify="left")
    for site, numbers in _newest(blocks).items():
        if set(_COLUMNS) <= numbers.keys():
            bad = numbers["nans"] + numbers["infs"]
            cells = [_number(name, numbers[name]) for name in _COLUMNS]
            table.add_row(site, *cells, f"{bad:.0f}", style="red" if bad else "")
        else:
            for name, value in numbers.items():
                others.add_row(site, name, f"{value:.6g}")
    return table, others


def _newest(blocks: Iterable[ScalarBlock]) -> dict[str, dict[str, float]]:
    """The last numbers of each site; later blocks win."""
    newest: dict[str, dict[str, float]] = {}
    for block in blocks:
        for row, site in enumerate(block.sites):
            if block.present is None or block.present[row]:
                numbers = zip(block.statistics, block.values[row].tolist(), strict=True)
                newest.setdefault(site, {}).update(numbers)
    return newest


def _number(name: str, value: float) -> str:
    return f"{value:.0%}" if name == "zeros" else compact(value)
