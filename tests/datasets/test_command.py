"""``torchtap harvest`` and what the viewer lists."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.datasets.models import documents, tiny
from tests.optional import need

import torchtap as tt
from torchtap.cli import torchtap

SCRIPT = """
import torch
from tests.datasets.models import documents, tiny

def data():
    return documents(20)

def tokenizer(text):
    return [3 + len(word) for word in text.split()]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text(SCRIPT)
    return tmp_path


def test_the_command_harvests_data_of_a_function_and_goes_on(folder: Path) -> None:
    words = ["harvest", "job.py:tiny", "job.py:data", "--sites", "first:output", "--out", "acts"]
    words += ["--quiet", "--window", "4"]
    first = CliRunner().invoke(torchtap, words)
    assert first.exit_code == 0, first.output
    acts = tt.open_activations("acts")
    assert len(acts) == sum(len(each["input_ids"]) for each in documents(20))
    assert f"{len(acts)} rows" in first.output.replace(",", "")
    (folder / "acts" / "index.json").unlink()
    (folder / "acts" / "shard-000002.safetensors").unlink()
    assert CliRunner().invoke(torchtap, words).exit_code == 0
    assert len(tt.open_activations("acts")) == len(acts)


def test_the_command_harvests_a_folder_of_texts_and_reshuffles(folder: Path) -> None:
    (folder / "texts").mkdir()
    for number in range(6):
        (folder / "texts" / f"{number}.txt").write_text(" ".join(["word"] * (number + 2)))
    words = ["harvest", "job.py:tiny", "texts", "--tokenizer", "job.py:tokenizer", "--sites", "first:output"]
    done = CliRunner().invoke(torchtap, [*words, "--out", "acts", "--dtype", "bfloat16"])
    assert done.exit_code == 0, done.output
    assert "6 documents" in done.output
    assert len(tt.open_activations("acts")) == sum(range(2, 8))
    mixed = CliRunner().invoke(torchtap, ["harvest", "acts", "--reshuffle", "--out", "mixed", "--seed", "3"])
    assert mixed.exit_code == 0, mixed.output
    assert len(tt.open_activations("mixed")) == sum(range(2, 8))


def test_what_is_missing_is_a_usage_error(folder: Path) -> None:
    done = CliRunner().invoke(torchtap, ["harvest", "job.py:tiny", "--out", "acts"])
    assert done.exit_code == 2
    assert "DATA and --sites are needed" in done.output


def test_the_viewer_lists_folders_of_activations_with_rows_sites_and_progress(tmp_path: Path) -> None:
    need("starlette")
    from torchtap.viewer.run_index import Catalog
    from torchtap.viewer.server import answer

    acts = tt.harvest(tiny(), documents(20), "first:output", tmp_path / "a" / "acts", window=4)
    tt.harvest(tiny(), documents(20), "first:output", tmp_path / "part", window=4)
    (tmp_path / "part" / "index.json").unlink()
    (tmp_path / "part" / "shard-000004.safetensors").unlink()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "activations.json").write_text("{")
    listed = {each["name"]: each for each in json.loads(answer(Catalog.open([tmp_path]), "activations", {}))}
    assert listed["a/acts"] == {
        "name": "a/acts", "rows": len(acts), "size": acts.nbytes, "shards": 5, "sites": ["first:output"],
        "progress": 1.0, "status": "complete",
    }  # fmt: skip
    assert (listed["part"]["progress"], listed["part"]["status"]) == (0.8, "interrupted")
    assert "cannot be read" in listed["broken"]["problem"]
