"""What a graph no longer knows of the model that it was made from, and what it was told.

A graph has operations. A module that handed on what it was given has none, so the graph has forgotten it; so has it a
call that did, a tensor that nothing used, and the modules of a graph that was traced before. An exported program still
lists the modules of its model: the graph modules that it gives are told them here.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import final

from torch import fx
from torch.export import ExportedProgram

from torchtap.forms.graph.regions import Region, graphs_inside, without_call
from torchtap.spi import ModulePath, reasons

__all__ = ["CallsInOrder", "module_of", "tell_modules", "told_modules", "unmarked_paths", "what_is_forgotten"]

# In the notes of a graph module: the paths of all modules of the model that it was made from.
_TOLD = "torchtap_modules"
_DEEPEST = 200  # no model is; a path of a damaged file may be


def module_of(program: ExportedProgram) -> fx.GraphModule:
    """The graph module of a program, which knows the modules that the program lists."""
    graph = program.module()
    tell_modules(graph, program)
    return graph


def tell_modules(graph: fx.GraphModule, program: ExportedProgram) -> None:
    """Note in a graph module the modules of the program that it is from."""
    paths = dict.fromkeys(without_call(entry.fqn) for entry in program.module_call_graph)
    graph.meta[_TOLD] = tuple(path for path in paths if path and len(ModulePath(path).parts) < _DEEPEST)


def told_modules(graph: fx.GraphModule) -> tuple[str, ...] | None:
    """The modules that a graph was told of; None where nobody told it."""
    told = graph.meta.get(_TOLD)
    return told if isinstance(told, tuple) else None


def what_is_forgotten(graph: fx.GraphModule) -> str:
    """The reason that stands for all that a graph cannot name."""
    modules = (
        "modules that hand on what they are given, are inside a branch, or were exported or traced before"
    )
    what = modules if told_modules(graph) is None else "calls that hand on what they are given"
    return reasons.FORGOTTEN.format(what=f"{what}, and tensors that nothing uses,")


def unmarked_paths(owner: fx.GraphModule, marked: Collection[str]) -> set[str]:
    """The modules of which a graph uses what they hold, but has nothing that is marked as theirs."""
    used = set(marked)
    for node in owner.graph.nodes:
        if node.op == "get_attr" and node.users and str(node.target) not in graphs_inside(owner, node):
            used.add(ModulePath(str(node.target)).parent)
    return {around for path in used for around in (path, *ModulePath(path).parents)} - set(marked)


@final
class CallsInOrder:
    """Find the calls that a graph has forgotten: asked for each module call, in order.

    The graph shows the calls that left something. If the mark of one has a higher number than calls were seen, those
    before it are gone.
    """

    def __init__(self) -> None:
        self._next: dict[str, int] = {}

    def begin(self, region: Region) -> range:
        """The next call. The numbers of those that are gone before it; its own is the one behind."""
        expected = self._next.get(region.path, 0)
        number = max(expected, region.mark.number)
        self._next[region.path] = number + 1
        return range(expected, number)
