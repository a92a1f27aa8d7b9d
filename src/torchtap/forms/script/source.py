"""Make a model with carriers scriptable: TorchScript compiles source, so each tapped module gets some.

For every tapped module a subclass is written whose ``forward`` has the original's own signature, word for word:
it emits the arguments, calls the original, emits the result. The source goes into ``linecache``, where
TorchScript and every debugger find it. Which tensors there are in an argument or a result, TorchScript itself is
asked: the model without taps is scripted once for its types.

Unlike a forward hook, which TorchScript wants typed as one tuple of all arguments, this takes defaults, keywords
and any argument types. Instances of one class share the source; each has its path in an attribute.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import linecache
import re
import textwrap
import types
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import nn

from torchtap._torch import script_methods
from torchtap.errors import FormError
from torchtap.forms.copy_model import copy_with_shared_tensors
from torchtap.forms.op.carrier import carried, remove_carriers
from torchtap.forms.op.channel import CALL, SAME_CALL
from torchtap.forms.script.copying import script_modules
from torchtap.forms.script.graph import PATH_ATTRIBUTE, inputs_of
from torchtap.forms.script.types import can_hold_tensors, emit_lines
from torchtap.torchscript import ScriptMethod, ScriptType

__all__ = ["scriptable"]

_numbers = itertools.count(1)


def scriptable(model: nn.Module) -> nn.Module:
    """A copy of a model with carriers that ``torch.jit.script`` takes, with the same parameters and buffers."""
    kinds_of = carried(model)
    clean = copy_with_shared_tensors(model)
    remove_carriers(clean)
    clean.__dict__.pop("__prepare_scriptable__", None)
    typed = script_modules(torch.jit.script(clean))
    written: dict[Hashable, type[nn.Module]] = {}
    for path, module in clean.named_modules():
        kinds = kinds_of.get(path)
        instance = typed.get(path)
        method = None if instance is None else script_methods(instance).get("forward")
        if not kinds or method is None:
            continue
        key = (type(module), kinds, str(method.schema))
        if key not in written:
            written[key] = _subclass(type(module), kinds, method)
        module.__class__ = written[key]
        module.__dict__[PATH_ATTRIBUTE] = path
    return clean


def _subclass(base: type[nn.Module], kinds: tuple[str, ...], method: ScriptMethod) -> type[nn.Module]:
    header, comment = _signature(base)
    original: Any = inspect.unwrap(base.forward)
    names = [argument.name for argument in method.schema.arguments[1:]]
    body = [*comment]
    for kind in (kind for kind in kinds if kind.endswith("input")):
        given = zip(inputs_of(method), names, strict=True)
        body += _call_lines(kind, [(leaf, jit_type, name) for (leaf, jit_type), name in given])
    body.append(f"_result = self._torchtap_forward({', '.join(names)})")
    returned = method.schema.returns[0].type
    for kind in (kind for kind in kinds if kind.endswith("output")):
        body += _call_lines(kind, [("", returned, "_result")])
    body.append("return _result")
    forward = _compiled("\n    ".join([header, *body]) + "\n", original, base)
    return types.new_class(
        base.__name__,
        (base,),
        exec_body=lambda space: space.update(
            forward=forward,
            _torchtap_forward=_renamed(original, "_torchtap_forward"),
            __module__=base.__module__,
            __qualname__=base.__qualname__,
        ),
    )


def _renamed(function: Any, name: str) -> Any:
    """The same function, which TorchScript compiles under another name."""
    copy = types.FunctionType(
        function.__code__, function.__globals__, name, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__annotations__ = function.__annotations__
    copy.__module__ = function.__module__
    return copy


def _call_lines(kind: str, found: list[tuple[str, ScriptType, str]]) -> list[str]:
    """Lines that emit what a call has of a kind: leaf, type and variable. Its first tensor counts the call."""
    lines: list[str] = []
    mark = CALL
    for leaf, jit_type, name in found:
        if not can_hold_tensors(jit_type):
            continue
        if mark == CALL and jit_type.kind() != "TensorType":
            lines.append(f"torch.ops.torchtap.call({_address(kind, '', mark)})")
            mark = SAME_CALL
        lines += emit_lines(jit_type, name, _address(kind, leaf, mark), kind)
        mark = SAME_CALL
    return lines


def _address(kind: str, leaf: str, mark: str) -> str:
    return f'self.{PATH_ATTRIBUTE} + ":{mark}{kind}{"." + leaf if leaf else ""}"'


def _signature(base: type[nn.Module]) -> tuple[str, list[str]]:
    """The ``def`` line of a forward, and its types where they stand in a comment."""
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(base.forward)))
    except (OSError, TypeError) as error:
        raise FormError(
            f"{base.__name__}.forward has no source to script; script the model first and give "
            "tt.instrument the scripted one"
        ) from error
    function = next(node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
    arguments = function.args
    # Values of defaults are those of the original function; here they only have to be there.
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [default and ast.Constant(None) for default in arguments.kw_defaults]
    arguments.args[0].arg = "self"
    returns = f" -> {ast.unparse(function.returns)}" if function.returns is not None else ""
    comment = re.search(r"^\s*(# type: \(.*\) -> .*)$", source, re.MULTILINE)
    return f"def forward({ast.unparse(arguments)}){returns}:", [comment.group(1)] if comment else []


def _compiled(source: str, original: Any, base: type[nn.Module]) -> Any:
    file = f"<torchtap {base.__module__}.{base.__qualname__} {next(_numbers)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    names: Mapping[str, Any] = inspect.getclosurevars(original).nonlocals
    space: dict[str, Any] = {**original.__globals__, **names, "torch": torch}
    exec(compile(source, file, "exec", dont_inherit=True), space)
    forward = space["forward"]
    forward.__defaults__, forward.__kwdefaults__ = original.__defaults__, original.__kwdefaults__
    return forward
