"""Which nodes of an FX graph belong to which module call, and which values go in and out of each.

FX, export and their transformations note at each node the modules inside whose forward it was made. A region is
one call of one module: the nodes that carry its mark. It guarantees:
- a module that is called several times has a region for each call, in order;
- what a graph does not tell is not made up: a module whose nodes are all gone has no region.

A graph knows tensors, not the structure that a forward returned them in. Where one value leaves a region it is
the output; where several do, they are numbered in the order in which they were made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import fx

from torchtap.names import without_compiler

__all__ = ["Region", "module_regions", "outermost_class"]


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


@final
@dataclass
class Region:
    """One call of one module in a graph."""

    path: str
    described: Any  # the class, or its dotted name
    lifted: frozenset[str] = frozenset()  # inputs of the graph that stand for parameters, buffers, constants
    nodes: dict[fx.Node, None] = field(default_factory=dict)

    def inputs(self) -> list[tuple[str, fx.Node]]:
        """``(leaf, value)`` for the tensors that come in, in the order of first use."""
        found: dict[fx.Node, None] = {}
        for node in self.nodes:
            for value in node.all_input_nodes:
                if value not in self.nodes and self._is_activation(value):
                    found[value] = None
        return _numbered(found)

    def outputs(self) -> list[tuple[str, fx.Node]]:
        """``(leaf, value)`` for the tensors that go out."""
        found = {
            node: None
            for node in self.nodes
            if self._is_activation(node) and any(user not in self.nodes for user in node.users)
        }
        own = {node: None for node in found if not self._passes_through(node)}
        return _numbered(own or found)

    def _passes_through(self, node: fx.Node) -> bool:
        """Whether a node only hands on a value from outside, as ``x.to(x.dtype)`` does."""
        if str(node.target) not in _NO_CHANGE or node.args[0] in self.nodes:
            return False
        given, made = (each.meta.get("val") for each in (node.args[0], node) if isinstance(each, fx.Node))
        return (
            given is not None
            and made is not None
            and given.dtype == made.dtype
            and given.device == made.device
        )

    def first_use_outside(self, value: fx.Node) -> fx.Node:
        """The node before which everything inside is done with the value and nothing outside has begun."""
        order = {node: position for position, node in enumerate(value.graph.nodes)}
        users = [user for user in value.users if user not in self.nodes]
        return min(users, key=order.__getitem__)

    def _is_activation(self, node: fx.Node) -> bool:
        if node.op == "get_attr" or (node.op == "placeholder" and node.name in self.lifted):
            return False
        value = node.meta.get("val", node.meta.get("example_value"))
        return value is None or isinstance(value, torch.Tensor)


def module_regions(graph: fx.Graph, lifted: frozenset[str] = frozenset()) -> list[Region]:
    """Every module call that the graph knows of, in the order in which they began, but not that of the outermost."""
    found: dict[tuple[str, str], Region] = {}
    for node in graph.nodes:
        for call, (path, described) in _stack(node):
            if path:
                region = found.setdefault((path, call), Region(path, described, lifted))
                region.nodes[node] = None
    return list(found.values())


def outermost_class(graph: fx.Graph) -> Any:
    """The class of the model itself, or its dotted name, if the graph tells."""
    return next((entry[1] for node in graph.nodes for _, entry in _stack(node) if not entry[0]), None)


def _stack(node: fx.Node) -> Iterator[tuple[str, tuple[str, Any]]]:
    for call, entry in (node.meta.get("nn_module_stack") or {}).items():
        if isinstance(entry, tuple) and len(entry) == 2 and "_empty_nn_module_stack" not in str(entry[0]):
            path, described = entry
            yield str(call), (_plain(str(path)), described)


def _plain(path: str) -> str:
    """A path without what export adds: the call's number and the wrapper of ``torch.compile``."""
    return without_compiler(path.partition("@")[0])


def _numbered(found: dict[fx.Node, None]) -> list[tuple[str, fx.Node]]:
    nodes = list(found)
    return [("" if len(nodes) == 1 else str(position), node) for position, node in enumerate(nodes)]
