"""A plan on a model that ``torch.compile`` compiles, in whole or in parts.

Dynamo traces carriers into the graph, so that values leave compiled code through the op: no graph break. It
guarantees:
- what the user compiled is never touched: a step with live taps runs a second compilation of the same module,
  made with the user's own settings, and any other step runs the user's own. So each is compiled once, switching
  costs nothing, and hooks that come after the first call are not ignored;
- asking again for the same sites of the same model compiles nothing again.

Not here: parameters, their gradients and buffers, which are read from the module (`state`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any, final
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, fx, nn

from torchtap import Plan
from torchtap._torch import (
    base_of,
    compiled_function,
    compiled_in_place,
    dynamic_setting,
    guard_options,
    in_backward,
    inside_compiled,
    is_compiled_module,
    kept_by_inductor,
    runs_compiled,
    skip_alone,
    user_backend,
)
from torchtap.errors import FormError
from torchtap.forms.op import channel
from torchtap.forms.op.branches import is_silent
from torchtap.forms.op.carrier import (
    Carriers,
    EnterCarrier,
    InputCarrier,
    LeaveCarrier,
    OutputCarrier,
)
from torchtap.forms.op.emitted import emit_leaves
from torchtap.forms.op.forms import CarriedAttachment
from torchtap.forms.op.fused import emit_measured
from torchtap.forms.op.passes import PassHooks
from torchtap.hooks.hooks import Handle
from torchtap.receive import by_name
from torchtap.receive.attention import report_attention
from torchtap.receive.by_name import activate, deactivate
from torchtap.spi import Name, PortState, Receiver, input_leaves, leaves, reasons, unwrap

__all__ = ["attach_compiled", "compiled_regions"]


def compiled_regions(model: nn.Module) -> list[CompiledRegion]:
    """Every part of a model that is compiled by itself: the model, or modules inside it."""
    return [_region_of(module) for module in model.modules() if _is_compiled(module)]


def _is_compiled(module: nn.Module) -> bool:
    return runs_compiled(module) or _compiled_forward(module) is not None


def _compiled_forward(module: nn.Module) -> Any:
    """What ``model.forward = torch.compile(model.forward)`` put into a module."""
    forward = module.__dict__.get("forward")
    own = not is_compiled_module(module) and compiled_function(forward) is not None
    return forward if own else None


@final
class CompiledRegion:
    """A compiled module and its further compilations, one for each set of carriers that was ever on together."""

    def __init__(self, module: nn.Module) -> None:
        self._reference = ref(module)  # who keeps regions keeps no model alive
        self._live: dict[frozenset[int], Callable[..., Any]] = {}
        self.armed: frozenset[int] = frozenset()
        self._forward = _compiled_forward(module)
        by_forward = is_compiled_module(module) or self._forward is not None
        self._slot = "forward" if by_forward else "_compiled_call_impl"
        self._plain: Any = None

    def is_of(self, module: nn.Module) -> bool:
        """Return True if this is the region of a module, not of one that it is a copy of."""
        return self._reference() is module

    @property
    def _module(self) -> nn.Module:
        module = self._reference()
        assert module is not None  # whoever switches has the model
        return module

    def switch(self, armed: frozenset[int]) -> None:
        """Run the compilation that has exactly these channels' carriers in it; none is the user's own."""
        attributes = self._module.__dict__
        if not self.armed:
            self._plain = attributes[self._slot]
        self.armed = armed
        if not armed:
            attributes[self._slot] = self._plain
            self._plain = None
            return
        if armed not in self._live:
            self._live[armed] = self._compile()
        attributes[self._slot] = self._live[armed]

    def _compile(self) -> Callable[..., Any]:
        module = self._module
        inner = inside_compiled(module) if is_compiled_module(module) else module
        call = inner.__call__ if is_compiled_module(module) else module._call_impl
        given = compiled_function(self._forward)
        if given is not None:
            call = given

        def tapped(*args: Any, **kwargs: Any) -> Any:
            return call(*args, **kwargs)

        # Dynamo keeps compiled code with the code object; its own one makes this a separate compilation.
        tapped.__code__ = tapped.__code__.replace(co_name=f"tapped_{type(inner).__name__}")
        settings = _settings_of(module, self._forward)
        compiled: Callable[..., Any] = torch.compile(
            tapped,
            backend=_OwnBackend(user_backend(settings.callback), self.armed),
            dynamic=dynamic_setting(settings),
            fullgraph=settings.fullgraph,
            options=guard_options(settings),
        )
        setattr(compiled, _REGION, self)  # while it stands in the module, it is what further sessions find
        return compiled


@final
class _OwnBackend:
    """The user's backend under another identity.

    After a graph break Dynamo compiles the model's own functions one by one and keeps each with its code object, which
    the user's compilation has as well; it takes one for the other unless their backends differ.
    """

    def __init__(self, backend: Callable[..., Any], channels: frozenset[int]) -> None:
        self._backend = backend
        self._channels = channels

    def __call__(self, graph: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        _hand_on_dropouts(graph)
        _promise_results(graph, self._channels)
        return kept_by_inductor(self._backend)(graph, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "_backend":  # asked for before it is set: by copying
            raise AttributeError(name)
        return getattr(self._backend, name)  # its context, its settings


_DROPOUTS = frozenset(
    getattr(nn.functional, name)
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
)


def _hand_on_dropouts(graph: fx.GraphModule) -> None:
    """Let a dropout in evaluation return what it is given, as it does in an eager model.

    AOT autograd makes it a copy. The gradient of the copy is only a part of the value's.
    """
    for node in list(graph.graph.nodes):
        given = dict(zip(("x", "p", "training"), node.args, strict=False)) | node.kwargs
        if node.target in _DROPOUTS and given.get("training", True) is False and "x" in given:
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)


def _promise_results(graph: fx.GraphModule, channels: frozenset[int]) -> None:
    """Promise the gradients of results that the graph itself uses: outside, only the other users' part is seen."""
    receivers = {number: channel.receivers.get(number) for number in channels}
    end = next(iter(reversed(graph.graph.nodes)))
    results = [
        node
        for node in end.all_input_nodes
        if isinstance(node.meta.get("example_value"), Tensor)
        and node.op != "placeholder"
        and any(user is not end and not _emits(user) for same in _same(node) for user in same.users)
    ]
    for number, receiver in receivers.items():
        if receiver is None or not any(port.kind.startswith("grad") for port in receiver.ports.values()):
            continue
        channel.promising.add(number)
        for place, node in enumerate(results):
            site = f"{number}|:{channel.SAME_CALL}{channel.PROMISE}.{place}"
            with graph.graph.inserting_before(end):
                graph.graph.call_function(torch.ops.torchtap.emit_grad.default, (node, site))
    graph.recompile()


