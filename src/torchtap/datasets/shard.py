"""One shard: a safetensors file with the rows of one unit, its documents and its statistics.

Tensors: ``document``, ``position``, ``token`` and one per site with a row each, all in one order; ``scale/<site>`` for
dtypes with scales; ``documents/…``, one entry per document of the unit; ``statistics/…``. The head has a crc32 of
itself and one for each block of rows of each tensor, so that a reader checks what it reads and no more.

It guarantees: a damaged head or block raises ``RunCorruptError``; the same rows give the same bytes.
"""

from __future__ import annotations

import json
import math
import struct
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from torchtap.datasets.encoding import SiteStatistics, decode
from torchtap.errors import RunCorruptError, RunFormatError, RunNotFoundError
from torchtap.sanitize import JSON_LIMIT, parse_json, storable
from torchtap.spi import SharedFolder

__all__ = [
    "FORMAT",
    "IDENTITY",
    "INDEX",
    "MANIFEST",
    "STATISTICS",
    "Buffers",
    "Shard",
    "pack",
    "read_json",
    "shard_name",
    "unit_number",
    "view_of",
]

FORMAT = 1
MANIFEST = "activations.json"
INDEX = "index.json"
STATISTICS = "statistics.safetensors"
IDENTITY = ("document", "position", "token")
_KEY = "torchtap.activations"
_LARGEST_HEAD = 64 << 20
_BLOCK_BYTES = 512 << 10
_SMALL = 1 << 20
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
        whole = free.pop() if free else np.empty(room, np.uint8)
        lease = whole[:size]
        key = id(lease)

        def come_back(_: Any) -> None:
            del self._lent[key]
            free.append(whole)

        self._lent[key] = weakref.ref(lease, come_back)
        return torch.frombuffer(lease, dtype=dtype).view(*shape)


