"""What a user's metric computes, read from its code without running it on anything.

``lambda x: x.abs().max()`` says in its bytecode that it is the largest magnitude. `recognise` follows such
expressions on stand-ins and answers with a formula over the state that one pass over a tensor leaves. It
guarantees:
- a function is followed only if its bytecode cannot have an effect: no stores, no loops, no closures, and no
  global but torch's own functions; anything else keeps being called as it is;
- a formula is meant for real floating-point values that are all finite, two of them at least; whoever uses
  it checks that and calls the function itself otherwise;
- results are in double precision, also where the value is in a 16-bit format, in which a norm overflows.

Not here: the pass over the tensor (`reduce`), when to use a formula (`ledger`).
"""

from __future__ import annotations

import builtins
import dis
import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["Formula", "Reading", "l2", "recognise"]

Columns = npt.NDArray[np.float64]  # (fields, rows): moments.FIELDS
Formula = Callable[[Columns], npt.NDArray[np.float64]]


@final
@dataclass(frozen=True, slots=True)
class Reading:
    """What is known of a metric. ``formula`` is None where it has to be called; ``safe`` says that a call
    cannot change its arguments."""

    formula: Formula | None = None
    safe: bool = False


def recognise(function: Callable[..., Any], arguments: int = 1) -> Reading:
    """What is known of a metric of one value, or (``arguments=2``) of a value and its reference.

    With two arguments only functions of their difference have a formula.
    """
    if not _cannot_have_effects(function, arguments):
        return Reading()
    if arguments == 2:
        stand_ins = [_Value("left"), _Value("right")]
    else:
        stand_ins = [_Value("x")]
    try:
        if isinstance(function, type(Tensor.mean)):  # torch.Tensor.mean, given as it is
            answer = _Method(stand_ins[0], function.__name__)(*stand_ins[1:])
        else:
            answer = function(*stand_ins)
    except Exception:  # an expression that is not known here, whatever way it fails in
        return Reading(safe=True)
    if isinstance(answer, _Value) and answer.kind == "number":
        return Reading(answer.formula, safe=True)
    return Reading(safe=True)


# -- whether following a function is harmless ----------------------------------------------------------------

_HARMLESS = {
    "BINARY_OP",
    "BINARY_SUBSCR",
    "BUILD_SLICE",
    "BUILD_TUPLE",
    "CACHE",
    "CALL",
    "CALL_KW",
    "COMPARE_OP",
    "COPY",
    "EXTENDED_ARG",
    "KW_NAMES",
    "LOAD_ATTR",
    "LOAD_CONST",
    "LOAD_FAST",
    "LOAD_FAST_BORROW",
    "LOAD_FAST_BORROW_LOAD_FAST_BORROW",
    "LOAD_FAST_LOAD_FAST",
    "LOAD_GLOBAL",
    "LOAD_METHOD",
    "LOAD_SMALL_INT",
    "NOP",
    "NOT_TAKEN",
    "PRECALL",
    "PUSH_NULL",
    "RESUME",
    "RETURN_VALUE",
    "SWAP",
    "UNARY_NEGATIVE",
}
_HARMLESS_GLOBALS = (torch, torch.nn.functional, torch.linalg, torch.nn, math, builtins.abs, builtins.float)


def _cannot_have_effects(function: Any, arguments: int) -> bool:
    if isinstance(function, functools.partial):
        values = (*function.args, *function.keywords.values())
        plain = all(isinstance(value, (int, float, str, type(None))) for value in values)
        return plain and "out" not in function.keywords and _is_torch_function(function.func)
    if _is_torch_function(function) or not isinstance(function, FunctionType):
        return _is_torch_function(function)
    code = function.__code__
    takes_only_values = (
        code.co_argcount == arguments and not code.co_kwonlyargcount and not code.co_flags & 0x0C
    )
    if not takes_only_values or code.co_freevars or code.co_cellvars or function.__defaults__:
        return False
    for instruction in dis.get_instructions(function):
        if instruction.opname not in _HARMLESS:
            return False
        if instruction.opname == "BINARY_OP" and instruction.argrepr.endswith("="):
            return False
        if instruction.opname == "LOAD_GLOBAL" and not _is_harmless_global(function, instruction.argval):
            return False
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and _changes_its_tensor(instruction.argval):
            return False
    return not any(isinstance(c, tuple) and "out" in c for c in code.co_consts)  # keyword names are constants


