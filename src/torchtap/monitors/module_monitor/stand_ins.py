"""Stand-ins for tensors that remember what was done to them, as far as it can be told from one pass over the tensor.

A `Derived` is the tensor itself, something simple made of it, a number with its formula, or unknown. Whatever is done
to it gives another one, so that a function can be followed to its end. It guarantees:
- nothing is decided by a stand-in: asking for its truth raises;
- whatever would write into a tensor raises.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias, final

import numpy as np
import numpy.typing as npt

from torchtap.hooks.arguments import Args, Kwargs

__all__ = ["Derived", "Formula", "Unknowable", "l2", "number_of", "outcome"]

Columns: TypeAlias = npt.NDArray[np.float64]  # (fields, rows): moments.FIELDS
Formula: TypeAlias = Callable[[Columns], npt.NDArray[np.float64]]
Binary: TypeAlias = Callable[[Any, Any], Any]


class Unknowable(Exception):
    """A function does what cannot be followed on stand-ins."""


@final
class Derived:
    """A tensor or number of which only the way it came about is known.

    ``kind`` is ``x`` (the value), ``abs``, ``square``, ``zero`` (where it is 0), ``left`` and ``right`` (the
    two values of a comparison), ``number`` with its formula, or ``unknown``. An attribute that was asked for has its
    ``name`` and its ``owner``: it may be called.
    """

    __slots__ = ("formula", "kind", "name", "owner")

    kind: str
    formula: Formula | None
    owner: Derived | None
    name: str

    def __init__(
        self, kind: str, formula: Formula | None = None, owner: Derived | None = None, name: str = ""
    ) -> None:
        for slot, given in (("kind", kind), ("formula", formula), ("owner", owner), ("name", name)):
            object.__setattr__(self, slot, given)

    def __getattr__(self, name: str) -> Derived:
        if name.startswith("__"):
            raise AttributeError(name)
        return Derived("unknown", owner=self, name=name)

    def __setattr__(self, name: str, value: object) -> None:
        raise Unknowable("an attribute is set")

    def __call__(self, *args: object, **kwargs: Any) -> Derived:
        if self.owner is None:
            raise Unknowable("a value is called")
        return outcome(self.name, (self.owner, *args), kwargs)

    def __getitem__(self, key: object) -> Derived:
        return Derived("unknown")

    def __abs__(self) -> Derived:
        return outcome("abs", (self,), {})

    def __neg__(self) -> Derived:
        return _arithmetic(operator.mul, self, -1.0)

    def __add__(self, other: object) -> Derived:
        return _arithmetic(operator.add, self, other)

    def __radd__(self, other: object) -> Derived:
        return _arithmetic(operator.add, other, self)

    def __sub__(self, other: object) -> Derived:
        return _arithmetic(operator.sub, self, other)

    def __rsub__(self, other: object) -> Derived:
        return _arithmetic(operator.sub, other, self)

    def __mul__(self, other: object) -> Derived:
        return _arithmetic(operator.mul, self, other)

    def __rmul__(self, other: object) -> Derived:
        return _arithmetic(operator.mul, other, self)

    def __truediv__(self, other: object) -> Derived:
        return _arithmetic(operator.truediv, self, other)

    def __rtruediv__(self, other: object) -> Derived:
        return _arithmetic(operator.truediv, other, self)

    def __pow__(self, other: object) -> Derived:
        return outcome("pow", (self, other), {})

    def __eq__(self, other: object) -> Derived:  # type: ignore[override]
        is_zero = self.kind == "x" and isinstance(other, (int, float)) and other == 0
        return Derived("zero" if is_zero else "unknown")

    def __ne__(self, other: object) -> Derived:  # type: ignore[override]
        return Derived("unknown")

    def _unknown(self, *_: object) -> Derived:
        return Derived("unknown")

    __lt__ = __le__ = __gt__ = __ge__ = __and__ = __or__ = __invert__ = _unknown
    __matmul__ = __mod__ = __floordiv__ = __rpow__ = __rfloordiv__ = _unknown

    def _written(self, *_: object) -> Derived:
        raise Unknowable("a tensor is written into")

    __iadd__ = __isub__ = __imul__ = __itruediv__ = __ipow__ = __setitem__ = __delitem__ = _written

    def __bool__(self) -> bool:
        raise Unknowable("a stand-in has no value to decide by")

    __hash__ = None  # type: ignore[assignment]
    __iter__ = None
    __contains__ = None


def outcome(name: str, args: Args, kwargs: Kwargs) -> Derived:
    """What torch's function or method of this name makes of its arguments."""
    if not args or not isinstance(args[0], Derived):
        raise Unknowable(f"{name} of something else than the value")
    if _writes(name, args, kwargs):
        raise Unknowable(f"{name} may write into a tensor")
    value: Derived = args[0]
    rest = list(args[1:])
    rule = _RULES.get(name)
    if rule is not None:
        return rule(value, rest, kwargs)
    return _UNKNOWN if rest or kwargs else _made_of_it(name, value)


