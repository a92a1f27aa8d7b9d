"""``torchtap compare A B``: exit code 0 the same, 1 they differ, 2 an error, 3 what there is cannot tell."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from torchtap.cli.console import Terminal, say

if TYPE_CHECKING:
    from torchtap import Run
    from torchtap.comparison.result import Comparison

__all__ = ["EXIT_CODES", "command"]

EXIT_CODES = {"same": 0, "differs": 1, "error": 2, "cannot tell": 3}


@click.command("compare")
@click.argument("reference")
@click.argument("target")
@click.option(
    "--map", "rules", multiple=True, metavar="RULE", help="Names that belong together, e.g. 'model.*=*'."
)
@click.option(
    "--repeat", multiple=True, metavar="RUN", help="Another recording of the reference, known to be right."
)
@click.option("--golden", metavar="RUN", help="A recording of the reference in higher precision.")
@click.option(
    "--step", "steps", multiple=True, type=int, help="Compare this step alone; may be given several times."
)
@click.option("--rank", type=int, help="One rank of each run; of a run of one process, its only one.")
@click.option(
    "--workers", type=click.IntRange(1, 256), default=1, metavar="N", help="Measure in so many processes."
)
@click.option(
    "--ray", is_flag=True, help="Let the workers be those of a Ray cluster (RAY_ADDRESS, else one here)."
)
@click.option("--html", type=click.Path(path_type=Path), help="Write a report that opens in any browser.")
@click.option(
    "--json",
    "json_path",
    is_flag=False,
    flag_value="-",
    metavar="[PATH]",
    help="Print the result as JSON; with a path, write it there. Put it last.",
)
@click.option(
    "--all", "every", is_flag=True, help="Show every site, not only those around the first divergence."
)
@click.option(
    "--explain-alignment", "explain", is_flag=True, help="Say which site was taken for which, and why."
)
@click.option("--quiet", is_flag=True, help="Print the verdict alone.")
def command(
    reference: str,
    target: str,
    rules: tuple[str, ...],
    repeat: tuple[str, ...],
    golden: str | None,
    steps: tuple[int, ...],
    rank: int | None,
    workers: int,
    ray: bool,
    html: Path | None,
    json_path: str | None,
    every: bool,
    explain: bool,
    quiet: bool,
) -> None:
    """Compare two recordings site by site and name the first that differs.

    REFERENCE and TARGET are run folders, or folders with layer_N_output.pt files. Exit code: 0 they are the same,
    1 they differ, 2 an error, 3 cannot tell: too much is missing or unreadable.
    """
    from torchtap.comparison.recorded import compare_stored

    result = compare_stored(
        _of_rank(reference, rank),
        _of_rank(target, rank),
        rules=rules,
        repeat=list(repeat) or None,
        golden=golden,
        steps=list(steps) or None,
        workers=workers,
        ray=ray,
    )
    if html is not None:
        result.to_html(html)
    if json_path is not None and json_path != "-":
        result.to_json(json_path)
    if json_path == "-":
        click.echo(result.to_json())
    elif quiet:
        say(result.verdict)
    else:
        _print(result, every=every)
    if explain and json_path != "-":
        say(result.explain_alignment())
    raise SystemExit(EXIT_CODES[result.outcome])


def _of_rank(path: str, rank: int | None) -> Run | str:
    """Return one rank of a run of several; every other path unchanged."""
    from torchtap.store.read.reader import is_run, open_run

    if rank is None or not is_run(path):
        return path
    run = open_run(path)
    return run.rank(rank) if len(run.ranks) > 1 else run


def _print(result: Comparison, *, every: bool) -> None:
    console = Terminal()
    console.print(
        f"{result.outcome}: {result.compared} of {result.total} sites compared ({result.coverage:.0%})",
        markup=False,
    )
    console.print(result.table(every=every))
    console.print(f"noise floor: {result.basis}")
    for line in result.problems:
        console.print(f"note: {line}")
    for left in result.unaligned[:10]:
        console.print(f"not compared: {left.site} ({left.side}): {left.why}")
    if len(result.unaligned) > 10:
        console.print(f"... and {len(result.unaligned) - 10} more that were not compared")
