"""Walk and rebuild structures of tensors: the arguments and outputs of modules.

Each tensor of a structure is a leaf, named by its place in the structure. `leaves` walks a structure, `map_leaves`
builds the same structure with other leaves. Both use the same names.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from torchtap._torch import pytree
from torchtap.plan.names import ModulePath

__all__ = [
    "Args",
    "Function",
    "Kwargs",
    "argument_name",
    "children",
    "fill",
    "from_names",
    "input_leaves",
    "is_object",
    "keyword_name",
    "leaves",
    "map_inputs",
    "map_leaves",
    "plain",
    "skeleton",
]

Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]
Function: TypeAlias = Callable[..., object]

_PLAIN = (str, bytes, int, float)
_DEEPEST = 8  # objects inside objects
_CONTAINERS = (Mapping, list, tuple, set, frozenset)
_NO_STRUCTURES = (Tensor, type, ModuleType, Enum, nn.Module, torch.Generator)
_HOLE = torch.empty(0, device="meta")


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def leaves(
    tree: object, prefix: str = "", around: tuple[object, ...] = (), *, through_objects: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Yield ``(name, tensor)`` for every tensor of a structure. A bare tensor has the empty name.

    Without ``through_objects`` caches and other objects that hold tensors from call to call are skipped.

    While FX traces, a proxy is a tensor. ``around`` are the enclosing objects, so that one that holds itself ends.
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
        yield from leaves(child, _join(prefix, key), around, through_objects=through_objects)


def children(tree: object) -> Iterator[tuple[Any, Any]]:
    """Yield the parts of a structure by key; nothing if it is not a structure."""
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
        # Before torch's pytree: registering a class must not change the names of its leaves.
        yield from tree.__dict__.items()
    elif type(tree) in pytree.SUPPORTED_NODES:
        yield from enumerate(pytree.SUPPORTED_NODES[type(tree)].flatten_fn(tree)[0])


def is_object(tree: object) -> bool:
    """Return True for an object of a user's class that may hold tensors as attributes, such as a cache."""
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
    """Yield the tensors of a call's arguments, named by parameter if ``names`` has them, else by index."""
    for position, value in enumerate(args):
        yield from leaves(value, argument_name(names, position), through_objects=through_objects)
    for key, value in kwargs.items():
        yield from leaves(value, keyword_name(names, key), through_objects=through_objects)


def argument_name(names: tuple[str, ...] | None, position: int) -> str:
    """Return the name of a positional argument."""
    return names[position] if names is not None and position < len(names) else str(position)


def keyword_name(names: tuple[str, ...] | None, key: str) -> str:
    """Return the name of a keyword argument."""
    return "" if names == ("",) else key


def map_leaves(
    tree: object,
    change: Callable[[str, Tensor], object],
    other: Callable[[object], object] = lambda value: value,
    prefix: str = "",
    around: tuple[object, ...] = (),
) -> Any:
    """Rebuild a structure with ``change(name, tensor)`` for its tensors and ``other(value)`` for the rest."""
    if isinstance(tree, Tensor):
        return change(prefix, tree)

    def child(key: object, value: object) -> Any:
        return map_leaves(value, change, other, _join(prefix, key), (*around, tree))

    rebuild = _rebuilding(tree, around)
    return other(tree) if rebuild is None else rebuild(tree, child)


def _rebuilding(
    tree: object, around: tuple[Any, ...]
) -> Callable[[Any, Callable[[Any, Any], Any]], Any] | None:
    """Return the function that rebuilds a structure; None if it is not one. An object that holds itself is not."""
    if isinstance(tree, Mapping):
        return _rebuilt_mapping
    if isinstance(tree, (list, tuple)):
        return _rebuilt_sequence
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return _rebuilt_dataclass
    if is_object(tree) and not any(tree is each for each in around) and _has_tensors(tree):
        return _rebuilt_object
    return _rebuilt_node if type(tree) in pytree.SUPPORTED_NODES else None