def _is_torch_function(function: Any) -> bool:
    name = getattr(function, "__name__", "")
    if not name or _changes_its_tensor(name):
        return False
    if isinstance(function, type(Tensor.mean)):
        return getattr(Tensor, name, None) is function
    return any(getattr(place, name, None) is function for place in (torch, torch.linalg, torch.nn.functional))


def _is_harmless_global(function: FunctionType, name: str) -> bool:
    value = function.__globals__.get(name, getattr(builtins, name, None))
    return any(value is known for known in _HARMLESS_GLOBALS) or (
        not isinstance(value, ModuleType) and _is_torch_function(value)
    )


def _changes_its_tensor(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


# -- stand-ins that remember what was done to them -----------------------------------------------------------


@final
class _Value:
    """A tensor or number of which only the way it came about is known.

    ``kind`` is ``x`` (the value), ``abs``, ``square``, ``zero`` (where it is 0), ``left`` and ``right`` (the
    two values of a comparison), or ``number`` with its formula.
    """

    def __init__(self, kind: str, formula: Formula | None = None) -> None:
        self.kind = kind
        self.formula = formula

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _apply(function.__name__.removeprefix("linalg_"), function, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Method(self, name)

    def __abs__(self) -> _Value:
        return _apply("abs", None, (self,), {})

    def __neg__(self) -> _Value:
        return _arithmetic(operator.mul, self, -1.0)

    def __add__(self, other: Any) -> _Value:
        return _arithmetic(operator.add, self, other)

    def __radd__(self, other: Any) -> _Value:
        return _arithmetic(operator.add, other, self)

    def __sub__(self, other: Any) -> _Value:
        return _arithmetic(operator.sub, self, other)

    def __rsub__(self, other: Any) -> _Value:
        return _arithmetic(operator.sub, other, self)

    def __mul__(self, other: Any) -> _Value:
        return _arithmetic(operator.mul, self, other)

    def __rmul__(self, other: Any) -> _Value:
        return _arithmetic(operator.mul, other, self)

    def __truediv__(self, other: Any) -> _Value:
        return _arithmetic(operator.truediv, self, other)

    def __rtruediv__(self, other: Any) -> _Value:
        return _arithmetic(operator.truediv, other, self)

    def __pow__(self, other: Any) -> _Value:
        return _apply("pow", None, (self, other), {})

    def __eq__(self, other: object) -> Any:
        if self.kind == "x" and _is_plain(other) and other == 0:
            return _Value("zero")
        raise LookupError

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise LookupError("a stand-in has no value to decide by")


@final
class _Method:
    """``x.name`` as long as it has not been called."""

    def __init__(self, value: _Value, name: str) -> None:
        self._value = value
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> _Value:
        return _apply(self._name, None, (self._value, *args), kwargs)


_UNCHANGED = {"detach", "clone", "flatten", "ravel", "contiguous", "float", "double", "cpu"}


def _apply(name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Value:
    """What torch's function or method of this name makes of a stand-in; LookupError where that is not known."""
    value, *rest = args
    key = (name, value.kind if isinstance(value, _Value) else "")
    if name in ("sub", "subtract") and len(rest) == 1 and not kwargs:
        return _arithmetic(operator.sub, value, rest[0])
    if name in _UNCHANGED and not rest and not kwargs:
        return value  # type: ignore[no-any-return]
    if name in ("view", "reshape") and rest in ([-1], [(-1,)]) and not kwargs:
        return value  # type: ignore[no-any-return]
    if name in ("norm", "vector_norm"):
        return _norm(value, function, rest, kwargs)
    if name in ("std", "var"):
        return _spread(name, value, rest, kwargs)
    if name == "pow" and len(rest) == 1 and _is_plain(rest[0]) and not kwargs:
        if value.kind in ("x", "abs") and rest[0] == 2:
            return _Value("square")
        exponent = float(rest[0])
        return _number(value, lambda a: np.power(a, exponent))
    if rest or kwargs:
        raise LookupError(name)
    if key in _KINDS:
        return _Value(_KINDS[key])
    if key in _SUMS:
        return _Value("number", _SUMS[key])
    if name in _OF_NUMBERS and value.kind == "number":
        return _number(value, _OF_NUMBERS[name])
    raise LookupError(name)


def _norm(value: _Value, function: Any, rest: list[Any], kwargs: dict[str, Any]) -> _Value:
    # torch.norm and Tensor.norm are Python functions that hand their defaults on.
    kwargs = {key: given for key, given in kwargs.items() if given is not None and given is not False}
    order = rest[0] if rest else kwargs.get("p", kwargs.get("ord"))
    matrix = function is torch.linalg.norm and order is not None  # an order of it may mean a matrix norm
    if len(rest) > 1 or kwargs.keys() - {"p", "ord"} or matrix or value.kind not in ("x", "abs"):
        raise LookupError("norm")
    if order is None or order == 2 or (order == "fro" and function is not torch.linalg.vector_norm):
        return _Value("number", l2)
    if order == 1:
        return _Value("number", lambda c: c[8])
    if order == math.inf:
        return _Value("number", _largest_magnitude)
    raise LookupError("norm")


def _spread(name: str, value: _Value, rest: list[Any], kwargs: dict[str, Any]) -> _Value:
    if value.kind != "x" or kwargs.keys() - {"unbiased", "correction"} or len(rest) > 1 or (rest and kwargs):
        raise LookupError(name)
    given = rest[0] if rest else kwargs.get("unbiased", True)
    if not isinstance(given, bool):
        raise LookupError(name)
    correction = kwargs.get("correction", int(given))
    if correction not in (0, 1):
        raise LookupError(name)
    root = np.sqrt if name == "std" else np.positive
    return _Value("number", lambda c: root(c[5] * c[5] * (c[0] / (c[0] - correction))))


def _arithmetic(operation: Callable[[Any, Any], Any], left: Any, right: Any) -> _Value:
    kinds = (getattr(left, "kind", None), getattr(right, "kind", None))
    if operation is operator.sub and set(kinds) == {"left", "right"}:
        # Only what does not depend on the sign would be the same the other way round, so that is not followed.
        if kinds == ("left", "right"):
            return _Value("x")
        raise LookupError("a difference the other way round")
    if operation is operator.mul and kinds == ("x", "x") and left is right:
        return _Value("square")
    if _is_plain(right) and kinds[0] == "number":
        return _number(left, lambda a: operation(a, right))
    if _is_plain(left) and kinds[1] == "number":
        return _number(right, lambda a: operation(left, a))
    if kinds == ("number", "number"):
        first, second = left.formula, right.formula
        return _Value("number", lambda c: operation(first(c), second(c)))
    raise LookupError("arithmetic on whole tensors")


def _number(value: _Value, then: Callable[[Any], Any]) -> _Value:
    before = value.formula
    if value.kind != "number" or before is None:
        raise LookupError("not a number")
    return _Value("number", lambda c: then(before(c)))


def _is_plain(value: Any) -> bool:
    return isinstance(value, (int, float))


def l2(c: Columns) -> npt.NDArray[np.float64]:
    """The Euclidean norm. Public, since torch can compute it of many tensors in one call."""
    return np.asarray(np.hypot(c[5], c[4]) * np.sqrt(c[0]))


def _largest_magnitude(c: Columns) -> npt.NDArray[np.float64]:
    return np.asarray(np.maximum(-c[6], c[7]))


_KINDS = {
    ("abs", "x"): "abs",
    ("abs", "abs"): "abs",
    ("absolute", "x"): "abs",
    ("square", "x"): "square",
    ("square", "abs"): "square",
}
_SUMS: dict[tuple[str, str], Formula] = {
    ("mean", "x"): lambda c: c[4],
    ("mean", "abs"): lambda c: c[8] / c[0],
    ("mean", "square"): lambda c: c[5] * c[5] + c[4] * c[4],
    ("mean", "zero"): lambda c: c[3] / c[0],
    ("sum", "x"): lambda c: c[4] * c[0],
    ("sum", "abs"): lambda c: c[8],
    ("sum", "square"): lambda c: c[0] * (c[5] * c[5] + c[4] * c[4]),
    ("sum", "zero"): lambda c: c[3],
    ("max", "x"): lambda c: c[7],
    ("amax", "x"): lambda c: c[7],
    ("max", "abs"): _largest_magnitude,
    ("amax", "abs"): _largest_magnitude,
    ("max", "square"): lambda c: _largest_magnitude(c) ** 2,
    ("min", "x"): lambda c: c[6],
    ("amin", "x"): lambda c: c[6],
    ("numel", "x"): lambda c: c[0],
}
_OF_NUMBERS: dict[str, Callable[[Any], Any]] = {
    "sqrt": np.sqrt,
    "log": np.log,
    "log10": np.log10,
    "log2": np.log2,
    "exp": np.exp,
    "abs": np.abs,
    "neg": np.negative,
    "item": np.positive,
}
