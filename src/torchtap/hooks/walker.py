"""The walker: shows what goes in and out of a model's modules to functions that may give back other values.

It knows where it is: in which thread, in a compiler's trace, or in a checkpoint's repetition. It guarantees:
- `leave` takes everything off again, in reverse, also where one removal fails;
- in a copy or a pickle of the model its hooks do nothing;
- a function that returns None changes nothing.

`Walker` is the machine, with the hot path of the receiver in it. `visit` has the plain interface for everything that
is not hot.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from threading import get_ident
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, final

import torch
from torch import nn

from torchtap._torch import graph_task
from torchtap.hooks.hooks import Hooks, RegisteredHook
from torchtap.hooks.ways import Handle, WayName, way_for

if TYPE_CHECKING:
    from torchtap.hooks.arguments import Args, Kwargs

__all__ = ["EVERY_THREAD", "Heard", "Walker", "is_compiling", "shown_call", "shown_output"]

is_compiling: Callable[[], bool] = torch.compiler.is_compiling

Stop = TypeVar("Stop")
_MOST_ASIDE = 8  # sets of hooks


class Heard(Protocol):
    """Who is listened to."""

    thread: int | None  # the identity of one thread; None for every thread


class _EveryThread:
    thread: int | None = None


EVERY_THREAD: Heard = _EveryThread()


def _unheeded(_: object) -> None:
    """A compiler follows the code, and there is nothing to put into its graph."""


def shown_output(
    stop: Stop,
    visit: Callable[[Stop, object], object],
    traced: Callable[[object], object] = _unheeded,
    heard: Heard = EVERY_THREAD,
) -> Callable[[nn.Module, object, object], object]:
    """A forward hook that shows what a module returns, but not what a checkpoint repeats."""

    # Called for every module of every step, so the questions about thread and repetition are spelled out.
    def hook(module: nn.Module, args: object, output: object) -> Any:
        if is_compiling():
            return traced(output)
        if (heard.thread == get_ident() or heard.thread is None) and graph_task() == -1:
            return visit(stop, output)
        return None

    return hook


def shown_call(
    visit: Callable[[Stop, Args, Kwargs, object], None],
) -> Callable[[Stop, nn.Module, Args, Kwargs, Any], None]:
    """The same for a hook that is given the arguments too, and its stop: one function serves many modules."""

    def hook(stop: Stop, module: nn.Module, args: Args, kwargs: Kwargs, output: object) -> None:
        if not is_compiling() and graph_task() == -1:
            visit(stop, args, kwargs, output)

    return hook


@final
class Walker:
    """Functions around the calls of one model's modules.

    A stop is whatever the caller knows a place by; it is handed back with each value. ``traced`` is called instead
    where a compiler follows the code: what it does becomes a part of the graph.
    """

    def __init__(self, root: nn.Module, way: WayName = "hook", heard: Heard = EVERY_THREAD) -> None:
        self._root = root
        self._way = way_for(root, way)
        self._heard = heard
        self._put: list[Handle] = []  # by the way
        self._kept: list[Handle] = []  # for others
        self._aside: dict[Hashable, Hooks] = {}

    def passes(
        self,
        begin: Callable[[], None],
        end: Callable[[], None] | None = None,
        traced: Callable[[Args, Kwargs], object] | None = None,
    ) -> None:
        """Call ``begin`` ahead of everything in a pass, and ``end`` after it, also when the pass raised.

        A compiler's trace is no pass, and neither is a checkpoint's repetition of the whole model.
        """

        def on_begin(module: nn.Module, args: Args, kwargs: Kwargs) -> None:
            if is_compiling():
                if traced is not None:
                    traced(args, kwargs)
            elif graph_task() == -1:
                begin()

        if end is None:
            self._put.append(self._way.before(self._root, on_begin, first=True))
            return

        def on_end(*_: object) -> None:
            if not is_compiling():
                end()

        self._put.extend(self._way.around(self._root, on_begin, on_end))

    def after(
        self,
        module: nn.Module,
        stop: Stop,
        visit: Callable[[Stop, object], object],
        traced: Callable[[object], object],
    ) -> None:
        """Show what the module returns. Repetitions are left out."""
        self._put.append(self._way.after(module, shown_output(stop, visit, traced, self._heard)))

    def before(
        self,
        module: nn.Module,
        stop: Stop,
        visit: Callable[[Stop, Args, Kwargs], Any],
        traced: Callable[[Args, Kwargs], Any],
    ) -> None:
        """Show what the module is given. Repetitions are left out."""
        heard = self._heard

        def hook(module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
            if is_compiling():
                return traced(args, kwargs)
            if (heard.thread == get_ident() or heard.thread is None) and graph_task() == -1:
                return visit(stop, args, kwargs)
            return None

        self._put.append(self._way.before(module, hook))

    def after_and_again(
        self,
        module: nn.Module,
        stop: Stop,
        visit: Callable[[Stop, object, bool], object],
        traced: Callable[[object], object],
    ) -> None:
        """Show what the module returns, and say whether a checkpoint repeats the call."""
        heard = self._heard

        def hook(module: nn.Module, args: object, output: object) -> Any:
            if is_compiling():
                return traced(output)
            if heard.thread == get_ident() or heard.thread is None:
                return visit(stop, output, graph_task() != -1)
            return None

        self._put.append(self._way.after(module, hook))

    def after_twice(
        self,
        module: nn.Module,
        first: tuple[Stop, Callable[[Stop, Any], Any], Callable[[Any], Any]],
        second: tuple[Stop, Callable[[Stop, Any, bool], Any], Callable[[Any], Any]],
    ) -> None:
        """`after` and then `after_and_again`, by one hook: torch takes long to call one, and each looks where it is."""
        heard = self._heard
        stop, visit, traced = first
        stop_again, visit_again, traced_again = second

        def hook(module: nn.Module, args: object, output: object) -> None:
            if is_compiling():
                traced(output)
                traced_again(output)
                return
            if heard.thread == get_ident() or heard.thread is None:
                repeated = graph_task() != -1
                if not repeated:
                    visit(stop, output)
                visit_again(stop_again, output, repeated)

        self._put.append(self._way.after(module, hook))

    def before_and_again(
        self,
        module: nn.Module,
        stop: Stop,
        visit: Callable[[Stop, Args, Kwargs, bool], object],
        traced: Callable[[Args, Kwargs], object],
    ) -> None:
        """Show what the module is given, and say whether a checkpoint repeats the call."""
        heard = self._heard

        def hook(module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
            if is_compiling():
                return traced(args, kwargs)
            if heard.thread == get_ident() or heard.thread is None:
                return visit(stop, args, kwargs, graph_task() != -1)
            return None

        self._put.append(self._way.before(module, hook))

    def at_the_end(self, module: nn.Module, stop: Stop, visit: Callable[[Stop], None]) -> None:
        """Say when a call of the module is over, also when it raised."""
        self._put.append(self._way.after(module, lambda *_: visit(stop), always=True))

    def keep(self, handle: Handle) -> None:
        """Have this removed, too, with all the rest."""
        self._kept.append(handle)

    def gone(self) -> list[nn.Module]:
        """The modules whose hooks somebody else has taken off."""
        if len(self._put) > 1:
            self._join()
        found: list[nn.Module] = []
        for each in self._put:
            if isinstance(each, (Hooks, RegisteredHook)):
                found += each.gone
        return list({id(module): module for module in found}.values()) if found else found

    def _join(self) -> None:
        """Have all hooks gone through at once."""
        hooks = [each for each in self._put if isinstance(each, Hooks)]
        others = [each for each in self._put if not isinstance(each, Hooks)]
        self._put = [*others, Hooks.joined(hooks)] if hooks else others

    def lay_aside(self, name: Hashable) -> None:
        """Take everything off, and remember the hooks, so that `take_up` has nothing to make."""
        if len(self._put) > 1:
            self._join()
        match self._put:
            case [Hooks() as hooks]:  # else torch's own tables are not all that there is to it
                if name not in self._aside and len(self._aside) >= _MOST_ASIDE:
                    del self._aside[next(iter(self._aside))]
                self._aside[name] = hooks
        self._take_off()

    def take_up(self, name: Hashable) -> bool:
        """Put the hooks on that were laid aside under a name; says whether there are any."""
        hooks = self._aside.get(name)
        if hooks is None:
            return False
        hooks.put_on()
        self._put.append(hooks)
        return True

    def leave(self) -> None:
        """Take everything off and remember nothing; the walker can be used again."""
        self._aside.clear()
        self._take_off()

    def _take_off(self) -> None:
        handles = [*self._put, *self._kept]
        self._put, self._kept = [], []
        failed: BaseException | None = None
        for handle in reversed(handles):
            try:
                handle.remove()
            except Exception as error:
                failed = error
        if failed is not None:
            raise failed
