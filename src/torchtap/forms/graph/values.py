"""Every value of a graph, from one run; and a graph that emits chosen ones under the names of the eager model."""

from __future__ import annotations

import hashlib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from torchtap.forms.graph.edit import OWN, EditedGraphs, all_graphs, editable_copy, emit_all, emit_here
from torchtap.forms.graph.forgotten import CallsInOrder
from torchtap.forms.graph.naming import certainly_returned, is_changed_in_place, named_inputs
from torchtap.forms.graph.regions import Region, attribute_of, graphs_inside, module_regions
from torchtap.forms.match.choose import CallKeys, FormValues
from torchtap.forms.match.recorder import PrintRecorder
from torchtap.forms.op import op
from torchtap.forms.op.forms import ForwardRoute
from torchtap.spi import ModulePath

__all__ = ["digest_of", "graph_values", "tap_values"]


def digest_of(model: fx.GraphModule) -> str:
    """Tells graphs apart: the operations, by name and in order."""
    text = "\n".join(f"{key} {node.op} {node.target}" for key, _, node in _keyed(model))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _keyed(owner: fx.GraphModule, prefix: str = "") -> Iterator[tuple[str, fx.GraphModule, fx.Node]]:
    """Every node that may stand for a tensor, with a key that is the same in every copy of the graph."""
    for node in owner.graph.nodes:
        stands_for_a_value = node.op in ("placeholder", "call_function", "call_module", "call_method") or (
            node.op == "get_attr" and isinstance(attribute_of(owner, str(node.target)), torch.Tensor)
        )
        if stands_for_a_value and "torchtap" not in str(node.target) and node.target is not emit_all:
            yield (ModulePath(prefix) / node.name).replace(".", "/"), owner, node
        for target, inner in graphs_inside(owner, node).items():
            yield from _keyed(inner, (ModulePath(prefix) / target.removeprefix(OWN)))


def graph_values(
    model: fx.GraphModule, run: Callable[[], object], run_again: Callable[[], object] | None = None
) -> FormValues:
    """Run a model and take the print of each value in its graph; ``run_again`` runs it on other inputs."""
    op.register()
    recorder = PrintRecorder()
    tapped = editable_copy(model)
    nodes = list(_keyed(tapped))
    key_of = {node: key for key, _, node in nodes}
    order = CallsInOrder()
    calls = [(region.path, order.begin(region), _call(region, key_of)) for region in module_regions(tapped)]
    for key, owner, node in nodes:
        emit_after(owner.graph, node, recorder.address(key), gradient=True)
        emit_after(owner.graph, node, recorder.address(key), gradient=False)
    other = PrintRecorder(recorder.channel)
    _run(model, tapped, lambda: recorder.record(run))
    if run_again is not None:
        _run(model, tapped, lambda: other.record(run_again))
    numbered: dict[tuple[str, int], CallKeys] = {}
    numbers: dict[str, int] = {}
    for path, gone, call in calls:
        number = numbers.get(path, 0) + len(gone)
        if any(key in recorder.prints for key in call.inside):  # else it is in a branch that did not run
            numbered[path, number] = call
            number += 1
        numbers[path] = number
    return FormValues(digest_of(model), recorder.prints, numbered, other.prints, recorder.gradients)


def _run(model: fx.GraphModule, tapped: fx.GraphModule, run: Callable[[], Any]) -> None:
    """Run with the edited graphs in place of the model's."""
    for each in all_graphs(tapped):
        each.recompile()
    forward = types.MethodType(type(tapped).forward, model)
    routes: list[Any] = [EditedGraphs(model, tapped), ForwardRoute(model, forward)]
    for route in routes:
        route.switch_on()
    try:
        run()
    finally:
        for route in reversed(routes):
            route.switch_off()


def _call(region: Region, key_of: Mapping[fx.Node, str]) -> CallKeys:
    return CallKeys(
        entering=_keys(region.entering(), key_of),
        inside=_keys(region.nodes, key_of),
        leaving=_keys(region.leaving(), key_of),
        given=_keys(
            (node for leaf, node in named_inputs(region) if not leaf and not is_changed_in_place(node)),
            key_of,
        ),
        returned=_keys(certainly_returned(region), key_of),
    )


def _keys(nodes: Iterable[fx.Node], key_of: Mapping[fx.Node, str]) -> tuple[str, ...]:
    return tuple(key_of[node] for node in nodes if node in key_of)


def tap_values(tapped: fx.GraphModule, sites: Iterable[tuple[str, str]], prefix: str) -> None:
    """Emit these sites, each from the node with its key."""
    by_key: dict[str, list[str]] = {}
    for site, key in sites:
        by_key.setdefault(key, []).append(site)
    for key, owner, node in list(_keyed(tapped)):
        for site in reversed(by_key.get(key, [])):
            emit_after(owner.graph, node, prefix + site, gradient=op.address(site).kind.startswith("grad"))
    for each in all_graphs(tapped):
        each.recompile()


def emit_after(graph: fx.Graph, node: fx.Node, site: str, *, gradient: bool) -> None:
    """Emit a value as soon as it is there, before anything can change it in place."""
    after = node
    if node.op == "placeholder":
        after = [each for each in graph.nodes if each.op == "placeholder"][-1]
    if "val" in node.meta and not isinstance(node.meta["val"], torch.Tensor):
        return
    with graph.inserting_after(after):
        emit_here(graph, node, site, gradient)
