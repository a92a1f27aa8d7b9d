"""``torchtap runs``: list, tag, rename, prune, delete, copy and merge runs. Deleting needs ``--yes``."""

from __future__ import annotations

import datetime as dt
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from torchtap.cli import SuggestingGroup
from torchtap.cli.console import Terminal, say, say_json
from torchtap.progress import tracked
from torchtap.store.read.lookup import compact
from torchtap.viewer import manage
from torchtap.viewer.open_run import Refused
from torchtap.viewer.run_index import Card, Catalog, better, read_notes

__all__ = ["command"]

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_BYTES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_TERM = re.compile(r"\s*([^<>=!~\s]+)\s*(<=|>=|!=|=|<|>|~)\s*(.+?)\s*$")


@click.group("runs", cls=SuggestingGroup)
def command() -> None:
    """List, tag, rename, prune, delete, copy and merge runs."""


def _cards(folder: str) -> list[tuple[Card, str]]:
    """Return the card and the path of every run below a folder; of a run itself, its own."""
    catalog = Catalog.open([folder])
    while catalog.survey():
        pass
    entries = tracked(catalog.entries(), "reading runs")
    return [(entry.card, entry.found.path) for entry in entries]


def fact_of(card: Card, name: str) -> Any:
    """Return a fact, label or logged value of a run by its name; ``best:loss`` and the like choose among values."""
    if name in ("tag", "tags"):
        return " ".join(card.tags)
    if name == "duration":
        return card.seconds
    if name in ("name", "status", "steps", "size", "sites", "ranks", "created"):
        return getattr(card, name)
    if name in card.labels:
        return card.labels[name]
    for place, which in enumerate(("last", "best", "min", "max")):
        if name.startswith(f"{which}:") and (chosen := card.values.get(name[len(which) + 1 :])) is not None:
            return chosen[place]
    held = card.values.get(name)
    return None if held is None else held[0]


def selects(expression: str) -> Callable[[Card], bool]:
    """Return a test for runs, e.g. ``lr > 0.001 and optimizer = adam``. A NaN satisfies ``= nan`` and nothing else."""
    terms = []
    for part in re.split(r"\s+and\s+", expression.strip()):
        found = _TERM.match(part)
        if found is None:
            raise click.BadParameter(
                f"{part!r} is no comparison; write for example 'lr > 0.001 and status = closed'"
            )
        terms.append(found.groups())

    def test(card: Card) -> bool:
        return all(_holds(fact_of(card, name), sign, wanted) for name, sign, wanted in terms)

    return test


def _holds(value: Any, sign: str, wanted: str) -> bool:
    if value is None:
        return sign == "!="
    text, word = str(value).lower(), wanted.strip("\"'").lower()
    if sign == "~":
        return word in text
    try:
        a, b = float(value), float(word)
        if math.isnan(a) or math.isnan(b):
            return (math.isnan(a) and math.isnan(b)) == (sign == "=") if sign in ("=", "!=") else False
    except ValueError:
        return {"=": text == word, "!=": text != word}.get(sign, False)
    return {"=": a == b, "!=": a != b, "<": a < b, "<=": a <= b, ">": a > b, ">=": a >= b}[sign]


def _seconds(text: str) -> float:
    found = re.fullmatch(r"([\d.]+)\s*([smhdw])", text.strip().lower())
    if found is None:
        raise click.BadParameter(f"{text!r} is no time; write 12h, 30d or 4w")
    return float(found[1]) * _UNITS[found[2]]


def _size(text: str) -> float:
    found = re.fullmatch(r"([\d.]+)\s*([kmgt]?)i?b?", text.strip().lower())
    if found is None:
        raise click.BadParameter(f"{text!r} is no size; write 500MB or 2GB")
    return float(found[1]) * _BYTES[found[2]]


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def _number(value: float | str | None) -> str:
    return (
        ""
        if value is None
        else {"nan": "NaN"}.get(value, value)
        if isinstance(value, str)
        else compact(value)
    )


