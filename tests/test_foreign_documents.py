"""Small files that a stranger made, besides runs and models: settings, plans, maps, notes. All are refused at once."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchtap as tt
from torchtap.cli import main
from torchtap.errors import TorchtapError
from torchtap.forms.match.site_map import SiteMap
from torchtap.monitors.monitor_outputs import read_item
from torchtap.monitors.monitor_settings import read_config
from torchtap.plan.plan import Plan
from torchtap.store.write.writer import RunWriter
from torchtap.viewer.run_index import read_notes

HOSTILE = {
    "nothing": b"",
    "deep lists": b"[" * 200_000,
    "deep objects": b'{"taps":' * 50_000,
    "no object": b"7",
    "a list": b"[1, 2]",
    "not UTF-8": b'{"taps": "\xff\xfe"}',
    "a large number": b'{"taps": [1e999], "version": ' + b"9" * 5000 + b"}",
    "escapes": b'{"format": "\\u001b]0;owned\\u0007", "taps": [{"selectors": ["\\u001b[2J"]}]}',
    "null bytes": b"\x00" * 100,
}


def read_plan(path: Path) -> object:
    return Plan.from_json(path.read_text(encoding="utf-8", errors="replace"), nn.Linear(2, 2))


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize(
    ("read", "suffix"),
    [
        (read_plan, ".json"),
        (SiteMap.load, ".json"),
        *((read_config, each) for each in (".json", ".toml", ".yaml")),
    ],
)
def test_a_hostile_document_is_an_error_of_torchtap_and_mere_text(
    tmp_path: Path, read: Callable[[Path], Any], suffix: str, content: bytes
) -> None:
    if suffix == ".yaml" and content.startswith((b"[" * 10, b'{"taps":{')):
        content = content[:3000]  # its parser is slow, not wrong
    path = tmp_path / f"document{suffix}"
    path.write_bytes(content)
    said = ""
    try:
        read(path)
    except TorchtapError as error:
        said = str(error)
    # Settings may be few, and may be for others.
    assert said or (read is read_config and content in (HOSTILE["nothing"], HOSTILE["escapes"]))
    assert "\x1b" not in said
    assert len(said) < 2000


@pytest.mark.parametrize("content", [b"", b"[" * 200_000, b"\xff"])
def test_a_hostile_comparison_is_told_by_the_viewer(
    tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunWriter(tmp_path / "run", manifest={}):
        pass
    (tmp_path / "result.json").write_bytes(content)
    words = ["view", str(tmp_path / "run"), "--comparison", str(tmp_path / "result.json"), "--no-browser"]
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    assert "not JSON" in capsys.readouterr().err


def test_a_map_with_hostile_names_is_printed_as_text(tmp_path: Path) -> None:
    made = SiteMap(form="x", sites={}, missing={"\x1b[2Ja:output": "\x1b]0;owned\x07"})
    assert "\x1b" not in str(made)
    assert "\x07" not in str(made)


@pytest.mark.parametrize("suffix", [".pt", ".npz", ".safetensors"])
@pytest.mark.parametrize(
    "content", [b"", b"PK\x03\x04", b"\x80\x02cos\nsystem\n.", b"\xff" * 99, b"[" * 9000]
)
def test_a_hostile_file_of_a_monitor_is_an_error_of_torchtap(
    tmp_path: Path, suffix: str, content: bytes
) -> None:
    path = tmp_path / f"item{suffix}"
    path.write_bytes(content)
    with pytest.raises(TorchtapError):
        read_item(path)


# -- archives that burst ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["exported", "script", "package"])
def test_an_archive_that_bursts_is_refused_before_it_is_unpacked(tmp_path: Path, kind: str) -> None:
    name = {
        "exported": "models/model.json",
        "script": "code/__torch__.py",
        "package": "data/aotinductor/model/x.json",
    }[kind]
    path = tmp_path / "model.pt2"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member in ("archive_format", "constants.pkl", "byteorder", "version", "data.pkl"):
            archive.writestr(f"archive/{member}", b"3\n")
        with archive.open(f"archive/{name}", "w") as file:
            for _ in range(300):
                file.write(b" " * (1 << 20))
    assert path.stat().st_size < 1 << 20
    with pytest.raises(TorchtapError, match=r"unpack to|AOTInductor"):  # by the sizes that the archive names
        tt.load(path)


def test_an_honest_script_and_program_are_read(tmp_path: Path) -> None:
    torch.jit.script(nn.Linear(2, 2)).save(str(tmp_path / "model.pt"))
    torch.export.save(torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),)), tmp_path / "model.pt2")
    for name in ("model.pt", "model.pt2"):
        assert tt.load(tmp_path / name)(torch.ones(1, 2)).shape == (1, 2)


# -- notes beside a run -------------------------------------------------------------------------------------------


def test_notes_of_a_stranger_neither_block_nor_lead_outside_nor_burst(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere.json"
    elsewhere.write_text(json.dumps({"tags": ["from outside"]}))
    folder = tmp_path / "run"
    folder.mkdir()
    notes = folder / "notes.json"
    notes.symlink_to(elsewhere)
    assert read_notes(str(folder)) == ([], False)
    notes.unlink()
    os.mkfifo(notes)
    assert read_notes(str(folder)) == ([], False)
    notes.unlink()
    with notes.open("wb") as file:
        file.truncate(20 << 30)
    assert read_notes(str(folder)) == ([], False)
    notes.unlink()
    notes.write_bytes(b"[" * 90_000)
    assert read_notes(str(folder)) == ([], False)
    notes.write_text(json.dumps({"tags": ["good"], "archived": True}))
    assert read_notes(str(folder)) == (["good"], True)
