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
from torchtap.forms.graph.regions import Region, graphs_inside, module_regions
from torchtap.forms.op import op
from torchtap.plan.names import OF_CALLS
from torchtap.spi import Name, leaves, reasons

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
    for region in module_regions(owner, lifted):
        known.add(region.path)
        gone = calls.begin(region)
        alone = uncertain.is_certain(region.path)
        for kind in kinds_of.get(region.path, ()):
            if (region.path, kind) in carried or kind not in OF_CALLS:
                continue
            for number in gone:
                tell(str(Name(region.path, kind, "", number)), reasons.NO_OPERATION)
            found = _passing(region, kind)
            counted = calls.is_certain(region.path, kind)
            if alone and not counted and any(leaf == "" for leaf, _, _ in found):
                tell(str(Name(region.path, kind, "", gone.stop)), reasons.UNCERTAIN_CALL)
            if not (alone and counted):
                found = [
                    (Name.unplaced(place), value, before) for place, (_, value, before) in enumerate(found)
                ]
            calls.named(region.path, kind, [leaf for leaf, _, _ in found])
            for leaf, value, before in found:
                emit_before(region.graph, before, value, prefix, str(Name(region.path, kind)), leaf)
    for inner in all_graphs(owner):
        inner.recompile()
    return known


def _passing(region: Region, kind: str) -> list[tuple[str, fx.Node, fx.Node]]:
    """What goes in or out of a module call: each leaf, its value, and the node that it is to be emitted before."""
    if kind in ("input", "grad_input"):
        first = next(iter(region.nodes))
        return [(leaf, value, first) for leaf, value in named_inputs(region)]
    return [(leaf, value, region.first_use_outside(value)) for leaf, value in named_outputs(region)]


def emit_before(graph: fx.Graph, before: fx.Node, value: fx.Node, prefix: str, bare: str, leaf: str) -> None:
    """Emit a value in front of a node."""
    site = f"{prefix}{bare}" + (f".{leaf}" if leaf else "")
    with graph.inserting_before(before):
        emit_here(graph, value, site, "emit_grad" if ":grad" in bare else "emit")


def emit_here(graph: fx.Graph, value: fx.Node, site: str, name: str) -> None:
    """Emit a value where the graph is being added to."""
    if "val" in value.meta:
        node = graph.call_function(getattr(torch.ops.torchtap, name).default, (value, site))
        node.meta["val"] = None
    else:
        node = graph.call_function(emit_all, (value, site))
    # Export wants to know where every node comes from.
    for key in ("nn_module_stack", "stack_trace", "torch_fn"):
        if key in value.meta:
            node.meta[key] = value.meta[key]


@fx.node.has_side_effect
def emit_all(value: object, site: str) -> None:
    """For a value whose type the graph does not tell: emit the tensors in it, if there are any."""
    emit = torch.ops.torchtap.emit_grad if ":grad" in site else torch.ops.torchtap.emit
    for leaf, tensor in leaves(value):
        emit(tensor, f"{site}.{leaf}" if leaf else site)


def _site_argument(node: fx.Node) -> int | None:
    """Which argument of a node is a site's name, if it is a call of the op."""
    ours = (getattr(torch.ops.torchtap, name).default for name in ("emit", "emit_grad"))
    if node.op != "call_function":
        return None
    if node.target in (emit_all, *ours):
        return 1
    if str(node.target) == "with_effects" and str(node.args[1]).startswith("torchtap.emit"):
        return 3
    return None


def is_exported(owner: fx.GraphModule) -> bool:
    """Whether export made a graph. It knows modules by their paths; an FX trace knows the modules themselves."""
    return any("val" in node.meta for node in owner.graph.nodes if node.op == "call_function")


def all_graphs(owner: fx.GraphModule) -> list[fx.GraphModule]:
    """A graph module and those that its graph runs, at any depth."""
    inside = [inner for node in owner.graph.nodes for inner in graphs_inside(owner, node).values()]
    return [owner, *(each for inner in inside for each in all_graphs(inner))]


def _every_node(owner: fx.GraphModule) -> Iterator[fx.Node]:
    for each in all_graphs(owner):
        yield from each.graph.nodes


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