def _same(node: fx.Node) -> list[fx.Node]:
    """Return a node, and what it may only have handed on: ``x.contiguous()`` is most often ``x``."""
    found = [node]
    while (given := next(iter(found[-1].all_input_nodes), None)) is not None:
        if not _is_same_memory(given.meta.get("example_value"), node.meta["example_value"]):
            break
        found.append(given)
    return found


def _is_same_memory(value: object, other: Tensor) -> bool:
    return (
        isinstance(value, Tensor)
        and value.untyped_storage() is other.untyped_storage()
        and (value.shape, value.stride(), value.storage_offset())
        == (other.shape, other.stride(), other.storage_offset())
    )


def _emits(node: fx.Node) -> bool:
    return "torchtap" in str(node.target)


def _settings_of(module: nn.Module, forward: Any = None) -> Any:
    """The user's ``torch.compile`` settings: what it returned was made by a context that wraps any function."""
    if is_compiled_module(module):
        return module.dynamo_ctx
    wrapper: Any = forward if forward is not None else compiled_in_place(module)
    for cell in getattr(wrapper, "__closure__", None) or ():
        if type(cell.cell_contents).__name__.endswith("OptimizeContext"):
            return cell.cell_contents
    raise FormError(
        f"{type(module).__name__} was compiled in a way that torchtap does not know; "
        "use torch.compile(model) or model.compile()"
    )


@final
class CompiledRoute:
    """Has a region run with one channel's carriers, beside those of other sessions."""

    def __init__(self, region: CompiledRegion, number: int) -> None:
        self._region = region
        self._number = number

    def switch_on(self) -> None:
        self._region.switch(self._region.armed | {self._number})

    def switch_off(self) -> None:
        self._region.switch(self._region.armed - {self._number})


_regions: WeakKeyDictionary[nn.Module, CompiledRegion] = WeakKeyDictionary()
_REGION = "_torchtap_region"  # in the attributes of a compiled function


def _region_of(module: nn.Module) -> CompiledRegion:
    """The region of a compiled module. What ``torch.compile(module)`` returns is not held by its compilations.

    Those of a module that is compiled in place hold the module: the function that it was compiled into keeps its
    region, so that only the module holds them. A module that is compiled anew has a new region.
    """
    if is_compiled_module(module):
        if module not in _regions:
            _regions[module] = CompiledRegion(module)
        return _regions[module]
    function: Any = _compiled_forward(module) or compiled_in_place(module)
    region: CompiledRegion | None = getattr(function, _REGION, None)
    if region is None or not region.is_of(module):
        region = CompiledRegion(module)
        setattr(function, _REGION, region)
    return region


_carriers: WeakKeyDictionary[nn.Module, dict[frozenset[tuple[str, str, bool]], Carriers]] = (
    WeakKeyDictionary()
)


