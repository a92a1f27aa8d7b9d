"""The former interface of `Hooks`, for callers that have not moved."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from torchtap._torch import graph_task
from torchtap.hooks.hooks import Hooks, is_compiling

__all__ = ["Walker", "shown_output"]


class Walker:
    """Former interface: a stop is passed to each function as its first argument."""

    def __init__(self, root: nn.Module, way: Any = "hook", heard: Any = None) -> None:
        self._hooks = Hooks(root, way, heard)

    def passes(
        self, begin: Callable[[], None], end: Callable[[], None] | None = None, traced: Any = None
    ) -> None:
        self._hooks.around(begin, end)

    def before(
        self, module: nn.Module, stop: Any, visit: Callable[..., Any], traced: Callable[..., Any]
    ) -> None:
        self._hooks.before(module, partial(visit, stop), traced=traced)

    def after(
        self, module: nn.Module, stop: Any, visit: Callable[..., Any], traced: Callable[..., Any]
    ) -> None:
        self._hooks.after(module, partial(visit, stop), traced=traced)

    def leave(self) -> None:
        self._hooks.remove()


def shown_output(stop: Any, visit: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward hook that passes on what a module returns."""

    def hook(module: nn.Module, args: object, output: object) -> Any:
        return visit(stop, output) if not is_compiling() and graph_task() == -1 else None

    return hook


def shown_call(visit: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward hook that passes on a call."""

    def hook(stop: Any, module: nn.Module, args: Any, kwargs: Any, output: object) -> None:
        if not is_compiling() and graph_task() == -1:
            visit(stop, args, kwargs, output)

    return hook
