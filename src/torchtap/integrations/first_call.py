"""Hear of the first call of a model, before anything in it runs: the moment at which it is in its final form.

A model may still be compiled or wrapped (DDP) after its optimizer was made. A global hook of torch's waits for the
first call of any of its modules: that module is the outermost one that the training really calls. The model itself
carries no hook meanwhile, so it can be saved or copied. Compiled modules do not go with global hooks; where the model
is compiled, hooks on the modules themselves take over.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, final

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_pre_hook,
    register_module_module_registration_hook,
)

__all__ = ["FirstCall"]

Tell = Callable[[nn.Module], None]


@final
class FirstCall:
    """Calls ``tell(module)`` once: at the first call of any module that it was told to wait for."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._waited_for: dict[int, nn.Module] = {}
        self._covered: list[tuple[nn.Module, Any]] = []
        self._done = False
        self._compiled = False
        self._global: Any = None
        self._handles: list[Any] = [register_module_module_registration_hook(self._on_registration)]
        original = self._original_compile = nn.Module.compile

        @functools.wraps(original)
        def compile_in_place(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            result = original(module, *args, **kwargs)
            if not self._done and id(module) in self._waited_for:
                self._wait_at_the_modules()
            return result

        nn.Module.compile = compile_in_place  # type: ignore[method-assign]

    def wait_for(self, root: nn.Module) -> None:
        """Wait for a call of this module, of any module in it, and of any that takes it in later."""
        if self._done:
            return
        self._waited_for |= {id(module): module for module in root.modules()}
        if any(_is_compiled(module) for module in root.modules()):
            self._wait_at_the_modules()
        elif self._global is None and not self._compiled:
            self._global = register_module_forward_pre_hook(self._on_any_call)

    def _on_registration(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if self._done or child is None or id(child) not in self._waited_for:
            return
        self._waited_for[id(parent)] = parent
        if _is_compiled(parent) or self._compiled:
            self._wait_at_the_modules()

    def _wait_at_the_modules(self) -> None:
        self._compiled = True
        if self._global is not None:
            self._global.remove()
            self._global = None
        for module in self._waited_for.values():
            compiled = module.__dict__.get("_compiled_call_impl")
            if compiled is None:
                self._handles.append(module.register_forward_pre_hook(self._on_any_call, prepend=True))
            elif not isinstance(compiled, _CoveredCall):
                # `module.compile()` compiles hooks with the module; this has to stay outside.
                self._covered.append((module, compiled))
                module.__dict__["_compiled_call_impl"] = _CoveredCall(self._on_any_call, module, compiled)

    def _on_any_call(self, module: nn.Module, args: Any) -> None:
        if not self._done and id(module) in self._waited_for and not torch.compiler.is_compiling():
            self.stop()
            self._tell(module)

    def stop(self) -> None:
        """Leave modules and torch as they were."""
        if self._done:
            return
        self._done = True
        for handle in (*self._handles, *([] if self._global is None else [self._global])):
            handle.remove()
        for module, compiled in self._covered:
            module.__dict__["_compiled_call_impl"] = compiled
        self._handles, self._covered, self._global = [], [], None
        self._waited_for.clear()
        nn.Module.compile = self._original_compile  # type: ignore[method-assign]


def _is_compiled(module: nn.Module) -> bool:
    return (
        type(module).__name__ == "OptimizedModule" or module.__dict__.get("_compiled_call_impl") is not None
    )


@final
class _CoveredCall:
    """Stands before the compiled call of a module until the first call has come."""

    def __init__(self, hook: Callable[[nn.Module, Any], None], module: nn.Module, compiled: Any) -> None:
        self._hook, self._module, self._compiled = hook, module, compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._hook(self._module, args)
        return self._compiled(*args, **kwargs)
