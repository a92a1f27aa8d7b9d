"""The folder of a golden: ``manifest.json``, one line for each site, and ``values.safetensors`` with the numbers.

The manifest is made to be read in a diff: an accepted change shows which weights, settings and values are new. A
checksum binds both files together.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np

from torchtap.errors import CompareError
from torchtap.golden.observe import Observation
from torchtap.golden.sketch import ROW, Sketch
from torchtap.sanitize import parse_json, read_file, replace_file

__all__ = ["MANIFEST", "Golden", "folder_of", "list_goldens", "load", "save"]

FORMAT, MANIFEST, VALUES = 1, "manifest.json", "values.safetensors"
_LARGEST = 256 << 20  # bytes


@final
@dataclass(slots=True)
class Golden:
    """A recorded run: what was seen, and the noise floors of the machine that recorded it."""

    name: str
    steps: int  # of a training; 0 for a forward pass
    seen: Observation
    floors: dict[str, float]
    target: str  # ``file.py:function``, for the command line; empty: checked by pytest
    made: dict[str, Any]


def folder_of(root: Path, name: str) -> Path:
    """Return the folder of a golden. A name is one word, or several with slashes."""
    if not re.fullmatch(r"[\w\-.]+(/[\w\-.]+)*", name) or ".." in name:
        raise CompareError(f"{name!r} cannot name a golden: use letters, digits, '-', '_' and '/'")
    return root / name


def list_goldens(root: Path) -> list[str]:
    """Return the names of all goldens below a folder."""
    return sorted(path.parent.relative_to(root).as_posix() for path in root.rglob(MANIFEST))


def save(golden: Golden, root: Path) -> Path:
    """Write a golden, in place of an older one of its name."""
    from safetensors.numpy import save as packed

    folder, seen = folder_of(root, golden.name), golden.seen
    folder.mkdir(parents=True, exist_ok=True)
    data = packed({
        "sites": np.reshape([each.row for each in seen.sites.values()], (-1, ROW)),
        "state": np.reshape([each.row for _, each in seen.state.values()], (-1, ROW)),
        "floors": np.array([golden.floors.get(key, 0.0) for key in seen.sites]),
    })  # fmt: skip
    manifest = {
        "format": FORMAT, "steps": golden.steps, "target": golden.target,
        "made": golden.made, "batch": seen.batch, "modules": [list(pair) for pair in seen.modules.items()],
        "state": [[key, digest, *_text(each)] for key, (digest, each) in seen.state.items()],
        "sites": [[key, each.parent, *_text(each)] for key, each in seen.sites.items()],
        "values": hashlib.sha256(data).hexdigest(),
    }  # fmt: skip
    replace_file(folder / VALUES, data)
    replace_file(folder / MANIFEST, ("{\n" + ",\n".join(map(_lines, manifest.items())) + "\n}\n").encode())
    return folder


def load(root: Path, name: str) -> Golden:
    """Read a golden. Raise `CompareError` if there is none or if it is damaged."""
    folder = folder_of(root, name)
    if not (folder / MANIFEST).exists():
        known = ", ".join(list_goldens(root)[:8]) or "none"
        raise CompareError(f"there is no golden {name!r} in {root} (there are: {known}); record it first")
    try:
        return _read(folder, name)
    except Exception as error:
        why = str(error) if isinstance(error, CompareError) else f"{type(error).__name__}: {error}"
        advice = f"Restore {folder} from version control, or record it again"
        raise CompareError(f"golden {name!r} is damaged: {why}. {advice}") from error


def _read(folder: Path, name: str) -> Golden:
    from safetensors.numpy import load as unpacked

    text = parse_json(read_file(folder / MANIFEST, _LARGEST))
    if text["format"] != FORMAT:
        raise CompareError(f"it has format {text['format']!r}, this torchtap reads {FORMAT}")
    data = read_file(folder / VALUES, _LARGEST)
    if hashlib.sha256(data).hexdigest() != text["values"]:
        raise CompareError(f"{VALUES} is not the file that its manifest names")
    arrays = unpacked(data)
    if not all(np.isfinite(table).all() for table in arrays.values()):
        raise CompareError("a stored number is NaN or infinite")
    seen = Observation(dict(text["modules"]), text["batch"])
    for (key, parent, dtype, shape, _), row in zip(text["sites"], arrays["sites"], strict=True):
        seen.sites[key] = Sketch(dtype, tuple(shape), row, parent)
    for (key, digest, dtype, shape, _), row in zip(text["state"], arrays["state"], strict=True):
        seen.state[key] = (digest, Sketch(dtype, tuple(shape), row))
    floors = dict(zip(seen.sites, map(float, arrays["floors"]), strict=True))
    return Golden(name, text["steps"], seen, floors, text["target"], text["made"])


def _text(sketch: Sketch) -> list[Any]:
    size = float(np.prod(sketch.shape)) or 1.0
    return [sketch.dtype, list(sketch.shape), float(f"{sketch.norm / size**0.5:.4g}")]


def _lines(entry: tuple[str, Any]) -> str:
    """Return a part of the manifest as JSON, with one line for each entry of a list."""
    key, value = entry
    if not isinstance(value, list):
        return f'"{key}": {json.dumps(value, indent=1, ensure_ascii=False)}'
    lines = ",\n".join(f" {json.dumps(each, ensure_ascii=False)}" for each in value)
    return f'"{key}": [\n{lines}\n]'
