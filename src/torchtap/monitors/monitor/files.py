"""The files that a `Monitor` leaves: one for each layer, epoch and batch, in one of three formats.

It guarantees:
- a file is there whole or not at all: it is written beside its place and moved there;
- ``.pt`` files load with ``torch.load(weights_only=True)``; no other format needs pickle either;
- `read_item` gives back the same entries whatever the format.

An item has ``epoch, batch_idx, layer, alias, output_shape, output``. Tuples stay tuples; dataclasses and
other classes of the model become dicts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from torchtap.errors import OutputError, PlanError, RunCorruptError, TorchtapError
from torchtap.hooks.leaves import leaves
from torchtap.hooks.structure import from_names, plain
from torchtap.plan.names import join_path
from torchtap.sanitize import parse_json, shown

__all__ = ["FileFormat", "check_format", "read_item", "shape_of", "writable_folder", "write_item"]

FileFormat = Literal["pt", "npz", "safetensors"]
_FACTS = "facts"  # where the formats that hold arrays only keep everything else, as JSON


def check_format(name: str) -> FileFormat:
    """The format that goes by ``name``."""
    for known in get_args(FileFormat):
        if name == known:
            return known  # type: ignore[no-any-return]
    raise PlanError(f"format {name!r}: outputs are saved as {', '.join(map(repr, get_args(FileFormat)))}")


def writable_folder(folder: str | os.PathLike[str]) -> Path:
    """The folder, made where it is missing, after a file could be written into it."""
    place = Path(folder)
    probe = place / f".torchtap-{os.getpid()}"
    try:
        place.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise OutputError(
            f"output_dir {str(folder)!r} cannot be written to ({error.strerror or error}): choose a folder with "
            "write permission"
        ) from error
    return place


def shape_of(output: object) -> list[object]:
    """``[2, 5, 16]`` for a tensor, a list of such lists for anything with several tensors."""
    if isinstance(output, Tensor):
        return list(output.shape)
    return [list(tensor.shape) for _, tensor in leaves(output)]


def write_item(path: Path, item: object) -> None:
    """Write tensors, numbers and text in any structure; the suffix of ``path`` says the format."""
    beside = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _WRITERS[path.suffix](beside, plain(item))
        os.replace(beside, path)
    except OSError as error:
        with suppress(OSError):
            beside.unlink()
        raise OutputError(f"{path} cannot be written: {error}") from error


def read_item(path: str | os.PathLike[str]) -> Any:
    """What `write_item` wrote. A ``.pt`` file is mapped, not read: its tensors cost memory when they are used."""
    place = Path(path)
    reader = _READERS.get(place.suffix)
    if reader is None:
        raise PlanError(f"{place}: a monitor's files end in {', '.join(_READERS)}")
    try:
        return reader(place)
    except (FileNotFoundError, TorchtapError):
        raise
    except (
        Exception
    ) as error:  # a damaged or foreign file fails anywhere in torch, numpy, safetensors or JSON
        said = shown(f"{type(error).__name__}: {error}")
        raise RunCorruptError(f"{place} cannot be read: {said}") from error


def _write_pt(path: Path, item: object) -> None:
    torch.save(_without_foreign(item), path)


def _without_foreign(tree: object) -> object:
    """The same, or an error where loading it would need a class that only the writer knows."""
    if isinstance(tree, dict):
        return {key: _without_foreign(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)([_without_foreign(value) for value in tree])
    if isinstance(tree, np.ndarray):
        return torch.from_numpy(tree)
    if isinstance(tree, np.generic):
        return tree.item()
    if isinstance(tree, Tensor):
        return _without_surroundings(tree.detach())
    if tree is None or isinstance(tree, (str, bytes, int, float, complex, torch.dtype, torch.Size)):
        return tree
    raise PlanError(
        f"a {type(tree).__name__} cannot be saved: give tensors, arrays, numbers, text, and lists, tuples or "
        "dicts of them, so that the file loads without pickle"
    )


def _without_surroundings(tensor: Tensor) -> Tensor:
    """The same; a copy of a view, which would drag the whole of its storage into the file."""
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def _read_pt(path: Path) -> object:
    return torch.load(path, weights_only=True, mmap=True, map_location="cpu")


def _take_apart(item: object, prefix: str = "") -> tuple[dict[str, Tensor], object]:
    """Tensors by dotted name, and the structure with ``{"tensor": name}`` in their places, as JSON data."""
    if isinstance(item, np.ndarray):
        item = torch.from_numpy(item)
    if isinstance(item, Tensor):
        name = prefix or "output"
        return {name: item.detach()}, {"tensor": name}
    if isinstance(item, dict):
        tensors, facts = _take_parts(item.items(), prefix)
        return tensors, {"dict": facts}
    if isinstance(item, (list, tuple)):
        tensors, facts = _take_parts(enumerate(item), prefix)
        return tensors, {"tuple" if isinstance(item, tuple) else "list": list(facts.values())}
    return {}, _without_foreign(item)


def _take_parts(
    parts: Iterable[tuple[object, object]], prefix: str
) -> tuple[dict[str, Tensor], dict[str, object]]:
    tensors: dict[str, Tensor] = {}
    facts: dict[str, Any] = {}
    for key, value in parts:
        inner, facts[str(key)] = _take_apart(value, join_path(prefix, str(key)))
        tensors |= inner
    return tensors, facts


def _put_together(facts: object, tensors: Mapping[str, object]) -> object:
    if not isinstance(facts, dict):
        return facts
    ((kind, inner),) = facts.items()
    if kind == "tensor":
        return tensors[inner]
    if kind == "dict":
        return {key: _put_together(value, tensors) for key, value in inner.items()}
    made = [_put_together(value, tensors) for value in inner]
    return tuple(made) if kind == "tuple" else made


def _write_safetensors(path: Path, item: object) -> None:
    from safetensors.torch import save_file

    tensors, facts = _take_apart(item)
    # Tensors that share memory are not taken, so each is on its own.
    save_file(
        {name: t.clone().contiguous() for name, t in tensors.items()}, path, {_FACTS: json.dumps(facts)}
    )


def _read_safetensors(path: Path) -> object:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        facts = (file.metadata() or {}).get(_FACTS)
    return from_names(tensors) if facts is None else _put_together(parse_json(facts), tensors)


def _write_npz(path: Path, item: object) -> None:
    tensors, facts = _take_apart(item)
    arrays: dict[str, Any] = {name: _array(tensor) for name, tensor in tensors.items()}
    arrays[_FACTS] = np.array(json.dumps(facts))
    with path.open("wb") as file:
        np.savez(file, **arrays)


def _array(tensor: Tensor) -> np.ndarray:
    try:
        return tensor.numpy()
    except TypeError:  # bfloat16 and its like: numpy has no such type, and float32 holds all their values
        return tensor.float().numpy()


def _read_npz(path: Path) -> object:
    # Opened here: numpy leaves a file open that turns out to be no archive.
    with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
        facts = parse_json(str(file[_FACTS]))
        tensors = {name: torch.from_numpy(file[name]) for name in file.files if name != _FACTS}
    return _put_together(facts, tensors)


_WRITERS = {".pt": _write_pt, ".safetensors": _write_safetensors, ".npz": _write_npz}
_READERS = {".pt": _read_pt, ".safetensors": _read_safetensors, ".npz": _read_npz}
