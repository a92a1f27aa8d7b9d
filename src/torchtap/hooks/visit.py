"""Visitors: whoever wants to see a model's calls one by one, and perhaps put other values in their place.

    with Visiting(model, visitor, stops):
        model(x)                       # visitor.before(call, args, kwargs), visitor.after(call, output)

Calls are counted as a capture counts them: inputs and outputs apart, anew in each pass, and a checkpoint's
repetition has the number of the call that it repeats.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from functools import partial
from typing import Any, NamedTuple, Protocol, Self, final

from torch import nn

from torchtap.hooks.arguments import Args, Kwargs
from torchtap.hooks.walker import Walker
from torchtap.plan.sites import input_names, unwrap

__all__ = ["Call", "Stop", "Visiting", "Visitor"]


class Stop(NamedTuple):
    """A module to stop at, and whether its inputs and its outputs are shown. ``key`` is the visitor's own."""

    path: str
    module: nn.Module
    inputs: bool = True
    outputs: bool = True
    key: Hashable = None


class Call(NamedTuple):
    """One call of one module."""

    path: str
    number: int  # which call of the module in this pass
    repeated: bool  # a checkpoint repeats an earlier call, during backward
    parent: str | None  # whose code made the call, as far as its inputs are shown; None for the user's
    input_names: tuple[str, ...] | None
    key: Any


class Visitor(Protocol):
    """Sees values go in and out. Either method may return what to use instead, or None."""

    def before(self, call: Call, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
        """A module is about to run on these arguments."""

    def after(self, call: Call, output: object) -> Any:
        """A module returned this."""


@final
class Visiting:
    """One visitor on one model: for the length of a block, or between `begin` and `end`."""

    def __init__(
        self, model: nn.Module, visitor: Visitor, stops: Iterable[Stop], *, passes_apart: bool = True
    ) -> None:
        self._root = unwrap(model)
        self._visitor = visitor
        self._passes_apart = passes_apart  # else the calls of all passes are counted in one row
        self._stops = [(stop, input_names(stop.module)) for stop in stops]
        self._walker = Walker(self._root)
        self._calls: dict[tuple[int, str, bool], int] = {}
        self._inside: list[str] = []

    def begin(self) -> None:
        """Put the visitor on the model."""
        walker = self._walker
        try:
            if self._passes_apart:
                walker.passes(self.start_pass)
            for number, (stop, names) in enumerate(self._stops):
                if stop.inputs:
                    shown = partial(self._before, number, names)
                    walker.before_and_again(stop.module, stop, shown, partial(shown, stop))
                if stop.outputs:
                    show = partial(self._after, number, names)
                    walker.after_and_again(stop.module, stop, show, partial(show, stop))
                if stop.inputs and stop.outputs:
                    walker.at_the_end(stop.module, stop, self._over)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Take the visitor off."""
        self._walker.leave()

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def start_pass(self) -> None:
        """Calls are counted from 0 again."""
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

    def _over(self, stop: Stop) -> None:
        if self._inside and self._inside[-1] == stop.path:
            self._inside.pop()
