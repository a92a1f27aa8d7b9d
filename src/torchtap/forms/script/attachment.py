"""A plan on a scripted or traced model, made here or only loaded.

While a tap is live, calls of the model go to a tapped copy of it that has the same parameters and buffers
(`graph`); otherwise the model runs unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import final

from torch import nn

from torchtap._torch import script_core, script_methods
from torchtap.forms.graph.lookalikes import DoubtfulNames, lookalike_paths
from torchtap.forms.match.mapped import mapped_sites
from torchtap.forms.match.site_map import SiteMap
from torchtap.forms.op.channel import Channel
from torchtap.forms.op.forms import CarriedAttachment, ForwardRoute
from torchtap.forms.op.op import address, register
from torchtap.forms.op.passes import in_pass
from torchtap.forms.script.copying import script_copy, script_modules
from torchtap.forms.script.graph import (
    PATH_ATTRIBUTE,
    assigned_attributes,
    constant_sites,
    inputs_of,
    tapped_copy,
)
from torchtap.forms.script.traced import TracedNames, forward_methods
from torchtap.forms.script.types import can_hold_tensors
from torchtap.forms.script.values import digest_of, tap_values
from torchtap.forms.stand_ins import skeleton
from torchtap.plan.names import KINDS, OF_CALLS
from torchtap.spi import ModulePath, Name, Receiver, reasons
from torchtap.torchscript import ScriptCore, ScriptMethod, ScriptType

__all__ = ["attach_script", "script_tree"]

_LEFT_NOTHING = "calls that hand on what they are given, and tensors that nothing uses,"


def script_tree(model: nn.Module) -> nn.Module:
    """The modules that a plan binds to: the model's own, and those that a frozen model still emits the values of."""
    register()
    modules = dict(model.named_modules())
    paths = [*modules, *(address(site)[1] for site in constant_sites(model))]
    return skeleton(paths, modules, {path: str(module.original_name) for path, module in modules.items()})


def attach_script(model: nn.Module, receiver: Receiver, site_map: SiteMap | None = None) -> CarriedAttachment:
    """Put a plan on a scripted or traced model. A map gives the sites of a trace's values."""
    register()
    channel = Channel()
    kinds_of: dict[str, set[str]] = {}
    for port in receiver.ports.values():
        if port.kind in OF_CALLS:
            kinds_of.setdefault(port.port.site.path, set()).add(port.kind)
        elif port.kind in ("attention", "value"):
            port.note = reasons.NOT_IN_A_GRAPH.format(kind=port.kind)
    constant = {address(site)[1:3] for site in constant_sites(model)}
    traced = TracedNames(script_modules(model))
    if site_map is not None and traced.is_traced:
        copy = _mapped_copy(model, receiver, site_map, channel.prefix, kinds_of)
    else:
        copy = tapped_copy(model, kinds_of, channel.prefix)
        _note_reasons(model, receiver, constant, traced)
    put_in = {path for path, each in script_modules(model).items() if each.hasattr(PATH_ATTRIBUTE)}
    groups = (
        [] if traced.is_traced else [each for each in lookalike_paths(model) if not put_in.issuperset(each)]
    )
    if groups:
        receiver.form.rename = DoubtfulNames(groups)
    return CarriedAttachment(receiver, channel, list(_routes(model, copy, receiver)))


def _routes(model: nn.Module, copy: nn.Module, receiver: Receiver) -> Iterator[ForwardRoute]:
    """Each module's forward by way of the tapped copy's."""
    copies = dict(copy.named_modules())
    shared = _SharedState(model, copy)
    for path, module in model.named_modules():
        if "forward" in script_methods(script_core(module)) and path in copies:
            forward = shared.around(copies[path].forward)
            yield ForwardRoute(module, in_pass(receiver, model, forward) if path == "" else forward)


def _mapped_copy(
    model: object, receiver: Receiver, site_map: SiteMap, prefix: str, kinds_of: dict[str, set[str]]
) -> nn.Module:
    """A copy of a trace that emits the sites of a map, beside those that it tells itself: put in, and outermost."""
    fresh = script_copy(model)
    site_map.check(digest_of(fresh))
    told = {address(site)[1:3] for site in constant_sites(fresh)} | {("", kind) for kind in KINDS}
    tap_values(fresh, mapped_sites(site_map, receiver, without=told), prefix)
    return tapped_copy(fresh, {"": kinds_of.get("", set())}, prefix)


def _why_not_scripted(instance: ScriptCore, kind: str) -> str:
    """Why a scripted module cannot bring this kind; empty if it can."""
    methods = forward_methods(instance).values()
    if not methods:
        return reasons.NO_FORWARD.format(name=ModulePath(instance.qualified_name).name)
    of_method = _types_given if kind.endswith("input") else _types_returned
    types = [jit_type for method in methods for jit_type in of_method(method)]
    if any(map(can_hold_tensors, types)):
        return ""
    return reasons.NO_TENSOR_TYPE.format(types=", ".join(each.annotation_str for each in types) or "nothing")


def _types_given(method: ScriptMethod) -> list[ScriptType]:
    return [jit_type for _, jit_type in inputs_of(method)]


def _types_returned(method: ScriptMethod) -> list[ScriptType]:
    return [each.type for each in method.schema.returns]


def _note_reasons(
    model: object, receiver: Receiver, constant: set[tuple[str, str]], traced: TracedNames
) -> None:
    """Say of each place that cannot bring anything why not."""
    instances = script_modules(model)
    receiver.form.knows_positions = not traced.is_traced
    for port in receiver.ports.values():
        path = port.port.site.path
        if (path, port.kind) in constant or port.kind not in OF_CALLS:
            continue
        if path not in instances:
            port.note = reasons.FOLDED
        elif traced.is_traced and not traced.brings(path, port.kind):
            port.note = reasons.NO_OPERATION
        elif not traced.is_traced:
            port.note = _why_not_scripted(instances[path], port.kind)
        elif path or not constant:  # what was put in before tracing is there for every call
            receiver.form.unnamed_reason = reasons.FORGOTTEN.format(what=_LEFT_NOTHING)
            for number, reason in traced.calls_without_name(path, port.kind) if path else ():
                receiver.form.missing[str(Name(path, port.kind, "", number))] = reason


@final
class _SharedState:
    """Attributes that are no tensors, kept the same in a model and its copy.

    ``train`` and ``eval`` change the model, and a forward may assign to attributes of its module.
    """

    def __init__(self, model: object, copy: object) -> None:
        copies = script_modules(copy)
        self._kept = [
            (instance, copies[path], assigned_attributes(instance))
            for path, instance in script_modules(model).items()
            if path in copies
        ]

    def around(self, forward: Callable[..., object]) -> Callable[..., object]:
        """A call of the copy that finds the model's attributes and leaves its own in the model."""

        def call(*args: object, **kwargs: object) -> object:
            for original, copy, names in self._kept:
                if original.hasattr("training"):
                    copy.setattr("training", original.getattr("training"))
                for name in names:
                    copy.setattr(name, original.getattr(name))
            try:
                return forward(*args, **kwargs)
            finally:
                for original, copy, names in self._kept:
                    for name in names:
                        original.setattr(name, copy.getattr(name))

        return call
