"""``torchtap golden record|check|accept|list``: goldens of models for which there is no pytest test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from torchtap.cli.console import say, say_json

__all__ = ["command"]

_WANTED = "is no target: give package.module:function or script.py:function, which returns (model, inputs)"
_root = click.option(
    "--dir", "root", type=click.Path(path_type=Path), help="Folder of goldens  [tests/golden]"
)


_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group("golden")
def command() -> None:
    """Keep a small recording of a right run in the repository, and check later runs against it.

    TARGET is a function without arguments, `package.module:function` or `script.py:function`. It returns a model and
    its inputs; with --steps, a model and a function step(i) that trains it for one step and returns the loss. The
    golden keeps TARGET, so that check and accept find it.
    """


@command.command("record")
@click.argument("name")
@click.argument("target")
@click.option("--steps", default=0, help="Record a training of so many steps.")
@_root
@_json
def record(name: str, target: str, steps: int, root: Path | None, as_json: bool) -> None:
    """Record NAME from TARGET. An existing golden is not replaced: see accept."""
    from torchtap import golden
    from torchtap.errors import CompareError
    from torchtap.golden.front import default_root
    from torchtap.golden.store import list_goldens

    if name in list_goldens(default_root(root)):
        raise CompareError(f"golden {name!r} exists; `torchtap golden accept {name}` replaces it")
    folder = _run(golden.record, name, target, steps, root, target=target)
    say_json({"name": name, "folder": str(folder)}) if as_json else say(f"recorded in {folder}")


@command.command("check")
@click.argument("names", nargs=-1)
@_root
@_json
def check(names: tuple[str, ...], root: Path | None, as_json: bool) -> None:
    """Check the named goldens, or all that have a target. Exit code: 0 the same, 1 one differs, 2 an error.

    A failure leaves an HTML report in the folder torchtap-golden-report.
    """
    from torchtap import golden
    from torchtap.integrations.pytest_golden import report

    failed, found = False, []
    for each in _chosen(names, root):
        verdict = _run(golden.check, each.name, each.target, each.steps, root)
        failed |= not verdict.same
        text = str(verdict) if verdict.same else report(verdict, Path(), "torchtap golden accept ")
        found.append({"name": each.name, "same": bool(verdict.same), "text": text})
        if not as_json:
            say(text)
    if as_json:
        say_json(found)
    raise SystemExit(int(failed))


@command.command("accept")
@click.argument("names", nargs=-1, required=True)
@_root
@_json
def accept(names: tuple[str, ...], root: Path | None, as_json: bool) -> None:
    """Record the named goldens anew: their change is intended."""
    from torchtap import golden

    done = {}
    for each in _chosen(names, root):
        folder = _run(golden.record, each.name, each.target, each.steps, root, target=each.target)
        done[each.name] = str(folder)
    if as_json:
        say_json(done)
    else:
        for folder in done.values():
            say(f"accepted in {folder}")


@command.command("list")
@_root
@_json
def list_all(root: Path | None, as_json: bool) -> None:
    """List the goldens: name, model, sites, torch, target."""
    from torchtap.golden.front import default_root
    from torchtap.golden.store import list_goldens, load

    goldens = [load(default_root(root), name) for name in list_goldens(default_root(root))]
    if as_json:
        rows = [
            {
                "name": each.name,
                "model": each.model,
                "steps": each.steps,
                "sites": len(each.sites),
                "target": each.target,
            }
            for each in goldens
        ]
        say_json(rows)
        return
    for each in goldens:
        kind = f"{each.steps} steps of {each.model}" if each.steps else each.model
        made = f"torch {each.made.get('torch')}, {each.made.get('processor')}"
        say(f"{each.name}  {kind}  {len(each.sites)} sites  {made}  {each.target or 'checked by pytest'}")


def _chosen(names: tuple[str, ...], root: Path | None) -> list[Any]:
    """Return the named goldens, or all that the command line can check."""
    from torchtap.errors import CompareError
    from torchtap.golden.front import default_root
    from torchtap.golden.store import list_goldens, load

    folder = default_root(root)
    found = [load(folder, name) for name in names or list_goldens(folder)]
    chosen = [each for each in found if each.target]
    unknown = [each.name for each in found if not each.target and names]
    if unknown or not chosen:
        what = (
            f"golden {unknown[0]!r} was recorded by pytest"
            if unknown
            else f"{folder} has no golden with a target"
        )
        raise CompareError(f"{what}; `torchtap golden record NAME TARGET` records one, pytest checks its own")
    return chosen


def _run(
    function: Callable[..., Any], name: str, source: str, steps: int, root: Path | None, **more: Any
) -> Any:
    """Call `torchtap.golden.record` or `check` with what the target returns."""
    from torchtap.cli.import_path import find_named
    from torchtap.errors import FormError

    _, found = find_named(source, _WANTED)
    made = (found, None) if steps else found() if callable(found) else None
    if not isinstance(made, tuple) or len(made) != 2:
        raise FormError(f"{source!r} returned {type(made).__name__}; it has to return (model, inputs)")
    return function(name, *made, steps=steps, root=root, **more)
