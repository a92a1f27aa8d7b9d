"""From a tensor to the bytes that are written, without copying what need not be copied.

A contiguous CPU tensor of any dtype gives a view of its own memory. What has no single stretch of memory is
made contiguous first, and what it was is noted: strides of a transposed tensor, the layout of a sparse one
(kept as values and indices), the dtype of a quantized one (kept dequantized).

The view is made without torch's operations, ``is_conj`` and the like included: each of them lets go of the
interpreter's lock, and getting it back from a busy training thread takes longer than all else here.

Takes numpy arrays as well, so that a run can be written by a process that never imports torch.

Lossless compression of a tensor's bytes: byte planes first, then zstd.

The bytes of floating-point numbers compress badly in the order they lie in; all first bytes, then all
second bytes and so on compress well, since exponents resemble each other. Needs the extra ``compress``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, final
from urllib.parse import unquote

import numpy as np

from torchtap.errors import RunCorruptError, RunError, needing
from torchtap.store.format.checksum import kept_checksum
from torchtap.store.format.dtypes import BY_NAME, StoredType

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "TRAINING",
    "Compressor",
    "Payload",
    "TensorName",
    "decompress",
    "lies_as_it_reads",
    "make_compressor",
    "nbytes_of",
    "payload_of",
]


@final
@dataclass(frozen=True, slots=True, eq=False)
class Payload:
    """A tensor as bytes. ``buffer`` keeps the memory alive."""

    type: StoredType
    shape: tuple[int, ...]
    buffer: memoryview
    notes: dict[str, object] = field(default_factory=dict)
    indices: Payload | None = None  # of a sparse tensor, whose ``buffer`` then holds the values
    checksum: int | None = None  # of ``buffer``, where it is known already


def nbytes_of(value: np.ndarray | Tensor) -> int:
    """How much memory a tensor or an array holds on to, for the queue's accounts."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    try:
        return int(value.nbytes)
    except (
        RuntimeError,
        NotImplementedError,
        AttributeError,
    ):  # sparse and other layouts have no single size
        try:
            from torchtap._torch import sparse_bytes

            return sparse_bytes(value)
        except Exception:
            return int(value.numel()) * int(value.element_size())


def payload_of(value: np.ndarray | Tensor) -> Payload:
    """The bytes of a tensor or a numpy array."""
    if isinstance(value, np.ndarray):
        return _of_array(value)
    return _of_tensor(value)


def _of_array(value: np.ndarray) -> Payload:
    stored = BY_NAME.get(value.dtype.name)
    if stored is None:
        raise TypeError(f"a run holds no arrays of dtype {value.dtype}")
    shape = value.shape
    notes: dict[str, object] = {}
    if not value.flags.c_contiguous:
        notes["strides"] = [stride // value.itemsize for stride in value.strides]
    little = np.ascontiguousarray(value.astype(value.dtype.newbyteorder("<"), copy=False))
    return Payload(stored, shape, little.reshape(-1).view(np.uint8).data, notes)


def _of_tensor(value: Tensor) -> Payload:
    import torch

    notes: dict[str, object] = {}
    if value.is_quantized:
        notes["quantized"] = str(value.dtype).removeprefix("torch.")
        value = value.dequantize()
    if value.layout is not torch.strided:
        notes["layout"] = str(value.layout).removeprefix("torch.")
        if value.is_mkldnn:
            value = value.to_dense()
        else:
            sparse = value if value.layout is torch.sparse_coo else value.to_sparse()
            sparse = sparse.coalesce()
            values = _dense(sparse.values(), notes)
            notes["shape"] = list(sparse.shape)
            return Payload(values.type, values.shape, values.buffer, notes, _dense(sparse.indices(), {}))
    elif not value.is_contiguous():
        notes["strides"] = list(value.stride())
    return _dense(value, notes)


def lies_as_it_reads(value: Tensor) -> bool:
    """Whether the value's bytes, as they lie in the host's memory, are those of its contiguous copy."""
    from torchtap._torch import has_lazy_bits

    return value.is_cpu and value.is_contiguous() and not has_lazy_bits(value)


def _dense(value: Tensor, notes: dict[str, object]) -> Payload:
    stored = BY_NAME.get(str(value.dtype).removeprefix("torch."))
    if stored is None:
        raise TypeError(f"a run holds no tensors of dtype {value.dtype}")
    if not lies_as_it_reads(value):
        value = value.resolve_conj().resolve_neg().cpu().contiguous()
    buffer = np.asarray(_Memory(value)).data
    return Payload(stored, tuple(value.shape), buffer, notes, checksum=kept_checksum(value))


@final
class _Memory:
    """A contiguous tensor as numpy can look at it, whatever its dtype: as bytes. It keeps the tensor."""

    __slots__ = ("__array_interface__", "_value")

    def __init__(self, value: Tensor) -> None:
        self._value = value
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (value.nbytes,),
            "data": (value.data_ptr(), True),  # nobody writes through it
        }


