"""The tensors inside whatever a module takes or returns, each with the name of its place in the structure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from enum import Enum
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from torchtap._torch import pytree
from torchtap.plan.names import join_path

if TYPE_CHECKING:
    from torchtap.hooks.arguments import Args

__all__ = ["argument_name", "children", "input_leaves", "is_object", "keyword_name", "leaves"]

_PLAIN = (str, bytes, int, float)
_DEEPEST = 8  # objects inside objects
_CONTAINERS = (Mapping, list, tuple, set, frozenset)
_NO_STRUCTURES = (Tensor, type, ModuleType, Enum, nn.Module, torch.Generator)


def leaves(
    tree: object, prefix: str = "", around: tuple[object, ...] = (), *, through_objects: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """``(name, tensor)`` for every tensor of a structure; a bare tensor has the empty name.

    Without ``through_objects`` caches and other objects that hold tensors from call to call are left out.

    While FX traces, a proxy stands for a tensor. ``around`` are the objects that the structure is in: one that holds
    itself is not walked in circles.
    """
    if isinstance(tree, (Tensor, Proxy)):
        yield prefix, tree  # type: ignore[misc]
        return
    if tree is None or isinstance(tree, _PLAIN):
        return
    if is_object(tree):
        if not through_objects or len(around) >= _DEEPEST or any(tree is each for each in around):
            return
        around = (*around, tree)
    for key, child in children(tree):
        yield from leaves(child, join_path(prefix, str(key)), around, through_objects=through_objects)


def children(tree: object) -> Iterator[tuple[Any, Any]]:
    """The parts of a structure by key; nothing for what is none."""
    if tree is None or isinstance(tree, _PLAIN):
        return
    if isinstance(tree, Mapping):
        yield from tree.items()
    elif isinstance(tree, tuple) and hasattr(tree, "_fields"):
        # Not `zip(…, strict=True)`: the compiler of torch 2.15 stumbles over its end.
        for index, name in enumerate(tree._fields):
            yield name, tree[index]
    elif isinstance(tree, (list, tuple)):
        yield from enumerate(tree)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for each in dataclasses.fields(tree):
            yield each.name, getattr(tree, each.name, None)
    elif is_object(tree):
        # Before what is registered with torch's pytree: whoever registers a class is not to change its names.
        yield from tree.__dict__.items()
    elif type(tree) in pytree.SUPPORTED_NODES:
        yield from enumerate(pytree.SUPPORTED_NODES[type(tree)].flatten_fn(tree)[0])


def is_object(tree: object) -> bool:
    """Whether something is an object of a user's class that may hold tensors as attributes, as a cache does."""
    return (
        not isinstance(tree, _CONTAINERS)
        and hasattr(tree, "__dict__")
        and not dataclasses.is_dataclass(tree)
        and not callable(tree)
        and not isinstance(tree, _NO_STRUCTURES)
    )


def input_leaves(
    names: tuple[str, ...] | None,
    args: Args,
    kwargs: Mapping[str, object],
    *,
    through_objects: bool = True,
) -> Iterator[tuple[str, Tensor]]:
    """The tensors among a call's arguments, named by parameter where ``names`` gives them, else by index."""
    for position, value in enumerate(args):
        yield from leaves(value, argument_name(names, position), through_objects=through_objects)
    for key, value in kwargs.items():
        yield from leaves(value, keyword_name(names, key), through_objects=through_objects)


def argument_name(names: tuple[str, ...] | None, position: int) -> str:
    """What an argument is called that came by position."""
    return names[position] if names is not None and position < len(names) else str(position)


def keyword_name(names: tuple[str, ...] | None, key: str) -> str:
    """What an argument is called that came by keyword."""
    return "" if names == ("",) else key
