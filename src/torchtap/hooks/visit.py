"""Visitors: callbacks that see the calls of a model's modules and may replace values.

    with Visiting(model, visitor, stops):
        model(x)                       # visitor.before(call, args, kwargs), visitor.after(call, output)

Calls are counted as in a capture: inputs and outputs apart, from 0 in each pass. A checkpoint's replay has the number
of the call that it repeats.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from functools import partial
from typing import Any, NamedTuple, Protocol, Self, final

from torch import nn

from torchtap.hooks.hooks import Hooks
from torchtap.hooks.leaves import Args, Kwargs
from torchtap.plan.sites import input_names, unwrap

__all__ = ["Call", "Stop", "Visiting", "Visitor"]


class Stop(NamedTuple):
    """A module to visit: its inputs, its outputs or both. ``key`` is for the visitor's own use."""

    path: str
    module: nn.Module
    inputs: bool = True
    outputs: bool = True
    key: Hashable = None


class Call(NamedTuple):
    """One call of one module."""

    path: str
    number: int  # of the call in this pass
    repeated: bool  # True for a replay by activation checkpointing
    parent: str | None  # the visited module whose code made the call; None if the user did
    input_names: tuple[str, ...] | None
    key: Any


class Visitor(Protocol):
    """Receive the inputs and outputs of modules. Each method may return a replacement, or None for no change."""

    def before(self, call: Call, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
        """A module is about to run on these arguments."""

    def after(self, call: Call, output: object) -> Any:
        """A module has returned this output."""


@final
class Visiting:
    """One visitor on one model, for the length of a block or from `begin` to `end`."""

    def __init__(
        self, model: nn.Module, visitor: Visitor, stops: Iterable[Stop], *, passes_apart: bool = True
    ) -> None:
        self._visitor = visitor
        self._passes_apart = passes_apart  # False: calls are counted on from pass to pass
        self._stops = [(stop, input_names(stop.module)) for stop in stops]
        self._hooks = Hooks(unwrap(model))
        self._calls: dict[tuple[int, str, bool], int] = {}
        self._inside: list[str] = []

    def begin(self) -> None:
        """Register the visitor's hooks."""
        hooks = self._hooks
        try:
            if self._passes_apart:
                hooks.around(self.start_pass)
            for number, (stop, names) in enumerate(self._stops):
                if stop.inputs:
                    enter = partial(self._before, number, names, stop)
                    hooks.before(stop.module, enter, replays=True, traced=enter)
                if stop.outputs:
                    leave = partial(self._after, number, names, stop)
                    hooks.after(stop.module, leave, replays=True, traced=leave)
                if stop.inputs and stop.outputs:
                    hooks.when_done(stop.module, partial(self._done, stop))
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Remove the visitor's hooks."""
        self._hooks.remove()

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def start_pass(self) -> None:
        """Count calls from 0 again."""
        self._calls.clear()
        self._inside.clear()

    def _next(self, number: int, side: str, repeated: bool) -> int:
        key = (number, side, repeated)
        count = self._calls.get(key, 0)
        self._calls[key] = count + 1
        return count

    def _before(
        self,
        number: int,
        names: tuple[str, ...] | None,
        stop: Stop,
        args: Args,
        kwargs: Kwargs,
        repeated: bool = False,
    ) -> object:
        count = self._next(number, "input", repeated)
        parent = self._inside[-1] if self._inside else None
        if stop.outputs:
            self._inside.append(stop.path)
        return self._visitor.before(Call(stop.path, count, repeated, parent, names, stop.key), args, kwargs)

    def _after(
        self, number: int, names: tuple[str, ...] | None, stop: Stop, output: object, repeated: bool = False
    ) -> object:
        count = self._next(number, "output", repeated)
        outer = self._inside[:-1] if stop.inputs else self._inside
        parent = outer[-1] if outer else None
        return self._visitor.after(Call(stop.path, count, repeated, parent, names, stop.key), output)

    def _done(self, stop: Stop) -> None:
        if self._inside and self._inside[-1] == stop.path:
            self._inside.pop()
