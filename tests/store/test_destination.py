"""Growing files: their bytes, their size, and the room on the disk that they give back."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from torchtap.store.files import folder as destination_module
from torchtap.store.files import system as allocate_module
from torchtap.store.files.folder import LocalDestination

_PIECES = [
    bytes([number]) * ((3 << 20) + number) for number in range(1, 8)
]  # past the room asked for at once


def _grown(tmp_path: Path) -> Path:
    place = LocalDestination(os.fspath(tmp_path), 0)
    stream = place.stream(64)
    for piece in _PIECES:
        stream.append(memoryview(piece))
    stream.commit("grown", b"h" * 64)
    place.release()
    return Path(place.path, "grown")


def test_a_grown_file_has_its_bytes_and_no_more_room_than_it_needs(tmp_path: Path) -> None:
    file = _grown(tmp_path)
    assert file.read_bytes() == b"h" * 64 + b"".join(_PIECES)
    with open(file, "rb") as opened:
        os.fsync(opened)  # only then does every file system say what it really uses
    assert file.stat().st_blocks * 512 < file.stat().st_size + (1 << 20)


def test_a_file_system_that_sets_no_room_aside_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(destination_module, "allocate", lambda *arguments: bool(asked.append(arguments)))
    assert _grown(tmp_path).read_bytes() == b"h" * 64 + b"".join(_PIECES)
    assert len(asked) == 1


def test_where_the_system_has_no_such_call_there_is_no_room_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allocate_module, "_fallocate", None)
    with open(tmp_path / "file", "wb") as file:
        assert not allocate_module.allocate(file.fileno(), 0, 1 << 20)


def test_asking_for_more_than_the_disk_has_is_refused_quietly(tmp_path: Path) -> None:
    with open(tmp_path / "file", "wb") as file:
        assert not allocate_module.allocate(file.fileno(), 0, 1 << 62)
        assert os.fstat(file.fileno()).st_size == 0
