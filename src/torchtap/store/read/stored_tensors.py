"""Tensors in tensor segments: what a head says of them, and their bytes as numpy arrays or torch tensors.

Reading checks everything a note claims against the entry it stands beside, and the bytes against their crc32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np
import numpy.typing as npt

from torchtap.errors import RunCorruptError, RunError
from torchtap.store.format.dtypes import BY_CODE, BY_NAME, StoredType, widen
from torchtap.store.format.payload import TensorName, decompress
from torchtap.store.format.segment import HeaderEntry, Segment
from torchtap.store.read.results import TensorRef

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["StoredTensor", "read_stored_tensors"]


class _Description(NamedTuple):
    """What an entry and its note say of a tensor."""

    type: StoredType
    shape: tuple[int, ...]  # of the stored values; of a sparse tensor the dense shape is in ``dense_shape``
    packed: bool = False
    dense_shape: tuple[int, ...] | None = None


@final
@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """A tensor of a segment that was not read yet. Its note is looked at only when something is asked of it."""

    segment: Segment
    name: TensorName
    entry: HeaderEntry

    def in_phase(self, phase: str) -> StoredTensor:
        """The same tensor, known to be of a phase."""
        return StoredTensor(self.segment, self.name._replace(phase=phase), self.entry)

    def ref(self) -> TensorRef:
        name, about = self.name, _described(self.segment, self.entry)
        shape = about.shape if about.dense_shape is None else about.dense_shape
        return TensorRef(
            name.site,
            name.field,
            name.reduction,
            name.step,
            shape,
            about.type.name,
            self.entry.nbytes,
            name.phase,
        )

    def _bytes(self, about: _Description) -> bytearray | memoryview:
        raw = self.segment.read(self.entry)
        if not about.packed:
            return raw
        return decompress(raw, about.type.size, prod(about.shape) * about.type.size)

    def pieces(self, size: int) -> Iterator[memoryview] | None:
        """The bytes in order, about ``size`` at a time; None where they have to be read whole."""
        about = _described(self.segment, self.entry)
        if about.packed or about.dense_shape is not None:
            return None
        return self.segment.pieces(self.entry, size)

    def _indices(self, about: _Description) -> npt.NDArray[np.int64]:
        name = self.name
        stored = TensorName.parse(self.entry.name) or name
        other = stored._replace(indices=True)
        entry = self.segment.header.entries.get(str(other))
        if entry is None:
            raise RunCorruptError(f"the indices of the sparse tensor {name} are missing")
        indices = StoredTensor(self.segment, other, entry).array()
        dense = about.dense_shape or ()
        sparse = len(indices)
        if indices.ndim != 2 or indices.dtype != np.int64 or sparse > len(dense):
            raise RunCorruptError(f"the indices of the sparse tensor {name} are not a list of positions")
        if about.shape != (indices.shape[1], *dense[sparse:]):
            raise RunCorruptError(f"the sparse tensor {name} has other values than indices")
        if not _lie_inside(indices, dense[:sparse]):
            raise RunCorruptError(f"the indices of the sparse tensor {name} lie outside of it")
        return indices

    def array(self) -> np.ndarray:
        """The tensor as numpy: types that numpy lacks are widened to float32, a sparse one is spread out."""
        about = _described(self.segment, self.entry)
        raw = self._bytes(about)
        if about.type.numpy is not None:
            values = np.frombuffer(raw, np.dtype(about.type.numpy).newbyteorder("<")).reshape(about.shape)
        else:
            values = widen(raw, about.type.name, about.shape)
        if about.dense_shape is None:
            return values
        indices = self._indices(about)
        try:
            dense = np.zeros(about.dense_shape, values.dtype)
        except (MemoryError, ValueError):
            raise RunError(
                f"the sparse tensor {self.name} has the shape {about.dense_shape}, for which there is no memory; "
                "run.tensor gives it as it is"
            ) from None
        dense[tuple(indices)] = values
        return dense

    def tensor(self) -> Tensor:
        """The tensor as it was recorded: same dtype, same values, sparse if it was sparse."""
        import torch

        about = _described(self.segment, self.entry)
        raw = self._bytes(about)
        dtype: torch.dtype | None = getattr(torch, about.type.name, None)
        if dtype is None:
            raise RunCorruptError(
                f"{self.name} is of dtype {about.type.name}, which this torch does not have"
            )
        if len(raw) == 0:
            values = torch.empty(about.shape, dtype=dtype)
        elif dtype.is_complex:
            real = {"complex32": torch.float16, "complex64": torch.float32}.get(
                about.type.name, torch.float64
            )
            values = torch.view_as_complex(torch.frombuffer(raw, dtype=real).reshape(*about.shape, 2))
        else:
            values = torch.frombuffer(raw, dtype=torch.uint8).view(dtype).reshape(about.shape)
        if about.dense_shape is None:
            return values
        indices = torch.from_numpy(self._indices(about).copy())
        return torch.sparse_coo_tensor(
            indices, values, about.dense_shape, is_coalesced=True, check_invariants=True
        )


def _lie_inside(indices: npt.NDArray[np.int64], shape: tuple[int, ...]) -> bool:
    if not indices.size:
        return True
    return bool(indices.min() >= 0 and (indices.max(axis=1) < np.array(shape)).all())


def _described(segment: Segment, entry: HeaderEntry) -> _Description:
    """Element type, shape, whether packed, and a sparse tensor's dense shape, checked against the entry."""
    note = segment.header.metadata.get(entry.name, "")
    if len(note) == len('{"crc32":"01234567"}') and note.startswith('{"crc32":"'):
        return _Description(BY_CODE[entry.code], entry.shape)  # nearly all of them: nothing but a checksum
    facts = segment.header.facts(entry.name)
    stored, shape = _contents(entry, facts)
    sparse = str(facts.get("layout", "")).startswith("sparse")
    return _Description(
        stored, shape, "codec" in facts, _sizes(facts.get("shape"), entry.name) if sparse else None
    )


def _contents(entry: HeaderEntry, facts: Mapping[str, object]) -> tuple[StoredType, tuple[int, ...]]:
    """Element type and shape of what an entry's bytes stand for."""
    which = f"entry {entry.name[:80]!r}"
    if "dtype" not in facts:
        if "codec" in facts:
            raise RunCorruptError(f"the compressed {which} does not say what it holds")
        return BY_CODE[entry.code], entry.shape
    stored = BY_NAME.get(str(facts["dtype"]))
    if stored is None or entry.code != "U8" or not entry.shape:
        raise RunCorruptError(f"the {which} is of an unknown dtype")
    if "codec" in facts:
        if facts["codec"] != "zstd":
            raise RunCorruptError(f"the {which} is compressed in an unknown way")
        return stored, _sizes(facts.get("stored_shape"), entry.name)
    if entry.shape[-1] != stored.size:
        raise RunCorruptError(f"the {which} does not have the bytes of {stored.name}")
    return stored, entry.shape[:-1]


def _sizes(numbers: object, name: str) -> tuple[int, ...]:
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
            found.append(StoredTensor(segment, name, entry))
    return found
