"""Put the op into an FX graph: one that was traced, exported or transformed, here or elsewhere.

Inputs are emitted before the first node of a module call, outputs before anything outside uses them, so a value
is taken before a later module can change it in place. Sites that came with the graph are kept and readdressed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import final

import torch
from torch import fx

from torchtap.forms.graph.forgotten import CallsInOrder
from torchtap.forms.graph.lookalikes import Lookalikes, lookalike_paths
from torchtap.forms.graph.naming import named_inputs, named_outputs
from torchtap.forms.graph.regions import Region, graphs_inside, module_regions, without_call
from torchtap.forms.op import op
from torchtap.forms.op.channel import SAME_CALL, marked, relative
from torchtap.plan.names import OF_CALLS
from torchtap.spi import ModulePath, Name, leaves, reasons

__all__ = [
    "OWN",
    "EditedGraphs",
    "all_graphs",
    "carried_sites",
    "editable_copy",
    "emit_all",
    "emit_before",
    "emit_here",
    "readdress",
    "tap_graph",
]


def tap_graph(
    owner: fx.GraphModule,
    kinds_of: Mapping[str, Iterable[str]],
    prefix: str = "",
    lifted: frozenset[str] = frozenset(),
    tell: Callable[[str, str], None] = lambda site, reason: None,
) -> set[str]:
    """Emit these kinds of these module paths, also from the graphs inside. Returns the paths that are known.

    ``tell`` is given the calls that have no value under their name, each with the reason.
    """
    op.register()
    carried = {op.address(site)[1:3] for site in carried_sites(owner)}
    uncertain = Lookalikes(lookalike_paths(owner) if is_exported(owner) else [])
    calls = CallsInOrder()
    known = set()
    found_of: dict[tuple[str, str], list[tuple[Region, list[tuple[str, fx.Node, fx.Node]], int]]] = {}
    for region in module_regions(owner, lifted, _renamed_paths(owner)):
        known.add(region.path)
        gone = calls.begin(region)
        alone = uncertain.is_certain(region.path)
        for kind in kinds_of.get(region.path, ()):
            if (region.path, kind) in carried or kind not in OF_CALLS:
                continue
            for number in gone:
                tell(str(Name(region.path, kind, "", number)), reasons.NO_OPERATION)
            found = _passing(region, kind)
            if not alone:
                found = [
                    (Name.unplaced(place, doubtful=True), value, before)
                    for place, (_, value, before) in enumerate(found)
                ]
            found_of.setdefault((region.path, kind), []).append((region, found, 1 + len(gone)))
    for (path, kind), each_call in found_of.items():
        if any(found for _, found, _ in each_call):
            for region, found, ahead in each_call:
                emit_call(region, found, Name(f"{prefix}{path}", kind), ahead)
    for inner in all_graphs(owner):
        inner.recompile()
    return known


def _passing(region: Region, kind: str) -> list[tuple[str, fx.Node, fx.Node]]:
    """What goes in or out of a module call: each leaf, its value, and the node that it is to be emitted before."""
    if kind in ("input", "grad_input"):
        first = next(iter(region.nodes))
        return [(leaf, value, first) for leaf, value in named_inputs(region)]
    return [(leaf, value, region.end_for(value)) for leaf, value in named_outputs(region)]


def emit_call(region: Region, found: list[tuple[str, fx.Node, fx.Node]], bare: Name, ahead: int) -> None:
    """Emit what one module call has of a kind, each value before a node; count the call if it has none."""
    found.sort(key=lambda each: each[2])  # in the order of the graph
    mark = relative(ahead)
    for leaf, value, before in found:
        emit_before(region.graph, before, value, bare._replace(leaf=leaf), mark)
        mark = SAME_CALL
    if not found:
        first = next(iter(region.nodes))
        with region.graph.inserting_before(first):
            node = region.graph.call_function(torch.ops.torchtap.call.default, (marked(str(bare), mark),))
        _say_origin(node, first)


def emit_before(graph: fx.Graph, before: fx.Node, value: fx.Node, site: Name, mark: str) -> None:
    """Emit a value in front of a node."""
    with graph.inserting_before(before):
        emit_here(graph, value, marked(str(site), mark), site.kind.startswith("grad"))


def emit_here(graph: fx.Graph, value: fx.Node, site: str, gradient: bool = False) -> None:
    """Emit a value, or its gradient, where the graph is being added to."""
    name = "emit_grad" if gradient else "emit"
    if "val" in value.meta:
        node = graph.call_function(getattr(torch.ops.torchtap, name).default, (value, site))
        node.meta["val"] = None
    else:
        node = graph.call_function(emit_all, (value, site, gradient))
    _say_origin(node, value)


def _say_origin(node: fx.Node, like: fx.Node) -> None:
    """Copy the notes on a node's origin, which export wants of every node."""
    node.meta.setdefault("val", None)
    for key in ("nn_module_stack", "stack_trace", "torch_fn"):
        if key in like.meta:
            node.meta[key] = like.meta[key]


