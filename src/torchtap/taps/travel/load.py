"""Load a model file of any form, with torchtap's op in place, so that it can be tapped.

A file that was made with taps needs the op to be known before torch reads it. ``import torchtap.op`` is the
other way to have it, for programs that go on calling torch's own loaders.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import torch

from torchtap.errors import FormError
from torchtap.taps.carry import op
from torchtap.taps.carry.emitting import EmittingModel

__all__ = ["load"]


def load(path: str | Path) -> Any:
    """A TorchScript ``.pt``, an exported ``.pt2``, an AOTInductor package or an ONNX file with extra outputs."""
    op.register()
    file = Path(path)
    if file.suffix == ".onnx":
        from torchtap.taps.travel.extra import load_onnx

        return load_onnx(file)
    names = _members(file)
    if any("data/aotinductor/" in name for name in names):
        return EmittingModel(
            torch._inductor.aoti_load_package(str(file)), _package_sites(file), about=str(file)
        )
    if any(name.endswith(("archive_format", "serialized_exported_program.json")) for name in names):
        return torch.export.load(file).module()
    if any(name.endswith("/constants.pkl") for name in names):
        return torch.jit.load(str(file))
    raise FormError(
        f"{file} is no TorchScript, exported, AOTInductor or ONNX file. If it is a whole model that torch.save "
        "pickled, and you trust it, load it with torch.load(path, weights_only=False): it can run any code"
    )


def _members(file: Path) -> list[str]:
    if not file.exists():
        raise FormError(f"there is no file {file}")
    try:
        with zipfile.ZipFile(file) as archive:
            return archive.namelist()
    except zipfile.BadZipFile:
        return []


def _package_sites(file: Path) -> list[str]:
    """The sites in an AOTInductor package: its calls of foreign ops are listed as JSON."""
    found: dict[str, None] = {}
    with zipfile.ZipFile(file) as archive:
        for name in archive.namelist():
            if "data/aotinductor/" not in name or not name.endswith(".json"):
                continue
            described = json.loads(archive.read(name))
            for entry in described.get("nodes", ()) if isinstance(described, dict) else ():
                node = entry.get("node", {})
                if node.get("target") in ("torchtap::emit", "torchtap::emit_grad"):
                    for argument in node["inputs"]:
                        site = argument["arg"].get("as_string")
                        if site is not None:
                            found[site] = None
    return list(found)
