"""Decide whether torch may read an exported program (``.pt2``) that a stranger made, without running their code.

torch trusts such a file: it unpickles some weights, hands texts to ``eval`` (expressions, guards), pastes names into
Python source that it executes, and imports modules that a tree's description names. So every text of the program
passes here first. A text is known by its key: an operator, an expression, a guard, a name, a tree. Free texts, which
torch never gives a meaning, may be anything. Every other text must have nothing in it that could leave a quoted string.

It guarantees: what passes names only registered operators, plain arithmetic and identifiers. Whatever is not
understood is refused, and the refusal says what would have run.

Not here: opening files (`load`), weights and inputs, which torch reads with ``weights_only``.
"""

from __future__ import annotations

import ast
import json
import keyword
import math
import operator
import re
from collections.abc import Callable
from typing import Any

import torch

from torchtap._torch import OPERATORS
from torchtap.errors import FormError
from torchtap.sanitize import parse_json

__all__ = ["check_payloads", "check_program", "check_tree"]

_FREE = {
    "as_string",
    "as_strings",
    "stack_trace",
    "nn_module_stack",
    "source_fn_stack",
    "from_node",
    "torch_fn",
}
_PLAIN = re.compile(r"[^\x00-\x1f\x7f-\x9f\u2028\u2029\"'\\`{}]*")  # cannot end a quoted string or a line
_OPERATOR = re.compile(r"torch\.ops(\.[A-Za-z_]\w*){2,3}", flags=re.ASCII)
_SYMBOL = re.compile(r"(?!__)[A-Za-z_]{1,40}\d{0,18}", flags=re.ASCII)
_PYTHON_OPERATORS = frozenset(
    {
        "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg", "pos", "abs", "eq", "ne", "lt", "le", "gt",
        "ge", "and_", "or_", "xor", "not_", "lshift", "rshift", "getitem",
    }
)  # fmt: skip
# They write or read files of the machine when they run.
_OPERATORS_ON_FILES = {"torch.ops.aten.from_file", "torch.ops.aten.save"}
_FUNCTIONS = frozenset(
    {
        "Symbol", "Integer", "Float", "Rational", "Add", "Mul", "Pow", "Mod", "Max", "Min", "Abs", "Eq", "Equality",
        "Ne", "Unequality", "Lt", "Le", "Gt", "Ge", "StrictLessThan", "LessThan", "StrictGreaterThan", "GreaterThan",
        "And", "Or", "Not", "Piecewise", "ExprCondPair", "Tuple", "floor", "ceiling", "sqrt", "log", "exp", "FloorDiv",
        "ModularIndexing", "Where", "PythonMod", "CleanDiv", "CeilToInt", "FloorToInt", "CeilDiv", "LShift", "RShift",
        "PowByNatural", "FloatPow", "FloatTrueDiv", "IntTrueDiv", "IsNonOverlappingAndDenseIndicator", "TruncToFloat",
        "TruncToInt", "RoundToInt", "RoundDecimal", "ToFloat", "Identity",
    }
)  # fmt: skip
_GUARD_ATTRIBUTES = frozenset(
    {
        "size", "stride", "storage_offset", "shape", "dim", "numel", "isnan", "isinf", "sqrt", "floor", "ceil",
    }
)  # fmt: skip
_ARITHMETIC = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Load, ast.operator, ast.unaryop, ast.boolop,
    ast.cmpop, ast.Constant, ast.keyword,
)  # fmt: skip
_MOST_LETTERS = 20_000  # of an expression: torch's own have some hundreds
_FACTORIES = {"list", "dict", "set", "int", "float", "str", "tuple"}


def _refuse(what: str, text: str) -> FormError:
    return FormError(
        f"{what} {text[:100]!r}: reading it could run code of whoever made the file; if you trust it, say unsafe=True "
        "(--unsafe)"
    )


def check_program(text: bytes) -> None:
    """Raise ``FormError`` unless the program's JSON means nothing but operators, arithmetic and names."""
    try:
        program = parse_json(text, bounded=False)
        _walk(program, "", 0)
    except (ValueError, RecursionError) as error:
        raise FormError(f"its program is not JSON: {str(error)[:200]}") from None


def check_payloads(text: bytes) -> None:
    """The same for the list of weights or constants: no objects, only tensors."""
    try:
        listed = parse_json(text, bounded=False)
        payloads = listed["config"].values()
        paths = [str(payload["path_name"]) for payload in payloads]
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise FormError(f"its list of weights is damaged: {str(error)[:200]}") from None
    for path in paths:
        if not re.fullmatch(r"(weight|tensor)_\d{1,9}", path, flags=re.ASCII):
            raise _refuse("it holds a pickled object,", path)
    _walk(listed, "", 0)


