"""Tell the receiver where a pass over a model begins and ends, without a trace in the model's own graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, final

from torch import nn

from torchtap.spi import Hooks

if TYPE_CHECKING:
    from torchtap.receive.placing import Placing

__all__ = ["PassHooks", "PassListener", "in_pass"]


class PassListener(Protocol):
    """Who is told of passes: a receiver, or whoever looks out for them."""

    def begin_pass(self, training: bool | None = None) -> None:
        """The model was called; ``training`` is its flag."""

    def end_pass(self) -> None:
        """The call is over."""


def in_pass(
    receiver: PassListener,
    model: object,
    call: Callable[..., object],
    on_output: Callable[[object], None] | None = None,
    on_call: Callable[[tuple[object, ...], dict[str, object]], None] | None = None,
) -> Callable[..., Any]:
    """``call`` with a pass of the receiver around it."""

    def one_pass(*args: object, **kwargs: object) -> object:
        receiver.begin_pass(getattr(model, "training", None))
        try:
            if on_call is not None:
                on_call(args, kwargs)
            output = call(*args, **kwargs)
            if on_output is not None:
                on_output(output)
            return output
        finally:
            receiver.end_pass()

    return one_pass


@final
class PassHooks:
    """Two hooks on the object that the user calls."""

    def __init__(
        self,
        model: nn.Module,
        receiver: PassListener,
        on_output: Callable[[object], None] | None = None,
        on_call: Callable[[tuple[object, ...], dict[str, object]], None] | None = None,
    ) -> None:
        self._model = model
        self._on_call = on_call  # is given the arguments
        self._on_output = on_output  # is given what the model returned, outside of what was compiled
        self._receiver = receiver
        self._hooks = Hooks(model)
        self._covered: object = None

    def switch_on(self) -> None:
        """Passes are noticed from now on."""
        model = self._model
        compiled = model.__dict__.get("_compiled_call_impl")
        if compiled is not None:
            # `model.compile()` compiles the module's hooks with it, and these must stay outside.
            self._covered = compiled
            model.__dict__["_compiled_call_impl"] = in_pass(
                self._receiver, model, compiled, self._on_output, self._on_call
            )
            return
        if self._hooks.resume("passes"):
            return
        if self._on_call is not None:
            self._hooks.before(self._model, self._take_call)
        if self._on_output is not None:
            self._hooks.after(self._model, self._take_output)
        self._hooks.around(self._begin, self._receiver.end_pass)
        placing: Placing | None = getattr(self._receiver, "placing", None)
        if placing is not None:
            self._hooks.before(model, placing.see_inputs)

    def suspend(self) -> None:
        """Remove the hooks, but keep them for the next `switch_on`."""
        self._hooks.suspend("passes")
        self._uncover()

    def switch_off(self) -> None:
        """Remove the hooks. Nothing refers to the receiver afterwards."""
        self._hooks.remove()
        self._uncover()

    def _uncover(self) -> None:
        if self._covered is not None:
            self._model.__dict__["_compiled_call_impl"] = self._covered
            self._covered = None

    def _take_output(self, output: object) -> None:
        assert self._on_output is not None
        self._on_output(output)

    def _take_call(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        assert self._on_call is not None
        self._on_call(args, kwargs)

    def _begin(self) -> None:
        self._receiver.begin_pass(self._model.training)