@fx.node.has_side_effect
def emit_all(value: object, site: str, gradient: bool = False) -> None:
    """For a value whose type the graph does not tell: emit the tensors in it, or their gradients, if there are any."""
    at = op.address(site)
    emit = torch.ops.torchtap.emit_grad if gradient else torch.ops.torchtap.emit
    found = False
    for leaf, tensor in leaves(value):
        emit(tensor, f"{site}.{leaf}" if leaf else site)
        if not found and at.place is not None and at.place.number is None:
            site = marked(site, SAME_CALL)
        found = True
    if not found and at.place is not None:
        torch.ops.torchtap.call(site)


def _site_argument(node: fx.Node) -> int | None:
    """Return which argument of a node is a site's name; None if it calls none of our ops."""
    if node.op != "call_function":
        return None
    effect = str(node.target) == "with_effects"  # with a token and the op as its first arguments
    target = node.args[1] if effect else node.target
    if target == torch.ops.torchtap.call.default:
        return 2 * effect
    if target in (emit_all, torch.ops.torchtap.emit.default, torch.ops.torchtap.emit_grad.default):
        return 1 + 2 * effect
    return None


def is_exported(owner: fx.GraphModule) -> bool:
    """Return True if export made a graph. It knows modules by their paths; an FX trace knows the modules themselves."""
    return any("val" in node.meta for node in owner.graph.nodes if node.op == "call_function")


def all_graphs(owner: fx.GraphModule) -> list[fx.GraphModule]:
    """A graph module and those that its graph runs, at any depth."""
    inside = [inner for node in owner.graph.nodes for inner in graphs_inside(owner, node).values()]
    return [owner, *(each for inner in inside for each in all_graphs(inner))]


def _every_node(owner: fx.GraphModule) -> Iterator[fx.Node]:
    for each in all_graphs(owner):
        yield from each.graph.nodes


def _renamed_paths(owner: fx.GraphModule) -> dict[str, str]:
    """Return the further paths of modules that were instrumented under another one: the marks have those."""
    found = {}
    for node in _every_node(owner):
        at = _site_argument(node)
        marks = node.meta.get("nn_module_stack") if at is not None else None
        if marks and at is not None:
            path = without_call(str(list(marks.values())[-1][0]))
            site = op.address(str(node.args[at])).path
            if path != site and ModulePath(path).name != "" and not ModulePath(path).is_inside(site):
                found[path] = site
    return found


def carried_sites(owner: fx.GraphModule) -> list[str]:
    """The sites that came with a graph."""
    op.register()
    return [str(n.args[at]) for n in _every_node(owner) if (at := _site_argument(n)) is not None]


def readdress(owner: fx.GraphModule, prefix: str) -> None:
    """Send what the graph's own sites emit to a channel."""
    for node in _every_node(owner):
        at = _site_argument(node)
        if at is not None:
            node.update_arg(at, prefix + str(node.args[at]).rpartition("|")[2])


OWN = "_torchtap_"  # begins the names of edited graphs inside


def editable_copy(model: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph module whose graph can be edited, and the graphs inside, which have names of their own."""
    made = fx.GraphModule(model, copy.deepcopy(model.graph))
    for node in list(made.graph.nodes):
        inside = graphs_inside(made, node)
        for given in node.all_input_nodes:
            target = str(given.target)
            if given.op == "get_attr" and target in inside and not target.startswith(OWN):
                name = OWN + target.replace(".", "_")
                if name not in made._modules:
                    made.add_module(name, editable_copy(inside[target]))
                given.target = name
    made.recompile()
    return made


@final
class EditedGraphs:
    """While it is on, a model has the edited graphs beside its own."""

    def __init__(self, model: fx.GraphModule, tapped: fx.GraphModule) -> None:
        self._attributes = model.__dict__
        self._graphs = {name: each for name, each in tapped._modules.items() if name.startswith(OWN)}

    def switch_on(self) -> None:
        self._attributes.update(self._graphs)

    def switch_off(self) -> None:
        for name in self._graphs:
            self._attributes.pop(name, None)
