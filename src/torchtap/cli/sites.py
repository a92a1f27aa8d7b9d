"""``torchtap sites``: the sites of a model, from ``module:factory``, a script, or a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from torchtap.cli.console import Terminal, say, say_json
from torchtap.cli.named import find_named
from torchtap.errors import FormError

if TYPE_CHECKING:
    from torchtap.plan.sites import Site

__all__ = ["command", "load_model"]


@click.command("sites")
@click.argument("model")
@click.option("--kind", "kinds", multiple=True, help="Only this kind (may be given several times).")
@click.option("--select", "selector", help="Only sites that this selector picks.")
@click.option("--plain", is_flag=True, help="Names only, one a line.")
@click.option("--json", "as_json", is_flag=True, help="A list of sites with their modules, for programs.")
@click.option(
    "--unsafe",
    is_flag=True,
    help="Allow a pickle or a compiled package, which can run code of whoever made it.",
)
def command(
    model: str, kinds: tuple[str, ...], selector: str | None, plain: bool, as_json: bool, unsafe: bool
) -> None:
    """List the sites of MODEL.

    MODEL is `package.module:factory`, `script.py:factory` (a module or a callable that makes one), a TorchScript
    or pickled `.pt`, or an exported `.pt2`.
    """
    loaded = load_model(model, unsafe=unsafe)
    sites = _sites(loaded, kinds, selector)
    rows = [(site.name, type(site.module).__name__, _source(site)) for site in sites]
    if as_json:
        say_json([{"site": name, "module": module, "forward": source} for name, module, source in rows])
    elif plain:
        for name, _, _ in rows:
            say(name)
    else:
        _print(rows, type(loaded).__name__)


def _source(site: Site) -> str | None:
    """Where the forward that makes a site's value is written."""
    from torchtap.session.model_tree import source_of

    return source_of(site.module) if site.module is not None else None


def _print(rows: Sequence[tuple[str, str, str | None]], model: str) -> None:
    table = Table(title=f"{len(rows)} sites of {model}", title_justify="left")
    table.add_column("site", overflow="fold")
    table.add_column("module")
    table.add_column("forward", overflow="fold", style="dim")
    for name, module, source in rows:
        table.add_row(name, module, source or "")
    Terminal().print(table)


def load_model(text: str, *, unsafe: bool = False) -> object:
    """A model from what was written on the command line."""
    path = Path(text)
    if path.suffix in (".pt", ".pth", ".pt2", ".ts", ".onnx") and ":" not in text:
        from torchtap.forms.instrument.load import load

        return load(path, unsafe=unsafe)
    _, made = find_named(
        text, "names no model: write package.module:factory, script.py:factory, or a .pt / .pt2 file"
    )
    from torch import nn

    try:
        model = made() if callable(made) and not isinstance(made, nn.Module) else made
    except TypeError as error:
        raise FormError(
            f"{text!r} cannot be called without arguments ({error}): name a function that takes none and makes "
            "the model"
        ) from error
    if not isinstance(model, nn.Module):
        raise FormError(f"{text!r} gave a {type(model).__name__}, not an nn.Module")
    return model


def _sites(model: Any, kinds: tuple[str, ...], selector: str | None) -> list[Site]:
    """The sites that a selector picks; without one, those of some kinds that can have a value."""
    from torchtap.cli.listing import can_come
    from torchtap.forms.attach import tree_of
    from torchtap.plan.names import KINDS
    from torchtap.plan.plan import candidates, make_plan
    from torchtap.plan.sites import places

    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise click.UsageError(f"--kind {unknown[0]}: the kinds are {', '.join(KINDS)}")
    if selector is not None:
        return [port.site for port in make_plan(tree_of(model), [selector]).ports]
    wanted: Any = frozenset(kinds or KINDS)
    every = (names[0] for names in candidates(places(tree_of(model)), wanted))
    return [site for site in every if can_come(site)]
