"""Put taps on a model that travel with it: through a transform, into a file, to another process.

Only the sites travel. What is kept of them, and when, says the session that listens where the model runs;
with none, the model does what it always did.
"""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from torchtap import Plan, Tap, make_plan
from torchtap.errors import FormError
from torchtap.forms.attach import form_of, tree_of
from torchtap.forms.copy_model import copy_with_shared_tensors
from torchtap.forms.op import op
from torchtap.forms.op.carrier import carried, put_carriers, put_on_root, remove_carriers
from torchtap.forms.op.travelling import names_left
from torchtap.plan.sites import Selectable

__all__ = ["instrument"]

_PASSED_ON = ("input", "output", "grad_input", "grad_output", "value")


def instrument(model: Any, *taps: Plan | Tap | Selectable) -> Any:
    """A copy of a model that emits what passes at these sites (all outputs, unless said otherwise).

    The copy has the model's own parameters and buffers. It can be scripted, traced, exported, compiled, packaged
    and pickled; a scripted or exported model can be given as well. A session finds the sites in what comes out.
    Of a model that was pickled with such sites, and without ``taps``, these are put on again.
    """
    form = form_of(model)
    if form in ("compiled", "aoti", "emitting"):
        raise FormError(
            f"cannot put travelling taps on a model that is {form} already: instrument the model it was made from, "
            "then compile that; or use capture and watch, which take it as it is"
        )
    op.register()
    left = names_left(model) if form == "eager" else {}
    kinds_of = dict(left) if left and not taps else {**left, **_kinds_of(model, taps)}
    if form == "script":
        from torchtap.forms.script.graph import tapped_copy

        return tapped_copy(model, kinds_of)
    if form == "exported":
        from torchtap.forms.graph.exported import tapped_program

        return tapped_program(model, kinds_of)
    if form == "graph":
        return _tapped_graph(model, kinds_of)
    return _tapped_module(model, kinds_of)


def _kinds_of(model: Any, taps: tuple[Any, ...]) -> dict[str, tuple[str, ...]]:
    if len(taps) == 1 and isinstance(taps[0], Plan):
        plan = taps[0]
    else:
        plan = make_plan(tree_of(model), taps or ("*:output",))
    found: dict[str, tuple[str, ...]] = {}
    for port in plan.ports:
        if port.site.kind in _PASSED_ON:
            found[port.site.path] = (*found.get(port.site.path, ()), port.site.kind)
    return found


def _tapped_module(model: nn.Module, kinds_of: dict[str, tuple[str, ...]]) -> nn.Module:
    tapped = copy_with_shared_tensors(model)
    present = carried(tapped)
    remove_carriers(tapped)
    for path, kinds in present.items():
        kinds_of[path] = tuple(dict.fromkeys((*kinds, *kinds_of.get(path, ()))))
    put_on_root(tapped, kinds_of)
    return tapped


def _tapped_graph(model: fx.GraphModule, kinds_of: dict[str, tuple[str, ...]]) -> fx.GraphModule:
    from torchtap.forms.graph.attachment import called_modules
    from torchtap.forms.graph.edit import tap_graph

    tapped = copy_with_shared_tensors(model)
    real = {"", *called_modules(tapped)}
    tap_graph(tapped, {path: kinds for path, kinds in kinds_of.items() if path not in real})
    tapped.recompile()
    put_carriers(tapped, {path: kinds for path, kinds in kinds_of.items() if path in real})
    return tapped
