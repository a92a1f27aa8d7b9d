"""Tensors in tensor segments: what a head says of them, and their bytes as numpy arrays or torch tensors.

Reading checks everything a note claims against the entry it stands beside, and the bytes against their crc32.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, final

import numpy as np
import numpy.typing as npt

from torchtap.errors import RunCorruptError
from torchtap.store.compress import decompress
from torchtap.store.dtypes import BY_CODE, BY_NAME, StoredType
from torchtap.store.header import Entry
from torchtap.store.narrow import widen
from torchtap.store.results import TensorRef
from torchtap.store.segment import Segment
from torchtap.store.tensors import TensorName

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["StoredTensor", "read_stored_tensors"]


@final
@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """A tensor of a segment that was not read yet."""

    segment: Segment
    name: TensorName
    entry: Entry
    type: StoredType
    shape: tuple[int, ...]  # of the stored values; of a sparse tensor the dense shape is in ``dense_shape``
    packed: bool
    dense_shape: tuple[int, ...] | None

    def ref(self) -> TensorRef:
        name = self.name
        shape = self.shape if self.dense_shape is None else self.dense_shape
        return TensorRef(
            name.site, name.field, name.reduction, name.step, shape, self.type.name, self.entry.nbytes
        )

    def _bytes(self) -> bytearray | memoryview:
        raw = self.segment.read(self.entry)
        if not self.packed:
            return raw
        return decompress(bytes(raw), self.type.size, prod(self.shape) * self.type.size)

    def _indices(self) -> npt.NDArray[np.int64]:
        name = self.name
        other = TensorName(name.step, name.reduction, name.field, name.site, name.copy, indices=True)
        entry = self.segment.header.entries.get(str(other))
        if entry is None:
            raise RunCorruptError(f"the indices of the sparse tensor {name} are missing")
        found = StoredTensor(self.segment, other, entry, *_described(self.segment, entry))
        indices = found.array()
        dense = self.dense_shape or ()
        sparse = len(indices)
        if indices.ndim != 2 or indices.dtype != np.int64 or sparse > len(dense):
            raise RunCorruptError(f"the indices of the sparse tensor {name} are not a list of positions")
        if self.shape != (indices.shape[1], *dense[sparse:]):
            raise RunCorruptError(f"the sparse tensor {name} has other values than indices")
        if indices.size and not (
            indices.min() >= 0 and (indices.max(axis=1) < np.array(dense[:sparse])).all()
        ):
            raise RunCorruptError(f"the indices of the sparse tensor {name} lie outside of it")
        return indices

    def array(self) -> npt.NDArray[Any]:
        """The tensor as numpy: types that numpy lacks are widened to float32, a sparse one is spread out."""
        raw = self._bytes()
        if self.type.numpy is not None:
            values = np.frombuffer(raw, np.dtype(self.type.numpy).newbyteorder("<")).reshape(self.shape)
        else:
            values = widen(raw, self.type.name, self.shape)
        if self.dense_shape is None:
            return values
        indices = self._indices()
        dense = np.zeros(self.dense_shape, values.dtype)
        dense[tuple(indices)] = values
        return dense

    def tensor(self) -> Tensor:
        """The tensor as it was recorded: same dtype, same values, sparse if it was sparse."""
        import torch

        raw = self._bytes()
        dtype: torch.dtype | None = getattr(torch, self.type.name, None)
        if dtype is None:
            raise RunCorruptError(f"{self.name} is of dtype {self.type.name}, which this torch does not have")
        if len(raw) == 0:
            values = torch.empty(self.shape, dtype=dtype)
        elif dtype.is_complex:
            real = {"complex32": torch.float16, "complex64": torch.float32}.get(self.type.name, torch.float64)
            values = torch.view_as_complex(torch.frombuffer(raw, dtype=real).reshape(*self.shape, 2))
        else:
            values = torch.frombuffer(raw, dtype=torch.uint8).view(dtype).reshape(self.shape)
        if self.dense_shape is None:
            return values
        indices = torch.from_numpy(self._indices().copy())
        return torch.sparse_coo_tensor(
            indices, values, self.dense_shape, is_coalesced=True, check_invariants=True
        )


def _described(
    segment: Segment, entry: Entry
) -> tuple[StoredType, tuple[int, ...], bool, tuple[int, ...] | None]:
    """Element type, shape, whether packed, and a sparse tensor's dense shape, checked against the entry."""
    facts = segment.header.facts(entry.name)
    stored, shape = BY_CODE[entry.code], entry.shape
    packed = "codec" in facts
    if "dtype" in facts:
        named = BY_NAME.get(str(facts["dtype"]))
        if named is None or entry.code != "U8" or not shape:
            raise RunCorruptError(f"the entry {entry.name[:80]!r} is of an unknown dtype")
        stored = named
        if packed:
            if facts["codec"] != "zstd":
                raise RunCorruptError(f"the entry {entry.name[:80]!r} is compressed in an unknown way")
            shape = _sizes(facts.get("stored_shape"), entry.name)
        elif shape[-1] != stored.size:
            raise RunCorruptError(f"the entry {entry.name[:80]!r} does not have the bytes of {stored.name}")
        else:
            shape = shape[:-1]
    elif packed:
        raise RunCorruptError(f"the compressed entry {entry.name[:80]!r} does not say what it holds")
    sparse = str(facts.get("layout", "")).startswith("sparse")
    return stored, shape, packed, _sizes(facts.get("shape"), entry.name) if sparse else None


def _sizes(numbers: Any, name: str) -> tuple[int, ...]:
    if not isinstance(numbers, list) or len(numbers) > 64:
        raise RunCorruptError(f"the shape noted for {name[:80]!r} is not a shape")
    if not all(type(number) is int and 0 <= number < 2**48 for number in numbers) or prod(numbers) > 2**48:
        raise RunCorruptError(f"the shape noted for {name[:80]!r} is not a shape")
    return tuple(numbers)


def read_stored_tensors(segment: Segment) -> list[StoredTensor]:
    """Everything in a tensor segment, in the order it was written."""
    found = []
    for entry in segment.header.entries.values():
        name = TensorName.parse(entry.name)
        if name is None:
            raise RunCorruptError(f"the entry {entry.name[:80]!r} does not name a step and a site")
        if not name.indices:
            found.append(StoredTensor(segment, name, entry, *_described(segment, entry)))
    return found
