"""Structures of tensors, rebuilt: the same tuples, dicts and dataclasses with other leaves in them.

The counterpart of `leaves`, which takes structures apart; names of leaves are the same in both.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from torchtap._torch import pytree
from torchtap.hooks.arguments import Args, Kwargs
from torchtap.hooks.leaves import argument_name, children, is_object, keyword_name, leaves
from torchtap.plan.names import first_part, join_path

__all__ = ["fill", "from_names", "map_inputs", "map_leaves", "plain", "skeleton"]

_PLAIN = (str, bytes, int, float, type(None))
_HOLE = torch.empty(0, device="meta")


def map_leaves(
    tree: object,
    change: Callable[[str, Tensor], object],
    other: Callable[[object], object] = lambda value: value,
    prefix: str = "",
    around: tuple[object, ...] = (),
) -> Any:
    """A structure like ``tree``: ``change(name, tensor)`` for its tensors, ``other(value)`` for the rest."""
    if isinstance(tree, Tensor):
        return change(prefix, tree)

    def child(key: object, value: object) -> Any:
        return map_leaves(value, change, other, join_path(prefix, str(key)), (*around, tree))

    rebuild = _rebuilding(tree, around)
    return other(tree) if rebuild is None else rebuild(tree, child)


def _rebuilding(
    tree: object, around: tuple[Any, ...]
) -> Callable[[Any, Callable[[Any, Any], Any]], Any] | None:
    """How a structure is rebuilt; None for what is none. An object that holds itself is none inside itself."""
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
    # A named tuple, and not by calling the type: a PackedSequence has checks of its own there.
    return tuple.__new__(type(tree), map(child, tree._fields, tree))


def map_inputs(
    names: tuple[str, ...] | None,
    args: Args,
    kwargs: Mapping[str, object],
    change: Callable[[str, Tensor], object],
) -> tuple[Args, Kwargs]:
    """Arguments with ``change(name, tensor)`` for their tensors, named as `leaves.input_leaves` names them."""
    return (
        tuple(map_leaves(value, change, prefix=argument_name(names, n)) for n, value in enumerate(args)),
        {key: map_leaves(value, change, prefix=keyword_name(names, key)) for key, value in kwargs.items()},
    )


def _assigned(mapping: Any, values: Mapping[Any, Any]) -> Any:
    for key, value in values.items():
        mapping[key] = value
    return mapping


def skeleton(tree: object) -> Any:
    """A structure without its values: what `fill` needs to build it again. It keeps no memory of the model's.

    None where a type of the user's cannot be built again; its values are taken all the same.
    """
    try:
        return map_leaves(tree, lambda *_: _HOLE, lambda value: value if isinstance(value, _PLAIN) else None)
    except Exception:
        return None


def fill(bones: object, values: Mapping[str, object]) -> Any:
    """The structure of a skeleton with these leaves; a leaf that is not among them is None."""
    return map_leaves(bones, lambda name, _: values.get(name))


def from_names(values: Mapping[str, object]) -> object:
    """A structure as far as leaf names tell it: numbers make tuples, other names dicts."""
    if set(values) == {""}:
        return values[""]
    children: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        first, rest = first_part(name)
        children.setdefault(first, {})[rest] = value
    built = {name: from_names(inner) for name, inner in children.items()}
    if all(name.isdigit() for name in built):
        return tuple(built.get(str(index)) for index in range(max(map(int, built)) + 1))
    return built


def _has_tensors(tree: object) -> bool:
    return next(leaves(tree), None) is not None


def plain(tree: object) -> Any:
    """The structure in tuples, lists and dicts only, which any reader knows."""
    if isinstance(tree, (list, tuple)):
        return (list if isinstance(tree, list) else tuple)(map(plain, tree))
    if isinstance(tree, Mapping) or dataclasses.is_dataclass(type(tree)):
        return {key: plain(value) for key, value in children(tree)}
    if is_object(tree) and _has_tensors(tree):
        return from_names(dict(leaves(tree)))
    if not isinstance(tree, Tensor) and type(tree) in pytree.SUPPORTED_NODES:
        return tuple(map(plain, pytree.SUPPORTED_NODES[type(tree)].flatten_fn(tree)[0]))
    return tree
