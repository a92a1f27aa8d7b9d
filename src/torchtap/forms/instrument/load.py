"""Load a model file of any form, with torchtap's op in place, so that it can be tapped.

Loading runs no code of whoever made the file, unless ``unsafe=True``:

| file | without ``unsafe`` |
| --- | --- |
| exported ``.pt2`` | read, once `program_gate` has looked at every text; weights with ``weights_only`` |
| TorchScript ``.pt`` | read; refused if a class of it has code that runs at loading (``__setstate__``) |
| ONNX | read by onnxruntime, which loads no libraries that a file names |
| AOTInductor package | refused: it is machine code |
| pickled ``.pt`` | refused: a pickle runs whatever it says |

A file that was made with taps needs the op to be known before torch reads it. ``import torchtap.op`` is the
other way to have it, for programs that go on calling torch's own loaders.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal

import torch

from torchtap._torch import archive_reader, load_aoti_package, load_program_archive, unpacked_size
from torchtap.errors import FormError
from torchtap.forms.graph.forgotten import module_of
from torchtap.forms.instrument.program_gate import check_payloads, check_program
from torchtap.forms.op import op
from torchtap.forms.op.carrier import put_on_root
from torchtap.forms.op.emitting import EmittingModel
from torchtap.forms.op.travelling import names_left
from torchtap.sanitize import open_file, parse_json
from torchtap.spi import Name

__all__ = ["load"]

_WEIGHTS_ONLY, _NO_WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


_MOST_CODE = 64 << 20  # bytes that the code of a scripted model may unpack to


def load(path: str | Path, *, unsafe: bool = False) -> Any:
    """A TorchScript ``.pt``, an exported ``.pt2``, an AOTInductor package or an ONNX file with extra outputs.

    ``unsafe=True`` also loads what can run code of whoever made the file: pickles and compiled packages.
    """
    op.register()
    file = Path(path)
    if not file.is_file():
        raise FormError(f"there is no file {file}")
    if file.suffix == ".onnx":
        from torchtap.forms.instrument.extra import load_onnx

        return load_onnx(file)
    with open_file(file) as opened:
        names = _members(opened, file)
        kind = _kind_of(names)
        if kind == "program":
            return module_of(torch.export.load(file)) if unsafe else _read_program(opened, names, file)
        if kind == "script":
            if not unsafe:
                _check_script(opened, names, file)
            return torch.jit.load(str(file))
    return _load_package(file, unsafe) if kind == "package" else _unpickle(file, unsafe)


def _kind_of(names: list[str]) -> Literal["package", "program", "script", "pickle"]:
    """What a file is, by the names of what it holds."""
    if any("data/aotinductor/" in name for name in names):
        return "package"
    if any(name.endswith(("archive_format", "serialized_exported_program.json")) for name in names):
        return "program"
    return "script" if "constants.pkl" in names else "pickle"


def _archive(opened: IO[bytes]) -> Any:
    opened.seek(0)
    return archive_reader(opened)


def _members(opened: IO[bytes], file: Path) -> list[str]:
    if opened.read(4) != b"PK\x03\x04":
        return []
    try:
        archive = _archive(opened)
        names: list[str] = archive.get_all_records()
        # torch stores values as they are and packs nothing but the code of scripts: whatever unpacks to far more than
        # the file was made to burst.
        unpacked = unpacked_size(archive, names, opened)
        if unpacked > (size := file.stat().st_size) + _MOST_CODE:
            raise FormError(
                f"{str(file)!r} has {size} bytes that unpack to {unpacked}: torch compresses code, never values"
            )
    except RuntimeError:
        opened.seek(0)
        try:  # torch's first archives have no folder, which its reader asks for
            with zipfile.ZipFile(opened) as archive:
                return archive.namelist()
        except (zipfile.BadZipFile, OSError, ValueError):
            return []
    return names


def _load_package(file: Path, unsafe: bool) -> EmittingModel:
    if not unsafe:
        raise FormError(
            f"{str(file)!r} is an AOTInductor package: loading it runs the machine code in it. If you trust whoever "
            "made it, say unsafe=True (--unsafe)"
        )
    return EmittingModel(load_aoti_package(str(file)), _package_sites(file), about=str(file))


def _read_program(opened: IO[bytes], names: list[str], file: Path) -> Any:
    """An exported program, after every text of it was looked at."""
    if "archive_format" not in names:
        raise FormError(
            f"{str(file)!r} is an exported program in torch's first format, whose weights are a pickle: save it again "
            "with a newer torch or, if you trust it, say unsafe=True (--unsafe)"
        )
    archive = _archive(opened)
    for name in names:
        if name.startswith("models/"):
            check_program(archive.get_record(name))
        elif name.endswith("_config.json"):
            check_payloads(archive.get_record(name))
    opened.seek(0)
    try:
        with _tensors_only():
            programs = load_program_archive(opened).exported_programs
            return module_of(programs["model"])
    except Exception as error:  # torch asserts, looks up and unpacks what the file says, with any error
        raise FormError(
            f"{str(file)!r} cannot be read as an exported program without running code: {type(error).__name__}: "
            f"{str(error)[:300]}"
        ) from error


@contextmanager
def _tensors_only() -> Iterator[None]:
    """Make every ``torch.load`` read tensors and plain values only, also where torch asks for more."""
    before = {name: os.environ.pop(name, None) for name in (_WEIGHTS_ONLY, _NO_WEIGHTS_ONLY)}
    os.environ[_WEIGHTS_ONLY] = "1"
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _check_script(opened: IO[bytes], names: list[str], file: Path) -> None:
    archive = _archive(opened)
    for name in names:
        if name.startswith("code/") and b"__setstate__" in archive.get_record(name):
            raise FormError(
                f"{str(file)!r} has code that would run while it is loaded (__setstate__ in {name[:100]!r}); if you "
                "trust whoever made it, say unsafe=True (--unsafe)"
            )


def _unpickle(file: Path, unsafe: bool) -> object:
    if not unsafe:
        raise FormError(
            f"{str(file)!r} is no TorchScript, exported, AOTInductor or ONNX file. If it is a pickle (torch.save of a "
            "whole model), opening it can run code of whoever made it: if you trust it, say unsafe=True (--unsafe)"
        )
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=False)
    except Exception as error:
        raise FormError(f"{str(file)!r} cannot be loaded: {type(error).__name__}: {error}") from error
    if isinstance(loaded, dict):
        raise FormError(
            f"{str(file)!r} holds weights, not a model: name the code that makes it, package.module:factory"
        )
    if isinstance(loaded, torch.nn.Module) and (sites := names_left(loaded)):
        put_on_root(loaded, sites)
    return loaded


def _package_sites(file: Path) -> list[str]:
    """The sites in an AOTInductor package: its calls of foreign ops are listed as JSON."""
    found: dict[str, None] = {}
    with zipfile.ZipFile(file) as archive:
        for name in archive.namelist():
            if "data/aotinductor/" not in name or not name.endswith(".json"):
                continue
            described = parse_json(archive.read(name), bounded=False)
            for entry in described.get("nodes", ()) if isinstance(described, dict) else ():
                node = entry.get("node", {})
                if node.get("target") in ("torchtap::emit", "torchtap::emit_grad"):
                    for argument in node["inputs"]:
                        site = argument["arg"].get("as_string")
                        if site is not None:
                            at = op.address(site)
                            found[str(Name(at.path, at.kind, at.leaf))] = None
    return list(found)
