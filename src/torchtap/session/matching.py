"""`torchtap.match`: run a form and the eager model once, and find out which value of the form is which site.

A graph knows tensors, not the structures that they were returned in, and not the modules that only handed a tensor
on. With the model at hand both are known: the values tell.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.export import ExportedProgram

from torchtap.errors import FormError, PlanError
from torchtap.forms.attach import attach, form_of
from torchtap.forms.match.choose import choose
from torchtap.forms.match.prints import Print, Prints
from torchtap.forms.match.recorder import as_it_was
from torchtap.forms.match.site_map import SiteMap
from torchtap.hooks.leaves import Args, Kwargs
from torchtap.plan.names import parse_name
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
    with as_it_was(model):
        eager = _eager_prints(model, args, kwargs)
    classes = {place.path: _class_name(place.module) for place in places(model)}
    if kind == "script":
        from torchtap.forms.script.values import script_values

        with as_it_was(form):
            return choose(eager, script_values(form, lambda copy: copy(*args, **kwargs)), classes)
    from torchtap.forms.graph.values import graph_values

    graph = form.module() if isinstance(form, ExportedProgram) else form
    with as_it_was(graph):
        return choose(eager, graph_values(graph, lambda: graph(*args, **kwargs)), classes)


def has_names(form: object) -> bool:
    """Whether a form tells the names of the eager model itself."""
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


def _eager_prints(model: nn.Module, args: Args, kwargs: Mapping[str, Any]) -> dict[str, Print]:
    """The print of every input and output of the eager model, in the order of execution."""
    plan = make_plan(model, ("*:input", "*:output"), Prints())
    receiver = Receiver(plan, strict=True)
    attachment = attach(model, receiver)
    live = plan.live(Moment(0))
    receiver.turn_to("train", live)
    receiver.begin_step(None)
    attachment.arm(live)
    try:
        model(*args, **kwargs)
    finally:
        receiver.end_step()
        attachment.detach()
    found = {entry.name: result_of(receiver.folding, entry)["prints"][0] for entry in receiver.entries}
    return {site: each for site, each in found.items() if parse_name(site).kind in ("input", "output")}
