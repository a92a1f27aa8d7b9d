"""Attach a plan to an eager model and pass each value to the receiver.

It guarantees:
- `detach` removes every hook, also after a forward that raised;
- a hook never changes what the model returns, nor the order in which gradients add up: gradients are read at
  autograd's nodes;
- a value is taken before anything can modify it in place;
- between active steps there is no hook on the model;
- a copy or a pickle of the model carries no hook.

Not here: registering hooks (`hooks`), selecting sites (`plan`), arithmetic (`reduce`), other forms (`forms`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, final

import torch
from torch import Tensor, nn

from torchtap._torch import graph_task
from torchtap.hooks.hooks import Hooks, HookSpec, WayName
from torchtap.hooks.leaves import input_leaves, leaves, map_leaves
from torchtap.plan.names import OF_CALLS
from torchtap.plan.sites import unwrap
from torchtap.receive import reasons
from torchtap.receive.gradients import ask_at_its_node, ask_for_gradient, own_view
from torchtap.receive.receiver import PortState, Receiver

if TYPE_CHECKING:
    from torchtap.hooks.leaves import Args, Kwargs
    from torchtap.receive.state import StateReader

__all__ = ["Attachment", "EagerAttachment", "TraceEmitter"]

is_compiling: Callable[[], bool] = torch.compiler.is_compiling


class Attachment(Protocol):
    """A plan attached to a model in some form."""

    def arm(self, live: frozenset[int]) -> None:
        """Begin a step in which these taps are active."""

    def finish_step(self) -> None:
        """End the step: pass on the values that are read at its end."""

    def disarm(self) -> None:
        """Make all taps inactive until `arm` is called again."""

    def detach(self) -> None:
        """Leave the model as it was found."""


class TraceEmitter(Protocol):
    """What hooks call when a compiler traces them. What it does becomes part of the graph."""

    channel: Any  # `open(receiver)` passes emitted values to a receiver, `close()` drops them

    def prepare(self, ports: Iterable[PortState]) -> Mapping[tuple[str, str], Any]:
        """Return what is emitted of each port, by path and kind."""

    def output(self, what: Any, output: object) -> None:
        """Emit a module's output."""

    def inputs(self, what: Any, names: tuple[str, ...] | None, args: Args, kwargs: Kwargs) -> None:
        """Emit a module's arguments."""

    def begin_pass(self, root: nn.Module, args: Args, kwargs: Kwargs) -> None:
        """Emit the beginning of a pass."""


@final
class EagerAttachment:
    """A plan attached to an eager model."""

    def __init__(self, model: nn.Module, receiver: Receiver, way: WayName, emitter: TraceEmitter) -> None:
        self._root = unwrap(model)
        self._receiver = receiver
        self._hooks = Hooks(self._root, way)
        self._emitter = emitter
        self._armed: frozenset[int] = frozenset()
        self._state: StateReader | None = None
        if receiver.plan.reads_state:
            from torchtap.receive.state import StateReader

            self._state = StateReader(receiver)

    def arm(self, live: frozenset[int]) -> None:
        if self._state is not None:
            self._state.arm(live)
        if live == self._armed:
            return
        if self._armed:
            self._suspend()
        if not live:
            return
        self._armed = live
        try:
            self._emitter.channel.open(self._receiver)
            if not self._hooks.resume(live):
                self._register(live)
            if not self._receiver.plan.kinds.isdisjoint(("value", "attention")):
                self._listen_inside(live)
        except BaseException:
            self.detach()
            raise

    def _listen_inside(self, live: frozenset[int]) -> None:
        """Receive the values that are made inside of modules' code."""
        kinds = {port.site.kind for port in self._receiver.plan.ports if not live.isdisjoint(port.taps)}
        if "value" in kinds:
            from torchtap.receive.by_name import activate

            self._hooks.keep(activate(self._receiver))
        if "attention" in kinds:
            from torchtap.receive.attention import report_attention

            self._hooks.keep(report_attention(self._receiver))

    def _register(self, live: frozenset[int]) -> None:
        """Register hooks for a set of active taps. They are kept for the next step with the same set.

        Parameters and buffers are read from the module (`state`), attention maps from the functions that compute them,
        emitted values from calls of `emit`.
        """
        receiver, emitter, root = self._receiver, self._emitter, self._root
        active = {
            (port.site.path, port.kind): port
            for port in receiver.ports.values()
            if port.kind in OF_CALLS and not live.isdisjoint(port.port.taps)
        }
        emitted = emitter.prepare(active.values())
        hooks: list[HookSpec] = []
        for (path, kind), port in active.items():
            module = port.site.module
            assert module is not None
            if kind in ("input", "grad_input"):
                hook = _input_hook(receiver, port, emitter, emitted[path, kind])
                hooks.append(HookSpec(module, hook, before=True))
            elif kind == "grad_output" and (path, "output") not in active:
                hooks.append(HookSpec(module, _output_hook(receiver, None, port, emitter, emitted)))
            elif kind == "output":
                gradient = active.get((path, "grad_output"))
                hooks.append(HookSpec(module, _output_hook(receiver, port, gradient, emitter, emitted)))

        self._register_operators()
        self._hooks.register([*hooks, *_pass_hooks(receiver, emitter, root)])
        if receiver.placing is not None:
            self._hooks.before(root, receiver.placing.see_inputs)

    def _register_operators(self) -> None:
        """Have the operators of the plan (``path/function``) called in place of their functions."""
        calls = self._receiver.plan.operator_calls()
        if calls is None:
            return
        self._hooks.around(calls.begin, calls.end)
        for port in self._receiver.ports.values():
            function = getattr(port.site.module, "function", None) if "/" in port.port.site.path else None
            if function is not None:
                port.note = reasons.NO_FUNCTION_CALL.format(function=function)

    def hooks_gone(self) -> list[nn.Module]:
        """Return the modules from which others have removed our hooks."""
        return self._hooks.lost()

    def disarm(self) -> None:
        if self._state is not None:
            self._state.disarm()
        self._suspend()

    def _suspend(self) -> None:
        self._emitter.channel.close()
        live, self._armed = self._armed, frozenset()
        self._hooks.suspend(live)

    def detach(self) -> None:
        if self._state is not None:
            self._state.disarm()
        self._emitter.channel.close()
        self._armed = frozenset()
        self._hooks.remove()

    def finish_step(self) -> None:
        if self._state is not None:
            self._state.finish_step()
        self._receiver.end_pass()


