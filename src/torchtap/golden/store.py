"""The folder of a golden: ``manifest.json``, one line for each site, and ``values.safetensors`` with the numbers.

The manifest is made to be read in a diff: an accepted change shows which weights, settings and values are new. A
checksum binds both files together.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from torchtap.errors import CompareError
from torchtap.golden.observe import Observation
from torchtap.golden.sketch import ROW, Sketch
from torchtap.sanitize import parse_json, read_file, replace_file

__all__ = ["MANIFEST", "folder_of", "list_goldens", "load", "save"]

FORMAT, MANIFEST, VALUES = 1, "manifest.json", "values.safetensors"
_LARGEST = 256 << 20  # bytes


def folder_of(root: Path, name: str) -> Path:
    """Return the folder of a golden. A name is one word, or several with slashes."""
    if not re.fullmatch(r"[\w\-.]+(/[\w\-.]+)*", name) or ".." in name:
        raise CompareError(f"{name!r} cannot name a golden: use letters, digits, '-', '_' and '/'")
    return root / name


def list_goldens(root: Path) -> list[str]:
    """Return the names of all goldens below a folder."""
    return sorted(path.parent.relative_to(root).as_posix() for path in root.rglob(MANIFEST))


def save(golden: Observation, root: Path) -> Path:
    """Write a golden, in place of an older one of its name."""
    from safetensors.numpy import save as packed

    folder = folder_of(root, golden.name)
    folder.mkdir(parents=True, exist_ok=True)
    data = packed({
        "sites": np.reshape([each.row for each in golden.sites.values()], (-1, ROW)),
        "state": np.reshape([each.row for each in golden.state.values()], (-1, ROW)),
        "floors": np.array([golden.floors.get(key, 0.0) for key in golden.sites]),
    })  # fmt: skip
    manifest = {
        "format": FORMAT, "steps": golden.steps, "target": golden.target,
        "made": golden.made, "batch": golden.batch, "modules": [list(pair) for pair in golden.modules.items()],
        "state": [[key, each.digest, *_text(each)] for key, each in golden.state.items()],
        "sites": [[key, each.parent, *_text(each)] for key, each in golden.sites.items()],
        "values": hashlib.sha256(data).hexdigest(),
    }  # fmt: skip
    replace_file(folder / VALUES, data)
    replace_file(folder / MANIFEST, ("{\n" + ",\n".join(map(_lines, manifest.items())) + "\n}\n").encode())
    return folder


def load(root: Path, name: str) -> Observation:
    """Read a golden. Raise `CompareError` if there is none or if it is damaged."""
    folder = folder_of(root, name)
    if not (folder / MANIFEST).exists():
        known = ", ".join(list_goldens(root)[:8]) or "none"
        raise CompareError(f"there is no golden {name!r} in {root} (there are: {known}); record it first")
    try:
        text, data = (read_file(folder / each, _LARGEST) for each in (MANIFEST, VALUES))
        return _parsed(name, parse_json(text), data)
    except Exception as error:
        why = str(error) if isinstance(error, CompareError) else f"{type(error).__name__}: {error}"
        advice = f"Restore {folder} from version control, or record it again"
        raise CompareError(f"golden {name!r} is damaged: {why}. {advice}") from error


def _parsed(name: str, text: Any, data: bytes) -> Observation:
    from safetensors.numpy import load as unpacked

    if text["format"] != FORMAT:
        raise CompareError(f"it has format {text['format']!r}, this torchtap reads {FORMAT}")
    if hashlib.sha256(data).hexdigest() != text["values"]:
        raise CompareError(f"{VALUES} is not the file that its manifest names")
    arrays = unpacked(data)
    if not all(np.isfinite(table).all() for table in arrays.values()):
        raise CompareError("a stored number is NaN or infinite")
    golden = Observation(dict(text["modules"]), text["batch"], name=name, steps=text["steps"])
    golden.target, golden.made = text["target"], text["made"]
    for (key, parent, dtype, shape, _), row in zip(text["sites"], arrays["sites"], strict=True):
        golden.sites[key] = Sketch(dtype, tuple(shape), row, parent)
    for (key, digest, dtype, shape, _), row in zip(text["state"], arrays["state"], strict=True):
        golden.state[key] = Sketch(dtype, tuple(shape), row, digest=digest)
    golden.floors = dict(zip(golden.sites, map(float, arrays["floors"]), strict=True))
    return golden


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
