"""The tensors in what a module returns, by hand: it knows nothing of torchtap."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

__all__ = ["leaves_of", "with_leaf"]


def leaves_of(tree: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Each tensor with its place, dotted."""
    if isinstance(tree, Tensor):
        yield prefix, tree
        return
    for key, value in _parts(tree):
        yield from leaves_of(value, f"{prefix}.{key}" if prefix else str(key))


def with_leaf(tree: Any, place: str, tensor: Tensor) -> Any:
    """The same structure with another tensor at one place; the structure that was given stays as it is."""
    if not place:
        return tensor
    for key, value in _parts(tree):
        if place == str(key) or place.startswith(f"{key}."):
            return _with_part(tree, key, with_leaf(value, place[len(str(key)) + 1 :], tensor))
    raise LookupError(place)


def _parts(tree: Any) -> list[tuple[Any, Any]]:
    if isinstance(tree, Mapping):
        return list(tree.items())
    if hasattr(tree, "_fields"):
        return list(zip(tree._fields, tree, strict=True))
    if isinstance(tree, (list, tuple)):
        return list(enumerate(tree))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return [(each.name, getattr(tree, each.name)) for each in dataclasses.fields(tree)]
    if tree is not None and type(tree).__module__.startswith("transformers."):
        return list(vars(tree).items())
    return []


def _with_part(tree: Any, key: Any, part: Any) -> Any:
    if hasattr(tree, "_fields"):
        return tree._replace(**{key: part})
    if isinstance(tree, tuple):
        return tuple(part if number == key else each for number, each in enumerate(tree))
    changed = copy.copy(tree)
    if isinstance(tree, (list, Mapping)):
        changed[key] = part  # type: ignore[index]
    else:
        setattr(changed, key, part)
    return changed
