"""Which part of the whole a rank's value is. Pure data: no torch, no files.

A value lives on a mesh of ranks, an arrangement with named axes. Along each axis it is one of:

- ``shard(d)``: the ranks hold different stretches of dimension ``d``;
- ``batch``: the ranks hold different samples; the parts join along dimension 0 in the order of the axis;
- ``replicate``: each rank holds the same;
- ``partial(op)``: the whole is the sum (or another ``op``) of what the ranks hold;
- ``unknown``: nobody said.

``boxes`` say exactly where a shard lies in the whole. Where they are not known, the parts follow one another in the
order of the axis. A shard that is dealt out in several strides has several boxes, one after the other in its memory.

`Placement.to_json` and `placement_of` are the form in which a run keeps it; `read_layout` reads what a user writes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any, Literal, NamedTuple, final, get_args

from torchtap.errors import PlanError

__all__ = [
    "Axis",
    "Box",
    "Layout",
    "Placement",
    "Share",
    "Stage",
    "boxes_of",
    "chunk",
    "placement_of",
    "read_layout",
]

Kind = Literal["shard", "batch", "replicate", "partial", "unknown"]
Stage = Literal["local", "reduced"]
Spans = tuple[tuple[int, int], ...]  # stretches of one dimension: start and end

_KINDS = get_args(Kind)
_STAGES = get_args(Stage)
_SHARE = re.compile(r"(shard|batch|replicate|partial|unknown)(?:\((?:(-?\d{1,3})|([a-z]{1,16}))\))?")
_WORD = re.compile(r"(\w+)(?:\(([^()]*)\))?")
_MOST_BOXES = 4096


@final
class Share(NamedTuple):
    """What a value is along one axis of the mesh."""

    kind: Kind
    dim: int | None = None  # of a shard
    op: str | None = None  # of partial values

    def __str__(self) -> str:
        inside = self.dim if self.dim is not None else self.op
        return self.kind if inside is None else f"{self.kind}({inside})"

    @property
    def divides(self) -> bool:
        """Return True if ranks along the axis hold different parts, which together are the whole."""
        return self.kind in ("shard", "batch")


@final
class Axis(NamedTuple):
    """One axis of the mesh: how many ranks lie along it, at which place this one is, and what it holds."""

    name: str
    size: int
    at: int
    share: Share


class Box(NamedTuple):
    """A rectangular part of the whole."""

    offset: tuple[int, ...]
    size: tuple[int, ...]


@final
@dataclass(frozen=True, slots=True)
class Placement:
    """Where one rank's value lies in the whole."""

    axes: tuple[Axis, ...]
    shape: tuple[int, ...] | None = None  # of the whole; None where the parts' own shapes decide
    boxes: tuple[Box, ...] | None = None  # this rank's; None where parts follow one another
    flat: bool = False  # whether boxes are stretches of the whole laid out in one row
    stage: Stage | None = None  # of a gradient
    root: int = 0  # the lowest rank of the mesh: ranks of another mesh hold something else

    @property
    def known(self) -> bool:
        """Return True if every axis says what it holds."""
        return all(axis.share.kind != "unknown" for axis in self.axes)

    def with_shares(self, shares: dict[str, Share]) -> Placement:
        """The same with other shares along some axes; boxes no longer hold."""
        axes = tuple(axis._replace(share=shares.get(axis.name, axis.share)) for axis in self.axes)
        return replace(self, axes=axes, shape=None, boxes=None)

    def to_json(self) -> dict[str, object]:
        found: dict[str, object] = {"axes": [[a.name, a.size, a.at, str(a.share)] for a in self.axes]}
        if self.shape is not None:
            found["shape"] = list(self.shape)
        if self.boxes is not None:
            found["boxes"] = [[list(box.offset), list(box.size)] for box in self.boxes]
        if self.flat:
            found["flat"] = True
        if self.stage is not None:
            found["stage"] = self.stage
        if self.root:
            found["root"] = self.root
        return found

    def __str__(self) -> str:
        axes = ", ".join(f"{a.name} {a.at} of {a.size}: {a.share}" for a in self.axes)
        whole = "" if self.shape is None else f" of {list(self.shape)}"
        stage = "" if self.stage is None else f", {self.stage}"
        return f"{axes or 'whole'}{whole}{stage}"


# -- from a run -----------------------------------------------------------------------------------------------


def placement_of(facts: Any) -> Placement | None:
    """A placement from its JSON, which may come from anywhere; None where it is none."""
    axes = facts.get("axes") if isinstance(facts, dict) else None
    if not isinstance(axes, list) or len(axes) > 16:
        return None
    found = [axis for axis in map(_axis, axes) if axis is not None]
    shape, boxes, flat = facts.get("shape"), facts.get("boxes"), facts.get("flat") is True
    if len(found) < len(axes) or not _are_extents(shape, boxes, flat):
        return None
    stage, root = facts.get("stage"), facts.get("root")
    return Placement(
        tuple(found),
        None if shape is None else tuple(shape),
        _boxes(boxes),
        flat,
        stage if stage in _STAGES else None,
        max(root, 0) if type(root) is int else 0,
    )


