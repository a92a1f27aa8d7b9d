"""A run with hostile names through every way out: reader, terminal, exports, page and report."""

from __future__ import annotations

import csv
import io
import json
import re
import unicodedata
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np

from torchtap.store.record import ScalarBlock, StepRecord, TensorItem
from torchtap.store.write.writer import RunWriter

__all__ = ["check_every_way_out", "harmful_in_a_terminal", "record_names"]

# Written by rich itself: colours and the cursor.
_OF_RICH = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\]8;[^\x1b]*\x1b\\")
_UNSEEN = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}


def harmful_in_a_terminal(text: str) -> str | None:
    """The first character that a terminal would take for more than text; colours of our own are none."""
    for letter in _OF_RICH.sub("", text):
        if letter not in "\n\t" and unicodedata.category(letter) in _UNSEEN:
            return letter
    return None


def record_names(folder: Path, names: Sequence[str], steps: int = 3) -> None:
    """A run whose sites, statistics, fields, reductions, events and manifest carry these names."""
    sites, statistics = tuple(names), tuple(dict.fromkeys(("rms", *names[:5])))
    grid = np.arange(len(sites) * len(statistics), dtype=float).reshape(len(sites), len(statistics))
    facts = [{"name": name, "module": name, "class": name, "source": name} for name in names[:50]]
    manifest = {
        "sites": facts,
        "model": {"name": names[0], "children": []},
        "environment": {names[0]: names[-1]},
    }
    with RunWriter(folder, manifest=manifest) as writer:
        for step in range(steps):
            items = [
                TensorItem(name, names[(at + 1) % len(names)], "full", np.full((2, 3), at + step, np.float32))  # type: ignore[arg-type]
                for at, name in enumerate(names[:40])
            ]
            writer.write(
                StepRecord(
                    step,
                    None,
                    None,
                    "train",
                    float(step),
                    (ScalarBlock(sites, statistics, grid + step),),
                    tuple(items),
                )
            )
        writer.event("lost", message=names[0], tensors=1)
        writer.event("coverage", missing=[{"site": name, "reason": name} for name in names[:50]])
        writer.event("tokens", step=0, tokens=list(names[:50]))


def check_every_way_out(folder: Path, names: Sequence[str], out: Path) -> int:
    """Raise unless the names come back as they are, and leave as mere text. Returns how many answers were checked."""
    from torchtap.store.read.reader import open_run

    run = open_run(folder)
    assert set(run.sites()) == set(names)
    for at, name in enumerate(names):
        assert run.series(name, "rms").values[0] == at * len(run.statistics()), name
    checked = len(names)
    for text in (repr(run), *run.problems):
        assert harmful_in_a_terminal(text) is None, text
    checked += _terminal(folder)
    checked += _exports(folder, names, out)
    checked += _page(folder, names, out)
    run._repr_html_().encode("utf-8")
    return checked


def _terminal(folder: Path) -> int:
    from torchtap.cli import main

    commands = [
        ["show", str(folder), "--rows", "5000"],
        ["show", str(folder), "--tensors"],
        ["show", str(folder), "--coverage"],
        ["show", str(folder), "--json"],
        ["tail", str(folder), "--once", "--rows", "500"],
        ["compare", str(folder), str(folder)],
    ]
    for words in commands:
        stdout, stderr = io.StringIO(), io.StringIO()
        code: object = None
        try:
            with redirect_stdout(stdout), redirect_stderr(stderr):
                main(words)
        except SystemExit as stop:
            code = stop.code
        said = stdout.getvalue() + stderr.getvalue()
        assert code in (0, 1, None) or (words[0] == "compare" and code == 2), (words, said[-500:])
        bad = harmful_in_a_terminal(said)
        assert bad is None, (words[0], bad)
    return len(commands)


def _exports(folder: Path, names: Sequence[str], out: Path) -> int:
    from torchtap.sinks.export import FORMATS, export_run
    from torchtap.store.read.reader import open_run

    run = open_run(folder)
    rows = len(names) * len(run.statistics()) * len(run.steps())
    for form in FORMATS:
        assert export_run(run, form, out / f"a run.{form}").stat().st_size > 0
    with (out / "a run.csv").open(newline="", encoding="utf-8") as file:
        assert len(list(csv.reader(file))) == rows + 1
    with (out / "a run.jsonl").open(encoding="utf-8") as file:
        assert len([json.loads(line) for line in file]) == rows
    with np.load(out / "a run.npz", allow_pickle=False) as arrays:
        assert sum(name.endswith("|values") for name in arrays) == len(names) * len(run.statistics())
    return len(FORMATS)


def _page(folder: Path, names: Sequence[str], out: Path) -> int:
    from tests.viewer.wire import unpack

    from torchtap.viewer.report import write_report
    from torchtap.viewer.run_index import Catalog
    from torchtap.viewer.server import answer, built

    catalog = Catalog.open([folder])
    about = json.loads(answer(catalog, "about", {"run": ""}))
    assert len(about["sites"]) == len(names)
    asked = 0
    for site in about["sites"]:
        site["name"].encode("utf-8")  # what no URL could carry would raise
        assert len(site["name"]) <= 1000
        if not site["name"]:
            continue  # no address can ask for it
        for question in ("series", "tensors", "histograms"):
            answer(catalog, question, {"run": "", "site": site["name"], "statistics": "rms"})
            asked += 1
        if site["name"] in about["tensors"]:
            listed = json.loads(answer(catalog, "tensors", {"run": "", "site": site["name"]}))["tensors"]
            field = listed[0]["field"]
            facts, _ = unpack(
                answer(catalog, "slice", {"run": "", "site": site["name"], "step": "0", "field": field})
            )
            assert facts["shape"] == [2, 3]
            asked += 1
    for names_ in about["statistics"]:
        for statistic in names_:
            answer(catalog, "map", {"run": "", "statistic": statistic, "kind": "output"})
            asked += 1
    for question in ("runs", "findings", "coverage", "tokens", "about"):
        body = answer(catalog, question, {"run": "", "step": "0"})
        keys = [key for pairs in _objects(body) for key, _ in pairs]
        assert not {"__proto__", "constructor"} & set(keys), "a name became a key that every object has"
        asked += 1
    if built():
        report = write_report([folder], out / "report.html")
        page = report.path.read_text(encoding="utf-8")
        assert page.count("<script") == 2, "a name became part of the page"
    return asked


def _objects(body: bytes) -> list[list[tuple[str, object]]]:
    """The keys and values of every object in a JSON text."""
    found: list[list[tuple[str, object]]] = []
    json.loads(body, object_pairs_hook=lambda pairs: found.append(pairs))
    return found
