"""Tensors in ``.pt`` files, read without torch: what a file says it holds, and the numbers, verified.

A file is a zip archive with a pickle that describes the tensors and one entry for each storage. The pickle is read by a
reader that knows the few names a plain tensor needs and refuses every other, so nothing in a file is ever run. Whatever
is not plain (an older file, a subclass, another byte order) is left to torch: `Unreadable` says so.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np

from torchtap.comparison.measure.streams import ValueStream
from torchtap.comparison.measure.values import Value
from torchtap.comparison.recorded.archives import Archive, is_archive
from torchtap.errors import RunCorruptError
from torchtap.store.format.dtypes import BY_NAME, widen

__all__ = ["SavedTensor", "Unreadable", "read_saved"]

_MOST_PICKLE = 1 << 20  # bytes; the description of a tensor has a few hundred
_STORAGES = {
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "UntypedStorage": "uint8",
}


class Unreadable(Exception):
    """A file that may be in order, but that only torch can read."""


class _Storage(NamedTuple):
    dtype: str
    key: str


@final
@dataclass(frozen=True, slots=True, eq=False)
class SavedTensor:
    """A tensor of a file that was not read yet."""

    archive: Archive
    entry: str
    dtype: str
    offset: int  # elements before its first, in its storage
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def value(self) -> Value:
        """Its numbers, verified."""
        raw = memoryview(bytearray(self.archive.size(self.entry)))
        at = 0
        for piece in self.archive.pieces(self.entry, 1 << 20):
            raw[at : at + len(piece)] = piece
            at += len(piece)
        stored = BY_NAME[self.dtype]
        count = len(raw) // stored.size
        flat = (
            widen(raw[: count * stored.size], self.dtype, (count,))
            if stored.numpy is None
            else np.frombuffer(raw[: count * stored.size], np.dtype(stored.numpy).newbyteorder("<"))
        )
        if not prod(self.shape):
            return Value(np.empty(self.shape, flat.dtype), self.dtype)
        last = self.offset + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        if last >= len(flat):
            raise RunCorruptError(f"{self.archive.path} is damaged: its tensor is larger than its storage")
        strides = tuple(step * flat.itemsize for step in self.stride)
        return Value(np.lib.stride_tricks.as_strided(flat[self.offset :], self.shape, strides), self.dtype)

    def stream(self, size: int) -> ValueStream | None:
        """Its bytes in order, ``size`` at a time; None where they do not lie so."""
        whole = self.archive.size(self.entry) == prod(self.shape) * BY_NAME[self.dtype].size
        if self.offset or not whole or self.stride != _dense(self.shape):
            return None
        return ValueStream(self.shape, self.dtype, self._pieces(size))

    def _pieces(self, size: int) -> Iterator[memoryview]:
        return self.archive.pieces(self.entry, size)


def read_saved(path: Path) -> object:
    """What a file holds, a `SavedTensor` in the place of each tensor. Raises `Unreadable` when torch is needed."""
    if not is_archive(path):
        raise Unreadable("it is no archive")
    archive = Archive(path)
    inside = {name.partition("/")[2]: name for name in archive.names}
    _check_parts(archive, inside)
    try:
        return _Reader(archive, inside).load()
    except (Unreadable, RunCorruptError):
        raise
    except Exception as error:  # a damaged pickle may fail anywhere
        raise Unreadable(f"{type(error).__name__}: {error}") from error


def _check_parts(archive: Archive, inside: Mapping[str, str]) -> None:
    """Read all but the storages: what is not asked for is checked as well, storages when they are read."""
    if "data.pkl" not in inside or archive.size(inside["data.pkl"]) > _MOST_PICKLE:
        raise Unreadable("it has no short description")
    if "byteorder" in inside and archive.read(inside["byteorder"]) != b"little":
        raise Unreadable("its bytes are in another order")
    for name in archive.names:
        if not name.partition("/")[2].startswith("data/"):
            archive.read(name)


@final
class _Reader(pickle.Unpickler):
    """Reads plain data and plain tensors, and nothing else."""

    def __init__(self, archive: Archive, inside: dict[str, str]) -> None:
        super().__init__(io.BytesIO(archive.read(inside["data.pkl"])))
        self._archive, self._inside = archive, inside

    def find_class(self, module: str, name: str) -> object:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
            return self._tensor
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return lambda tensor, *_: tensor
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch" and name in BY_NAME:
            return name
        raise Unreadable(f"it needs {module}.{name}")

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, *_ = pid
        if kind != "storage" or not isinstance(dtype, str) or f"data/{key}" not in self._inside:
            raise Unreadable("its storage is of another kind")
        return _Storage(dtype, str(key))

    def _tensor(
        self, storage: _Storage, offset: int, shape: Any, stride: Any, gradient: Any, hooks: Any, *more: Any
    ) -> SavedTensor:
        dtype = more[0] if more and isinstance(more[0], str) else storage.dtype
        sizes = (offset, *shape, *stride)
        if len(shape) != len(stride) or any(type(n) is not int or not 0 <= n < 2**48 for n in sizes):
            raise Unreadable("its shape is no shape")
        entry = self._inside[f"data/{storage.key}"]
        return SavedTensor(self._archive, entry, dtype, offset, tuple(shape), tuple(stride))


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    steps, step = [], 1
    for size in reversed(shape):
        steps.append(step)
        step *= max(size, 1)
    return tuple(reversed(steps))