def attach_compiled(model: nn.Module, receiver: Receiver) -> CarriedAttachment:
    """Put a plan on a compiled model, or on one with compiled parts."""
    _never_compile_alone()
    outside = _root_gradients(model, receiver)
    looks_inside = receiver.listens_to("attention") or receiver.listens_to("value")
    carriers = _carriers_for(unwrap(model), receiver, looks_inside)
    for port in receiver.ports.values():
        if is_silent(carriers.channel.prefix + str(Name(port.port.site.path, port.kind))):
            port.note = reasons.IN_A_BRANCH
    number = carriers.channel.number
    compiled = [CompiledRoute(region, number) for region in compiled_regions(model)]
    looking = [_LookInside(receiver)] if looks_inside else []
    take = None if outside is None else partial(_take_gradients, receiver, outside)
    routes = [carriers, *compiled, *looking, PassHooks(model, receiver, take)]
    return CarriedAttachment(receiver, carriers.channel, routes)


def _carriers_for(root: nn.Module, receiver: Receiver, looks_inside: bool) -> Carriers:
    """Carriers of the plan's sites: those of an earlier session that had the same and is over, else new ones."""
    ports = receiver.ports.values()
    measured = frozenset(
        (port.port.site.path, port.kind) for port in ports if _only_measures(receiver.plan, port.port.taps)
    )
    sites = frozenset(
        (port.port.site.path, port.kind, (port.port.site.path, port.kind) in measured) for port in ports
    )
    known = _carriers.setdefault(root, {})
    carriers = known.get(sites)
    if carriers is None or carriers.channel.is_open():
        modules = ((port.port.site.path, port.port.site.module, port.kind) for port in ports)
        carriers = known[sites] = Carriers(
            ((path, module, kind) for path, module, kind in modules if module is not None),
            ((place.path, place.module) for place in receiver.plan.places) if looks_inside else (),
            measured,
            purpose=f"{type(root).__qualname__} {sorted(sites)}",
        )
    return carriers


def _only_measures(plan: Plan, taps: Iterable[int]) -> bool:
    """Return True if all of these taps keep statistics, which the carrier computes itself."""
    return all(plan.taps[index].keep.in_rows for index in taps)


def _root_gradients(model: nn.Module, receiver: Receiver) -> PortState | None:
    """The port of the gradients of what a wholly compiled model returns."""
    whole = runs_compiled(model)
    return receiver.ports.get(("", "grad_output", "")) if whole else None


def _take_gradients(receiver: Receiver, port: PortState, output: Any) -> None:
    """Ask for the gradients of results that share their memory.

    A compiled graph returns these as one base, and makes the views anew behind itself: what is asked inside the
    graph is never answered.
    """
    if not receiver.hears_this_thread() or in_backward():
        return
    found = [(leaf, value, base_of(value)) for leaf, value in leaves(output) if value.requires_grad]
    for leaf, value, base in found:
        sharing = [each for _, each, other in found if base is not None and (base is each or base is other)]
        sharing = [each for each in sharing if each is not value]
        if not sharing:
            continue
        if any(_may_be_in(value, each) for each in sharing if each is not base):
            by_name.refuse(receiver, "", port.kind, leaf, reasons.SHARED_MEMORY)
        else:
            by_name.await_gradient(receiver, "", port.kind, leaf, value, by_name.Count(0), again=True)


def _may_be_in(value: Tensor, other: Tensor) -> bool:
    """Return True if another result may be a view of this one, so that its gradient is a part of this one's."""
    spans = [
        sum((n - 1) * s for n, s in zip(each.shape, each.stride(), strict=True)) for each in (value, other)
    ]
    begin = other.storage_offset() - value.storage_offset()
    inside = begin >= 0 and begin + spans[1] <= spans[0]
    return inside and other.numel() <= value.numel()


@cache
def _never_compile_alone() -> None:
    """After a graph break Dynamo looks at each function by itself. Ours are to be traced with the model or not at all:
    a graph of a hook alone does not know the model's autograd graph.
    """
    for function in (
        OutputCarrier.__call__,
        InputCarrier.__call__,
        EnterCarrier.__call__,
        LeaveCarrier.__call__,
        emit_leaves,
        emit_measured,
        leaves,
        input_leaves,
    ):
        skip_alone(function)


@final
class _LookInside:
    """While it is on, attention functions and ``emit`` report, in compiled code and around it."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._attention: Handle | None = None

    def switch_on(self) -> None:
        activate(self._receiver)
        if self._receiver.listens_to("attention"):
            self._attention = report_attention(self._receiver)

    def switch_off(self) -> None:
        deactivate(self._receiver)
        by_name.paths.clear()
        by_name.busy.clear()
        if self._attention is not None:
            self._attention.remove()
            self._attention = None
