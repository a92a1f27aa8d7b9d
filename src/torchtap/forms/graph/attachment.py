"""A plan on a graph module: FX traces and their transformations, and what ``ExportedProgram.module()`` gives.

Modules that the graph calls, and the outermost, are real: they get carriers, and so the exact structure of what
they return. Modules that tracing took apart are found again from the marks on the nodes (`regions`) and emit
from a copy of the graph, which runs while a tap is live.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterable
from typing import Any, final

from torch import fx, nn
from torch.export import ExportedProgram

from torchtap.forms.graph.edit import EditedGraphs, carried_sites, editable_copy, readdress, tap_graph
from torchtap.forms.graph.forgotten import (
    module_of,
    tell_modules,
    told_modules,
    unmarked_paths,
    what_is_forgotten,
)
from torchtap.forms.graph.leaks import takes_several
from torchtap.forms.graph.regions import (
    graphs_inside,
    module_regions,
    outermost_class,
    without,
    wrapped_paths,
)
from torchtap.forms.graph.values import digest_of, tap_values
from torchtap.forms.match.mapped import mapped_sites
from torchtap.forms.match.site_map import SiteMap
from torchtap.forms.op.carrier import Carriers
from torchtap.forms.op.forms import CarriedAttachment, ForwardRoute
from torchtap.forms.op.op import address
from torchtap.forms.op.passes import PassHooks
from torchtap.forms.stand_ins import skeleton
from torchtap.plan.names import KINDS
from torchtap.spi import ModulePath, PortState, Receiver, input_names, reasons

__all__ = ["attach_exported", "attach_graph", "called_modules", "exported_tree", "graph_tree"]


def graph_tree(model: fx.GraphModule) -> nn.Module:
    """The modules that a plan binds to: real ones where the graph calls them, stand-ins elsewhere."""
    real = called_modules(model)
    classes: dict[str, Any] = {"": outermost_class(model.graph)}
    inside = graph_paths(model)
    wrapped = wrapped_paths(model)
    known = {
        without(path, wrapped): module
        for path, module in model.named_modules()
        if path not in wrapped
        and path not in inside
        and not any(ModulePath(path).is_inside(each) for each in inside)
    }
    told = (without(path, wrapped) for path in told_modules(model) or ())
    paths: dict[str, None] = dict.fromkeys((*known, *told))
    for region in module_regions(model):
        paths[region.path] = None
        classes.setdefault(region.path, region.mark.described)
    for site in carried_sites(model):
        paths[address(site)[1]] = None
    paths.pop("_guards_fn", None)
    tree = skeleton(paths, known, classes)
    for path, module in real.items():
        tree.get_submodule(ModulePath(path).parent)._modules[ModulePath(path).name] = module
    tree.__dict__["forward"] = model.forward  # its signature names the inputs
    return tree


def exported_tree(program: ExportedProgram) -> nn.Module:
    """The modules of an exported program, which still lists those that left no operation in its graph."""
    return graph_tree(module_of(program))


def graph_paths(model: fx.GraphModule) -> set[str]:
    """Where a graph module keeps the graphs that its own graph runs: they are no modules of the model's."""
    return {name for node in model.graph.nodes for name in graphs_inside(model, node)}


def called_modules(model: fx.GraphModule) -> dict[str, nn.Module]:
    """The modules that a graph calls, and those inside them, which they call themselves."""
    targets = [
        str(node.target)
        for node in model.graph.nodes
        if node.op == "call_module" and node.target != "_guards_fn"
    ]
    return {
        (ModulePath(path) / inner) if inner else path: module
        for path in dict.fromkeys(targets)
        for inner, module in model.get_submodule(path).named_modules()
    }


