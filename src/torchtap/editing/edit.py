"""Change values on their way through a model: ``with edit(model, {"blocks.3:output": fn_or_tensor}): model(x)``.

It guarantees:
- autograd goes through the change: a function's gradient flows on, a tensor that is put in gets its own;
- a capture that was entered before the edit sees the value before it, one entered inside the edit sees it after;
- a tensor that is put in is never changed by in-place operations of the model;
- leaving the block takes every change off, also when the body raised;
- an edit that no value ever met is warned of.

For a gradient (``x:grad_output``) the change is made between the two sides of the value: outside the edit,
towards the module that made the value, the gradient is the changed one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, Self, TypeAlias, final

import torch
from torch import Tensor

from torchtap import Plan, Selector, Site, Stats, Tap, make_plan
from torchtap.editing.eager_only import hookable, refuse_inlined, running_eagerly
from torchtap.errors import PlanError
from torchtap.hooks.leaves import Args, Kwargs, map_inputs
from torchtap.plan.plan import Port
from torchtap.plan.sites import Selectable
from torchtap.sanitize import shown
from torchtap.spi import Call, Hooks, Name, Stop, Visiting, map_leaves

__all__ = ["Change", "Edit", "edit"]

Change: TypeAlias = Callable[[Tensor], Tensor] | Tensor | float

_KINDS = ("input", "output", "grad_input", "grad_output")


def edit(model: object, changes: Mapping[Selectable, Change]) -> Edit:
    """Change what passes at some sites for as long as a ``with`` block lasts.

    A change is a function of the value, a tensor to put in its place (moved to the value's device and dtype, and
    spread over its shape), or a number. Selectors may pick several sites; later changes see what earlier ones
    made. Sites are of the kinds input, output, grad_input and grad_output.
    """
    return Edit(model, changes)


@final
class Edit:
    """Made by `edit`. ``applied`` counts, for each site, how many values were changed."""

    def __init__(self, model: object, changes: Mapping[Selectable, Change]) -> None:
        if not changes:
            raise PlanError(
                "an edit needs at least one change, e.g. {'blocks.3:output': lambda value: value * 0}"
            )
        self._model = model
        self._root = hookable(model, "an edit")
        self._changes = [_change_of(key, change) for key, change in changes.items()]
        self._plan = make_plan(self._root, [Tap((Selector.of(key),), Stats()) for key in changes])
        _refuse_several(self._plan)
        for port in self._plan.ports:
            if port.site.kind not in _KINDS:
                raise PlanError(
                    f"{port.site.name} cannot be edited: the kinds that pass through a forward are "
                    f"{', '.join(_KINDS)}; parameters and buffers can be changed in place"
                )
            refuse_inlined(model, port.site.path, "an edit")
        self._stack = ExitStack()
        self.applied: dict[str, int] = {}

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(running_eagerly(self._model))
            # Counted as in a capture of whole tensors: on, from one call of the model to the next.
            visiting = Visiting(self._root, self, map(_stop, self._plan.ports), passes_apart=False)
            stack.enter_context(visiting)
            self._run_operators(stack)
            self._stack = stack.pop_all()
        return self

    def _run_operators(self, stack: ExitStack) -> None:
        """Have the operators of the plan (``path/function``) called in place of their functions."""
        calls = self._plan.operator_calls()
        if calls is not None:
            hooks = Hooks(self._root)
            stack.callback(hooks.remove)
            hooks.around(calls.begin, calls.end)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stack.close()
        if kind is None:
            untouched = [p.site.name for p in self._plan.ports if not self._was_applied(p)]
            if untouched:
                some = ", ".join(untouched[:4])
                message = f"nothing passed at {some} while it was edited, so nothing was changed there"
                warnings.warn(shown(message, 5000), RuntimeWarning, stacklevel=2)

    def _was_applied(self, port: Port) -> bool:
        bare = port.site.name
        return any(Name.read(name).belongs_to(bare) for name in self.applied)

    # -- the visitor's side ---------------------------------------------------------------------------------

    def before(self, call: Call, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """A module is given these values."""
        return map_inputs(call.input_names, args, kwargs, partial(self._change, call.key, call.number))

    def after(self, call: Call, output: object) -> object:
        """A module returned this."""
        return map_leaves(output, partial(self._change, call.key, call.number))

    def _change(self, port: Port, call: int, leaf: str, value: Tensor) -> Tensor:
        names = [Site(each.path, each.kind, leaf, call, module=each.module) for each in port.names]
        for index in port.taps:
            if self._plan.taps[index].wants(names):
                value = self._apply(names[0], self._changes[index], value)
        return value

    def _apply(self, site: Site, change: Callable[[Site, Tensor], Tensor], value: Tensor) -> Tensor:
        if not site.kind.startswith("grad"):
            self._count(site)
            return change(site, value)
        if not value.requires_grad:
            return value

        def on_gradient(gradient: Tensor) -> Tensor:
            self._count(site)
            return change(site, gradient)

        changed: Tensor = _ChangedGradient.apply(value, on_gradient)  # type: ignore[no-untyped-call]
        return changed

    def _count(self, site: Site) -> None:
        self.applied[site.name] = self.applied.get(site.name, 0) + 1


def _refuse_several(plan: Plan) -> None:
    """A selector without a wildcard is meant for one place: another one of that name is not to be changed by chance."""
    for index, each in enumerate(plan.taps):
        asked = each.selectors[0]
        picked = [port.site.name for port in plan.ports if index in port.taps]
        if asked.plain_path is not None and len(picked) > 1:
            raise PlanError(
                f"{asked.text!r} picks {len(picked)} places: {', '.join(picked[:3])} …; give the full path of one, or "
                f"'**.{asked.text}' to edit them all"
            )


def _stop(port: Port) -> Stop:
    assert port.site.module is not None
    returned = port.site.kind in ("output", "grad_output")
    return Stop(port.site.path, port.site.module, inputs=not returned, outputs=returned, key=port)


class _ChangedGradient(torch.autograd.Function):
    """Identity in the forward; changes the gradient in the backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return value.clone()  # not a view: the model may go on to change it in place

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.change(gradients[0]), None


def _change_of(key: Selectable, change: object) -> Callable[[Site, Tensor], Tensor]:
    if isinstance(change, Tensor):
        return partial(_put_in, change)
    if isinstance(change, (int, float)):
        return partial(_put_in, torch.tensor(change))
    if callable(change):
        return partial(_call, change)
    raise PlanError(
        f"the change of {key!r} is a {type(change).__name__}: give a function of the value, a tensor or a number"
    )


def _put_in(replacement: Tensor, site: Site, value: Tensor) -> Tensor:
    fitting = replacement.to(device=value.device, dtype=value.dtype)
    try:
        return fitting.expand(value.shape).clone()  # a copy, which the model may change in place
    except RuntimeError:
        raise PlanError(
            f"a tensor of shape {tuple(replacement.shape)} cannot take the place of {site.name}, which has shape "
            f"{tuple(value.shape)}"
        ) from None


def _call(function: Callable[[Tensor], object], site: Site, value: Tensor) -> Tensor:
    changed = function(value)
    if not isinstance(changed, Tensor):
        raise PlanError(
            f"the edit of {site.name} returned {type(changed).__name__}: a change has to return the tensor that "
            "continues"
        )
    return changed
