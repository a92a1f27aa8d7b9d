"""Put a plan on a live eager model and hand each value to the receiver.

It guarantees:
- `detach` removes every hook, also after a forward that raised;
- a hook never changes what the model returns, nor the order in which gradients add up: gradients are read by
  hooks on the tensors themselves;
- a value is taken before anything can modify it in place;
- between live steps no hook is on the model at all;
- a copy or a pickle of the model carries no live hook.

Not here: choosing sites (`sites`, `plan`), arithmetic (`reduce`), other forms (their own files).
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any, Protocol, final

import torch
from torch import nn

from torchtap.sites import unwrap
from torchtap.taps.carry.op import Channel
from torchtap.taps.carry.traced import TracedPort
from torchtap.taps.eager import attention
from torchtap.taps.eager.fitting import Via, fitting_for
from torchtap.taps.receive.active import activate, deactivate
from torchtap.taps.receive.entries import LivePort
from torchtap.taps.receive.leaves import input_leaves, leaves
from torchtap.taps.receive.receiver import Receiver
from torchtap.taps.receive.state import StateReader

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


is_compiling: Callable[[], bool] = torch.compiler.is_compiling
graph_task: Callable[[], int] = torch._C._current_graph_task_id


def in_backward() -> bool:
    """Whether autograd is at work in this thread: a forward that runs now is a checkpoint's repetition."""
    return graph_task() != -1


@final
class EagerAttachment:
    """A plan on an eager model."""

    def __init__(self, model: nn.Module, receiver: Receiver, via: Via = "hook") -> None:
        self._root = unwrap(model)
        self._receiver = receiver
        self._fitting = fitting_for(self._root, via)
        self._armed: frozenset[int] = frozenset()
        self._handles: list[Any] = []
        self._state = StateReader(receiver)
        self._channel = Channel()

    def arm(self, live: frozenset[int]) -> None:
        self._state.arm(live)
        if live == self._armed:
            return
        self._take_off()
        self._armed = live
        if not live:
            return
        try:
            self._install(live)
        except BaseException:
            self.disarm()
            raise

    def _install(self, live: frozenset[int]) -> None:
        receiver = self._receiver
        self._channel.open(receiver)
        fit, keep = self._fitting, self._handles.append
        keep(fit.before(self._root, self._on_pass_begin, first=True))
        for port in receiver.ports.values():
            if live.isdisjoint(port.port.taps):
                continue
            module = port.port.site.module
            assert module is not None
            match port.kind:
                case "output":
                    keep(fit.after(module, self._output_hook(port)))
                case "input":
                    keep(fit.before(module, self._input_hook(port)))
                case "grad_output":
                    keep(fit.after(module, self._grad_output_hook(port)))
                case "grad_input":
                    keep(fit.before(module, self._grad_input_hook(port)))
                case "param" | "param_grad" | "buffer":
                    pass  # read from the module, by `state`
                case "attention":
                    pass  # taken from the functions that compute it, below
                case "value":
                    pass  # the model's own code calls `emit`
        keep(fit.after(self._root, self._on_pass_end, always=True))
        if any(
            p.kind in ("attention", "value") and not live.isdisjoint(p.port.taps)
            for p in receiver.ports.values()
        ):
            activate(receiver)
        if any(p.kind == "attention" and not live.isdisjoint(p.port.taps) for p in receiver.ports.values()):
            keep(attention.patch())

    def disarm(self) -> None:
        self._state.disarm()
        self._take_off()

    def _take_off(self) -> None:
        self._channel.close()
        deactivate(self._receiver)
        handles, self._handles = self._handles, []
        for handle in reversed(handles):
            handle.remove()
        self._armed = frozenset()

    def detach(self) -> None:
        self.disarm()

    def finish_step(self) -> None:
        self._state.finish_step()
        self._receiver.end_pass()

    # -- hooks --------------------------------------------------------------------------------------------

    # A model may be compiled while taps are on it. The compiler then traces these hooks: they emit through the op
    # and leave passes alone.

    def _on_pass_begin(self, *_: Any) -> None:
        if not is_compiling() and not in_backward():
            self._receiver.begin_pass(self._root.training)

    def _on_pass_end(self, *_: Any) -> None:
        if not is_compiling():
            self._receiver.end_pass()

    def _output_hook(self, port: LivePort) -> Callable[..., None]:
        receiver, take = self._receiver, self._receiver.take
        traced = TracedPort(self._channel, port)

        # Called for every module: the two questions are those of `hears_this_thread` and `in_backward`, spelled out.
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if is_compiling():
                traced.emit_output(output)
            elif (receiver.thread == get_ident() or receiver.thread is None) and graph_task() == -1:
                take(port, output)

        return hook

    def _input_hook(self, port: LivePort) -> Callable[..., None]:
        receiver = self._receiver
        traced = TracedPort(self._channel, port)

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if is_compiling():
                traced.emit_inputs(args, kwargs)
            elif receiver.hears_this_thread() and not in_backward():
                receiver.take_inputs(port, args, kwargs)

        return hook

    def _grad_output_hook(self, port: LivePort) -> Callable[..., None]:
        receiver = self._receiver
        traced = TracedPort(self._channel, port)

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if is_compiling():
                traced.emit_output(output)
            elif receiver.hears_this_thread():
                receiver.take_gradients(port, leaves(output), recomputed=in_backward())

        return hook

    def _grad_input_hook(self, port: LivePort) -> Callable[..., None]:
        receiver = self._receiver
        traced = TracedPort(self._channel, port)

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if is_compiling():
                traced.emit_inputs(args, kwargs)
            elif receiver.hears_this_thread():
                found = input_leaves(port.input_names, args, kwargs)
                receiver.take_gradients(port, found, recomputed=in_backward())

        return hook
