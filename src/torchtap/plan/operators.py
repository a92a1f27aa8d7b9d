"""Sites of operators: the values between modules, such as a softmax inside an attention or a residual sum.

    with capture(model, "blocks.*.attn/softmax:output") as seen:
        model(x)

``path/function`` is a call of one of torch's functions in the code of the module at ``path`` itself, not in that of a
module inside it. The calls of one function in one module are numbered in each pass. An operator is a module that stands
for these calls, so hooks, reductions, gradients and edits reach it as they reach any module. It guarantees:
- without an operator in a plan nothing here is imported, and nothing is called for any function;
- with one, only functions of the wanted names are handed to an operator; every other costs a look at its name;
- the function itself runs, on the arguments that it was given.

Eager models only: other forms refuse it. Functions that a function of torch calls inside are not seen.
"""

from __future__ import annotations

import dis
import fnmatch
import inspect
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from types import CodeType, FunctionType
from typing import Any, final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, get_overridable_functions

from torchtap.plan.names import ModulePath, selector_parts
from torchtap.plan.sites import Place, places

__all__ = [
    "SEPARATOR",
    "Operator",
    "OperatorCalls",
    "function_name",
    "operator_places",
    "operators_in",
    "operators_of",
]

SEPARATOR = "/"
_DEEPEST = 4  # helpers of helpers, where names are looked for
_SYMBOLS = {
    "+": "add", "-": "sub", "*": "mul", "/": "truediv", "//": "floordiv", "@": "matmul", "**": "pow", "%": "mod",
    "+=": "iadd", "-=": "isub", "*=": "imul", "/=": "itruediv",
}  # fmt: skip
_METHODS = {f"__{sign}{name}__": name for name in _SYMBOLS.values() for sign in ("", "r")}


@final
class Operator(nn.Module):
    """The calls of one function in the code of one module."""

    def __init__(self, path: str, function: str) -> None:
        super().__init__()
        self.path = path
        self.function = function
        self.running: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        function, self.running = self.running, None
        return function(*args, **kwargs)


def function_name(function: Any) -> str:
    """Return the name by which a function of torch is asked for: ``softmax``, ``add`` for ``+``, ``relu_``."""
    name = getattr(function, "__name__", "")
    return _METHODS.get(name) or name.strip("_") + (
        "_" if name.endswith("_") and not name.endswith("__") else ""
    )


def operator_places(found: Sequence[Place], selectors: Iterable[str]) -> list[Place]:
    """Return the operators that selectors ask for: a module for each function at each path."""
    known = {place.path for place in found}
    made: dict[str, Place] = {}
    for text in selectors:
        asked = selector_parts(text)[0]
        owner, slash, function = asked.rpartition(SEPARATOR)
        if not slash or asked in known or text.startswith("re:"):
            continue
        for place in found:
            names = operators_in(place.module) if any(sign in function for sign in "*?[") else (function,)
            for name in names:
                path = f"{place.path}{SEPARATOR}{name}"
                if fnmatch.fnmatchcase(name, function) and path not in made and _is_asked(place.path, owner):
                    made[path] = Place(path, Operator(place.path, name))
    return list(made.values())


def _is_asked(path: str, owner: str) -> bool:
    """Return True if a path is one that the part of a selector before the slash means."""
    if "." not in owner and owner not in ("", "*", "**"):
        return fnmatch.fnmatchcase(ModulePath(path).name, owner) or path == owner
    return (
        owner in ("*", "**")
        or path == owner
        or _glob(tuple(ModulePath(owner).parts), tuple(ModulePath(path).parts))
    )


def _glob(pattern: tuple[str, ...], parts: tuple[str, ...]) -> bool:
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_glob(pattern[1:], parts[n:]) for n in range(len(parts) + 1))
    return bool(parts) and fnmatch.fnmatchcase(parts[0], pattern[0]) and _glob(pattern[1:], parts[1:])


# -- which operators a module has, by its code ------------------------------------------------------------------------


@cache
def _functions_of_torch() -> frozenset[str]:
    found = (function for functions in get_overridable_functions().values() for function in functions)
    return frozenset(map(function_name, found)) - {"get", "set", "type", "size", "dim", "len", "float", ""}


def operators_in(module: nn.Module) -> tuple[str, ...]:
    """Return the functions of torch that the code of a module names, with its own methods and helpers."""
    forward = inspect.unwrap(type(module).forward)
    return _operators_in(forward, type(module)) if isinstance(forward, FunctionType) else ()  # type: ignore[arg-type]


@cache
def _operators_in(forward: FunctionType, owner: type[nn.Module]) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for function in _followed(forward, owner, _DEEPEST, set()):
        for code in _with_inner(function.__code__):
            for instruction in dis.get_instructions(code):
                symbol = instruction.argrepr if instruction.opname == "BINARY_OP" else ""
                name = _SYMBOLS.get(symbol, str(instruction.argval))
                if symbol in _SYMBOLS or (
                    instruction.opname.startswith("LOAD") and name in _functions_of_torch()
                ):
                    found[name] = None
    return tuple(found)


def _followed(
    function: FunctionType, owner: type[nn.Module], depth: int, seen: set[FunctionType]
) -> Iterator[FunctionType]:
    if function in seen:
        return
    seen.add(function)
    yield function
    names = [name for code in _with_inner(function.__code__) for name in code.co_names] if depth else []
    for name in names:
        helper: Any = getattr(owner, name, None) if name not in nn.Module.__dict__ else None
        helper = helper if helper is not None else function.__globals__.get(name)
        if isinstance(helper, FunctionType) and not (helper.__module__ or "").startswith("torch"):
            yield from _followed(helper, owner, depth - 1, seen)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)


def operators_of(model: nn.Module) -> list[str]:
    """Return the operators of a model by name, as far as its code shows them: ``blocks.0.attn/softmax``."""
    return [
        f"{place.path}{SEPARATOR}{name}" for place in places(model) for name in operators_in(place.module)
    ]


# -- while a model runs -----------------------------------------------------------------------------------------


class _Mode(TorchFunctionMode):
    """Hands calls of wanted functions to their operators."""

    def __init__(self, calls: OperatorCalls) -> None:
        super().__init__()
        self._calls = calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function_name(func)
        if name not in self._calls.names:
            return func(*args, **kwargs)
        operator = self._calls.find(name)
        if operator is None:
            return func(*args, **kwargs)
        operator.running = func
        return operator(*args, **kwargs)


@final
class OperatorCalls:
    """Run a model with its operators in place of the functions that they stand for, from `begin` to `end` of a pass."""

    def __init__(self, found: Iterable[Place], operators: Iterable[Operator]) -> None:
        self._operators = {(each.path, each.function): each for each in operators}
        self.names = frozenset(function for _, function in self._operators)
        self._paths = {
            id(place.module): place.path for place in found if not isinstance(place.module, Operator)
        }
        self._modes: list[_Mode] = []

    def begin(self) -> None:
        """Enter the mode: the model was called."""
        if not torch.compiler.is_compiling():
            mode = _Mode(self)
            mode.__enter__()  # type: ignore[no-untyped-call]
            self._modes.append(mode)

    def end(self) -> None:
        """Leave the mode: the call is over."""
        if self._modes:
            self._modes.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def find(self, name: str) -> Operator | None:
        """Return the operator for a function that the innermost running module calls."""
        frame: Any = sys._getframe(2)
        while frame is not None:
            running = frame.f_locals.get("self") if "self" in frame.f_code.co_varnames[:1] else None
            if isinstance(running, nn.Module) and id(running) in self._paths:
                return self._operators.get((self._paths[id(running)], name))
            frame = frame.f_back
        return None
