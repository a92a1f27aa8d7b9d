"""One shard: a safetensors file with the rows of one unit, its documents and its statistics.

Tensors: ``document``, ``position``, ``token`` and one per site with a row each, all in one order; ``scale/<site>`` for
dtypes with scales; ``documents/…``, one entry per document of the unit; ``statistics/…``. Every tensor is cut into
blocks along its first dimension. The last tensor has a crc32 of each block, so that a file is written in one pass and
a reader checks what it reads and no more. The head has a crc32 of itself.

It guarantees: a damaged head or block raises ``RunCorruptError``; the same rows give the same bytes.
"""

from __future__ import annotations

import json
import math
import struct
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from torchtap.datasets.encoding import SiteStatistics
from torchtap.errors import RunCorruptError, RunFormatError, RunNotFoundError
from torchtap.sanitize import JSON_LIMIT, parse_json
from torchtap.spi import SharedFolder

__all__ = [
    "FORMAT",
    "IDENTITY",
    "INDEX",
    "MANIFEST",
    "Buffers",
    "Column",
    "Shard",
    "block_rows",
    "pack",
    "read_json",
    "shard_name",
    "unit_number",
    "view_of",
]

FORMAT = 1
MANIFEST = "activations.json"
INDEX = "index.json"
IDENTITY = ("document", "position", "token")
_KEY = "torchtap.activations"
_CHECKS = "checksums"
_LARGEST_HEAD = 64 << 20
_BLOCK_BYTES = 512 << 10
_SMALL = 1 << 20
_ALIGNED = 64
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
}
_TORCH = {name: dtype for dtype, name in _DTYPES.items()}


def shard_name(number: int) -> str:
    """Return the file name of a unit's shard."""
    return f"shard-{number:06d}.safetensors"


def unit_number(name: str) -> int | None:
    """Return the unit of a shard's file name; None for other files."""
    middle = name.removeprefix("shard-").removesuffix(".safetensors")
    return int(middle) if middle.isdecimal() and name == shard_name(int(middle)) else None


def view_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")


