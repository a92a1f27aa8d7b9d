"""Which sites of a model are worth listing before it has run: those that a call of their module can give.

A plan may ask for more and says afterwards what did not come. Here a module without a forward of its own has no values,
and one is listed for attention or for named values only where its code, or a function that its code calls, names one
of the functions they come from. Code that cannot be looked into may name them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from functools import cache
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from torchtap.plan.sites import Site

__all__ = ["can_come"]

_OF_A_CALL = frozenset({"input", "output", "grad_input", "grad_output", "attention", "value"})
_SOURCES = {
    "attention": frozenset(
        {
            "scaled_dot_product_attention",
            "multi_head_attention_forward",
            "_native_multi_head_attention",
            "_transformer_encoder_layer_fwd",
        }
    ),
    "value": frozenset({"emit"}),
}
_DEPTH = 4  # helpers of helpers


def can_come(site: Site) -> bool:
    """Whether a run of the model could give this site a value."""
    module = site.module
    if module is None or site.kind not in _OF_A_CALL:
        return True
    if type(module).forward is nn.Module.forward and "forward" not in module.__dict__:
        return False
    kind: Any = type(module)
    names = _names_in_forward(kind)
    return names is None or site.kind not in _SOURCES or not _SOURCES[site.kind].isdisjoint(names)


@cache
def _names_in_forward(kind: type[Any]) -> frozenset[str] | None:
    forward = inspect.unwrap(kind.forward)
    return frozenset(_names(forward, kind, _DEPTH)) if isinstance(forward, FunctionType) else None


def _names(function: FunctionType, owner: type[nn.Module], depth: int) -> Iterator[str]:
    """The names that a function's code has, and those of its own methods and helpers that it names."""
    for name in _words(function.__code__):
        yield name
        if depth:
            for helper in _helpers(name, function, owner):
                yield from _names(helper, owner, depth - 1)


def _words(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):  # a function or a comprehension inside
            yield from _words(constant)


def _helpers(name: str, function: FunctionType, owner: type[nn.Module]) -> Iterator[FunctionType]:
    """What a name stands for: a method of the module, a function of its file, or a table of such functions."""
    found: Any = getattr(owner, name, None) if name not in nn.Module.__dict__ else None
    found = found if found is not None else function.__globals__.get(name)
    candidates = list(found.values()) if isinstance(found, Mapping) else [found]
    for each in candidates:
        if isinstance(each, FunctionType) and not each.__module__.startswith("torch."):
            yield each
