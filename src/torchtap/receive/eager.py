"""Put a plan on a live eager model and hand each value to the receiver.

It guarantees:
- `detach` removes every hook, also after a forward that raised;
- a hook never changes what the model returns, nor the order in which gradients add up: gradients are read at
  autograd's nodes;
- a value is taken before anything can modify it in place;
- between live steps no hook is on the model at all;
- a copy or a pickle of the model carries no live hook.

Not here: hooks (`walk`), choosing sites (`sites`, `plan`), arithmetic (`reduce`), other forms (their own rooms).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Protocol, final

from torch import nn

from torchtap.forms.op.channel import Channel
from torchtap.forms.op.traced import emitting_inputs, emitting_output, emitting_pass
from torchtap.hooks.leaves import input_leaves
from torchtap.hooks.walker import Walker
from torchtap.hooks.ways import WayName
from torchtap.plan.names import Kind
from torchtap.plan.sites import unwrap
from torchtap.receive.entries import PortState
from torchtap.receive.receiver import Receiver

if TYPE_CHECKING:
    from torchtap.hooks.arguments import Args, Kwargs
    from torchtap.receive.asking import Asking
    from torchtap.receive.state import StateReader

__all__ = ["Attachment", "EagerAttachment"]


class Attachment(Protocol):
    """A plan on a model in some form."""

    def arm(self, live: frozenset[int]) -> None:
        """A step begins in which these taps are live."""

    def finish_step(self) -> None:
        """The step is over: hand over what is read at its end."""

    def disarm(self) -> None:
        """No tap is live until `arm` is called again."""

    def detach(self) -> None:
        """Leave the model as it was found."""


@final
class EagerAttachment:
    """A plan on an eager model."""

    def __init__(self, model: nn.Module, receiver: Receiver, way: WayName = "hook") -> None:
        self._root = unwrap(model)
        self._receiver = receiver
        self._walker = Walker(self._root, way, receiver)
        self._armed: frozenset[int] = frozenset()
        self._state: StateReader | None = None
        if receiver.plan.reads_state:
            from torchtap.receive.state import StateReader

            self._state = StateReader(receiver)
        self._of_passes = receiver.plan.kinds <= {"input", "output"}  # what comes, comes within passes
        self._channel = Channel()

    def arm(self, live: frozenset[int]) -> None:
        if self._state is not None:
            self._state.arm(live)
        if live == self._armed:
            return
        if self._armed:
            self._rest()
        if not live:
            return
        self._armed = live
        try:
            self._install(live)
        except BaseException:
            self.detach()
            raise

    def _install(self, live: frozenset[int]) -> None:
        receiver = self._receiver
        self._channel.open(receiver)
        if not self._walker.take_up(live):
            self._make_hooks(live)
        if self._of_passes:
            return
        if self._is_asked("value", live):
            from torchtap.receive.active import activate

            self._walker.keep(activate(receiver))
        if self._is_asked("attention", live):
            from torchtap.receive.attention import report_attention

            self._walker.keep(report_attention(receiver))

    def _make_hooks(self, live: frozenset[int]) -> None:
        """Made once for each set of live taps, and put on. None of them knows the step."""
        receiver = self._receiver
        for port in receiver.ports.values():
            if not live.isdisjoint(port.port.taps):
                self._put_on(port)
        begin = receiver.begin_pass if receiver.takes_all else self._begin_pass
        self._walker.passes(begin, receiver.end_pass, emitting_pass(self._channel, self._root))
        if receiver.placing is not None:
            self._walker.before(self._root, None, receiver.placing.see_inputs, _nothing)

    def _is_asked(self, kind: Kind, live: frozenset[int]) -> bool:
        plan = self._receiver.plan
        return kind in plan.kinds and any(
            port.site.kind == kind and not live.isdisjoint(port.taps) for port in plan.ports
        )

    def _put_on(self, port: PortState) -> None:
        """Stop at a port's module. Kinds that do not pass there are read elsewhere.

        Parameters and buffers are read from the module (`state`), attention maps come from the functions that
        compute them, values from the model's own calls of `emit`.
        """
        module, receiver = port.port.site.module, self._receiver
        assert module is not None
        match port.kind:
            case "output":
                path = port.port.site.path
                first = port, receiver.take, emitting_output(self._channel, path, "output")
                gradient = self._live_port(path, "grad_output")
                if gradient is None:
                    self._walker.after(module, *first)
                else:
                    emit = emitting_output(self._channel, path, "grad_output")
                    second = gradient, self._asking.of_output, emit
                    self._walker.after_twice(module, first, second)
            case "input":
                self._walker.before(module, port, receiver.take_inputs, emitting_inputs(self._channel, port))
            case "grad_output" if self._live_port(port.port.site.path, "output") is None:
                emit = emitting_output(self._channel, port.port.site.path, "grad_output")
                self._walker.after_and_again(module, port, self._asking.of_output, emit)
            case "grad_input":
                emit_given = emitting_inputs(self._channel, port)
                taps = receiver.plan.taps
                own = any(taps[number].per_consumer for number in port.port.taps)
                wait = self._await_own_inputs() if own else self._await_inputs
                self._walker.before_and_again(module, port, wait, emit_given)

    def _live_port(self, path: str, kind: str) -> PortState | None:
        port = self._receiver.ports.get((path, kind, ""))
        return None if port is None or self._armed.isdisjoint(port.port.taps) else port

    def hooks_gone(self) -> list[nn.Module]:
        """The modules from which somebody else has taken our hooks off."""
        return self._walker.gone()

    def disarm(self) -> None:
        if self._state is not None:
            self._state.disarm()
        self._rest()

    def _rest(self) -> None:
        self._channel.close()
        live, self._armed = self._armed, frozenset()
        self._walker.lay_aside(live)

    def detach(self) -> None:
        if self._state is not None:
            self._state.disarm()
        self._channel.close()
        self._armed = frozenset()
        self._walker.leave()

    def finish_step(self) -> None:
        if self._state is not None:
            self._state.finish_step()
        if not (self._of_passes and self._receiver.no_pass_is_open):
            self._receiver.end_pass()

    def _begin_pass(self) -> None:
        self._receiver.begin_pass(self._root.training)

    @cached_property
    def _asking(self) -> Asking:
        """Asks for gradients, where a tap does."""
        from torchtap.receive.asking import Asking

        return Asking(self._receiver)

    def _await_own_inputs(self) -> Callable[[PortState, Args, Kwargs, bool], object]:
        from torchtap.receive.own_inputs import awaiting_own_inputs

        return awaiting_own_inputs(self._asking)

    def _await_inputs(self, port: PortState, args: Args, kwargs: Kwargs, repeated: bool) -> None:
        found = input_leaves(port.input_names, args, kwargs)
        self._asking.of_each(port, found, repeated)


def _nothing(*_: object) -> None:
    """What a compiler's trace is to see."""
