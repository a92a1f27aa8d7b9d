"""Whether a class can hand a tensor out of its forward by another way than returning it.

A graph knows which tensors leave a module's forward, not how. What leaves a forward that keeps nothing on
``self``, in a container or in a global was returned: only then is its name certain. It guarantees:
- a class that is not loaded in this process, or has no Python code to read, is taken to leak;
- a leak in a method or function that the forward calls counts, torch's own code aside.
"""

from __future__ import annotations

import ast
import dis
import inspect
import textwrap
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType, FunctionType, ModuleType
from typing import Any, final

from torch import nn

from torchtap.forms.stand_ins import find_class

__all__ = ["can_leak", "is_meddled_with", "is_torch_class", "returns_structure", "takes_one", "takes_several"]

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
_CHANGING_ATTRIBUTES = frozenset(("set", "add", "send"))  # of a context variable, a set, a generator
# Calls that return several tensors, or what a container holds.
_SEVERAL = frozenset(
    [
        "split", "chunk", "unbind", "tensor_split", "hsplit", "vsplit", "dsplit", "topk", "sort", "max", "min",
        "median", "mode", "kthvalue", "std_mean", "var_mean", "frexp", "svd", "qr", "eigh", "eig", "slogdet", "lu",
        "unique", "aminmax", "cummax", "cummin", "meshgrid", "broadcast_tensors", "nonzero", "pop", "get", "items",
        "values", "keys", "copy", "tuple", "list", "dict", "zip", "map", "filter", "sorted", "reversed", "set",
    ]
)  # fmt: skip
_VIEWS = ("T", "mT", "H", "mH", "real", "imag", "data")  # attributes that are tensors
_DEEPEST = 6  # functions that return what another returns
_MOST_FUNCTIONS = 200  # that a forward is followed into


def is_torch_class(described: object) -> bool:
    """Return True if a class, or its dotted name, is one of torch.nn: its forward is known to leak nothing."""
    if isinstance(described, type):
        return described.__module__.startswith("torch.nn.modules.")
    return str(described).startswith("torch.nn.modules.")


def can_leak(described: object) -> bool:
    """Return True if the forward of a class, or of a dotted name of one, can hand out what it does not return."""
    if is_torch_class(described):
        return False
    found = described if isinstance(described, type) else find_class(described)
    return found is None or _leaks(found)


def returns_structure(described: object, of_child: bool = False) -> bool:
    """Return False if every return of a class's forward is seen to be one tensor.

    of_child: whether the module inside that made the value may return a structure; the forward may hand that on.
    """
    found = described if isinstance(described, type) else find_class(described)
    return found is None or _Returns(found, of_child).of_method("forward")


def is_meddled_with(described: object) -> bool:
    """Return True if a class puts hooks or other forwards on modules when it is made: these may keep any tensor."""
    found = described if isinstance(described, type) else find_class(described)
    return found is not None and not is_torch_class(found) and _meddles(found)


@lru_cache(maxsize=4096)
def _meddles(found: type) -> bool:
    for function in _methods(found, "__init__"):
        for code in _with_inner(function.__code__):
            if any("forward" in name and "hook" in name for name in code.co_names):
                return True
            stores = (each for each in dis.get_instructions(code) if each.opname == "STORE_ATTR")
            if any(each.argval == "forward" for each in stores):
                return True
    return False


def takes_one(described: object) -> bool:
    """Return True if the forward of a class has one parameter beside ``self``."""
    found = described if isinstance(described, type) else find_class(described)
    if found is None:
        return False
    parameters = list(inspect.signature(inspect.unwrap(found.forward)).parameters.values())  # type: ignore[attr-defined]
    return len(parameters) == 2 and parameters[1].kind is parameters[1].POSITIONAL_OR_KEYWORD


def takes_several(described: object) -> bool:
    """Return True if the forward of a class is known to have more than one parameter beside ``self``."""
    found = described if isinstance(described, type) else find_class(described)
    return found is not None and len(inspect.signature(inspect.unwrap(found.forward)).parameters) > 2  # type: ignore[attr-defined]


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
        if len(followed) > _MOST_FUNCTIONS or _stores(function.__code__) or _calls_back(function):
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
            if instruction.argval in _CHANGING_ATTRIBUTES and instruction.opname in (
                "LOAD_ATTR",
                "LOAD_METHOD",
            ):
                return True
    return False


def _calls_back(function: FunctionType) -> bool:
    """Return True if a function calls one of its arguments, which may keep what it is given."""
    tree = _tree_of(function)
    if tree is None:
        return True
    given = {each.arg for each in (*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs)}
    called = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return any(isinstance(each, ast.Name) and each.id in given for each in called)


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


@lru_cache(maxsize=4096)
def _tree_of(function: FunctionType) -> ast.FunctionDef | None:
    """Return the source of a function as a tree; None if it has none."""
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, SyntaxError):
        return None
    return next((node for node in body if isinstance(node, ast.FunctionDef)), None)