TRAINING = "train"
_PIECE = 1 << 20
_WINDOW = 8 << 20  # what a frame may ask to be kept while it is unpacked; ours ask for half a MiB


class Compressor(Protocol):
    """Bytes in, fewer bytes out."""

    def __call__(self, buffer: memoryview, item_size: int) -> bytes | None:
        """The compressed bytes; ``None`` when that would not save anything worth having."""


def _zstandard() -> Any:
    with needing("the package zstandard", "compress", who="compress='zstd'"):
        import zstandard
    return zstandard


def make_compressor(name: str | None) -> Compressor | None:
    """The compressor called ``name``; ``None`` for none."""
    if name is None:
        return None
    if name != "zstd":
        raise ValueError(f"compress={name!r} is not known; 'zstd' and None are")
    zstd = _zstandard().ZstdCompressor(level=1, write_content_size=True)

    def compress(buffer: memoryview, item_size: int) -> bytes | None:
        planes = np.frombuffer(buffer, np.uint8).reshape(-1, item_size).T
        packed: bytes = zstd.compress(np.ascontiguousarray(planes))
        return packed if len(packed) < 0.95 * len(buffer) else None

    return compress


def decompress(packed: bytearray, item_size: int, nbytes: int) -> memoryview:
    """The original bytes, exactly ``nbytes`` of them, or ``RunCorruptError``.

    Plane after plane goes to its place as it is unpacked, so that little more than the result is in memory.
    """
    zstandard = _zstandard()
    try:
        # before anything is allocated, so that a lying frame cannot take more memory than the shape says
        if zstandard.frame_content_size(packed) != nbytes:
            raise RunCorruptError(f"its compressed bytes do not unpack to the {nbytes} bytes of its shape")
        items = np.empty((nbytes // item_size, item_size), np.uint8)
        unpacked = zstandard.ZstdDecompressor(max_window_size=_WINDOW).stream_reader(packed)
        for plane in range(item_size):
            for start in range(0, len(items), _PIECE):
                stop = min(start + _PIECE, len(items))
                piece = unpacked.read(stop - start)
                if len(piece) != stop - start:
                    raise RunCorruptError("its compressed bytes end too early")
                items[start:stop, plane] = np.frombuffer(piece, np.uint8)
    except MemoryError:
        raise RunError(f"it unpacks to {nbytes} bytes, for which there is no memory") from None
    except zstandard.ZstdError as error:
        raise RunCorruptError(f"its compressed bytes cannot be unpacked: {error}") from None
    return items.reshape(-1).data


# --- names of tensors -----------------------------------------------------------------------------------------

_INDICES = "@indices"


class TensorName(NamedTuple):
    """What an entry's name says."""

    step: int
    reduction: str
    field: str
    site: str
    copy: int = 0
    indices: bool = False  # the positions of a sparse tensor whose values have the same name without this
    phase: str = TRAINING

    def __str__(self) -> str:
        copy = f"~{self.copy}" if self.copy else ""
        phase = "" if self.phase == TRAINING else f"@{_quote(self.phase)}"
        field = _quote(self.field) + (_INDICES if self.indices else "")
        return f"{self.step}{phase}{copy}/{_quote(self.reduction)}/{field}/{self.site}"

    @classmethod
    def parse(cls, text: str) -> TensorName | None:
        parts = text.split("/", 3)
        if len(parts) != 4:
            return None
        at, _, copy = parts[0].partition("~")
        step, _, phase = at.partition("@")
        try:
            numbers = int(step[:20]), int(copy[:9] or "0")
        except ValueError:
            return None
        indices = parts[2].endswith(_INDICES)
        field = parts[2].removesuffix(_INDICES)
        if "%" in field or "%" in parts[1]:
            field, parts[1] = unquote(field), unquote(parts[1])
        return cls(numbers[0], parts[1], field, parts[3], numbers[1], indices, unquote(phase) or TRAINING)


def _quote(text: str) -> str:
    return text.replace("%", "%25").replace("/", "%2F").replace("@", "%40").replace("~", "%7E")
