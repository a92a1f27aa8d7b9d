"""``torchtap rcc``: the refined coordinate check over widths, as a picture and a table of exponents."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from torchtap.cli.console import json_text
from torchtap.cli.import_path import find_named
from torchtap.errors import FormError

__all__ = ["command"]


@click.command("rcc")
@click.argument("factories", nargs=-1, metavar="[FILE.py:FUNCTION]...")
@click.option(
    "--widths", default="64,128,256,512", show_default=True, help="The widths, with commas between."
)
@click.option(
    "--steps",
    default=5,
    show_default=True,
    type=click.IntRange(min=1),
    help="Training steps before the check.",
)
@click.option("--seed", default=0, show_default=True, help="Seed at each width.")
@click.option(
    "--output",
    "-o",
    default="rcc.png",
    show_default=True,
    type=click.Path(path_type=Path),
    help="The picture.",
)
@click.option(
    "--json",
    "json_path",
    is_flag=False,
    flag_value="-",
    metavar="[PATH]",
    help="Print the sizes and exponents as JSON; with a path, write them there. Put it last.",
)
def command(
    factories: tuple[str, ...], widths: str, steps: int, seed: int, output: Path, json_path: str | None
) -> None:
    """Refined coordinate check over model widths.

    Each FUNCTION takes a width and returns a torchtap.monitors.widths.Setup: a model, its optimizer,
    batches and a loss. Without one, the same network is shown in the standard parametrisation and in µP. A layer is
    right if the size of (W_t-W_0)x_t does not depend on the width: an exponent near 0.
    """
    from torchtap.monitors.widths import TERMS, check_widths, plot_widths

    try:
        sizes = [int(width) for width in widths.split(",")]
    except ValueError:
        raise click.BadParameter(
            f"{widths!r}: give whole numbers with commas between", param_hint="--widths"
        ) from None
    checks = [
        check_widths(build, sizes, steps=steps, name=name, seed=seed) for name, build in _factories(factories)
    ]
    plot_widths(checks, output)
    if json_path is not None:
        _write_json(checks, json_path)
    if json_path != "-":
        for check in checks:
            click.echo(f"{check.name}: exponents of the width after {steps} steps")
            terms = [check.exponents(term) for term in TERMS]
            for layer in terms[0]:
                shown = "   ".join(
                    f"{term} {found[layer]:+.2f}"
                    for term, found in zip(TERMS, terms, strict=True)
                    if layer in found
                )
                click.echo(f"  {layer:<20} {shown}")
        click.echo(f"drawn in {output}")


def _factories(given: tuple[str, ...]) -> list[tuple[str, Callable[[int], Any]]]:
    if not given:
        from torchtap.cli.rcc_models import mup, standard

        return [("standard parametrisation", standard), ("maximal update parametrisation", mup)]
    return [_factory(each) for each in given]


def _factory(place: str) -> tuple[str, Callable[[int], object]]:
    name, function = find_named(place, "names no function: give FILE.py:FUNCTION or MODULE:FUNCTION")
    if not callable(function):
        raise FormError(f"{place!r} is no function of a width")
    return name, function


def _write_json(checks: list[Any], path: str) -> None:
    text = json_text(
        [
            {
                "name": check.name,
                "widths": check.widths,
                "steps": check.steps,
                "sizes": check.sizes,
                "exponents": {term: check.exponents(term) for term in check.sizes},
            }
            for check in checks
        ]
    )
    if path == "-":
        click.echo(text)
    else:
        Path(path).write_text(text)