@final
class _Returns:
    """Tell whether functions of a class may return a structure. Whatever is not understood may be one."""

    def __init__(self, found: type, of_child: bool) -> None:
        self._found = found
        self._of_child = of_child
        self._depth = 0

    def of_method(self, name: str) -> bool:
        functions = [each for each in (getattr(self._found, name, None),) if callable(each)]
        unwrapped = [inspect.unwrap(each) for each in functions]
        return not unwrapped or any(
            not isinstance(each, FunctionType) or self._of_function(each) for each in unwrapped
        )

    def _of_function(self, function: FunctionType) -> bool:
        tree = _tree_of(function)
        if tree is None or self._depth >= _DEEPEST:
            return True
        self._depth += 1
        try:
            names = _Names(self, function, tree)
            returned = [node.value for node in _own_nodes(tree) if isinstance(node, ast.Return)]
            return any(each is not None and names.may_be(each) for each in returned)
        finally:
            self._depth -= 1

    def of_call(self, call: ast.Call, names: _Names) -> bool:
        """Return True if what a call returns may be a structure."""
        match call.func:
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if owner == names.itself:
                known = getattr(self._found, name, None)
                return self.of_method(name) if inspect.isfunction(known) else self._of_child
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super"))):
                return any(self._of_function(each) for each in _bases(self._found, names.function))
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if isinstance(
                names.globals.get(owner), ModuleType
            ):
                return self._of_object(getattr(names.globals[owner], name, None), name)
            case ast.Attribute(attr=name):
                return name in _SEVERAL
            case ast.Name(id=name) if name in names.globals and name not in names.assigned:
                return self._of_object(names.globals[name], name)
            case ast.Name(id=name) if name in _SEVERAL:
                return True
        return self._of_child  # a module in a variable or a list

    def _of_object(self, called: Any, name: str) -> bool:
        if name in _SEVERAL or isinstance(called, type):
            return True
        called = inspect.unwrap(called) if callable(called) else called
        if isinstance(called, FunctionType) and not (called.__module__ or "").startswith("torch"):
            return self._of_function(called)
        return False


@final
class _Names:
    """The variables of one function: what each may be."""

    def __init__(self, returns: _Returns, function: FunctionType, tree: ast.FunctionDef) -> None:
        self._returns = returns
        self.function = function
        self.globals = function.__globals__
        arguments = [each.arg for each in (*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs)]
        self.itself = arguments[0] if arguments else ""
        self._given = set(arguments)
        self.assigned: dict[str, list[ast.expr | bool]] = {}
        self._asked: set[str] = set()
        for node in _own_nodes(tree):
            self._read(node)

    def _read(self, node: ast.AST) -> None:
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._assign(target, value)
            case ast.AugAssign(target=target, value=value) | ast.NamedExpr(target=target, value=value):
                self._assign(target, value)
            case ast.AnnAssign(target=target, value=value) if value is not None:
                self._assign(target, value)
            case ast.For(target=target) | ast.comprehension(target=target):
                self._assign(target, True)
            case ast.withitem(optional_vars=target) if target is not None:
                self._assign(target, True)

    def _assign(self, target: ast.expr, value: ast.expr | bool) -> None:
        match target:
            case ast.Name(id=name):
                self.assigned.setdefault(name, []).append(value)
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                values: list[ast.expr | bool] = [True] * len(parts)
                if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(parts):
                    values = list(value.elts)
                elif isinstance(value, ast.Call) and getattr(value.func, "attr", "") in _SEVERAL:
                    values = [False] * len(parts)  # the parts of a tensor
                for part, each in zip(parts, values, strict=True):
                    self._assign(part, each)

    def may_be(self, value: ast.expr | bool) -> bool:  # noqa: C901 - one line for each kind of expression
        """Return True if an expression may be a structure."""
        match value:
            case bool():
                return value
            case ast.Constant() | ast.UnaryOp() | ast.Compare() | ast.JoinedStr():
                return False
            case ast.BinOp(left=left, op=ast.Add() | ast.Mult(), right=right):
                return self.may_be(left) and self.may_be(right)
            case ast.BinOp():
                return False
            case ast.BoolOp(values=values):
                return any(map(self.may_be, values))
            case ast.IfExp(body=body, orelse=orelse):
                return self.may_be(body) or self.may_be(orelse)
            case ast.NamedExpr(value=inner):
                return self.may_be(inner)
            case ast.Subscript(value=inner):
                return self.may_be(inner)
            case ast.Attribute(attr=name):
                return name not in _VIEWS
            case ast.Name(id=name):
                return self._may_be_named(name)
            case ast.Call():
                return self._returns.of_call(value, self)
        return True

    def _may_be_named(self, name: str) -> bool:
        if name in self._asked:  # ``x = x + 1``
            return False
        if name not in self.assigned:
            return name not in self._given
        self._asked.add(name)
        try:
            return any(map(self.may_be, self.assigned[name]))
        finally:
            self._asked.discard(name)


def _own_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node of a function, without those of functions inside it."""
    for node in ast.iter_child_nodes(tree):
        yield node
        if not isinstance(node, ast.FunctionDef | ast.Lambda | ast.ClassDef):
            yield from _own_nodes(node)


def _bases(found: type, function: FunctionType) -> Iterator[FunctionType]:
    """The methods of the same name in the bases of a class."""
    for each in _methods(found, function.__name__):
        if each is not function:
            yield each
