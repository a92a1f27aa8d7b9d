"""Real and untidy architectures in every form, site by site beside hand-written hooks: no name on another value.

The fast part of `make forms`, whose table is in docs/forms.md.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.architectures import Count, count, judge, reference
from benchmarks.every_form import main, table
from tests.corpus.zoo import build

GRAPHS = ("export", "trace", "FX")
PUT_IN = ("export, instrumented", "trace, instrumented")
# What torch can make of each; the rest of the matrix is longer.
FAST = {
    "resnet, by hand": (*GRAPHS, *PUT_IN),
    "gpt, LoRA": (*GRAPHS, *PUT_IN),
    "gpt, no_grad": (*GRAPHS, *PUT_IN),
    "gpt, DataParallel": ("export", "trace", *PUT_IN),
    "experts": (*GRAPHS, *PUT_IN),
    "shared": (*GRAPHS, "script", *PUT_IN, "compile, aot_eager"),
    "swapped": (*GRAPHS, "script", *PUT_IN, "compile, aot_eager"),
    "lstm": (*GRAPHS, "script", *PUT_IN),
    "convnext, by hand": (*GRAPHS, *PUT_IN),
    "shifted windows": (*GRAPHS, "script", *PUT_IN),
    "sparse experts": (*GRAPHS, "script", *PUT_IN),
    "cells": ("export", "script", "export, instrumented"),
    "nested outputs": ("export", "FX", "export, instrumented"),
    "codebook": ("export", "FX", "export, instrumented"),
    "parametrized": (*GRAPHS, *PUT_IN),
    "old norms": (*GRAPHS, *PUT_IN),
    "adapters": ("export", "trace", *PUT_IN),
    "mixed precision": ("export", "export, instrumented", "compile, aot_eager"),
    "tied": (*GRAPHS, *PUT_IN),
    "unused": ("export", "export, instrumented", "compile, aot_eager"),
    "in place": ("export", "trace", *PUT_IN),
    "llama": ("export", "trace", *PUT_IN),
}


# A value that is changed in place between the operation that makes it and the module that is given it: the map has no
# key for the time between, and the coverage has the reason.
MISSING = {("in place", "export, like the model"): 1}


def assert_holds(form: str, found: Count, missing: int = 0) -> None:
    assert found.sites > 2
    assert found.wrong == 0, found.details
    assert found.unexplained == 0, found.details
    assert found.verdict in ("", "same"), found.details
    if form in GRAPHS:  # without the model at hand
        assert found.clean + found.plain + found.renamed >= 0.8 * found.sites, found.details
    elif form != "script":  # TorchScript does not tell one module under two names
        assert found.clean + found.plain == found.sites - missing, found.details


@pytest.mark.parametrize("name", FAST)
def test_an_eager_model_has_every_value_under_its_name(name: str) -> None:
    assert_holds("eager", count(name, "eager")["eager"])


@pytest.mark.parametrize(("name", "form"), [(name, form) for name, forms in FAST.items() for form in forms])
def test_a_form_has_no_name_on_another_value_and_compares_as_the_same(name: str, form: str) -> None:
    found = count(name, form)
    assert len(found) == (2 if form in GRAPHS else 1)
    for asked, each in found.items():
        assert_holds(asked, each, MISSING.get((name, asked), 0))


def test_a_name_on_another_value_is_counted_as_wrong() -> None:
    """The count itself: values that change places are seen."""
    model, args, kwargs = build("swapped")
    expected = reference(model, args, kwargs)
    moved = {
        **expected,
        "inner:output.0": expected["inner:output.1"],
        "inner:output.1": expected["inner:output.0"],
    }
    assert judge(expected, moved).wrong == 2
    assert judge(expected, {":output": expected[":output"]}).missing == 2
    elsewhere = judge(expected, {**{f"other.{site}": value for site, value in expected.items()}})
    assert elsewhere.renamed == 3
    assert elsewhere.wrong == 3  # there is no such module
    invented = judge(expected, {**expected, "inner:output": expected[":output"]})
    assert invented.wrong == 1  # there is such a module, but it does not return this


def test_a_count_that_was_interrupted_goes_on_where_it_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "counts.jsonl"
    asked = ["--names", "mlp", "swapped", "--forms", "eager", "FX", "--jobs", "1", "--out", str(file)]
    main(asked)
    lines = file.read_text().splitlines()
    assert [json.loads(line)["asked"] for line in lines] == ["eager", "FX"] * 2
    file.write_text("\n".join(lines[:3]) + "\n")
    capsys.readouterr()
    main(asked)
    told = capsys.readouterr().out
    assert len(file.read_text().splitlines()) == 4
    assert "swapped" in told
    assert "mlp" not in told
    assert told.count("| FX |") == 1
    rows = [{**row, "name": pair["name"]} for pair in map(json.loads, lines) for row in pair["rows"]]
    assert table(rows) in told
