"""Which name the tensors that go in and out of a module call in a graph have.

A name is a proof. The eager name goes to a tensor only if the graph and the module's class leave no other
possibility; any other tensor is numbered (``x:output.@0``), which no eager site is. It guarantees:
- ``x:output`` is a tensor that the module returned, and if the module returned one tensor, that one;
- ``x:input`` is the only tensor that a module with one parameter was given.

The proof: what leaves the forward of a class that keeps nothing anywhere (`leaks`) was returned. A value that a leaky
module inside made, or one that was changed in place where it came in, may have left by another way; a value that an
operation without effect handed on was not made here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from torchtap.forms.graph.leaks import can_leak, is_meddled_with, is_torch_class, returns_structure, takes_one
from torchtap.forms.graph.regions import Region
from torchtap.spi import Name

__all__ = ["certainly_returned", "is_changed_in_place", "named_inputs", "named_outputs"]

# Operations that return what they are given when there is nothing to change.
_NO_CHANGE = frozenset(
    f"aten.{name}"
    for name in (
        "to.dtype",
        "to.device",
        "to.dtype_layout",
        "to.other",
        "contiguous.default",
        "alias.default",
    )
)


def named_outputs(region: Region) -> list[tuple[str, fx.Node]]:
    """``(leaf, value)`` for the tensors that go out of a module call."""
    found = region.leaving()
    made = [node for node in found if not _hands_on(region, node)]
    returned = certainly_returned(region)
    if len(returned) == 1 and not _in_structure(region, returned[0]):
        others = [node for node in made if node is not returned[0]]
        return [("", returned[0]), *_numbered(others, doubtful=True)]
    return _numbered(made or found, doubtful=len(returned) != len(made))


def _in_structure(region: Region, node: fx.Node) -> bool:
    """Return True if a value may stand in a tuple or dict that the module, or one inside, returned."""
    of_child = False
    for mark in (*reversed(region.marks_inside(node)), region.mark):
        of_child = returns_structure(mark.described, of_child)
    return of_child


def certainly_returned(region: Region) -> list[fx.Node]:
    """The tensors of which it is proved that the module returned them, in whatever structure."""
    made = [node for node in region.leaving() if not _hands_on(region, node)]
    return [node for node in made if not _may_leak(region, node)]


def named_inputs(region: Region) -> list[tuple[str, fx.Node]]:
    """``(leaf, value)`` for the tensors that come into a module call."""
    found = region.entering()
    doubtful = _may_read_elsewhere(region)
    if len(found) == 1 and takes_one(region.mark.described) and not doubtful:
        return [("", found[0])]
    return _numbered(found, doubtful)


def _may_read_elsewhere(region: Region) -> bool:
    """Whether a module may use a tensor that was not given to it, which somebody then must have left lying about."""
    if is_torch_class(region.mark.described):
        return False
    around = next(iter(region.nodes.values()))[: region.depth + 1]
    return any(can_leak(mark.described) for mark in around)


def _numbered(found: list[fx.Node], doubtful: bool) -> list[tuple[str, fx.Node]]:
    return [(Name.unplaced(position, doubtful=doubtful), node) for position, node in enumerate(found)]


def _may_leak(region: Region, node: fx.Node) -> bool:
    """Return True if a value may have left a module by another way than its return."""
    if any(is_meddled_with(mark.described) for mark in region.nodes[node]):
        return True
    if is_torch_class(region.mark.described) and not region.marks_inside(node):
        return False
    if can_leak(region.mark.described) or any(can_leak(m.described) for m in region.marks_inside(node)):
        return True
    return _changes_what_came_in(region, node)


def _changes_what_came_in(region: Region, node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return False
    changed: Any = node.args[0] if node.args else None
    while isinstance(changed, fx.Node) and changed in region.nodes and _shares_memory(changed):
        changed = changed.args[0] if changed.args else None
    return isinstance(changed, fx.Node) and changed not in region.nodes


def is_changed_in_place(node: fx.Node) -> bool:
    """Return True if an operation writes into a node's tensor, or into a view of it."""
    views = [node]
    for view in views:
        for user in view.users:
            if user.args and user.args[0] is view:
                if _writes(user):
                    return True
                if user not in views and (_shares_memory(user) or user.op == "call_method"):
                    views.append(user)
    return False


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        return bool(schema.is_mutable)
    name = getattr(node.target, "__name__", str(node.target))
    return (name.endswith("_") and not name.endswith("__")) or name in (
        "iadd",
        "isub",
        "imul",
        "itruediv",
        "setitem",
    )


def _shares_memory(node: fx.Node) -> bool:
    """Return True if a node's tensor may be that of its first argument, or a view of it."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(each.alias_info is not None for each in schema.returns)


def _hands_on(region: Region, node: fx.Node) -> bool:
    """Return True if a node only hands on a value from outside, as ``x.to(x.dtype)`` does."""
    while str(node.target) in _NO_CHANGE and isinstance(node.args[0], fx.Node) and _same_kind(node):
        node = node.args[0]
        if node not in region.nodes:
            return True
    return False


def _same_kind(node: fx.Node) -> bool:
    given, made = node.args[0].meta.get("val"), node.meta.get("val")  # type: ignore[union-attr]
    return (
        isinstance(given, torch.Tensor)
        and isinstance(made, torch.Tensor)
        and given.dtype == made.dtype
        and given.device == made.device
    )
