"""``torchtap export``: a run in a format that other tools read."""

from __future__ import annotations

from pathlib import Path

import click

from torchtap import open as open_run
from torchtap.cli.console import say, say_json
from torchtap.progress import note

__all__ = ["command"]


@click.command("export")
@click.argument("run")
@click.option(
    "--to",
    "target",
    required=True,
    help="parquet, dataset (parquet files by rank), hdf5, pt, npz, csv, jsonl or packed (the run itself in few files).",
)
@click.option("-o", "--out", help="Where to; by default beside the run.")
@click.option("--partial", is_flag=True, help="Of a damaged run, what there is.")
@click.option("--json", "as_json", is_flag=True, help="What was written, as JSON.")
def command(run: str, target: str, out: str | None, partial: bool, as_json: bool) -> None:
    """Write RUN in another format."""
    from torchtap.sinks.export import export_run

    opened = open_run(run, partial=partial)
    path = out if out is not None else f"{str(Path(run)).rstrip('/')}.{target}"
    note(f"writing {path}")
    written = export_run(opened, target, path)
    if as_json:
        say_json({"path": str(written), "format": target, "problems": list(opened.problems)})
    else:
        say(str(written))
