"""`torchtap report RUN...`: one self-contained page, and a picture of it."""

from __future__ import annotations

import click

from torchtap.cli.console import say, say_json

__all__ = ["command"]


@click.command("report")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("-o", "--out", default="report.html", show_default=True, help="The file to write.")
@click.option(
    "--site",
    "sites",
    multiple=True,
    metavar="PATTERN",
    help="Sites that get a page of their own, such as 'blocks.*:output'; may be given again. Default: all that fit.",
)
@click.option("--png", metavar="FILE", help="Also write a picture of the map.")
@click.option("--rank", type=int, help="One rank's recording; without it, that of all ranks together.")
@click.option("--title", help="The page's title; default: the runs' names.")
@click.option("--json", "as_json", is_flag=True, help="What was written, as JSON.")
def command(
    runs: tuple[str, ...],
    out: str,
    sites: tuple[str, ...],
    png: str | None,
    rank: int | None,
    title: str | None,
    as_json: bool,
) -> None:
    """Write one HTML file with the map, the findings and the sites of RUN, to mail or to keep."""
    from torchtap.viewer.report import write_picture, write_report

    report = write_report(runs, out, sites=sites, title=title, rank=rank)
    drawn_by = write_picture(report.path, runs[0], png) if png is not None else None
    if as_json:
        facts = {"path": str(report.path), "bytes": report.size, "sites": list(report.sites)}
        say_json({**facts, "left_out": list(report.left_out), "png": png, "drawn_by": drawn_by})
        return
    say(f"{report.path}  {report.size / 1e6:.1f} MB, {len(report.sites)} sites")
    if report.left_out:
        click.echo(f"{len(report.left_out)} sites did not fit; --site chooses which do", err=True)
    if png is not None:
        say(f"{png}  drawn by {drawn_by}")