def block_rows(columns: Sequence[Tensor]) -> int:
    """Return the rows of a block: a power of two, for which the widest column has at most 512 KiB."""
    widest = max(column[:1].nbytes if len(column) else 1 for column in columns)
    return max(1, 1 << (_BLOCK_BYTES // max(widest, 1)).bit_length() - 1) if widest < _BLOCK_BYTES else 1


def pack(
    rows: Mapping[str, Tensor], others: Mapping[str, Tensor], facts: Mapping[str, Any]
) -> list[bytes | memoryview]:
    """Return the bytes of a file with tensors of rows and other tensors. Its facts are JSON."""
    every = {**rows, **others}
    # Large elements first: then every tensor is aligned, whatever the number of rows is.
    names = sorted(every, key=lambda name: -every[name].element_size())
    buffers = [view_of(every[name]) for name in names]
    block = block_rows(list(rows.values())) if rows else 1
    checks = {
        storable(name): _checks(buffer, _row_bytes(every[name]) * block if name in rows else len(buffer))
        for name, buffer in zip(names, buffers, strict=True)
    }
    table: dict[str, Any] = {}
    offset = 0
    for name, buffer in zip(names, buffers, strict=True):
        tensor = every[name]
        span = [offset, offset + len(buffer)]
        table[storable(name)] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": span,
        }
        offset += len(buffer)
    text = json.dumps({**facts, "block": block, "crc32": checks}, sort_keys=True)
    check = SharedFolder.checksum((text + json.dumps(table, sort_keys=True)).encode())
    head = json.dumps({"__metadata__": {_KEY: text, "crc32": f"{check:08x}"}, **table}).encode()
    head += b" " * (-(8 + len(head)) % 64)
    return [struct.pack("<Q", len(head)), head, *buffers]


def _row_bytes(tensor: Tensor) -> int:
    return tensor.nbytes // len(tensor) if len(tensor) else 1


def _checks(buffer: memoryview, chunk: int) -> list[str]:
    starts = range(0, len(buffer), max(chunk, 1))
    return [f"{SharedFolder.checksum(buffer[start : start + chunk]):08x}" for start in starts]


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
            head = parse_json(file.read(8, length))
            self.facts, self._table = _checked(head)
            self._start = 8 + length
            if any(self._start + each["data_offsets"][1] > file.size for each in self._table.values()):
                raise RunCorruptError("it is shorter than its head says")
        except (RunCorruptError, ValueError, KeyError, TypeError, struct.error) as error:
            raise RunCorruptError(f"{name} is damaged: {error}") from None
        self.rows = int(self.facts["rows"])
        self.block = int(self.facts["block"])
        self._offsets: dict[str, int] = {}  # of the columns that were read
        self._unchecked: dict[str, set[int]] = {}  # their blocks whose checksum was not compared yet

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
    def nbytes(self) -> int:
        return int(self._start + max((each["data_offsets"][1] for each in self._table.values()), default=0))

    @property
    def sites(self) -> dict[str, dict[str, Any]]:
        return dict(self.facts["sites"])

    def __contains__(self, column: str) -> bool:
        return storable(column) in self._table

    def place(self, column: str) -> tuple[int, torch.dtype, tuple[int, ...]]:
        """Return a tensor's offset in the file, its dtype and its shape."""
        facts = self._table[storable(column)]
        return self._start + facts["data_offsets"][0], _TORCH[facts["dtype"]], tuple(facts["shape"])

    def whole(self, column: str) -> Tensor:
        """Return a tensor that is not of rows."""
        offset, dtype, shape = self.place(column)
        found = torch.empty(shape, dtype=dtype)
        self._open().read_into(offset, view_of(found))
        self._check(column, 0, view_of(found))
        return found

    def read(self, column: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Return rows of a column as they are stored."""
        stop = self.rows if stop is None else stop
        _, dtype, shape = self.place(column)
        found = torch.empty((stop - start, *shape[1:]), dtype=dtype)
        self.read_into(column, start, stop, view_of(found))
        return found

    def values(self, site: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Return rows of a site as values."""
        scale = f"scale/{site}"
        return decode(self.read(site, start, stop), self.read(scale, start, stop) if scale in self else None)

    def read_into(self, column: str, start: int, stop: int, buffer: memoryview) -> None:
        """Read the bytes of rows into a buffer of their size."""
        if stop <= start:
            return
        width = len(buffer) // (stop - start)
        offset = self._offsets.get(column)
        if offset is None:
            offset = self._offsets[column] = self.place(column)[0]
            self._unchecked[column] = set(range(-(-self.rows // self.block)))
        self._open().read_into(offset + start * width, buffer)
        if unchecked := self._unchecked[column]:
            for number in range(start // self.block, (stop - 1) // self.block + 1):
                if number in unchecked:
                    self._check_block(column, number, start, stop, buffer, width)
                    unchecked.discard(number)

    def _check_block(
        self, column: str, number: int, start: int, stop: int, buffer: memoryview, width: int
    ) -> None:
        low, high = number * self.block, min((number + 1) * self.block, self.rows)
        if start <= low and high <= stop:
            piece = buffer[(low - start) * width : (high - start) * width]
        else:  # only a part of it was wanted
            whole = bytearray((high - low) * width)
            self._open().read_into(self.place(column)[0] + low * width, memoryview(whole))
            piece = memoryview(whole)
        self._check(column, number, piece)

    def _check(self, column: str, number: int, piece: memoryview) -> None:
        expected = self.facts["crc32"][storable(column)]
        if len(piece) and f"{SharedFolder.checksum(piece):08x}" != expected[number]:
            raise RunCorruptError(
                f"{self.name} is damaged: the checksum of {column!r}, block {number}, differs"
            )

    def all_statistics(self) -> dict[str, SiteStatistics]:
        """Return the statistics of each site."""
        names = [name for name in self._table if name.startswith("statistics/")]
        sites = dict.fromkeys(name.split("/", 2)[2] for name in names)
        return {
            site: SiteStatistics(
                {name.split("/", 2)[1]: self.whole(name) for name in names if name.split("/", 2)[2] == site}
            )
            for site in sites
        }

    def verify(self) -> None:
        """Check every byte against its checksum, and close."""
        for column in self._table:
            if len(self.facts["crc32"][column]) <= 1:
                self.whole(column)
                continue
            for start in range(0, self.rows, self.block):
                self.read(column, start, min(start + self.block, self.rows))
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
