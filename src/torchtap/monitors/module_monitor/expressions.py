"""What a user's metric computes, found out by running it once on a stand-in.

``lambda x: x.abs().max()``, called with an object that remembers what is done to it (`stand_ins`), says that it is the
largest magnitude. `recognise` answers with a formula over the state that one pass over a tensor leaves. It
guarantees:
- the run has no effect: nothing is in the function's reach but stand-ins for torch, ``math`` and numbers. A function
  that needs anything else (a closure, a global of its own, ``print``) fails there, and keeps being called as it is;
- a function that decides by a value, handles exceptions or writes into its argument is called as it is, too;
- a formula is meant for real floating-point values that are all finite, two of them at least; whoever uses
  it checks that and calls the function itself otherwise;
- results are in double precision, also where the value is in a 16-bit format, in which a norm overflows.

Not here: what torch's functions make of a stand-in (`stand_ins`), the pass over the tensor (`reduce`), when to use a
formula (`ledger`).
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import functional

from torchtap.monitors.module_monitor.stand_ins import Derived, Formula, Unknowable, number_of, outcome

__all__ = ["Reading", "recognise"]

_MODULES = {torch: "", torch.linalg: "linalg.", functional: "functional.", torch.nn: "nn."}
_ODD_FUNCTIONS = (
    inspect.CO_VARARGS
    | inspect.CO_VARKEYWORDS
    | inspect.CO_GENERATOR
    | inspect.CO_COROUTINE
    | inspect.CO_ASYNC_GENERATOR
)


@final
@dataclass(frozen=True, slots=True)
class Reading:
    """What is known of a metric. ``formula`` is None where it has to be called; ``safe`` says that a call
    cannot change its arguments."""

    formula: Formula | None = None
    safe: bool = False


def recognise(function: Callable[..., object], arguments: int = 1) -> Reading:
    """What is known of a metric of one value, or (``arguments=2``) of a value and its reference.

    With two arguments only functions of their difference have a formula.
    """
    stand_ins = (Derived("x"),) if arguments == 1 else (Derived("left"), Derived("right"))
    try:
        answer = _followed(function, stand_ins)
    except Exception:  # whatever way a function fails in that cannot do with stand-ins
        return Reading()
    return Reading(answer.formula if answer.kind == "number" else None, safe=True)


def _followed(function: object, stand_ins: tuple[Derived, ...]) -> Derived:
    """What a function makes of stand-ins; raises where that cannot be told."""
    if isinstance(function, functools.partial):
        plain = all(isinstance(given, (int, float, str, type(None))) for given in function.keywords.values())
        if function.args or not plain:
            raise Unknowable("a partial of something else than plain keywords")
        answer = _torch_function(function.func)(*stand_ins, **function.keywords)
    elif isinstance(function, FunctionType) and not _is_torch_function(function):
        answer = _with_nothing_in_reach(function, stand_ins)
    else:
        answer = _torch_function(function)(*stand_ins)
    if not isinstance(answer, Derived):
        raise Unknowable("its result does not depend on the value")
    return answer


def _with_nothing_in_reach(function: FunctionType, stand_ins: tuple[Derived, ...]) -> Any:
    """Run the function's code with globals that hold stand-ins for torch, ``math``, and nothing else."""
    _check_plain(function, len(stand_ins))
    code, outside = function.__code__, function.__globals__
    builtins = {"abs": abs, "float": number_of}
    reach: dict[str, object] = {
        "__builtins__": {name: known for name, known in builtins.items() if name not in outside}
    }
    for name in code.co_names:
        found = _stand_in_for(outside.get(name))
        if found is not None:
            reach[name] = found
    before = dict(reach)
    answer = FunctionType(code, reach)(*stand_ins)
    if reach != before:
        raise Unknowable("it has set a global")
    return answer


def _check_plain(function: FunctionType, arguments: int) -> None:
    code = function.__code__
    takes_only_values = code.co_argcount == arguments and not code.co_kwonlyargcount
    if not takes_only_values or code.co_freevars or function.__defaults__ or code.co_flags & _ODD_FUNCTIONS:
        raise Unknowable("it takes more than the values")
    if code.co_exceptiontable:
        raise Unknowable("it would handle the failure of what is out of reach")


def _stand_in_for(found: object) -> object:
    """What takes the place of a global; None for what is to be out of reach."""
    if found is math:
        return math
    if isinstance(found, ModuleType):
        return _Module(found) if found in _MODULES else None
    return _torch_function(found) if _is_torch_function(found) else None


@final
class _Module:
    """Stands for torch, or a module of it: its functions are not called, only noted."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        if isinstance(found, (int, float, torch.dtype)):
            return found
        if isinstance(found, ModuleType):
            return _Module(found) if found in _MODULES else None
        return functools.partial(_noted, _MODULES[self._module] + name)


def _noted(name: str, *args: object, **kwargs: object) -> Derived:
    return outcome(name, args, kwargs)


def _torch_function(function: object) -> Callable[..., Derived]:
    """A stand-in for a function or a method of torch."""
    name = getattr(function, "__name__", "")
    if name and getattr(Tensor, name, None) is function:
        return functools.partial(_noted, name)
    name = name.removeprefix("linalg_")  # torch.linalg.norm says that it is linalg_norm
    for module, prefix in _MODULES.items():
        if name and getattr(module, name, None) is function:
            return functools.partial(_noted, prefix + name)
    raise Unknowable("no function of torch's")


def _is_torch_function(function: object) -> bool:
    try:
        _torch_function(function)
    except Unknowable:
        return False
    return True