def _rebuilt_object(tree: object, child: Callable[[object, object], object]) -> object:
    copied = copy.copy(tree)
    copied.__dict__.update({name: child(name, value) for name, value in tree.__dict__.items()})
    return copied


def _rebuilt_node(tree: object, child: Callable[[object, object], object]) -> object:
    node = pytree.SUPPORTED_NODES[type(tree)]
    children, context = node.flatten_fn(tree)
    return node.unflatten_fn([child(index, value) for index, value in enumerate(children)], context)


def _rebuilt_dataclass(tree: Any, child: Callable[[object, object], Any]) -> Any:
    copied = copy.copy(tree)
    for each in dataclasses.fields(tree):
        object.__setattr__(copied, each.name, child(each.name, getattr(tree, each.name, None)))
    return copied


def _rebuilt_mapping(tree: Mapping[object, object], child: Callable[[object, object], object]) -> Any:
    changed = {key: child(key, value) for key, value in tree.items()}
    return changed if type(tree) is dict else _assigned(copy.copy(tree), changed)


def _rebuilt_sequence(tree: Any, child: Callable[[Any, Any], Any]) -> Any:
    if not hasattr(tree, "_fields"):
        return type(tree)([child(index, value) for index, value in enumerate(tree)])
    # A named tuple, without calling its type: a PackedSequence checks its arguments.
    return tuple.__new__(type(tree), map(child, tree._fields, tree))


def map_inputs(
    names: tuple[str, ...] | None,
    args: Args,
    kwargs: Mapping[str, object],
    change: Callable[[str, Tensor], object],
) -> tuple[Args, Kwargs]:
    """Rebuild arguments with ``change(name, tensor)`` for their tensors, named as by `input_leaves`."""
    return (
        tuple(map_leaves(value, change, prefix=argument_name(names, n)) for n, value in enumerate(args)),
        {key: map_leaves(value, change, prefix=keyword_name(names, key)) for key, value in kwargs.items()},
    )


def _assigned(mapping: Any, values: Mapping[Any, Any]) -> Any:
    for key, value in values.items():
        mapping[key] = value
    return mapping


def skeleton(tree: object) -> Any:
    """Return a structure without its values, for `fill`. It holds no memory of the model.

    Return None if a type of the user's cannot be rebuilt.
    """
    try:
        return map_leaves(tree, lambda *_: _HOLE, lambda value: value if isinstance(value, _PLAIN) else None)
    except Exception:
        return None


def fill(bones: object, values: Mapping[str, object]) -> Any:
    """Rebuild the structure of a skeleton with these leaves; a missing leaf is None."""
    return map_leaves(bones, lambda name, _: values.get(name))


def from_names(values: Mapping[str, object]) -> object:
    """Build a structure from leaf names: numbers make tuples, other names make dicts."""
    if set(values) == {""}:
        return values[""]
    children: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        first, rest = ModulePath(name).split_first()
        children.setdefault(first, {})[rest] = value
    built = {name: from_names(inner) for name, inner in children.items()}
    if all(name.isdigit() for name in built):
        return tuple(built.get(str(index)) for index in range(max(map(int, built)) + 1))
    return built


def _has_tensors(tree: object) -> bool:
    return next(leaves(tree), None) is not None


def plain(tree: object) -> Any:
    """Rebuild the structure with tuples, lists and dicts only."""
    if isinstance(tree, (list, tuple)):
        return (list if isinstance(tree, list) else tuple)(map(plain, tree))
    if isinstance(tree, Mapping) or dataclasses.is_dataclass(type(tree)):
        return {key: plain(value) for key, value in children(tree)}
    if is_object(tree) and _has_tensors(tree):
        return from_names(dict(leaves(tree)))
    if not isinstance(tree, Tensor) and type(tree) in pytree.SUPPORTED_NODES:
        return tuple(map(plain, pytree.SUPPORTED_NODES[type(tree)].flatten_fn(tree)[0]))
    return tree
