"""Metrics as an HDF5 file: a group for each key, with the datasets ``keys`` (steps) and ``values``.

A ``/`` in a key makes groups in groups, so that ``file["activation/fc1/mean"]["values"]`` reads one series. A key
that HDF5 would change (``a//b``) or that is in the way of another (``a`` beside ``a/values``) gets a spelling of
its own, and its group says in the attribute ``key`` what it was. Every key comes back as it went in.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from torchtap.errors import needing

__all__ = ["keys", "load", "read", "save"]

_SLASH = "∕"  # U+2215, which looks like a slash and is an ordinary character to HDF5
_DATASETS = {"keys", "values"}


def save(
    filename: str | os.PathLike[str],
    entries: Mapping[Any, Mapping[Any, Any]],
    *,
    flat: bool = False,
    refused: Callable[[Any, Exception], None] = lambda entry, reason: None,
) -> None:
    """Write entries; one that is not numbers is refused and the others go on."""
    h5py = _h5py()
    names = {str(entry) for entry in entries}
    with h5py.File(filename, "w") as file:
        for entry, series in entries.items():
            name = str(entry)
            try:
                steps, values = _column(series.keys()), np.array(list(series.values()), dtype=np.float64)
                spelled = name.replace("/", _SLASH) if flat or _in_the_way(name, names) else name
                group = file.create_group(spelled)
                if group.name != f"/{name}":
                    group.attrs["key"] = name
                group.create_dataset("keys", data=steps)
                group.create_dataset("values", data=values)
            except (TypeError, ValueError) as reason:
                refused(entry, reason)


def keys(filename: str | os.PathLike[str]) -> list[str]:
    """The keys in a file."""
    with _h5py().File(filename, "r") as file:
        return [key for key, _ in _entries(file)]


def read(filename: str | os.PathLike[str], key: str) -> tuple[Any, Any] | None:
    """Steps and values of one key."""
    with _h5py().File(filename, "r") as file:
        for known, group in _entries(file):
            if known == key:
                stored = group["keys"]
                return stored.asstr()[()] if stored.dtype.kind == "O" else stored[()], group["values"][()]
    return None


def load(filename: str | os.PathLike[str]) -> dict[str, dict[Any, Any]]:
    """Everything in a file."""
    with _h5py().File(filename, "r") as file:
        return {
            key: dict(zip(_steps(group).tolist(), group["values"][()].tolist(), strict=True))
            for key, group in _entries(file)
        }


def _entries(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every group that holds a series, by its key, in the order of the file."""
    h5py = _h5py()
    if isinstance(group, h5py.Group) and set(group) >= _DATASETS and isinstance(group["keys"], h5py.Dataset):
        yield group.attrs.get("key", prefix), group
    for name in group:
        child = group[name]
        if isinstance(child, h5py.Group):
            yield from _entries(child, f"{prefix}/{name}" if prefix else name)


def _in_the_way(name: str, names: set[str]) -> bool:
    """Whether HDF5 would change this path, or would take it for something inside another key's group."""
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return True
    return parts[-1] in _DATASETS or any(
        "/".join(parts[:length]) in names and parts[length] in _DATASETS for length in range(1, len(parts))
    )


def _column(labels: Any) -> Any:
    """Steps as float64; keys of a step as text."""
    listed = list(labels)
    if all(isinstance(label, str) for label in listed) and listed:
        return np.array(listed, dtype=object)
    return np.array(listed, dtype=np.float64)


def _steps(group: Any) -> Any:
    stored = group["keys"]
    if stored.dtype.kind == "O":
        return stored.asstr()[()]
    steps = stored[()]
    whole = steps.astype(np.int64)
    return whole if np.array_equal(whole, steps) else steps


def _h5py() -> Any:
    with needing("h5py", "hdf5", who="an HDF5 file"):
        import h5py
    return h5py