@final
class Buffers:
    """Memory that is used again. A buffer comes back when the last tensor over it is gone.

    Touching new memory costs several times as much as reading a file into used memory.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray[Any, Any]]] = {}
        self._lent: dict[int, weakref.ref[Any]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"_free": {}, "_lent": {}}

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor without values."""
        size = math.prod(shape) * dtype.itemsize
        if size < _SMALL:
            return torch.empty(shape, dtype=dtype)
        grain = max(_SMALL, 1 << (size.bit_length() - 3))  # similar sizes share buffers
        room = -(-size // grain) * grain
        if not self._free.get(room):
            self._free = {room: []}  # buffers of other sizes are released
        free = self._free[room]
        whole = free.pop() if free else np.empty(room + _ALIGNED, np.uint8)
        start = -whole.ctypes.data % _ALIGNED  # matrix products depend on the alignment in their last bits
        lease = whole[start : start + size]
        key = id(lease)

        def come_back(_: Any) -> None:
            del self._lent[key]
            free.append(whole)

        self._lent[key] = weakref.ref(lease, come_back)
        return torch.frombuffer(lease, dtype=dtype).view(*shape)


@final
@dataclass(frozen=True, slots=True)
class Column:
    """A tensor that is made block by block while its file is written."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    blocks: Iterable[Tensor]


def block_rows(row_bytes: int) -> int:
    """Return the rows of a block: a power of two, for which the widest column has at most 512 KiB."""
    return 1 << max(0, (_BLOCK_BYTES // max(row_bytes, 1)).bit_length() - 1)


def pack(
    tensors: Mapping[str, Tensor | Column], facts: Mapping[str, Any], block: int
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a file. A tensor is read when its turn comes; a view is valid until the next one."""
    laid: dict[str, Tensor | Column] = {}
    offset = 0
    for name, tensor in tensors.items():
        if offset % 8:  # elements are aligned, and the format allows no gaps
            laid[f"padding/{name}"] = torch.zeros(-offset % 8, dtype=torch.uint8)
            offset += -offset % 8
        laid[name] = tensor
        offset += math.prod(tensor.shape) * tensor.dtype.itemsize
    count = sum(-(-tensor.shape[0] // block) for tensor in laid.values())
    yield _head({**laid, _CHECKS: torch.empty(count, 4, dtype=torch.uint8)}, {**facts, "block": block})
    checks = []
    for tensor in laid.values():
        for piece in tensor.blocks if isinstance(tensor, Column) else tensor.split(block):
            if len(piece):
                view = view_of(piece.contiguous())
                checks.append(SharedFolder.checksum(view))
                yield view
    yield np.array(checks, dtype="<u4").tobytes()


def _head(tensors: Mapping[str, Tensor | Column], facts: Mapping[str, Any]) -> bytes:
    table, offset = {}, 0
    for name, tensor in tensors.items():
        end = offset + math.prod(tensor.shape) * tensor.dtype.itemsize
        found = {"dtype": _DTYPES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [offset, end]}
        table[name] = found
        offset = end
    text = json.dumps(facts, sort_keys=True)
    check = SharedFolder.checksum((text + json.dumps(table, sort_keys=True)).encode())
    head = json.dumps({"__metadata__": {_KEY: text, "crc32": f"{check:08x}"}, **table}).encode()
    head += b" " * (-(8 + len(head)) % _ALIGNED)
    return struct.pack("<Q", len(head)) + head


@final
class Shard:
    """A shard that is open for reading. Rows are checked when they are read for the first time."""

    def __init__(self, folder: SharedFolder, name: str) -> None:
        self.name = name
        self._folder = folder
        self._file: Any = None
        try:
            file = self._open()
            (length,) = struct.unpack("<Q", file.read(0, 8))
            if length > min(_LARGEST_HEAD, file.size):
                raise RunCorruptError("its head is too long")
            self.facts, self._table = _checked(parse_json(file.read(8, length)))
            self._start = 8 + length
            self.nbytes: int = self._start + max(each["data_offsets"][1] for each in self._table.values())
            if self.nbytes > file.size:
                raise RunCorruptError("it is shorter than its head says")
            self.rows, self.block = int(self.facts["rows"]), int(self.facts["block"])
            self._first = self._first_checks()
        except (RunCorruptError, ValueError, KeyError, TypeError, struct.error) as error:
            raise RunCorruptError(f"{name} is damaged: {error}") from None
        self._checks: list[int] = []  # read with the first rows
        self._compared = bytearray(self._table[_CHECKS]["shape"][0])  # 1 for each block that was checked

    def _first_checks(self) -> dict[str, int]:
        """Return the number of the first checksum of each tensor."""
        found, count = {}, 0
        for name, facts in sorted(self._table.items(), key=lambda item: item[1]["data_offsets"]):
            if name != _CHECKS:
                found[name] = count
                count += -(-facts["shape"][0] // self.block)
        if count != self._table[_CHECKS]["shape"][0]:
            raise RunCorruptError("its checksums do not fit its tensors")
        return found

    def _open(self) -> Any:
        if self._file is None:
            self._file = self._folder.open(self.name)
        return self._file

    def close(self) -> None:
        """Release the file; the next read opens it again."""
        if self._file is not None:
            self._file.__exit__(None, None, None)
            self._file = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}

    @property
    def sites(self) -> dict[str, dict[str, Any]]:
        return dict(self.facts["sites"])

    def __contains__(self, column: str) -> bool:
        return column in self._table

    def place(self, column: str) -> tuple[int, torch.dtype, tuple[int, ...]]:
        """Return a tensor's offset in the file, its dtype and its shape."""
        facts = self._table[column]
        return self._start + facts["data_offsets"][0], _TORCH[facts["dtype"]], tuple(facts["shape"])

    def read(self, column: str) -> Tensor:
        """Return a whole tensor as it is stored."""
        _, dtype, shape = self.place(column)
        found = torch.empty(shape, dtype=dtype)
        self.read_into(column, 0, shape[0], view_of(found))
        return found

    def read_into(self, column: str, start: int, stop: int, buffer: memoryview) -> None:
        """Read rows ``start`` to ``stop`` of a tensor into a buffer of their size."""
        if stop <= start or not len(buffer):
            return
        facts, first = self._table[column], self._first[column]
        offset, width = self._start + facts["data_offsets"][0], len(buffer) // (stop - start)
        self._open().read_into(offset + start * width, buffer)
        for number in range(start // self.block, (stop - 1) // self.block + 1):
            if self._compared[first + number]:
                continue
            low, high = number * self.block, min((number + 1) * self.block, facts["shape"][0])
            if start <= low and high <= stop:
                piece = buffer[(low - start) * width : (high - start) * width]
            else:  # only a part of the block is wanted
                piece = memoryview(bytearray((high - low) * width))
                self._open().read_into(offset + low * width, piece)
            if SharedFolder.checksum(piece) != self._checksum(first + number):
                raise RunCorruptError(
                    f"{self.name} is damaged: the checksum of {column!r}, block {number}, differs"
                )
            self._compared[first + number] = 1

    def _checksum(self, number: int) -> int:
        if not self._checks:
            facts = self._table[_CHECKS]
            raw = self._open().read(self._start + facts["data_offsets"][0], 4 * facts["shape"][0])
            self._checks = np.frombuffer(raw, dtype="<u4").tolist()
        return self._checks[number]

    def statistics(self) -> dict[str, SiteStatistics]:
        """Return the statistics of each site."""
        sums: dict[str, dict[str, Tensor]] = {}
        for name in self._table:
            if name.startswith("statistics/"):
                _, kind, site = name.split("/", 2)
                sums.setdefault(site, {})[kind] = self.read(name)
        return {site: SiteStatistics(each) for site, each in sums.items()}

    def verify(self) -> None:
        """Check every byte against its checksum, and close."""
        for column in self._first:
            _, dtype, shape = self.place(column)
            width = math.prod(shape[1:]) * dtype.itemsize
            for start in range(0, shape[0], self.block):
                stop = min(start + self.block, shape[0])
                self.read_into(column, start, stop, memoryview(bytearray((stop - start) * width)))
        self.close()


def _checked(head: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the facts and the table of tensors of a head, if they are those that were written."""
    notes = head.pop("__metadata__")
    text = notes[_KEY]
    check = SharedFolder.checksum((text + json.dumps(head, sort_keys=True)).encode())
    if f"{check:08x}" != notes["crc32"]:
        raise RunCorruptError("the checksum of its head differs")
    return parse_json(text), head


def read_json(folder: SharedFolder, name: str) -> dict[str, Any]:
    """Return a JSON file of a folder."""
    try:
        found = parse_json(folder.read(name, JSON_LIMIT))
    except FileNotFoundError:
        raise RunNotFoundError(f"there are no activations at {folder.path}") from None
    except (OSError, ValueError) as error:
        raise RunCorruptError(f"{name} in {folder.path} cannot be read: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("format"), int):
        raise RunFormatError(f"{name} in {folder.path} is not a file of activations")
    if found["format"] > FORMAT:
        raise RunFormatError(
            f"{folder.path} has format {found['format']}; this torchtap reads up to {FORMAT}"
        )
    return found
