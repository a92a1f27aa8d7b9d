"""Whether a class can hand a tensor out of its forward by another way than returning it.

A graph knows which tensors leave a module's forward, not how. What leaves a forward that keeps nothing on
``self``, in a container or in a global was returned: only then is its name certain. It guarantees:
- a class that is not loaded in this process, or has no Python code to read, is taken to leak;
- a leak in a method or function that the forward calls counts, torch's own code aside.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType, FunctionType

from torch import nn

from torchtap.forms.stand_ins import find_class

__all__ = ["can_leak", "is_torch_class", "returns_structure", "takes_one"]

_STORES = frozenset(("STORE_ATTR", "STORE_SUBSCR", "STORE_GLOBAL", "STORE_NAME"))
_CHANGING_METHODS = frozenset(
    [
        "append",
        "appendleft",
        "extend",
        "insert",
        "update",
        "setdefault",
        "put",
        "push",
        "setattr",
        "register_buffer",
        "__setattr__",
        "__setitem__",
        "__dict__",
    ]
)
_BUILDS = frozenset(("BUILD_TUPLE", "BUILD_LIST", "BUILD_MAP", "BUILD_CONST_KEY_MAP"))
_MOST_FUNCTIONS = 200  # that a forward is followed into


def is_torch_class(described: object) -> bool:
    """Whether a class, or its dotted name, is one of torch.nn: its forward is known to leak nothing."""
    if isinstance(described, type):
        return described.__module__.startswith("torch.nn.modules.")
    return str(described).startswith("torch.nn.modules.")


def can_leak(described: object) -> bool:
    """Whether the forward of a class, or of a dotted name of one, can hand out what it does not return."""
    if is_torch_class(described):
        return False
    found = described if isinstance(described, type) else find_class(described)
    return found is None or _leaks(found)


def returns_structure(described: object) -> bool:
    """Whether the forward of a class is seen to return a tuple, list or dict, at least in one place."""
    found = described if isinstance(described, type) else find_class(described)
    return found is not None and _builds_what_it_returns(found)


def takes_one(described: object) -> bool:
    """Whether the forward of a class has one parameter beside ``self``."""
    found = described if isinstance(described, type) else find_class(described)
    if found is None:
        return False
    parameters = list(inspect.signature(inspect.unwrap(found.forward)).parameters.values())  # type: ignore[attr-defined]
    return len(parameters) == 2 and parameters[1].kind is parameters[1].POSITIONAL_OR_KEYWORD


@lru_cache(maxsize=4096)
def _builds_what_it_returns(found: type) -> bool:
    forward = inspect.unwrap(found.forward)  # type: ignore[attr-defined]
    if not isinstance(forward, FunctionType):
        return False
    before = ""
    for instruction in dis.get_instructions(forward.__code__):
        if instruction.opname == "RETURN_VALUE" and before in _BUILDS:
            return True
        before = instruction.opname
    return False


@lru_cache(maxsize=4096)
def _leaks(found: type) -> bool:
    waiting, followed = list(_methods(found, "forward")), set[FunctionType]()
    if not waiting:
        return True
    while waiting:
        function = waiting.pop()
        if function in followed:
            continue
        followed.add(function)
        if len(followed) > _MOST_FUNCTIONS or _stores(function.__code__):
            return True
        waiting.extend(_called(found, function))
    return False


def _stores(code: CodeType) -> bool:
    for each in _with_inner(code):
        for instruction in dis.get_instructions(each):
            if instruction.opname in _STORES:
                return True
            if instruction.opname == "STORE_DEREF" and instruction.argval in each.co_freevars:
                return True
            if instruction.argval in _CHANGING_METHODS and instruction.opname.startswith("LOAD"):
                return True
    return False


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)


def _called(found: type, function: FunctionType) -> Iterator[FunctionType]:
    """The Python functions that a function may call: methods of the class, and functions it names."""
    for code in _with_inner(function.__code__):
        for name in code.co_names:
            if name != "forward" or "super" in code.co_names:
                yield from _methods(found, name)
            named = inspect.unwrap(function.__globals__[name]) if name in function.__globals__ else None
            if isinstance(named, FunctionType) and not (named.__module__ or "").startswith("torch."):
                yield named


def _methods(found: type, name: str) -> Iterator[FunctionType]:
    """Every method of this name in a class and its bases, decorators taken off; torch's own are left out."""
    for each in found.__mro__:
        if each in (nn.Module, object) or is_torch_class(each):
            continue
        method = each.__dict__.get(name)
        method = getattr(method, "__func__", method)  # of a static or class method
        if callable(method):
            method = inspect.unwrap(method)
        if isinstance(method, FunctionType):
            yield method
