"""Which nodes of an FX graph belong to which module call, and which values go in and out of each.

FX, export and their transformations note at each node the modules inside whose forward it was made. A region is
one call of one module: the nodes that carry its mark. It guarantees:
- a module that is called several times has a region for each call, in order;
- graphs inside the graph (``no_grad``, ``autocast``, ``cond``, loops, checkpoints) are walked into;
- what a graph does not tell is not made up: a module whose nodes are all gone has no region.

A graph knows tensors, not the structure that a forward returned them in. Which of them has which name is decided
in `naming`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from torch import fx

from torchtap._torch import pytree
from torchtap.plan.names import WRAPPER_CLASSES
from torchtap.spi import ModulePath

__all__ = [
    "Mark",
    "Region",
    "attribute_of",
    "graphs_inside",
    "module_regions",
    "outermost_class",
    "without",
    "without_call",
    "wrapped_paths",
]


class Mark(NamedTuple):
    """One module call that a node was made in."""

    call: str  # distinguishes the calls of one module
    path: str
    described: Any  # the class, or its dotted name
    number: int = 0  # of the call among those of its module


@final
@dataclass
class Region:
    """One call of one module in a graph."""

    mark: Mark
    graph: fx.Graph
    depth: int  # how many of a node's marks are around this one
    lifted: frozenset[fx.Node] = frozenset()  # inputs of the graph that stand for parameters and buffers
    nodes: dict[fx.Node, tuple[Mark, ...]] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return self.mark.path

    def entering(self) -> list[fx.Node]:
        """The tensors that come in, in the order of first use."""
        found: dict[fx.Node, None] = {}
        for node in self.nodes:
            for value in node.all_input_nodes:
                if value not in self.nodes and self.is_activation(value):
                    found[value] = None
        return list(found)

    def leaving(self) -> list[fx.Node]:
        """The tensors that something outside uses, in the order in which they were made."""
        return [
            node
            for node in self.nodes
            if self.is_activation(node) and any(user not in self.nodes for user in node.users)
        ]

    def marks_inside(self, node: fx.Node) -> tuple[Mark, ...]:
        """The module calls inside this one that a node was made in."""
        return self.nodes[node][self.depth + 1 :]

    def end_for(self, value: fx.Node) -> fx.Node:
        """Return the node before which everything inside is done with a value and nothing outside has begun.

        Calls of one module end in the order in which they began, whichever of their results is used first.
        """
        return min((max(self.nodes).next, *(user for user in value.users if user not in self.nodes)))

    def is_activation(self, node: fx.Node) -> bool:
        """Return True if a node stands for a tensor that the model computes or is given."""
        if node.op == "get_attr" or node in self.lifted:
            return False
        value = node.meta.get("val", node.meta.get("example_value"))
        return value is None or isinstance(value, torch.Tensor)


def graphs_inside(owner: fx.GraphModule, node: fx.Node) -> dict[str, fx.GraphModule]:
    """The graphs that a node runs, by where they are kept: branches, loops, blocks under ``no_grad``."""
    found = {}
    for given in node.all_input_nodes if node.op == "call_function" else ():
        inner = attribute_of(owner, str(given.target)) if given.op == "get_attr" else None
        if isinstance(inner, fx.GraphModule):
            found[str(given.target)] = inner
    return found


def attribute_of(owner: object, target: str) -> object:
    """Return what a graph module keeps at a dotted name; None if there is nothing."""
    for name in ModulePath(target).parts:
        owner = getattr(owner, name, None)
    return owner


def module_regions(
    owner: fx.GraphModule, lifted: frozenset[str] = frozenset(), renamed: Mapping[str, str] | None = None
) -> list[Region]:
    """Every module call that a graph knows of, in the order in which they began, but not that of the outermost.

    ``renamed`` has the first path of modules that are marked with a further one.
    """
    names = frozenset(node for node in owner.graph.nodes if node.op == "placeholder" and node.name in lifted)
    regions: list[Region] = []
    _collect(owner, names, 0, regions)
    # Export by Dynamo knows a module by its number, or by the name that it met it under first: further names of it are
    # one module. Other marks say the path once more.
    first_paths: dict[str, str] = {}
    for region in regions:
        module = region.mark.call.partition("@")[0]
        path = first_paths.setdefault(module, region.mark.path)
        region.mark = region.mark._replace(path=renamed.get(path, path) if renamed else path)
    return regions


def _collect(owner: fx.GraphModule, lifted: frozenset[fx.Node], outer: int, regions: list[Region]) -> None:
    """The regions of one graph, and of those inside it. ``outer`` marks of each node are of the graph around."""
    marks = _marks(owner)
    found: dict[tuple[str, str], Region] = {}
    for node in owner.graph.nodes:
        for depth, mark in enumerate(marks[node]):
            if depth < outer or not mark.path:
                continue
            region = found.get((mark.path, mark.call))
            if region is None:
                region = found[mark.path, mark.call] = Region(mark, owner.graph, depth, lifted)
                regions.append(region)
            region.nodes[node] = marks[node]
        for inner in graphs_inside(owner, node).values():
            _collect(inner, _lifted_inside(node, inner, lifted), len(marks[node]), regions)


def _lifted_inside(node: fx.Node, inner: fx.GraphModule, lifted: frozenset[fx.Node]) -> frozenset[fx.Node]:
    """Which inputs of a graph inside stand for parameters: those that are given them."""
    given = [each for each in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(each, fx.Node)]
    inputs = [each for each in inner.graph.nodes if each.op == "placeholder"]
    pairs = zip(reversed(inputs), reversed(given), strict=False)
    return frozenset(inside for inside, outside in pairs if outside.op == "get_attr" or outside in lifted)


def _marks(owner: fx.GraphModule) -> dict[fx.Node, tuple[Mark, ...]]:
    """The module calls around each node of one graph, the outermost first.

    A node that runs a graph was made in the calls that everything in that graph was made in, whatever its own mark
    says; so were the nodes that take its results apart.
    """
    found: dict[fx.Node, tuple[Mark, ...]] = {}
    if _is_of_several_models(owner.graph):
        return dict.fromkeys(owner.graph.nodes, ())
    for node in owner.graph.nodes:
        shared = [_shared_marks(inner) for inner in graphs_inside(owner, node).values()]
        known = [marks for marks in shared if marks is not None]
        if known:
            found[node] = _common(known)
        elif str(node.target) == "<built-in function getitem>" and _runs_a_graph(owner, node.args[0]):
            found[node] = found[node.args[0]]
        else:
            found[node] = tuple(_own_marks(node))
    return found


def _is_of_several_models(graph: fx.Graph) -> bool:
    """Whether paths begin at different models: a strict export of a model around an exported one leaves such marks."""
    outermost = set()
    for node in graph.nodes:
        first = next(_own_marks(node), None)
        if first is not None and not first.path:
            outermost.add(str(first.described))
    return len(outermost) > 1


def _runs_a_graph(owner: fx.GraphModule, node: object) -> bool:
    return isinstance(node, fx.Node) and bool(graphs_inside(owner, node))


def _shared_marks(inner: fx.GraphModule) -> tuple[Mark, ...] | None:
    """The marks that all nodes of a graph have; None where no node has any."""
    marked = [marks for marks in _marks(inner).values() if marks]
    return _common(marked) if marked else None


def _common(stacks: list[tuple[Mark, ...]]) -> tuple[Mark, ...]:
    length = 0
    while all(len(each) > length and each[length] == stacks[0][length] for each in stacks):
        length += 1
    return stacks[0][:length]


def outermost_class(graph: fx.Graph) -> object:
    """The class of the model itself, or its dotted name, if the graph has it."""
    return next((m.described for node in graph.nodes for m in _own_marks(node) if not m.path), None)


def _own_marks(node: fx.Node) -> Iterator[Mark]:
    wrapped: list[str] = []  # paths of what wrappers hold
    for call, entry in (node.meta.get("nn_module_stack") or {}).items():
        if isinstance(entry, tuple) and len(entry) == 2 and "_empty_nn_module_stack" not in str(entry[0]):
            source, described = ModulePath.of_source(str(entry[0])), entry[1]
            if source is None:  # no module of the model
                continue
            path = without_call(source)
            if path == "_export_root" or path in wrapped:  # the model once more
                continue
            if class_name(described) in WRAPPER_CLASSES:
                wrapped.append(ModulePath(path) / "module")
            number = max(map(_call_number, (str(call), str(entry[0]))))
            yield Mark(str(call), without(path, wrapped), described, number)


def _call_number(text: str) -> int:
    """The number of a call, as tracers write it: ``layer@2``."""
    number = text.rpartition("@")[2]
    return int(number) if "@" in text and number.isdigit() else 0


def wrapped_paths(owner: fx.GraphModule) -> list[str]:
    """Where wrappers such as DataParallel hold the model: these parts of a path have no place in a name."""
    found: dict[str, None] = {}
    for node in owner.graph.nodes:
        for path, described in (node.meta.get("nn_module_stack") or {}).values():
            if class_name(described) in WRAPPER_CLASSES:
                found[(ModulePath(without_call(str(path))) / "module")] = None
    return list(found)


def without(path: str, wrapped: Iterable[str]) -> str:
    """A path without the last part of each of these paths that it is inside of."""
    for outer in sorted(wrapped, key=len, reverse=True):
        if path == outer or ModulePath(path).is_inside(outer):
            path = (
                (ModulePath(outer).parent / path[len(outer) + 1 :])
                if path != outer
                else ModulePath(outer).parent
            )
    return path


def class_name(described: object) -> str:
    """The name of a class, without its module."""
    return described.__name__ if isinstance(described, type) else ModulePath(str(described)).name


def without_call(path: str) -> str:
    """A path without what export adds: the call's number, its own root, the wrapper of ``torch.compile``."""
    return ModulePath(path.partition("@")[0].removeprefix("_export_root.")).without_compiler()