def _axis(facts: object) -> Axis | None:
    match facts:
        case [str(name), int(size), int(index), str(share)] if 0 <= index < size < 2**31:
            read = _SHARE.fullmatch(share)
            if read is None or len(name) > 64:
                return None
            kind: Kind = next(kind for kind in _KINDS if kind == read[1])
            return Axis(name, size, index, Share(kind, int(read[2]) if read[2] else None, read[3]))
    return None


def _are_sizes(sizes: object) -> bool:
    return (
        isinstance(sizes, list)
        and len(sizes) <= 64
        and all(type(size) is int and 0 <= size < 2**48 for size in sizes)
    )


def _are_extents(shape: Any, boxes: Any, flat: bool) -> bool:
    """Return True if this can be the shape of a whole, where it is said, and these the boxes in it, where they are."""
    if shape is not None and not _are_sizes(shape):
        return False
    return boxes is None or _are_boxes(boxes, [prod(shape)] if flat and shape is not None else shape)


def _are_boxes(boxes: Any, shape: Any) -> bool:
    """Return True if these are boxes that lie inside a whole of this shape."""
    if shape is None or not isinstance(boxes, list) or len(boxes) > _MOST_BOXES:
        return False
    return all(_is_box(box, shape) for box in boxes)


def _boxes(boxes: list[list[list[int]]] | None) -> tuple[Box, ...] | None:
    return None if boxes is None else tuple(Box(tuple(offset), tuple(size)) for offset, size in boxes)


def _is_box(box: object, shape: list[int]) -> bool:
    if not (isinstance(box, list) and len(box) == 2 and all(map(_are_sizes, box))):
        return False
    offset, size = box
    if not len(offset) == len(size) == len(shape):
        return False
    return all(start + long <= end for start, long, end in zip(offset, size, shape, strict=True))


# -- from sizes -----------------------------------------------------------------------------------------------


def chunk(spans: Spans, parts: int, index: int) -> Spans:
    """One of so many chunks of some stretches, as ``torch.chunk`` cuts: all of one size, the last ones smaller."""
    total = sum(end - start for start, end in spans)
    size = -(-total // parts)
    low, high = min(index * size, total), min((index + 1) * size, total)
    taken: list[tuple[int, int]] = []
    passed = 0
    for start, end in spans:
        first, last = max(low - passed, 0), min(high - passed, end - start)
        if first < last:
            taken.append((start + first, start + last))
        passed += end - start
    return tuple(taken)


def boxes_of(spans: Sequence[Spans]) -> tuple[Box, ...]:
    """The boxes of the stretches of each dimension, in the order in which they lie in the part's memory."""
    return tuple(
        Box(tuple(start for start, _ in each), tuple(end - start for start, end in each))
        for each in product(*spans)
    )


# -- from a user ----------------------------------------------------------------------------------------------


@final
class Layout(NamedTuple):
    """One statement about a value: what it is along an axis, or along all that it can mean."""

    share: Share
    axis: str | None = None


_MEANT = {
    "batch": Share("batch", 0),
    "replicated": Share("replicate"),
    "replicate": Share("replicate"),
}
_ALONE = {**_MEANT, "unknown": Share("unknown")}
_ALONG_AN_AXIS = {**_MEANT, "partial": Share("partial", op="sum")}


def read_layout(text: str) -> tuple[Layout, ...]:
    """What a user says of a site: ``"batch"``, ``"replicated"``, ``"shard(1, tp)"``, ``"batch(dp); partial(tp)"``."""
    found = tuple(_statement(part.strip(), text) for part in text.split(";") if part.strip())
    if not found:
        raise _no_layout(text)
    return found


def _statement(part: str, text: str) -> Layout:
    read = _WORD.fullmatch(part)
    if read is None:
        raise _no_layout(text)
    word, inside = read[1], [each.strip() for each in (read[2] or "").split(",") if each.strip()]
    match inside:
        case [] if word in _ALONE:
            return Layout(_ALONE[word])
        case [str(axis)] if word in _ALONG_AN_AXIS:
            return Layout(_ALONG_AN_AXIS[word], axis)
        case [str(dim), str(axis)] if word == "shard" and dim.removeprefix("-").isdigit():
            return Layout(Share("shard", int(dim)), axis)
    raise _no_layout(text)


def _no_layout(text: str) -> PlanError:
    return PlanError(
        f"layout {text!r} is none: write 'batch', 'replicated', 'shard(1, tp)' with a dimension and an axis of the "
        "mesh, 'partial(tp)' or 'unknown'; several are separated by semicolons: 'batch(dp); shard(-1, tp)'"
    )
