"""Find out what form a model has, and put a plan's taps on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from torchtap._torch import compiled_function, runs_compiled
from torchtap.errors import FormError
from torchtap.hooks.hooks import WayName
from torchtap.receive.eager import EagerAttachment
from torchtap.spi import Attachment, Receiver

if TYPE_CHECKING:
    from torchtap.forms.match.site_map import SiteMap

__all__ = ["attach", "form_of", "tree_of"]


def form_of(model: object) -> str:
    """The name of a model's form."""
    if isinstance(model, torch.jit.ScriptModule):
        return "script"
    if isinstance(model, fx.GraphModule):
        return "graph"
    if isinstance(model, nn.Module):
        return "compiled" if _is_compiled(model) else "eager"
    if type(model).__name__ == "ExportedProgram":
        return "exported"
    if type(model).__name__ == "AOTICompiledModel":
        return "aoti"
    if hasattr(model, "torchtap_sites"):
        return "emitting"
    raise _refusal(model)


def tree_of(model: Any) -> nn.Module:
    """The modules that a plan for this model binds to."""
    match form_of(model):
        case "script":
            from torchtap.forms.script.attachment import script_tree

            return script_tree(model)
        case "graph":
            from torchtap.forms.graph.attachment import graph_tree

            return graph_tree(model)
        case "exported":
            from torchtap.forms.graph.attachment import exported_tree

            return exported_tree(model)
        case "aoti" | "emitting":
            from torchtap.forms.op.emitting import emitting_tree

            return emitting_tree(model)
    return model  # type: ignore[no-any-return]


def attach(
    model: Any,
    receiver: Receiver,
    way: WayName = "hook",
    site_map: SiteMap | None = None,
) -> Attachment:
    """Return an attachment for the form of this model.

    A map gives the sites of a graph's values.
    """
    form = form_of(model)
    if way != "hook" and form != "eager":
        raise FormError(f"way={way!r} is for eager models, and this one is {form}: leave it out")
    if form != "eager":
        _refuse_for(form, receiver)
    match form:
        case "script":
            from torchtap.forms.script.attachment import attach_script

            return attach_script(model, receiver, site_map)
        case "graph":
            from torchtap.forms.graph.attachment import attach_graph

            return attach_graph(model, receiver, site_map)
        case "compiled":
            from torchtap.forms.compiled import attach_compiled

            return attach_compiled(model, receiver)
        case "exported":
            from torchtap.forms.graph.attachment import attach_exported

            return attach_exported(model, receiver, site_map)
        case "aoti" | "emitting":
            from torchtap.forms.op.emitting import attach_emitting

            return attach_emitting(model, receiver)
    from torchtap.forms.op.traced import GraphEmitter

    return EagerAttachment(model, receiver, way, GraphEmitter())


def _refuse_for(form: str, receiver: Receiver) -> None:
    """Refuse what only an eager model can give, instead of giving something else."""
    if any(tap.per_consumer for tap in receiver.plan.taps):
        raise FormError(
            f"per_consumer=True needs an eager model, and this one is {form}: its graph has the gradient of the value, "
            "the sum over all modules that use it; leave per_consumer out, or give the eager model"
        )
    if form in ("compiled", "aoti") and any(
        getattr(tap.keep, "copy", True) is False for tap in receiver.plan.taps
    ):
        raise FormError(
            f"Full(copy=False) keeps the model's own tensors, and this model is {form}: compiled code writes other "
            "values into their memory without a trace; leave copy=False out"
        )
    found = [
        port.port.site.name
        for port in receiver.ports.values()
        if type(port.site.module).__name__ == "Operator"
    ]
    if found:
        raise FormError(
            f"{found[0]} is an operator, which only eager models have, and this one is {form}: give the eager model"
        )


def _is_compiled(model: nn.Module) -> bool:
    """Return True if any part of a model is compiled. Asked for every eager model, so it walks by itself."""
    waiting, seen = [model], {id(model)}
    while waiting:
        module = waiting.pop()
        if runs_compiled(module):
            return True
        if compiled_function(module.__dict__.get("forward")) is not None:
            return True  # model.forward = torch.compile(model.forward)
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)
    return False


def _refusal(model: object) -> FormError:
    if isinstance(model, torch.jit.ScriptFunction):
        return FormError(
            "cannot tap a torch.jit.ScriptFunction: it has no modules and so no sites; "
            "script or trace an nn.Module that calls it, and give that"
        )
    if callable(compiled_function(model)):
        return FormError(
            "cannot tap a compiled function: the model inside it is not known; give the model itself, "
            "as torch.compile(model) or with model.compile(), and compile the function around it after tapping"
        )
    if isinstance(model, (str, bytes)) or hasattr(model, "__fspath__"):
        return FormError(
            f"cannot tap the path {str(model)!r}: load it first, e.g. with tt.load({str(model)!r})"
        )
    if type(model).__module__.startswith("onnxruntime"):
        return FormError(
            "cannot tap an onnxruntime session: its graph takes no foreign op; export the model with "
            "tt.extra_outputs(model, ...) and wrap the session with its `onnx` method"
        )
    if type(model).__name__ in ("dict", "OrderedDict"):
        return FormError("cannot tap a state dict: it holds tensors but no model; load it into an nn.Module")
    return FormError(
        f"cannot tap a {type(model).__name__}: give an nn.Module (eager, compiled, scripted, traced, FX), a "
        "torch.export program or its module(), or a model that torchtap loaded; tt.instrument puts taps on a "
        "model before a transform that takes it apart"
    )
