"""`torchtap tail RUN`: a live training in the terminal. Imports no torch."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from torchtap import Run

__all__ = ["command"]


@click.command("tail")
@click.argument("run")
@click.option(
    "--site",
    "patterns",
    multiple=True,
    metavar="PATTERN",
    help="Only sites like this, e.g. 'blocks.*:output'.",
)
@click.option("--statistic", help="What the sparkline follows; default: rms.")
@click.option("--rows", default=20, show_default=True, help="At most so many sites.")
@click.option("--poll", default=1.0, show_default=True, help="Seconds between two looks.")
@click.option("--rank", type=int, help="One rank's recording; without it, that of all ranks together.")
@click.option("--once", is_flag=True, help="Look once and end.")
@click.option("--json", "as_json", is_flag=True, help="A line of JSON for each look that finds a new step.")
def command(
    run: str,
    patterns: tuple[str, ...],
    statistic: str | None,
    rows: int,
    poll: float,
    rank: int | None,
    once: bool,
    as_json: bool,
) -> None:
    """Follow RUN while it is written: its numbers, their history, and what looks wrong.

    Ends when the recording has ended.
    """
    from rich.live import Live

    from torchtap import open as open_run
    from torchtap.cli.console import Terminal
    from torchtap.diagnosis.diagnose import diagnose
    from torchtap.viewer.terminal import live_view

    opened = open_run(run, rank=rank, partial=True)
    if as_json:
        _tell_programs(opened, patterns, rows, None if once else poll)
        return
    console = Terminal()

    def look() -> object:
        found = diagnose(opened)
        return live_view(
            opened, patterns=patterns, statistic=statistic, rows=rows, width=console.width, findings=found
        )

    if once or not console.is_terminal:
        console.print(look())
        if once:
            return
    if not console.is_terminal:
        # No screen to redraw: a line for each step, for logs and pipes.
        for step in opened.follow(poll):
            console.print(f"step {step}", highlight=False)
        return
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            ended = not opened.recording  # read before the records, so that the last ones are shown
            opened.refresh()
            live.update(look(), refresh=True)  # type: ignore[arg-type]
            if ended:
                return
            time.sleep(poll)


def _tell_programs(run: Run, patterns: tuple[str, ...], rows: int, poll: float | None) -> None:
    """One line now and, unless ``poll`` is None, one whenever steps have come."""
    from torchtap.cli.console import say_json

    say_json(_newest(run, patterns, rows), line=True)
    if poll is not None:
        for _ in run.follow(poll):
            say_json(_newest(run, patterns, rows), line=True)


def _newest(run: Run, patterns: tuple[str, ...], rows: int) -> dict[str, object]:
    from torchtap.diagnosis.diagnose import diagnose
    from torchtap.viewer.figures import matching_sites
    from torchtap.viewer.terminal import logged_first, newest

    steps = run.steps()
    sites = logged_first(matching_sites(run, patterns) if patterns else run.sites())[:rows]
    return {
        "run": run.path,
        "status": run.status,
        "step": int(steps[-1]) if len(steps) else None,
        "sites": {site: {name: newest(run, site, name) for name in run.statistics(site)} for site in sites},
        "findings": [finding.to_dict() for finding in diagnose(run)],
    }
