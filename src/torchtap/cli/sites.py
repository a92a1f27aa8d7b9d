"""``torchtap sites``: list the sites of a model.

Only sites that a call of their module can produce are listed. A module without a forward of its own has none. Attention
and named values are listed if the module's code, or a function that it calls, uses a function that produces them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table
from torch import nn

from torchtap import Site
from torchtap.cli.console import Terminal, say, say_json
from torchtap.cli.import_path import find_named
from torchtap.errors import FormError

if TYPE_CHECKING:
    from torchtap import Site

__all__ = ["can_come", "command", "load_model"]


_OF_A_CALL = frozenset({"input", "output", "grad_input", "grad_output", "attention", "value"})
_SOURCES = {
    "attention": frozenset(
        {
            "scaled_dot_product_attention",
            "multi_head_attention_forward",
            "_native_multi_head_attention",
            "_transformer_encoder_layer_fwd",
        }
    ),
    "value": frozenset({"emit"}),
}
_DEPTH = 4  # helpers of helpers


def can_come(site: Site) -> bool:
    """Return True if a run of the model can produce a value for this site."""
    module = site.module
    if module is None or site.kind not in _OF_A_CALL:
        return True
    if type(module).forward is nn.Module.forward and "forward" not in module.__dict__:
        return False
    kind: Any = type(module)
    names = _names_in_forward(kind)
    return names is None or site.kind not in _SOURCES or not _SOURCES[site.kind].isdisjoint(names)


@cache
def _names_in_forward(kind: type[Any]) -> frozenset[str] | None:
    forward = inspect.unwrap(kind.forward)
    return frozenset(_names(forward, kind, _DEPTH)) if isinstance(forward, FunctionType) else None


def _names(function: FunctionType, owner: type[nn.Module], depth: int) -> Iterator[str]:
    """The names that a function's code has, and those of its own methods and helpers that it names."""
    for name in _words(function.__code__):
        yield name
        if depth:
            for helper in _helpers(name, function, owner):
                yield from _names(helper, owner, depth - 1)


def _words(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):  # a function or a comprehension inside
            yield from _words(constant)


def _helpers(name: str, function: FunctionType, owner: type[nn.Module]) -> Iterator[FunctionType]:
    """Yield what a name refers to: a method of the module, a function of its file, or a table of such functions."""
    found: Any = getattr(owner, name, None) if name not in nn.Module.__dict__ else None
    found = found if found is not None else function.__globals__.get(name)
    candidates = list(found.values()) if isinstance(found, Mapping) else [found]
    for each in candidates:
        if isinstance(each, FunctionType) and not each.__module__.startswith("torch."):
            yield each


@click.command("sites")
@click.argument("model")
@click.option("--kind", "kinds", multiple=True, help="Only this kind (may be given several times).")
@click.option("--select", "selector", help="Only sites that this selector picks.")
@click.option("--ops", is_flag=True, help="The operators in the code of each module: values between modules.")
@click.option("--plain", is_flag=True, help="Names only, one a line.")
@click.option("--json", "as_json", is_flag=True, help="A list of sites with their modules, for programs.")
@click.option(
    "--unsafe",
    is_flag=True,
    help="Allow a pickle or a compiled package, which can run its author's code.",
)
def command(
    model: str,
    kinds: tuple[str, ...],
    selector: str | None,
    ops: bool,
    plain: bool,
    as_json: bool,
    unsafe: bool,
) -> None:
    """List the sites of MODEL.

    MODEL is `package.module:factory`, `script.py:factory` (a module or a callable that makes one), a TorchScript
    or pickled `.pt`, or an exported `.pt2`.
    """
    loaded = load_model(model, unsafe=unsafe)
    sites = _operators(loaded, selector) if ops else _sites(loaded, kinds, selector)
    rows = [(site.name, type(site.module).__name__, _source(site)) for site in sites]
    if as_json:
        say_json([{"site": name, "module": module, "forward": source} for name, module, source in rows])
    elif plain:
        for name, _, _ in rows:
            say(name)
    else:
        _print(rows, type(loaded).__name__)


def _source(site: Site) -> str | None:
    """Return the file and line of the forward that produces a site's value."""
    from torchtap.store.write.manifest import source_of

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


def _operators(model: Any, selector: str | None) -> list[Site]:
    """The operators of a model, as far as its code shows them."""
    from torchtap import make_plan
    from torchtap.forms.attach import form_of

    if form_of(model) != "eager":
        raise click.UsageError(f"--ops: operators are of eager models, and this one is {form_of(model)}")
    return [port.site for port in make_plan(model, [selector or "*/*:output"], all_match=False).ports]


def _sites(model: Any, kinds: tuple[str, ...], selector: str | None) -> list[Site]:
    """The sites that a selector picks; without one, those of some kinds that can have a value."""
    from torchtap import make_plan
    from torchtap.forms.attach import tree_of
    from torchtap.plan.names import KINDS
    from torchtap.plan.plan import candidates
    from torchtap.spi import places

    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise click.UsageError(f"--kind {unknown[0]}: the kinds are {', '.join(KINDS)}")
    if selector is not None:
        return [port.site for port in make_plan(tree_of(model), [selector]).ports]
    wanted: Any = frozenset(kinds or KINDS)
    every = (names[0] for names in candidates(places(tree_of(model)), wanted))
    return [site for site in every if can_come(site)]