@command.command("list")
@click.argument("folder", default="runs")
@click.option("--where", "expression", help="Only these, e.g. 'lr > 0.001 and status = closed'.")
@click.option(
    "--sort",
    default="created",
    show_default=True,
    help="A fact, label or logged value; best:loss for its best.",
)
@click.option("--json", "as_json", is_flag=True, help="The runs as JSON.")
def list_runs(folder: str, expression: str | None, sort: str, as_json: bool) -> None:
    """List the runs in FOLDER: state, steps, last and best loss, duration, size, labels, tags."""
    test = selects(expression) if expression else None
    cards = [card for card, _ in _cards(folder) if test is None or test(card)]
    missing = [card for card in cards if not isinstance(fact_of(card, sort), int | float)]
    if len(missing) == len(cards):
        cards.sort(key=lambda card: str(fact_of(card, sort) or ""))
    else:
        cards.sort(key=lambda card: (card in missing, fact_of(card, sort) if card not in missing else 0))
    if as_json:
        say_json([card.line() for card in cards])
        return
    console = Terminal()
    columns = _columns(cards)
    shown = _fitting(columns, console.width)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in shown:
        table.add_column(title, no_wrap=True)
    for row in zip(*(columns[title] for title in shown), strict=True):
        table.add_row(*row)
    console.print(table)
    if left := [title for title in columns if title not in shown]:
        say(f"no room for: {', '.join(left)}; a wider terminal or --json shows them")
    say(f"{len(cards)} run{'s'[: len(cards) != 1]}, {_bytes(sum(card.size for card in cards))}")


def _columns(cards: Sequence[Card]) -> dict[str, list[str]]:
    """Return the cells of the table by title, the most important columns first."""
    columns = {
        "run": [card.name for card in cards],
        "status": ["unreadable" if card.problem else card.status for card in cards],
        "steps": [f"{card.steps:,}" for card in cards],
    }
    for name in dict.fromkeys(
        name for card in cards for name, held in card.values.items() if held[1] is not None
    ):
        for place, which in enumerate(("last", "best")):
            columns[f"{which} {name}"] = [
                _number(card.values.get(name, [None, None])[place]) for card in cards
            ]
    columns["size"] = [_bytes(card.size) for card in cards]
    columns["tags"] = [" ".join(card.tags) for card in cards]
    columns["duration"] = [_duration(card.seconds) for card in cards]
    for label in dict.fromkeys(label for card in cards for label in card.labels):
        columns.setdefault(label, [str(card.labels.get(label, "")) for card in cards])
    return {title: cells for title, cells in columns.items() if title in ("run", "steps") or any(cells)}


def _fitting(columns: Mapping[str, list[str]], width: int) -> list[str]:
    """Return the titles of the columns that fit into a line, without cutting any."""
    shown: list[str] = []
    for title, cells in columns.items():
        needed = max(len(title), *map(len, cells), 0) + 2
        if not shown or needed <= width:
            shown.append(title)
            width -= needed
    return shown


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds:.1f} s" if seconds < 60 else str(dt.timedelta(seconds=round(seconds)))


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except Refused as refused:
        raise click.ClickException(str(refused)) from refused


_JSON = click.option("--json", "as_json", is_flag=True, help="What was done, as JSON.")


@command.command("tag")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--add", multiple=True, metavar="TAG", help="May be given again.")
@click.option("--remove", multiple=True, metavar="TAG", help="May be given again.")
@_JSON
def tag(runs: tuple[str, ...], add: tuple[str, ...], remove: tuple[str, ...], as_json: bool) -> None:
    """Add tags to runs or remove them; without options, print them."""
    found = {}
    with _refusing():
        for path in [manage.run_folder(run) for run in runs]:
            tags, _ = read_notes(str(path))
            if add or remove:
                manage.tag_run(path, [tag for tag in dict.fromkeys([*tags, *add]) if tag not in remove])
            found[path.name] = read_notes(str(path))[0]
    if as_json:
        say_json(found)
    for name, tags in () if as_json else found.items():
        say(f"{name}: {', '.join(tags) or 'no tags'}")


@command.command("rename")
@click.argument("run")
@click.argument("name")
@_JSON
def rename(run: str, name: str, as_json: bool) -> None:
    """Rename the folder of RUN to NAME, where it is."""
    with _refusing():
        path = manage.run_folder(run)
        manage.rename_run(path, name)
    _say_path(path.with_name(name), as_json)


def _say_path(path: Path, as_json: bool) -> None:
    if as_json:
        say_json({"path": str(path)})
    else:
        say(str(path))


_YES = click.option("--yes", is_flag=True, help="Do it; without this, only list what would be deleted.")


@command.command("delete")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@_YES
@_JSON
def delete(runs: tuple[str, ...], yes: bool, as_json: bool) -> None:
    """Delete runs and everything recorded in them."""
    _delete(list(runs), yes, as_json)