def _made_of_it(name: str, value: Derived) -> Derived:
    """What a function with no further arguments makes of a value."""
    if name in _UNCHANGED:
        return value
    if (name, value.kind) in _KINDS:
        return Derived(_KINDS[name, value.kind])
    if (name, value.kind) in _SUMS:
        return Derived("number", _SUMS[name, value.kind])
    return _of_number(value, _OF_NUMBERS[name]) if name in _OF_NUMBERS else _UNKNOWN


def number_of(value: Derived) -> Derived:
    """``float(value)``."""
    return value if value.kind == "number" else _UNKNOWN


def _writes(name: str, args: Args, kwargs: Kwargs) -> bool:
    in_place = name.endswith("_") or kwargs.get("inplace") or kwargs.get("out") is not None
    return bool(in_place) or (name.startswith("functional.") and any(given is True for given in args[1:]))


_UNKNOWN = Derived("unknown")
_UNCHANGED = {"detach", "clone", "flatten", "ravel", "contiguous", "float", "double", "cpu"}


def _norm(value: Derived, rest: list[Any], kwargs: Kwargs, orders: dict[Any, Formula]) -> Derived:
    kwargs = {key: given for key, given in kwargs.items() if given is not None and given is not False}
    if len(rest) > 1 or kwargs.keys() - {"p", "ord"} or value.kind not in ("x", "abs"):
        return _UNKNOWN
    order = rest[0] if rest else kwargs.get("p", kwargs.get("ord"))
    known = order is None or isinstance(order, (int, float, str))
    formula = orders.get(order) if known else None
    return _UNKNOWN if formula is None else Derived("number", formula)


def _spread(value: Derived, rest: list[Any], kwargs: Kwargs, root: Callable[..., Any]) -> Derived:
    if value.kind != "x" or kwargs.keys() - {"unbiased", "correction"} or len(rest) > 1 or (rest and kwargs):
        return _UNKNOWN
    unbiased = rest[0] if rest else kwargs.get("unbiased", True)
    correction = kwargs.get("correction", int(unbiased) if isinstance(unbiased, bool) else None)
    if correction not in (0, 1):
        return _UNKNOWN
    return Derived("number", lambda c: root(c[5] * c[5] * (c[0] / (c[0] - correction))))


def _power(value: Derived, rest: list[Any], kwargs: Kwargs) -> Derived:
    if len(rest) != 1 or not isinstance(rest[0], (int, float)) or kwargs:
        return _UNKNOWN
    if value.kind in ("x", "abs") and rest[0] == 2:
        return Derived("square")
    exponent = float(rest[0])
    return _of_number(value, lambda a: np.power(a, exponent))


def _difference(value: Derived, rest: list[Any], kwargs: Kwargs) -> Derived:
    return _arithmetic(operator.sub, value, rest[0]) if len(rest) == 1 and not kwargs else _UNKNOWN


def _flat(value: Derived, rest: list[Any], kwargs: Kwargs) -> Derived:
    return value if rest in ([-1], [(-1,)]) and not kwargs else _UNKNOWN


def _arithmetic(operation: Binary, left: Any, right: Any) -> Derived:
    kinds = (getattr(left, "kind", None), getattr(right, "kind", None))
    # The other way round only what does not depend on the sign would be the same, so that is not followed.
    if operation is operator.sub and kinds == ("left", "right"):
        return Derived("x")
    if operation is operator.mul and kinds == ("x", "x") and left is right:
        return Derived("square")
    if kinds == ("number", "number"):
        first, second = left.formula, right.formula
        return Derived("number", lambda c: operation(first(c), second(c)))
    if kinds[0] == "number" and isinstance(right, (int, float)):
        return _of_number(left, lambda a: operation(a, right))
    if kinds[1] == "number" and isinstance(left, (int, float)):
        return _of_number(right, lambda a: operation(left, a))
    return _UNKNOWN


def _of_number(value: Derived, then: Callable[[Any], Any]) -> Derived:
    before = value.formula
    return _UNKNOWN if before is None else Derived("number", lambda c: then(before(c)))


def l2(c: Columns) -> npt.NDArray[np.float64]:
    """The Euclidean norm. Public, since torch can compute it of many tensors in one call."""
    return np.asarray(np.hypot(c[5], c[4]) * np.sqrt(c[0]))


def _l1(c: Columns) -> npt.NDArray[np.float64]:
    return np.asarray(c[8])


def _largest_magnitude(c: Columns) -> npt.NDArray[np.float64]:
    return np.asarray(np.maximum(-c[6], c[7]))


_VECTOR_NORMS: dict[Any, Formula] = {None: l2, 2: l2, 1: _l1, math.inf: _largest_magnitude}
_FROBENIUS: dict[Any, Formula] = {**_VECTOR_NORMS, "fro": l2}
_RULES: dict[str, Callable[[Derived, list[Any], dict[str, Any]], Derived]] = {
    "norm": partial(_norm, orders=_FROBENIUS),
    "linalg.vector_norm": partial(_norm, orders=_VECTOR_NORMS),
    "linalg.norm": partial(_norm, orders={None: l2}),  # with an order it may be that of a matrix
    "std": partial(_spread, root=np.sqrt),
    "var": partial(_spread, root=np.positive),
    "pow": _power,
    "sub": _difference,
    "subtract": _difference,
    "view": _flat,
    "reshape": _flat,
}
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
    ("sum", "abs"): _l1,
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
