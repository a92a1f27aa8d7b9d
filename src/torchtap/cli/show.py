"""``torchtap show``: print a run, or a folder of layer files, in the terminal. Imports no torch."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from pathlib import Path

import click
from rich.table import Table

from torchtap import Run
from torchtap import open as open_run
from torchtap.cli.console import Terminal, say_json
from torchtap.store.read.lookup import compact, in_order
from torchtap.viewer.terminal import (
    cut_in_the_middle,
    is_logged,
    logged_first,
    newest,
    site_word,
    spark_width,
    sparkline,
)

__all__ = ["command", "has_layers", "show_layers"]


def has_layers(folder: str) -> bool:
    """Return True if a folder has layer files, judged by their names alone."""
    place = Path(folder)
    return (place / "embedding_output.pt").is_file() or any(place.glob("layer_*_output.pt"))


def show_layers(folder: str, *, as_json: bool, rows: int) -> None:
    """Print statistics of every layer."""
    from torchtap.monitors.layers import open_layers  # needs torch, which the command does not import

    layers = open_layers(folder)
    statistics = {f"layer_{n}": layers.statistics.get(f"layer_{n}", {}) for n in layers.numbers}
    if as_json:
        say_json({"path": folder, "metadata": layers.metadata, "statistics": statistics})
        return
    console = Terminal()
    console.print(_heading(folder, layers.metadata, len(layers)), highlight=False)
    for name, stat in list(statistics.items())[:rows]:
        wrong = stat.get("has_nan") or stat.get("has_inf")
        console.print(_line(name, stat), style="red" if wrong else "", highlight=False)
    if len(statistics) > rows:
        console.print(f"{len(statistics) - rows} further layers; --rows shows more", style="dim")
    further = len(layers.passes())
    if further:
        console.print(f"{further} further passes, each in a folder inside this one", style="dim")


def _heading(folder: str, metadata: dict[str, object], count: int) -> str:
    blocks = metadata.get("blocks")
    of = f" of {blocks} blocks" if blocks is not None else ""
    norm = metadata.get("final_norm")
    last = f"; the last is before the final norm {norm!r}" if norm else ""
    return f"{folder}: {count} layers{of}; layer_0 enters the first block{last}"


def _line(name: str, stat: dict[str, object]) -> str:
    mean, std = stat.get("mean", float("nan")), stat.get("std", float("nan"))
    return f"{name}: Mean={mean:.6f}, Std={std:.6f}, NaN={stat.get('has_nan')}, Inf={stat.get('has_inf')}"


_COLUMNS = ("mean", "std", "absmax", "l2", "zeros")
_NARROW_COLUMNS = ("mean", "std", "absmax", "zeros")


@click.command("show")
@click.argument("run")
@click.option(
    "--site", "pattern", default="*", show_default=True, help="Only sites like this, e.g. 'blocks.*:output'."
)
@click.option("--statistic", default="std", show_default=True, help="What the sparkline follows.")
@click.option(
    "--phase", help="Only what was recorded in this phase, e.g. eval; without it training where there is one."
)
@click.option("--tensors", is_flag=True, help="List the recorded tensors.")
@click.option("--coverage", is_flag=True, help="List what was expected and did not come, and why.")
@click.option("--rank", type=int, help="One rank's recording; without it, that of all ranks together.")
@click.option("--json", "as_json", is_flag=True, help="The run's facts as JSON.")
@click.option("--rows", default=60, show_default=True, help="At most so many rows.")
def command(
    run: str,
    pattern: str,
    statistic: str,
    phase: str | None,
    tensors: bool,
    coverage: bool,
    rank: int | None,
    as_json: bool,
    rows: int,
) -> None:
    """Show RUN: its newest statistics with their history, its tensors, or its coverage.

    A folder of layer files, as record_layers writes it, is shown layer by layer.
    """
    if has_layers(run):
        show_layers(run, as_json=as_json, rows=rows)
        return
    opened = open_run(run, rank=rank, partial=True)
    phases = _phases(opened)
    if phase is not None:
        opened = opened.of_phase(phase)
    if as_json:
        say_json({**_facts(opened), "phases": phases})
        return
    console = Terminal()
    console.print(repr(opened), highlight=False)
    if len(phases) > 1:
        listed = ", ".join(f"{name} ({count:,} step{'s'[: count != 1]})" for name, count in phases.items())
        console.print(f"phases: {listed}; --phase shows one", highlight=False)
    for incident in opened.events("incident"):
        _print_incident(console, incident)
    if coverage:
        _print_coverage(console, opened)
    elif tensors:
        _print_tensors(console, opened, pattern, rows)
    else:
        _print_statistics(console, opened, pattern, statistic, rows)
    for problem in opened.problems[:10]:
        console.print(f"problem: {problem}", style="red")


def _print_incident(console: Terminal, incident: dict[str, object]) -> None:
    """Why a flight recorder has kept this step, and what it found out."""
    console.print(
        f"step {incident.get('step')} was kept: {incident.get('reason')}", style="red", highlight=False
    )
    birth = incident.get("birth")
    if isinstance(birth, dict):
        op = f" by {birth.get('op')}" if birth.get("op") else ""
        where = f"{birth.get('kind')} in the {birth.get('direction')}, at {birth.get('site')}{op}"
        console.print(f"first bad value: {where}; {birth.get('line') or ''}", highlight=False)
    if incident.get("replayed"):
        same = "the same numbers" if incident.get("reproduced") else "other numbers"
        console.print(f"its replay, phase replay, gave {same}", highlight=False)


def _phases(run: Run) -> dict[str, int]:
    """How many steps have something of each phase."""
    clock = run.clock()
    return {phase: len(set(clock.step[clock.phase == phase].tolist())) for phase in in_order(run.phases)}


def _facts(run: Run) -> dict[str, object]:
    steps = run.steps()
    return {
        "path": run.path,
        "status": run.status,
        "ranks": {str(rank): status for rank, status in run.statuses.items()},
        "sites": run.sites(),
        "statistics": list(run.statistics()),
        "steps": {"count": len(steps), "first": int(steps[0]), "last": int(steps[-1])}
        if len(steps)
        else {"count": 0},
        "tensors": len(run.tensors()),
        "coverage": run.coverage(),
        "problems": list(run.problems),
    }


def _print_statistics(console: Terminal, run: Run, pattern: str, statistic: str, rows: int) -> None:
    asked = [site for site in run.sites() if fnmatch.fnmatchcase(site, pattern) or pattern in site]
    chosen = logged_first([site for site in asked if _has_numbers(run, site)])
    table = Table(title=f"newest statistics, and {statistic} over time", title_justify="left")
    columns = _COLUMNS if console.width >= 100 else _NARROW_COLUMNS
    # The width that the other columns leave; rich would cut off the last column.
    names_width = max([len(site_word(site)) for site in chosen[:rows]], default=4)
    room = spark_width(console.width, names_width, len(columns) + 1)
    site_width = max(8, console.width - 10 * len(columns) - room - 6)
    table.add_column("site", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True, min_width=5 if name == "zeros" else 7)
    table.add_column(statistic, no_wrap=True, min_width=room)
    for site in chosen[:rows]:
        name, *cells = _row(run, site, columns, statistic, room)
        table.add_row(cut_in_the_middle(name, site_width), *cells)
    console.print(table)
    if len(chosen) > rows:
        console.print(f"{len(chosen) - rows} further sites; --rows and --site choose among them", style="dim")
    only_tensors = {ref.site for ref in run.tensors()}.intersection(asked).difference(chosen)
    if only_tensors:
        console.print(f"kept as tensors alone: {len(only_tensors)}; --tensors lists them", style="dim")


def _has_numbers(run: Run, site: str) -> bool:
    """Return True if the shown phase has a number of this site."""
    return any(len(run.series(site, name).steps) for name in run.statistics(site))


def _row(run: Run, site: str, columns: Sequence[str], statistic: str, room: int) -> list[str]:
    names = run.statistics(site)
    followed = statistic if statistic in names else names[0]
    cells = [_newest(run, site, name) if name in names else "" for name in columns]
    if is_logged(site):  # one number, in the first column
        cells[0] = _newest(run, site, followed)
    return [site_word(site), *cells, sparkline(run.series(site, followed).values, room)]


def _newest(run: Run, site: str, name: str) -> str:
    value = newest(run, site, name)
    if value is None:
        return ""
    return f"{value:.0%}" if name == "zeros" else compact(value)


def _print_tensors(console: Terminal, run: Run, pattern: str, rows: int) -> None:
    table = Table("site", "field", "step", "dtype", "shape", "size", title="tensors", title_justify="left")
    found = [ref for ref in run.tensors() if fnmatch.fnmatchcase(ref.site, pattern) or pattern in ref.site]
    for ref in found[:rows]:
        shape = "×".join(str(size) for size in ref.shape) or "scalar"
        table.add_row(ref.site, ref.field, str(ref.step), ref.dtype, shape, f"{ref.nbytes:,}")
    console.print(table)
    if len(found) > rows:
        console.print(f"{len(found) - rows} further tensors", style="dim")


def _print_coverage(console: Terminal, run: Run) -> None:
    missing = run.coverage().get("missing")
    if not isinstance(missing, list) or not missing:
        console.print("everything that the plan expected arrived")
        return
    table = Table("site", "why it did not come", title=f"{len(missing)} missing", title_justify="left")
    for entry in missing:
        if isinstance(entry, dict):
            table.add_row(str(entry.get("site")), str(entry.get("reason")))
    console.print(table)
