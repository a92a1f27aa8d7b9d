"""Read what a model holds rather than passes on: parameters, their gradients, buffers. The same for every form.

Parameters and gradients are read just before the optimizer changes them, after clipping and unscaling; what no
optimizer step brought is read at the end of the step, and so are buffers.
"""

from __future__ import annotations

from typing import Any, final

from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from torchtap.taps.receive.entries import LivePort
from torchtap.taps.receive.receiver import Receiver

__all__ = ["StateReader"]


@final
class StateReader:
    """Reads the parameters, gradients and buffers that live taps ask for."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._armed: frozenset[int] = frozenset()
        self._parameters: dict[int, tuple[LivePort, ...]] = {}  # id of a parameter -> its live ports
        self._buffers: tuple[LivePort, ...] = ()
        self._taken: set[int] = set()
        self._handle: Any = None

    def arm(self, live: frozenset[int]) -> None:
        """A step begins in which these taps are live."""
        self._taken.clear()
        if live == self._armed:
            return
        self.disarm()
        self._armed = live
        by_parameter: dict[int, list[LivePort]] = {}
        buffers: list[LivePort] = []
        for port in self._receiver.ports.values():
            if live.isdisjoint(port.port.taps):
                continue
            if port.kind == "buffer":
                buffers.append(port)
            elif port.kind in ("param", "param_grad"):
                by_parameter.setdefault(id(_tensor_of(port)), []).append(port)
        self._parameters = {key: tuple(ports) for key, ports in by_parameter.items()}
        self._buffers = tuple(buffers)
        if by_parameter:
            self._handle = register_optimizer_step_pre_hook(self._on_optimizer_step)

    def finish_step(self) -> None:
        """Read what no optimizer step has brought yet."""
        for ports in self._parameters.values():
            self._read(ports)
        for port in self._buffers:
            buffer = _tensor_of(port)
            if buffer is not None:
                self._receiver.take_tensor(port, buffer)

    def disarm(self) -> None:
        """Nothing is read until `arm` is called again."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()
        self._armed = frozenset()
        self._parameters, self._buffers = {}, ()

    def _on_optimizer_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._receiver.hears_this_thread():
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                ports = self._parameters.get(id(parameter))
                if ports is not None:
                    self._read(ports)

    def _read(self, ports: tuple[LivePort, ...]) -> None:
        for port in ports:
            parameter = _tensor_of(port)
            if parameter is None or id(port) in self._taken:
                continue
            value: Tensor | None = parameter if port.kind == "param" else parameter.grad
            if value is None:
                port.note = "its gradient was None: frozen, or not part of the loss"
                continue
            self._taken.add(id(port))
            self._receiver.take_tensor(port, value)


def _tensor_of(port: LivePort) -> Tensor | None:
    site = port.port.site
    if site.module is None:
        return None
    held = site.module._buffers if port.kind == "buffer" else site.module._parameters
    return held.get(site.leaf)
