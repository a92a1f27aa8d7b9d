"""`torchtap.match`: run a form and the eager model once, and find out which value of the form is which site.

A graph knows tensors, not the structures that they were returned in, and not the modules that only handed a tensor
on. With the model at hand both are known: the values tell.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from torchtap.errors import FormError, PlanError
from torchtap.forms.attach import attach, form_of
from torchtap.forms.match.choose import EagerValues, choose
from torchtap.forms.match.prints import Print, Prints
from torchtap.forms.match.recorder import as_it_was
from torchtap.forms.match.site_map import SiteMap
from torchtap.hooks.leaves import Args, Kwargs, leaves, map_leaves
from torchtap.plan.names import Name, parse_name
from torchtap.plan.plan import make_plan
from torchtap.plan.sites import places
from torchtap.receive.collect import result_of
from torchtap.receive.receiver import Receiver
from torchtap.schedule.base import Moment

__all__ = ["has_names", "match", "site_map_of"]


def match(form: Any, model: nn.Module, inputs: Any) -> SiteMap:
    """Which value of a form is which site of the eager model; ``inputs`` are arguments that both take.

    ``inputs`` are a tuple of arguments, a mapping of keywords, or the only argument. The map goes to
    ``capture(form, like=…)``; ``save`` puts it beside the artefact.
    """
    kind = form_of(form)
    if has_names(form):
        raise FormError(
            f"match is for graphs, exported programs and traces; this model is {kind} and tells its names"
        )
    if not isinstance(model, nn.Module) or form_of(model) != "eager":
        raise FormError(
            f"match compares with the eager model that the form was made from; got {type(model).__name__}"
        )
    args, kwargs = _arguments(inputs)
    eager, changed, backward = _eager_values(model, args, kwargs)
    classes = {place.path: _class_name(place.module) for place in places(model)}
    run = partial(_run, args=args, kwargs=kwargs, backward=backward)
    again = None if changed is None else partial(_run, args=changed[0], kwargs=changed[1], backward=False)
    if kind == "script":
        from torchtap.forms.script.values import script_values

        with as_it_was(form):
            return choose(eager, script_values(form, run, again), classes)
    from torchtap.forms.graph.values import graph_values

    graph = form.module() if isinstance(form, ExportedProgram) else form
    with as_it_was(graph):
        values = graph_values(graph, partial(run, graph), None if again is None else partial(again, graph))
        return choose(eager, values, classes)


def has_names(form: object) -> bool:
    """Return True if a form has the names of the eager model itself."""
    if form_of(form) == "script":
        from torchtap.forms.script.copying import script_modules
        from torchtap.forms.script.traced import TracedNames

        return not TracedNames(script_modules(form)).is_traced
    return form_of(form) not in ("graph", "exported")


def site_map_of(form: Any, like: Any, inputs: Any) -> SiteMap | None:
    """The map that ``like`` stands for: a model, a map, or a file with one; none for a form that has its names."""
    if isinstance(like, SiteMap):
        return like
    if isinstance(like, (str, os.PathLike)):
        return SiteMap.load(like)
    if inputs is None:
        raise PlanError(
            "like= a model needs inputs= as well: arguments that the model and the form both take"
        )
    return None if has_names(form) else match(form, like, inputs)


def _arguments(inputs: object) -> tuple[Args, Kwargs]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}


def _class_name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _eager_values(
    model: nn.Module, args: Args, kwargs: Kwargs
) -> tuple[EagerValues, tuple[Args, Kwargs] | None, bool]:
    """What the eager model has at each site; other inputs that it takes, if any; and whether a backward runs."""
    backward = True
    try:
        found = _eager_prints(model, args, kwargs, backward=True)
    except Exception:  # noqa: BLE001 - a model that takes no inputs with gradients, or has no derivative
        backward = False
        found = _eager_prints(model, args, kwargs, backward=False)
    changed: tuple[Args, Kwargs] | None = map_leaves(args, _other), map_leaves(kwargs, _other)
    try:
        again = _eager_prints(model, *changed, backward=False) if changed is not None else {}
    except Exception:  # noqa: BLE001 - it refuses these numbers
        changed, again = None, {}
    gradients = {
        str(name._replace(kind=name.kind.removeprefix("grad_"))): each
        for name, each in found.items()
        if name.kind.startswith("grad")
    }
    return (
        EagerValues(_values(found), _values(again), gradients if backward and gradients else None),
        changed,
        backward,
    )


def _values(found: Mapping[Name, Print]) -> dict[str, Print]:
    return {str(name): each for name, each in found.items() if name.kind in ("input", "output")}


def _other(_: str, value: Tensor) -> Tensor:
    """A value of the same kind that another input may have."""
    moved = value.detach().roll(1, -1) if value.dim() else value.detach()
    return moved * -1.25 + 0.125 if moved.is_floating_point() else moved


def _run(model: Any, args: Args, kwargs: Mapping[str, Any], backward: bool) -> None:
    """Run a model and, for every gradient that there may be, a backward that leaves nothing behind."""
    if not backward:
        model(*args, **kwargs)
        return
    with torch.enable_grad():
        args, kwargs = map_leaves(args, _with_gradient), map_leaves(kwargs, _with_gradient)
        given = [tensor for _, tensor in leaves((args, kwargs)) if tensor.requires_grad]
        ends = [tensor for _, tensor in leaves(model(*args, **kwargs)) if tensor.requires_grad]
        held = [each for each in getattr(model, "parameters", tuple)() if each.requires_grad]
        parts = [
            (
                tensor.double()
                * torch.cos(torch.arange(tensor.numel(), device=tensor.device)).view(tensor.shape)
            ).sum()
            for tensor in ends
            if tensor.is_floating_point()
        ]
        if parts and (given or held):
            torch.autograd.grad(sum(parts), [*given, *held], allow_unused=True)  # type: ignore[arg-type]


def _with_gradient(_: str, value: Tensor) -> Tensor:
    """A copy that a gradient reaches and that may be changed in place."""
    return value.detach().requires_grad_().clone() if value.is_floating_point() else value


def _eager_prints(
    model: nn.Module, args: Args, kwargs: Mapping[str, Any], *, backward: bool
) -> dict[Name, Print]:
    """The print of every input and output of the eager model, and of their gradients, in the order of execution."""
    kinds = ("*:input", "*:output", *(("*:grad_input", "*:grad_output") if backward else ()))
    plan = make_plan(model, kinds, Prints())
    receiver = Receiver(plan, strict=True)
    attachment = attach(model, receiver)
    live = plan.live(Moment(0))
    receiver.switch("train", live)
    with as_it_was(model):
        receiver.begin_step(None)
        attachment.arm(live)
        try:
            _run(model, args, kwargs, backward)
        finally:
            receiver.end_step()
            attachment.detach()
    arrived = [site for site in receiver.sites if site.shape is not None]
    return {parse_name(site.name): result_of(receiver.accumulator, site)["prints"][0] for site in arrived}
