"""A plan on a graph module: FX traces and their transformations, and what ``ExportedProgram.module()`` gives.

Modules that the graph calls, and the outermost, are real: they get carriers, and so the exact structure of what
they return. Modules that tracing took apart are found again from the marks on the nodes (`regions`) and emit
from a copy of the graph, which runs while a tap is live.
"""

from __future__ import annotations

import copy
import types
from typing import Any, final

from torch import fx, nn
from torch.export import ExportedProgram

from torchtap.names import last_part, parent_path
from torchtap.taps.carry.carrier import Carriers
from torchtap.taps.carry.forms import CarriedAttachment, ForwardRoute
from torchtap.taps.carry.op import address
from torchtap.taps.carry.passes import PassHooks
from torchtap.taps.graph.edit import carried_sites, readdress, tap_graph
from torchtap.taps.graph.regions import module_regions, outermost_class
from torchtap.taps.graph.skeleton import skeleton
from torchtap.taps.receive.receiver import Receiver

__all__ = ["attach_exported", "attach_graph", "called_modules", "exported_tree", "graph_tree"]


def graph_tree(model: fx.GraphModule) -> nn.Module:
    """The modules that a plan binds to: real ones where the graph calls them, stand-ins elsewhere."""
    real = called_modules(model)
    classes: dict[str, Any] = {"": outermost_class(model.graph)}
    paths: dict[str, None] = {path: None for path, _ in model.named_modules()}
    for region in module_regions(model.graph):
        paths[region.path] = None
        classes.setdefault(region.path, region.described)
    for site in carried_sites(model.graph):
        paths[address(site)[1]] = None
    paths.pop("_guards_fn", None)
    tree = skeleton(paths, dict(model.named_modules()), classes)
    for path, module in real.items():
        tree.get_submodule(parent_path(path))._modules[last_part(path)] = module
    tree.__dict__["forward"] = model.forward  # its signature names the inputs
    return tree


def exported_tree(program: ExportedProgram) -> nn.Module:
    """The modules of an exported program."""
    return graph_tree(program.module())


def called_modules(model: fx.GraphModule) -> dict[str, nn.Module]:
    return {
        str(node.target): model.get_submodule(str(node.target))
        for node in model.graph.nodes
        if node.op == "call_module" and node.target != "_guards_fn"
    }


def attach_graph(model: fx.GraphModule, receiver: Receiver) -> CarriedAttachment:
    """Put a plan on a graph module."""
    real: dict[str, nn.Module] = {"": model, **called_modules(model)}
    ports = receiver.ports.values()
    carried = {address(site)[1:3] for site in carried_sites(model.graph)}
    carriers = Carriers(
        (port.port.site.path, real[port.port.site.path], port.kind)
        for port in ports
        if port.port.site.path in real and (port.port.site.path, port.kind) not in carried
    )
    kinds_of: dict[str, list[str]] = {}
    for port in ports:
        if port.port.site.path not in real:
            kinds_of.setdefault(port.port.site.path, []).append(port.kind)
    graph = copy.deepcopy(model.graph)
    readdress(graph, carriers.channel.prefix)
    known = tap_graph(graph, kinds_of, carriers.channel.prefix)
    known |= {path for path, _ in carried}
    for port in ports:
        if port.port.site.path not in real and port.port.site.path not in known:
            port.note = "no operation of its own is left in the graph: a pass-through, folded, or fused away"
        if port.kind in ("attention", "value"):
            port.note = f"a graph gives no {port.kind}: capture it before the model is traced"
    # The tapped code runs on the model itself, so that it always has the model's present attributes.
    forward = types.MethodType(type(fx.GraphModule(model, graph)).forward, model)
    routes: list[Any] = [ForwardRoute(model, forward), carriers, PassHooks(model, receiver)]
    return CarriedAttachment(receiver, carriers.channel, routes)


@final
class _ModuleRoute:
    """While it is on, every module that the program gives is tapped."""

    def __init__(self, program: ExportedProgram, receiver: Receiver) -> None:
        self._program = program
        self._receiver = receiver
        self._given: list[CarriedAttachment] = []

    def switch_on(self) -> None:
        make = self._program.module

        def module(*args: Any, **kwargs: Any) -> Any:
            given = make(*args, **kwargs)
            attachment = attach_graph(given, self._receiver)
            attachment.arm(self._receiver.live)
            self._given.append(attachment)
            return given

        self._program.__dict__["module"] = module

    def switch_off(self) -> None:
        self._program.__dict__.pop("module", None)
        given, self._given = self._given, []
        for attachment in given:
            attachment.detach()


def attach_exported(program: ExportedProgram, receiver: Receiver) -> CarriedAttachment:
    """Put a plan on an exported program: on each module that it gives while a tap is live."""
    return CarriedAttachment(receiver, None, [_ModuleRoute(program, receiver)])
