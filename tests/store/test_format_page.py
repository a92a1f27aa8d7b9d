"""The page about the format, held against a recorded run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tests.store.records import record

from torchtap.store.files.layout import FORMAT_NAME, FORMAT_VERSION, parse_segment
from torchtap.store.record import ScalarBlock, StepRecord, TensorItem
from torchtap.store.write.writer import RunWriter

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text()


def section(title: str) -> str:
    return re.split(r"^## ", PAGE, flags=re.MULTILINE)[
        [part.splitlines()[0] for part in re.split(r"^## ", PAGE, flags=re.MULTILINE)].index(title)
    ]


def first_column(title: str, table: int = 0) -> set[str]:
    """The code words of the first column of a section's table."""
    tables = re.findall(r"((?:^\|.*\n)+)", section(title), flags=re.MULTILINE)
    rows = tables[table].splitlines()[2:]
    return {word for row in rows for word in re.findall(r"`([^`]+)`", row.split("|")[1])}


@pytest.fixture(scope="module")
def part(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a bit of everything the page speaks of."""
    run = tmp_path_factory.mktemp("run")
    odd = ScalarBlock(("a:output", "b:output"), ("mean",), np.ones((2, 1)), np.array([True, False]))
    items = (
        TensorItem("a:output", "value", "full", torch.ones(2, dtype=torch.complex128)),
        TensorItem("b:output", "value", "full", torch.eye(3).to_sparse()),
        TensorItem("c:output", "value", "full", torch.ones(2, 3).T),
        TensorItem("d:output", "value", "full", torch.zeros(1000)),
        TensorItem("d:output", "value", "full", torch.zeros(1000)),
        TensorItem("e:output", "a/b%@", "mine", torch.zeros(1)),
    )
    manifest = {"sites": [], "plan": {}, "model": {}, "environment": {}}
    with RunWriter(run, manifest=manifest, compress="zstd") as writer:
        writer.write(StepRecord(0, None, None, "train", 0.0, (odd,), items))
        writer.write(record(1))
        writer.event("warning", text="x")
    return run / "rank-00000" / "attempt-0000"


def test_the_files_are_those_of_the_page(part: Path) -> None:
    tree = section("Files").split("```")[1]
    named = {line.split()[0] for line in tree.splitlines() if line.strip() and not line.startswith("<run>")}
    kinds = {parsed.kind if (parsed := parse_segment(name)) else name.rstrip("/") for name in named}
    found = {parsed.kind if (parsed := parse_segment(path.name)) else path.name for path in part.iterdir()}
    assert found | {part.name, part.parent.name} == kinds


def test_the_manifest_has_the_fields_of_the_page(part: Path) -> None:
    manifest = json.loads((part / "manifest.json").read_text())
    assert set(manifest) == first_column("manifest.json")
    assert manifest["format"] == {"name": FORMAT_NAME, "version": FORMAT_VERSION}
    assert f"**version {FORMAT_VERSION}**" in PAGE
    assert f'`{{"name": "{FORMAT_NAME}", "version": {FORMAT_VERSION}}}`' in PAGE


def test_scalar_segments_have_the_entries_of_the_page(part: Path) -> None:
    with safe_open(next(part.glob("scalars-*")), framework="np") as opened:
        found = {name for name in opened.keys() if not name.startswith("grid1")}  # noqa: SIM118
        assert found == first_column("Scalar segments")
        metadata = opened.metadata()
        assert set(json.loads(metadata["torchtap"])) == {
            "format",
            "check",
            "kind",
            "part",
            "run_id",
            "flushes",
            "steps",
            "phases",
        }
        assert json.loads(metadata["grid0"]) == {"sites": ["a:output", "b:output"], "statistics": ["mean"]}
        assert opened.get_tensor("grid0.values").shape == (1, 2, 1)
        assert opened.get_tensor("clock.epoch").tolist() == [-(2**63)] * 2


def test_tensor_segments_have_the_names_and_notes_of_the_page(part: Path) -> None:
    with safe_open(next(part.glob("tensors-*")), framework="pt") as opened:
        names, metadata = set(opened.keys()), opened.metadata()
    assert {"0/full/value/d:output", "0~1/full/value/d:output"} <= names
    assert "0/full/value@indices/b:output" in names
    assert "0/mine/a%2Fb%25%40/e:output" in names
    facts = set().union(*(json.loads(metadata[name]) for name in names))
    assert facts | {"quantized"} == first_column("Notes", table=1) | {"crc32"}


def test_the_closing_has_the_fields_of_the_page(part: Path) -> None:
    closing = json.loads((part / "closed.json").read_text())
    assert set(closing) == set(re.findall(r"`(\w+)`", section("closed.json").split("\n", 1)[1]))


def test_events_are_json_lines_with_kind_and_time(part: Path) -> None:
    (line,) = next(part.glob("events-*")).read_text().splitlines()
    assert {"kind", "time"} <= set(json.loads(line))
