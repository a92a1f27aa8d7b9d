"""The tensors inside whatever a module takes or returns, each with the name of its place in the structure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.fx import Proxy
from torch.utils import _pytree as pytree

from torchtap.names import join_path

__all__ = ["children", "input_leaves", "leaves"]


def leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """``(name, tensor)`` for every tensor of a structure; a bare tensor has the empty name.

    While FX traces, a proxy stands for a tensor.
    """
    if isinstance(tree, (Tensor, Proxy)):
        yield prefix, tree  # type: ignore[misc]
        return
    for key, child in children(tree):
        yield from leaves(child, join_path(prefix, str(key)))


def children(tree: Any) -> Iterator[tuple[Any, Any]]:
    """The parts of a structure by key; nothing for what is none."""
    if tree is None or isinstance(tree, (str, bytes, int, float)):
        return
    if isinstance(tree, Mapping):
        yield from tree.items()
    elif isinstance(tree, tuple) and hasattr(tree, "_fields"):
        yield from zip(tree._fields, tree, strict=True)
    elif isinstance(tree, (list, tuple)):
        yield from enumerate(tree)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for each in dataclasses.fields(tree):
            yield each.name, getattr(tree, each.name, None)
    elif type(tree) in pytree.SUPPORTED_NODES:
        yield from enumerate(pytree.SUPPORTED_NODES[type(tree)].flatten_fn(tree)[0])


def input_leaves(
    names: tuple[str, ...] | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors among a call's arguments, named by parameter where ``names`` gives them, else by index."""
    for position, value in enumerate(args):
        name = names[position] if names is not None and position < len(names) else str(position)
        yield from leaves(value, name)
    lone = names == ("",)
    for key, value in kwargs.items():
        yield from leaves(value, "" if lone else key)