def check_tree(text: str) -> None:
    """The same for the text of a pytree's description."""
    try:
        _walk_tree(parse_json(text, bounded=False))
    except (ValueError, RecursionError) as error:
        raise FormError(f"the description of its inputs or outputs is not JSON: {str(error)[:200]}") from None


def _walk(value: object, key: str, depth: int) -> None:
    if depth > 200:
        raise FormError("its program is nested too deeply")
    if isinstance(value, str):
        if key not in _FREE:
            _CHECKS.get(key, _plain)(value)
    elif isinstance(value, list):
        for each in value:
            _walk(each, key, depth + 1)
    elif isinstance(value, dict):
        for name, each in value.items():
            _plain(name)
            if name != "custom" or key != "metadata":  # kept as JSON and given no meaning
                _walk(each, name, depth + 1)


def _plain(text: str) -> None:
    if not _PLAIN.fullmatch(text) or ("__" in text and text.endswith("__")):
        raise _refuse("it has the text", text)


def _identifier(text: str) -> None:
    if text and (not text.isidentifier() or not text.isascii() or keyword.iskeyword(text)):
        raise _refuse("it has a value with the name", text)


def _operator(text: str) -> None:
    module, _, name = text.partition(".")
    known = (
        module == "_operator" and name in _PYTHON_OPERATORS,
        module == "math" and name.isalpha() and callable(getattr(math, name, None)),
        re.fullmatch(r"torch\.(sym_\w+|_sym_\w+)", text, flags=re.ASCII) is not None,
    )
    if not any(known) and not _is_of_torch(text):
        raise _refuse("it calls", text)


def _is_of_torch(text: str) -> bool:
    """Whether this is one of torch's operators that touch no file; one that torch does not have it refuses itself."""
    if not _OPERATOR.fullmatch(text) or ".".join(text.split(".")[:4]) in _OPERATORS_ON_FILES:
        return False
    try:
        found: Any = operator.attrgetter(text.removeprefix("torch."))(torch)
    except (AttributeError, RuntimeError):
        return True
    return isinstance(found, OPERATORS)


def _expression(text: str) -> None:
    for node in _parsed(text):
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in _FUNCTIONS:
                pass
            case ast.Name(id=name) if _SYMBOL.fullmatch(name) or name in _FUNCTIONS:
                pass
            case ast.Constant(value=str(name)) if not _SYMBOL.fullmatch(name):
                raise _refuse("it has the expression", text)
            case _ if not isinstance(node, _ARITHMETIC):
                raise _refuse("it has the expression", text)


def _guard(text: str) -> None:
    for node in _parsed(text):
        match node:
            case ast.Attribute(attr=name) if name in _GUARD_ATTRIBUTES:
                pass
            case ast.Call(func=ast.Attribute()):
                pass
            case ast.Call(func=ast.Name(id=name)) if name in _FUNCTIONS:
                pass
            case ast.Name(id=name) if name in ("L", "math", "inf") or name in _FUNCTIONS:
                pass
            case ast.Constant(value=str(name)):
                _plain(name)
            case ast.Subscript() | ast.Tuple():
                pass
            case _ if not isinstance(node, _ARITHMETIC):
                raise _refuse("it has the guard", text)


def _parsed(text: str) -> list[ast.AST]:
    """Every node of an expression. Names in it are told apart from functions by what stands around them."""
    try:
        if len(text) > _MOST_LETTERS or "\n" in text:
            raise ValueError
        nodes = list(ast.walk(ast.parse(text, mode="eval")))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raise _refuse("it has the expression", text) from None
    powers = [node for node in nodes if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow)]
    if len(powers) > 4 or any(not _small(node.right) for node in powers):
        raise _refuse("it has the expression", text)  # a tower of powers never ends
    return nodes


def _small(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float) and abs(node.value) <= 64


def _walk_tree(value: object) -> None:
    match value:
        case str(text):
            if text[:1] in ("{", "[", '"'):  # a context is JSON in JSON
                _walk_tree(parse_json(text, bounded=False))
            else:
                _plain(text)
        case list(values):
            for each in values:
                _walk_tree(each)
        case dict(facts):
            if "__enum__" in facts or not _harmless_factory(facts):
                raise _refuse("it names a class to import:", json.dumps(facts))
            for name, each in facts.items():
                _plain(name)
                _walk_tree(each)


def _harmless_factory(facts: dict[str, object]) -> bool:
    if "default_factory_module" not in facts:
        return True
    return facts["default_factory_module"] == "builtins" and facts.get("default_factory_name") in _FACTORIES


_CHECKS: dict[str, Callable[[str], None]] = {
    "target": _operator,
    "as_operator": _operator,
    "expr_str": _expression,
    "guards_code": _guard,
    "name": _identifier,
    "as_name": _identifier,
    "forward_arg_names": _identifier,
    "in_spec": check_tree,
    "out_spec": check_tree,
}
