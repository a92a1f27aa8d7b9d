"""Attributions by site: Captum's methods, with torchtap's names for layers.

``attribute(model, "blocks.3:output", method="LayerConductance", inputs=x, target=0)`` finds the module, runs the
method and gives the tensor back, of the shape that the site has. With ``into`` it also becomes a value of that
recording, ``blocks.3:value.LayerConductance``, which is read back like any other. Needs the extra ``captum``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, final

from torch import Tensor, nn

from torchtap import Selector, Site, Stats, Tap, Watch, make_plan
from torchtap.editing.eager_only import hookable, running_eagerly
from torchtap.errors import PlanError, SelectionError, needing
from torchtap.plan.sites import Selectable
from torchtap.spi import Name, leaves

__all__ = ["METHODS", "attribute"]

# A method's name to Captum's classes for the model's own inputs and for a layer inside it.
METHODS: dict[str, tuple[str | None, str | None]] = {
    "IntegratedGradients": ("IntegratedGradients", "LayerIntegratedGradients"),
    "DeepLift": ("DeepLift", "LayerDeepLift"),
    "InputXGradient": ("InputXGradient", "LayerGradientXActivation"),
    "Saliency": ("Saliency", None),
    "LayerIntegratedGradients": (None, "LayerIntegratedGradients"),
    "LayerGradCam": (None, "LayerGradCam"),
    "LayerConductance": (None, "LayerConductance"),
    "LayerDeepLift": (None, "LayerDeepLift"),
    "LayerActivation": (None, "LayerActivation"),
    "LayerGradientXActivation": (None, "LayerGradientXActivation"),
    "InternalInfluence": (None, "InternalInfluence"),
}


def attribute(
    model: Any,
    site: Selectable,
    *,
    inputs: Tensor | tuple[Tensor, ...],
    target: Any = None,
    method: str = "IntegratedGradients",
    output: str = "",
    into: Watch | None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, ...]:
    """Return the contribution of each element at a site to the model's output ``target``.

    ``site`` is a module's output or input, or ``":input"`` for the model's own inputs, where methods without
    "Layer" in their name belong; at an inner site these stand for their layer variant. ``output`` names the leaf
    of a structured output that ``target`` is an index into (``"logits"``). ``options`` go to Captum's ``attribute``
    (``baselines``, ``n_steps`` …). Passes made for this are not taken by the recording ``into``.
    """
    place = _place(model, site)
    at_inputs = place.path == "" and place.kind == "input"
    name = _class_for(method, place, at_inputs)
    root = hookable(model, "attribution")
    forward = _OneOutput(root, output) if output else root
    with running_eagerly(model), into.paused() if into is not None else nullcontext():
        found = _run(name, forward, None if at_inputs else place, inputs, target, options)
    result = _chosen(found, place)
    if into is not None:
        _log(into, place, method, result)
    return result


def _class_for(method: str, place: Site, at_inputs: bool) -> str:
    """The name of Captum's class: some are for the model's inputs, some for inner sites, some for both."""
    if method not in METHODS:
        raise PlanError(f"method {method!r}: known are {', '.join(METHODS)}")
    name = METHODS[method][0 if at_inputs else 1]
    if name is None:
        where = "inner sites, e.g. 'blocks.3:output'" if at_inputs else "the model's inputs, ':input'"
        raise PlanError(f"{method} is for {where}; {place.name} is not one")
    return name


def _log(into: Watch, place: Site, method: str, result: Tensor | tuple[Tensor, ...]) -> None:
    parts = result if isinstance(result, tuple) else (result,)
    for number, part in enumerate(parts):
        suffix = f".{number}" if len(parts) > 1 else ""
        into.log(str(Name(place.path, "value", f"{method}{suffix}")), part)


def _place(model: Any, site: Selectable) -> Site:
    ports = make_plan(hookable(model, "attribution"), [Tap((Selector.of(site),), Stats())]).ports
    if len(ports) != 1 or ports[0].site.kind not in ("input", "output"):
        found = ", ".join(port.site.name for port in ports[:4])
        raise PlanError(f"an attribution is of one module's output or input; {site!r} picks {found}")
    bare = ports[0].site
    leaf = Name.read(site).leaf if isinstance(site, str) else ""
    return Site(bare.path, bare.kind, leaf, module=bare.module)


def _run(
    name: str,
    forward: nn.Module,
    layer: Site | None,
    inputs: Tensor | tuple[Tensor, ...],
    target: Any,
    options: dict[str, Any],
) -> Any:
    with needing("captum", "captum", who="attribute"):
        from captum import attr
    made_by = getattr(attr, name)
    if layer is None:
        return made_by(forward).attribute(inputs, target=target, **options)
    options = {"attribute_to_layer_input": layer.kind == "input", **options}
    if name == "LayerActivation":  # which knows of no target
        return made_by(forward, layer.module).attribute(inputs, **options)
    return made_by(forward, layer.module).attribute(inputs, target=target, **options)


def _chosen(found: Any, place: Site) -> Tensor | tuple[Tensor, ...]:
    """Return one tensor if there is one or one was selected, else all of them."""
    if isinstance(found, Sequence) and len(found) == 1:
        found = found[0]
    if isinstance(found, Tensor):
        return found.detach()
    parts = dict(leaves(tuple(found)))
    if place.leaf in parts:
        return parts[place.leaf].detach()
    return tuple(part.detach() for part in parts.values())


@final
class _OneOutput(nn.Module):
    """A model with one leaf of its output as the output, which is what Captum can take a target of."""

    def __init__(self, model: nn.Module, leaf: str) -> None:
        super().__init__()
        self.model, self._leaf = model, leaf

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        found = dict(leaves(self.model(*args, **kwargs)))
        if self._leaf not in found:
            raise SelectionError(f"the model's output has no leaf {self._leaf!r}; it has {', '.join(found)}")
        return found[self._leaf]
