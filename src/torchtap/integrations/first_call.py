"""Run a callback before the first call of a model, when the model has its final form.

A model may still be compiled or wrapped (DDP) after its optimizer was made. So the calls of all its modules are
intercepted, and wrappers are noticed when they receive the model. The first call is that of the outermost module that
the training calls. Everything is removed before the call continues, so taps that are attached meanwhile see all of it.

torch looks for ``_compiled_call_impl`` first when a module is called; that is what is covered here. Copies and pickles
of a module leave it out, so they carry no trace.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, final

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

__all__ = ["FirstCall"]

Tell = Callable[[nn.Module], None]
_CALL = "_compiled_call_impl"


@final
class FirstCall:
    """Calls ``tell(module)`` once: at the first call of any module in its list."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._covered: dict[int, _CoveredCall] = {}
        self._done = False
        self._registration = register_module_module_registration_hook(self._on_registration)
        original = self._original_compile = nn.Module.compile

        @functools.wraps(original)
        def compile_in_place(module: nn.Module, *args: object, **kwargs: object) -> object:
            result = original(module, *args, **kwargs)
            if not self._done and id(module) in self._covered:
                self._cover(module)
            return result

        nn.Module.compile = compile_in_place  # type: ignore[method-assign, assignment]

    def wait_for(self, root: nn.Module) -> None:
        """Wait for a call of this module, of any module in it, and of any that takes it in later."""
        if not self._done:
            for module in root.modules():
                self._cover(module)

    def _on_registration(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if not self._done and child is not None and id(child) in self._covered:
            self._cover(parent)

    def _cover(self, module: nn.Module) -> None:
        there = module.__dict__.get(_CALL)
        if not isinstance(there, _CoveredCall):
            self._covered[id(module)] = covered = _CoveredCall(self._on_call, module, there)
            module.__dict__[_CALL] = covered

    def _on_call(self, module: nn.Module) -> None:
        if not self._done:
            self.stop()
            self._tell(module)

    def stop(self) -> None:
        """Remove every hook from the modules and from torch."""
        if self._done:
            return
        self._done = True
        self._registration.remove()
        for covered in self._covered.values():
            covered.remove()
        self._covered.clear()
        nn.Module.compile = self._original_compile  # type: ignore[method-assign]


@final
class _CoveredCall:
    """Stands before the call of a module until the first call has come."""

    def __init__(self, tell: Tell, module: nn.Module, compiled: object) -> None:
        self._tell, self._module, self._compiled = tell, module, compiled

    def __call__(self, *args: object, **kwargs: object) -> Any:
        module = self._module
        if torch.compiler.is_compiling():  # a function around the model is compiled: its calls are never seen
            return module._call_impl(*args, **kwargs)
        self._tell(module)
        self.remove()
        return module(*args, **kwargs)

    def remove(self) -> None:
        """Put back what was there."""
        held = self._module.__dict__
        if held.get(_CALL) is self:
            if self._compiled is None:
                del held[_CALL]
            else:
                held[_CALL] = self._compiled
