"""Give what passes through layers to handlers of one's own, as quantizers accumulate what their layers see.

    with hand_over(model, {"blocks.0.fc": handler}):    # handler.add_batch(inputs, outputs)
        for batch in loader:
            model(batch)

It guarantees:
- the model runs as before, and its modules and ``state_dict`` keys are the same: nothing is replaced;
- leaving the block, or `HandedOver.remove`, restores the model;
- a handler gets the tensors themselves, detached; it copies what it wants to keep.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol, Self, final

from torch import nn

from torchtap.editing.eager_only import hookable
from torchtap.errors import PlanError
from torchtap.hooks.leaves import Args, Kwargs
from torchtap.spi import Call, Stop, Visiting, input_leaves, leaves, places

__all__ = ["HandedOver", "Handler", "hand_over"]


class Handler(Protocol):
    """A handler of batches. ``add_batch`` may also take the inputs alone."""

    def add_batch(self, inputs: object, outputs: object) -> object:
        """One call of the layer: its first tensor argument, and the first tensor that it returned."""


def hand_over(
    model: object, handlers: Mapping[str | nn.Module, Handler | Callable[..., object]]
) -> HandedOver:
    """Call each layer's handler with ``(inputs, outputs)`` of every call, from now on until `remove`.

    ``handlers`` maps layers, or their paths, to objects with ``add_batch`` or to functions. One that takes a single
    argument gets the inputs alone.
    """
    return HandedOver(model, handlers)


@final
class HandedOver:
    """Handlers on a model; made by `hand_over`."""

    def __init__(
        self, model: object, handlers: Mapping[str | nn.Module, Handler | Callable[..., object]]
    ) -> None:
        root = hookable(model, "hand_over")
        found = places(root)
        by_path = {path: place for place in found for path in (place.path, *place.other_paths)}
        by_module = {place.module: place for place in found}
        stops = []
        for layer, handler in handlers.items():
            place = by_path.get(layer) if isinstance(layer, str) else by_module.get(layer)
            if place is None:
                asked = repr(layer) if isinstance(layer, str) else f"a {type(layer).__name__}"
                known = ", ".join(repr(path) for path in list(by_path)[1:6])
                raise PlanError(
                    f"hand_over: {asked} is no layer of this model; its layers are {known} …: give a layer, or its "
                    "path in named_modules()"
                )
            stops.append(Stop(place.path, place.module, key=_told(handler)))
        self._inputs: dict[str, list[object]] = {}
        self._telling = False  # a handler may call its layer itself
        self._visiting = Visiting(root, self, stops)
        self._visiting.begin()

    def remove(self) -> None:
        """Remove the handlers from the model."""
        self._visiting.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def before(self, call: Call, args: Args, kwargs: Kwargs) -> None:
        """A visitor's."""
        if not call.repeated and not self._telling:
            if call.number == 0:  # what a pass that failed has left behind
                self._inputs[call.path] = []
            first = next((tensor for _, tensor in input_leaves(call.input_names, args, kwargs)), None)
            self._inputs.setdefault(call.path, []).append(None if first is None else first.detach())

    def after(self, call: Call, output: object) -> None:
        """A visitor's."""
        if call.repeated or self._telling or not self._inputs.get(call.path):
            return
        first = next((tensor for _, tensor in leaves(output)), None)
        self._telling = True
        try:
            call.key(self._inputs[call.path].pop(), None if first is None else first.detach())
        finally:
            self._telling = False


def _told(handler: object) -> Callable[[Any, Any], Any]:
    """How a handler is called."""
    add: Any = getattr(handler, "add_batch", handler)
    if not callable(add):
        raise PlanError(f"hand_over: {handler!r} has no add_batch(inputs, outputs) and cannot be called")
    try:
        inspect.signature(add).bind(None, None)
    except TypeError:
        return lambda inputs, outputs: add(inputs)
    except ValueError:  # a builtin that does not say what it takes
        pass
    return add  # type: ignore[no-any-return]
