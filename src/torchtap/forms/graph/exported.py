"""An exported program with taps in its graph: it can be saved, decomposed and compiled ahead of time like any other."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from torchtap._torch import pytree
from torchtap.forms.graph.edit import emit_before, tap_graph
from torchtap.forms.op.channel import CALL, SAME_CALL
from torchtap.spi import Name, leaves

__all__ = ["tapped_program"]


def tapped_program(program: ExportedProgram, kinds_of: Mapping[str, Iterable[str]]) -> ExportedProgram:
    """A copy of a program that emits these kinds at these paths; it has the program's own parameters."""
    signature = program.graph_signature
    user_inputs = list(signature.user_inputs)
    tapped = copy.copy(program)
    graph_module = copy.deepcopy(program.graph_module)
    tapped.__dict__["_graph_module"] = graph_module
    graph = graph_module.graph
    lifted = frozenset(
        node.name for node in graph.nodes if node.op == "placeholder" and node.name not in user_inputs
    )
    tap_graph(graph_module, {path: kinds for path, kinds in kinds_of.items() if path}, lifted=lifted)
    _tap_outermost(program, graph, kinds_of.get("", ()))
    graph_module.recompile()
    return tapped


def _tap_outermost(program: ExportedProgram, graph: fx.Graph, kinds: Iterable[str]) -> None:
    nodes = {node.name: node for node in graph.nodes}
    body = next(node for node in graph.nodes if node.op != "placeholder")
    end = next(node for node in reversed(graph.nodes) if node.op == "output")
    for kind in kinds:
        if kind.endswith("input"):
            at, tree, values = body, _given(program), program.graph_signature.user_inputs
        elif kind.endswith("output"):
            at, tree, values = end, _returned(program), program.graph_signature.user_outputs
        else:
            continue
        mark = CALL
        for leaf, number in leaves(tree):
            value = values[int(number)]
            if isinstance(value, str) and value in nodes:
                emit_before(graph, at, nodes[value], Name("", kind, leaf), mark)
                mark = SAME_CALL


def _given(program: ExportedProgram) -> Any:
    """The program's arguments as its caller names them, with their number in the place of each value."""
    if program.call_spec.in_spec is None:
        return None
    count = len(program.graph_signature.user_inputs)
    args, kwargs = pytree.tree_unflatten(_numbers(count), program.call_spec.in_spec)
    names = [str(name) for name in _argument_names(program)]
    given = dict(zip(names, args, strict=False)) | kwargs
    return next(iter(given.values())) if len(given) == 1 else given


def _returned(program: ExportedProgram) -> object:
    """What the program returns, with its number in the place of each value."""
    if program.call_spec.out_spec is None:
        return None
    count = len(program.graph_signature.user_outputs)
    return pytree.tree_unflatten(_numbers(count), program.call_spec.out_spec)


def _numbers(count: int) -> list[torch.Tensor]:
    """Stand-ins for tensors that say which they are."""
    return [torch.tensor(position) for position in range(count)]


def _argument_names(program: ExportedProgram) -> list[str]:
    entry = program.module_call_graph[0].signature
    names = getattr(entry, "forward_arg_names", None)
    return list(names) if names else [str(position) for position in range(64)]
