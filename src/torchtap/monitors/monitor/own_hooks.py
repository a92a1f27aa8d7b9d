"""Hooks that a subclass of `Monitor` wrote itself: ``_hook_fn(layer_name)`` gives one for each layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from torchtap.errors import PlanError
from torchtap.forms.attach import form_of
from torchtap.hooks.ways import Handle, HookWay
from torchtap.monitors.monitor.chosen import MonitoredLayer
from torchtap.plan.sites import places

__all__ = ["put_on_own_hooks"]


def put_on_own_hooks(
    model: nn.Module, layers: Iterable[MonitoredLayer], hook_for: Callable[[str], object]
) -> list[Handle]:
    """Register what ``hook_for`` gives for each layer, as a forward hook of torch."""
    form = form_of(model)
    if form != "eager":
        raise PlanError(
            f"this Monitor has a _hook_fn of its own, and the model is {form}: such a model runs no hooks. Monitor "
            "the eager model, or override _custom_condition in place of _hook_fn"
        )
    modules = {place.path: place.module for place in places(model)}
    handles: list[Handle] = []
    for layer in layers:
        hook = hook_for(layer.name)
        if not callable(hook):
            for handle in handles:
                handle.remove()
            raise PlanError(
                f"_hook_fn({layer.name!r}) returned {hook!r}: it has to return hook(module, input, output)"
            )
        handles.append(HookWay().after(modules[layer.path], hook))
    return handles
