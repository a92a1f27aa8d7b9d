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

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, final

from torch import nn

from torchtap.hooks.hooks import Hooks, WayName
from torchtap.hooks.leaves import input_leaves
from torchtap.plan.names import Kind
from torchtap.plan.sites import unwrap
from torchtap.receive import reasons
from torchtap.receive.receiver import PortState, Receiver

if TYPE_CHECKING:
    from torchtap.hooks.leaves import Args, Kwargs
    from torchtap.receive.gradients import GradientRequests
    from torchtap.receive.state import StateReader

__all__ = ["Attachment", "EagerAttachment", "TraceEmitter"]


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
    """Functions for hooks to call when a compiler traces them. What they do becomes part of the graph."""

    def open(self, receiver: Receiver) -> None:
        """Pass emitted values to this receiver."""

    def close(self) -> None:
        """Drop emitted values."""

    def output(self, path: str, kind: Kind) -> Callable[[object], None]:
        """Return a function that emits a module's output."""

    def inputs(self, port: PortState) -> Callable[[Args, Kwargs], None]:
        """Return a function that emits a module's arguments."""

    def passes(self, root: nn.Module) -> Callable[[Args, Kwargs], None]:
        """Return a function that emits the beginning of a pass."""


@final
class EagerAttachment:
    """A plan attached to an eager model."""

    def __init__(self, model: nn.Module, receiver: Receiver, way: WayName, emitter: TraceEmitter) -> None:
        self._root = unwrap(model)
        self._receiver = receiver
        # A capture's lanes decide whose calls are received; other receivers have one thread.
        self._hooks = Hooks(self._root, way, receiver if receiver.lanes is None else None)
        self._emitter = emitter
        self._armed: frozenset[int] = frozenset()
        self._state: StateReader | None = None
        if receiver.plan.reads_state:
            from torchtap.receive.state import StateReader

            self._state = StateReader(receiver)
        self._only_calls = receiver.plan.kinds <= {"input", "output"}  # all values belong to a pass

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
            self._install(live)
        except BaseException:
            self.detach()
            raise

    def _install(self, live: frozenset[int]) -> None:
        self._emitter.open(self._receiver)
        if not self._hooks.resume(live):
            self._register(live)
        if self._only_calls:
            return
        if self._wants("value", live):
            from torchtap.receive.by_name import activate

            self._hooks.keep(activate(self._receiver))
        if self._wants("attention", live):
            from torchtap.receive.attention import report_attention

            self._hooks.keep(report_attention(self._receiver))

    def _register(self, live: frozenset[int]) -> None:
        """Register hooks for a set of active taps. They are kept for the next step with the same set."""
        receiver = self._receiver
        for port in receiver.ports.values():
            if not live.isdisjoint(port.port.taps):
                self._register_port(port)
        self._register_operators()
        begin = receiver.begin_pass if receiver.single_phase else self._begin_pass
        self._hooks.around(begin, receiver.end_pass, traced=self._emitter.passes(self._root))
        if receiver.placing is not None:
            self._hooks.before(self._root, receiver.placing.see_inputs)

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

    def _register_port(self, port: PortState) -> None:
        """Register the hook of one port.

        Parameters and buffers are read from the module (`state`), attention maps from the functions that compute them,
        emitted values from calls of `emit`.
        """
        site, receiver, hooks = port.site, self._receiver, self._hooks
        module, path = site.module, site.path
        assert module is not None
        key = path, port.kind, site.leaf
        match port.kind:
            case "output":
                emit_output = self._emitter.output(path, "output")
                gradient = self._active_port(path, "grad_output")
                if gradient is None and receiver.lanes is None:
                    hooks.add(module, receiver.output_hook(port, emit_output))
                elif gradient is None:
                    hooks.after(
                        module, self._bound(lambda to: partial(to.take, to.ports[key])), traced=emit_output
                    )
                else:
                    emit_gradient = self._emitter.output(path, "grad_output")
                    take = self._bound(partial(_taking_both, key))
                    hooks.after(
                        module, take, replays=True, traced=partial(_emit_both, emit_output, emit_gradient)
                    )
            case "input":
                take_inputs = self._bound(lambda to: partial(to.take_inputs, to.ports[key]))
                hooks.before(module, take_inputs, traced=self._emitter.inputs(port))
            case "grad_output" if self._active_port(path, "output") is None:
                request = self._bound(lambda to: partial(_requests(to).of_output, to.ports[key]))
                hooks.after(module, request, replays=True, traced=self._emitter.output(path, "grad_output"))
            case "grad_input":
                own = any(receiver.plan.taps[number].per_consumer for number in port.port.taps)
                of_inputs = self._bound(partial(_requesting_inputs, key, own))
                # A compiler's graph gives the sum over all consumers: it has nothing for a single one.
                traced = {} if own else {"traced": self._emitter.inputs(port)}
                hooks.before(module, of_inputs, replays=True, **traced)

    def _bound(self, make: Callable[[Receiver], Callable[..., Any]]) -> Callable[..., Any]:
        """Return what ``make`` returns for the receiver, or for the lane of each caller."""
        lanes = self._receiver.lanes
        return make(self._receiver) if lanes is None else lanes.dispatch(make)

    def _active_port(self, path: str, kind: str) -> PortState | None:
        port = self._receiver.ports.get((path, kind, ""))
        return None if port is None or self._armed.isdisjoint(port.port.taps) else port

    def _wants(self, kind: Kind, live: frozenset[int]) -> bool:
        plan = self._receiver.plan
        return kind in plan.kinds and any(
            port.site.kind == kind and not live.isdisjoint(port.taps) for port in plan.ports
        )

    def _begin_pass(self) -> None:
        self._receiver.begin_pass(self._root.training)

    def hooks_gone(self) -> list[nn.Module]:
        """Return the modules from which others have removed our hooks."""
        return self._hooks.lost()

    def disarm(self) -> None:
        if self._state is not None:
            self._state.disarm()
        self._suspend()

    def _suspend(self) -> None:
        self._emitter.close()
        live, self._armed = self._armed, frozenset()
        self._hooks.suspend(live)

    def detach(self) -> None:
        if self._state is not None:
            self._state.disarm()
        self._emitter.close()
        self._armed = frozenset()
        self._hooks.remove()

    def finish_step(self) -> None:
        if self._state is not None:
            self._state.finish_step()
        if not (self._only_calls and self._receiver.no_pass_is_open):
            self._receiver.end_pass()


def _requests(receiver: Receiver) -> GradientRequests:
    from torchtap.receive.gradients import GradientRequests

    return GradientRequests(receiver)


def _taking_both(key: tuple[str, str, str], receiver: Receiver) -> Callable[[object, bool], None]:
    """Return a function that takes an output and requests its gradient."""
    port, gradient = receiver.ports[key], receiver.ports[key[0], "grad_output", key[2]]
    take, request = receiver.take, _requests(receiver).of_output

    def take_both(output: object, replayed: bool) -> None:
        if not replayed:
            take(port, output)
        request(gradient, output, replayed)

    return take_both


def _requesting_inputs(key: tuple[str, str, str], own: bool, receiver: Receiver) -> Callable[..., Any]:
    """Return a function that requests the gradients of a call's arguments."""
    port, requests = receiver.ports[key], _requests(receiver)
    if own:
        return partial(requests.of_own_inputs, port)

    def request(args: Args, kwargs: Kwargs, replayed: bool) -> None:
        requests.of_each(port, input_leaves(port.input_names, args, kwargs), replayed)

    return request


def _emit_both(first: Callable[[Any], None], second: Callable[[Any], None], output: object) -> None:
    first(output)
    second(output)