@command.command("prune")
@click.argument("folder")
@click.option("--older-than", metavar="TIME", help="Runs that began longer ago: 12h, 30d, 4w.")
@click.option("--larger-than", metavar="SIZE", help="Runs with more bytes: 500MB, 2GB.")
@click.option(
    "--where", "expression", help="Runs of which this holds, e.g. 'status = interrupted' or 'steps < 100'."
)
@click.option("--keep-best", type=click.IntRange(1), metavar="N", help="Never these many best runs.")
@click.option("--by", default="loss", show_default=True, help="The logged value that --keep-best goes by.")
@_YES
@_JSON
def prune(
    folder: str,
    older_than: str | None,
    larger_than: str | None,
    expression: str | None,
    keep_best: int | None,
    by: str,
    yes: bool,
    as_json: bool,
) -> None:
    """Delete the runs in FOLDER that fulfil all conditions. At least one is needed; tagged `keep`, a run stays.

    With --keep-best alone, all but the best are deleted. Runs that are being written are never touched.
    """
    if older_than is None and larger_than is None and expression is None and keep_best is None:
        raise click.UsageError("name a condition: --older-than, --larger-than, --where or --keep-best")
    tests: list[Callable[[Card], bool]] = [
        lambda card: card.status != "recording" and "keep" not in card.tags
    ]
    if older_than is not None:
        before = dt.datetime.now(dt.UTC) - dt.timedelta(seconds=_seconds(older_than))
        tests.append(lambda card: _created(card) is not None and (_created(card) or before) < before)
    if larger_than is not None:
        most = _size(larger_than)
        tests.append(lambda card: card.size > most)
    if expression is not None:
        tests.append(selects(expression))
    cards = _cards(folder)
    if keep_best is not None:
        kept = _best([card for card, _ in cards], by, keep_best)
        say(f"kept as the best by {by}: {', '.join(kept)}", err=True)
        tests.append(lambda card: card.name not in kept)
    _delete([path for card, path in cards if all(test(card) for test in tests)], yes, as_json)


def _created(card: Card) -> dt.datetime | None:
    try:
        when = dt.datetime.fromisoformat(card.created)
    except ValueError:
        return None
    return when if when.tzinfo is not None else when.replace(tzinfo=dt.UTC)


def _best(cards: list[Card], by: str, most: int) -> list[str]:
    """Return the names of the best runs; one whose value is unknown or NaN is never among them."""
    turn = -1 if better(by) == "max" else 1
    found = [
        (turn * value, card.name)
        for card in cards
        if isinstance(value := fact_of(card, f"{'max' if turn < 0 else 'min'}:{by}"), float)
    ]
    if not found:
        raise click.UsageError(f"none of the runs logged {by!r}; --by names another value")
    return [name for _, name in sorted(found)[:most]]


def _delete(runs: list[str], yes: bool, as_json: bool) -> None:
    gone: list[str] = []
    with _refusing():
        paths = [manage.run_folder(run) for run in runs]
        try:
            for path in tracked(paths, "deleting runs") if yes else paths:
                size = sum(file.lstat().st_size for file in path.rglob("*") if not file.is_dir())
                if yes:
                    manage.delete_run(path, path.name)
                    gone.append(str(path))
                if not as_json:
                    say(f"{'deleted' if yes else 'would delete'} {os.path.relpath(path)}  {_bytes(size)}")
        finally:
            if yes and len(gone) < len(paths):
                say(f"{len(gone)} of {len(paths)} runs deleted", err=True)
    if as_json:
        say_json({"deleted": gone, "chosen": [str(path) for path in paths]})
    elif not paths:
        say("no run fulfils the conditions")
    elif not yes:
        say(f"{len(paths)} run{'s'[: len(paths) != 1]}; nothing was deleted. --yes deletes them", err=True)


@command.command("copy")
@click.argument("run")
@click.argument("target")
@_JSON
def copy(run: str, target: str, as_json: bool) -> None:
    """Copy RUN to the folder TARGET, which must not exist yet, or into TARGET if it is a folder of runs."""
    place = Path(target)
    with _refusing():
        path = manage.run_folder(run)
        place = place / path.name if place.is_dir() else place
        manage.copy_run(path, place)
    _say_path(place, as_json)


@command.command("merge")
@click.argument("runs", nargs=-1, required=True, metavar="RUN RUN...")
@click.option("-o", "--out", required=True, help="The run folder to write.")
@_JSON
def merge(runs: tuple[str, ...], out: str, as_json: bool) -> None:
    """Write one run from several: ranks that wrote into different folders, or a training and its resumption.

    Name them in order. Where two recorded the same step, the later counts.
    """
    if len(runs) < 2:
        raise click.UsageError("merging needs at least two runs")
    with _refusing():
        manage.merge_runs([manage.run_folder(run) for run in runs], Path(out))
    _say_path(Path(out), as_json)
