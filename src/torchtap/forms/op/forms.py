"""A plan on models whose values leave through the op: one attachment, with what each form adds to it.

`CarriedAttachment` opens the channel, reads parameters and buffers, and keeps switching on and off in one place.
A form says what has to happen so that a call of the model runs the tapped graph (`Route`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, final

from torchtap.errors import SessionError
from torchtap.forms.op.channel import Channel
from torchtap.receive.state import StateReader
from torchtap.spi import Receiver

# In the attributes of a module whose calls go elsewhere.
_MARK = "_torchtap_rerouted"

__all__ = ["CarriedAttachment", "ForwardRoute", "Route"]


class Route(Protocol):
    """How calls of a model come to run the graph that has taps in it."""

    def switch_on(self) -> None:
        """From now on they do."""

    def switch_off(self) -> None:
        """Restore the model."""


@final
class ForwardRoute:
    """Calls go to another ``forward``, kept in the instance, where it hides that of the class."""

    def __init__(self, module: object, forward: Callable[..., object]) -> None:
        self._attributes: dict[str, object] = module.__dict__
        self._forward = forward
        self._before: list[object] = []

    def switch_on(self) -> None:
        if _MARK in self._attributes:
            raise SessionError(
                "another session is at work on this scripted, traced or exported model; one graph carries the taps "
                "of one session at a time: ask for all sites in one session, or tap a second copy of the model"
            )
        if "forward" in self._attributes:
            self._before.append(self._attributes["forward"])
        self._attributes["forward"] = self._forward
        self._attributes[_MARK] = True

    def switch_off(self) -> None:
        del self._attributes[_MARK]
        if self._before:
            self._attributes["forward"] = self._before.pop()
        else:
            del self._attributes["forward"]


@final
class CarriedAttachment:
    """A plan on a model that emits on a channel, or in a way of its own."""

    def __init__(self, receiver: Receiver, channel: Channel | None, routes: list[Any]) -> None:
        self._receiver = receiver
        self._channel = channel
        self._routes: list[Route] = routes
        self._state = StateReader(receiver) if receiver.plan.reads_state else None
        self._on: list[Route] | None = None

    def arm(self, live: frozenset[int]) -> None:
        if self._state is not None:
            self._state.arm(live)
        if not live:
            self.disarm()
            return
        if self._on is not None:
            return
        self._on = []
        try:
            if self._channel is not None:
                self._channel.open(self._receiver)
            for route in self._routes:
                route.switch_on()
                self._on.append(route)
        except BaseException:
            self.disarm()
            raise

    def finish_step(self) -> None:
        if self._state is not None:
            self._state.finish_step()
        self._receiver.end_pass()

    def disarm(self) -> None:
        if self._state is not None:
            self._state.disarm()
        routes, self._on = self._on, None
        for route in reversed(routes or []):
            route.switch_off()
        if routes is not None and self._channel is not None:
            self._channel.close()

    def detach(self) -> None:
        self.disarm()