def attach_graph(
    model: fx.GraphModule, receiver: Receiver, site_map: SiteMap | None = None
) -> CarriedAttachment:
    """Put a plan on a graph module. A map gives the sites of its values."""
    receiver.form.knows_positions = site_map is not None
    real: dict[str, nn.Module] = {"": model, **called_modules(model)}
    ports = receiver.ports.values()
    carried = {address(site)[1:3] for site in carried_sites(model)}
    called = [(port.port.site.path, port.kind) for port in ports if port.port.site.path in real]
    carriers = Carriers(
        ((path, real[path], kind) for path, kind in called if (path, kind) not in carried),
        root_names=_root_names(model),
    )
    prefix = carriers.channel.prefix
    tapped = editable_copy(model)
    readdress(tapped, prefix)
    if site_map is not None:
        site_map.check(digest_of(model))
        known = carried | {(path, kind) for path in real for kind in KINDS}
        tap_values(tapped, mapped_sites(site_map, receiver, without=known), prefix)
    else:
        inlined = [port for port in ports if port.port.site.path not in real]
        if _tap_inlined(tapped, inlined, prefix, carried, receiver.form.missing):
            receiver.form.unnamed_reason = what_is_forgotten(model)
    _note_insides(ports)
    # The tapped code runs on the model itself, so that it always has the model's present attributes.
    forward = types.MethodType(type(tapped).forward, model)
    routes: list[Any] = [EditedGraphs(model, tapped), ForwardRoute(model, forward)]
    return CarriedAttachment(receiver, carriers.channel, [*routes, carriers, PassHooks(model, receiver)])


def _root_names(model: fx.GraphModule) -> tuple[str, ...] | None:
    """Return the names of a graph's arguments. One argument of several that the model's class takes has its name."""
    names = input_names(model)
    if names == ("",) and takes_several(outermost_class(model.graph)):
        return tuple(inspect.signature(model.forward).parameters)
    return names


def _tap_inlined(
    tapped: fx.GraphModule,
    ports: list[PortState],
    prefix: str,
    carried: set[tuple[str, str]],
    told: dict[str, str],
) -> bool:
    """Tap modules that a graph no longer calls; one of which it has no operation either says so, and so has ``told``.

    Returns whether the graph may have forgotten modules: sites that were put in before it was made are there for
    every module that was called.
    """
    kinds: dict[str, list[str]] = {}
    for port in ports:
        kinds.setdefault(port.port.site.path, []).append(port.kind)
    put_in = set(carried_sites(tapped))
    found = tap_graph(tapped, kinds, prefix, tell=told.__setitem__) | {path for path, _ in carried}
    unmarked = unmarked_paths(tapped, found | called_modules(tapped).keys())
    for port in ports:
        path = port.port.site.path
        if path not in found:
            port.note = reasons.UNMARKED if path in unmarked else reasons.NO_OPERATION
    return not put_in or put_in != set(carried_sites(tapped))


@final
class _ModuleRoute:
    """While it is on, every module that the program gives is tapped."""

    def __init__(self, program: ExportedProgram, receiver: Receiver, site_map: SiteMap | None) -> None:
        self._program = program
        self._site_map = site_map
        self._receiver = receiver
        self._given: list[CarriedAttachment] = []

    def switch_on(self) -> None:
        make = self._program.module

        def module(*args: Any, **kwargs: Any) -> Any:
            given = make(*args, **kwargs)
            tell_modules(given, self._program)
            attachment = attach_graph(given, self._receiver, self._site_map)
            attachment.arm(frozenset(range(len(self._receiver.plan.taps))))
            self._given.append(attachment)
            return given

        self._program.__dict__["module"] = module

    def switch_off(self) -> None:
        self._program.__dict__.pop("module", None)
        given, self._given = self._given, []
        for attachment in given:
            attachment.detach()


def attach_exported(
    program: ExportedProgram, receiver: Receiver, site_map: SiteMap | None = None
) -> CarriedAttachment:
    """Put a plan on an exported program: on each module that it gives while a tap is live."""
    return CarriedAttachment(receiver, None, [_ModuleRoute(program, receiver, site_map)])


def _note_insides(ports: Iterable[PortState]) -> None:
    for port in ports:
        if port.kind in ("attention", "value"):
            port.note = reasons.NOT_IN_A_GRAPH.format(kind=port.kind)