# -- hooks: each tells a compiler's trace, a pass and a checkpoint's replay apart ---------------------------------


def _output_hook(
    receiver: Receiver,
    port: PortState | None,
    gradient: PortState | None,
    emitter: TraceEmitter,
    emitted: Mapping[tuple[str, str], Any],
) -> Callable[..., None]:
    """Return a hook that takes an output (``port``), requests its gradient (``gradient``), or does both."""
    what = [emitted[each.site.path, each.kind] for each in (port, gradient) if each is not None]

    def hook(module: nn.Module, args: object, output: object) -> None:
        if is_compiling():
            for each in what:
                emitter.output(each, output)
            return
        replayed = graph_task() != -1
        if port is not None and not replayed:
            receiver.take(port, output)
        if gradient is not None:
            found = (("", output),) if isinstance(output, Tensor) else leaves(output)
            receiver.request_gradients(gradient, found, replayed)

    return hook


def _input_hook(receiver: Receiver, port: PortState, emitter: TraceEmitter, what: Any) -> Callable[..., Any]:
    """Return a hook that takes the arguments of a call, or requests their gradients."""
    own = any(receiver.plan.taps[number].per_consumer for number in port.port.taps)
    names, takes = port.input_names, port.kind == "input"

    def hook(module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
        if is_compiling():
            if takes or not own:  # a graph gives the sum over all consumers: it has nothing for a single one
                emitter.inputs(what, names, args, kwargs)
            return None
        replayed = graph_task() != -1
        if takes:
            if not replayed:
                receiver.take_inputs(port, args, kwargs)
            return None
        if own:  # the module runs on views, so that their gradients are what this call alone sends back
            args, kwargs = map_leaves(args, own_view), map_leaves(kwargs, own_view)
        ask = ask_at_its_node if own else ask_for_gradient
        receiver.request_gradients(port, input_leaves(names, args, kwargs), replayed, ask)
        return (args, kwargs) if own else None

    return hook


def _pass_hooks(receiver: Receiver, emitter: TraceEmitter, root: nn.Module) -> list[HookSpec]:
    """Return hooks that begin a pass before everything else, and end it, also if it raised.

    A compiler's trace is no pass, nor is a replay of the whole model.
    """

    def begin_pass(module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        if is_compiling():
            emitter.begin_pass(root, args, kwargs)
        elif graph_task() == -1:
            receiver.begin_pass(root.training)

    def end_pass(*_: object) -> None:
        if not is_compiling():
            receiver.end_pass()

    begin = HookSpec(root, begin_pass, before=True, first=True)
    return [begin, HookSpec(root, end_pass, always=True)]
