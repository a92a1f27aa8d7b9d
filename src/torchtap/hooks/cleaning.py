"""What a module is without torchtap's things on it, for whoever copies, pickles or scripts a watched model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from torchtap.hooks.untraced import CleanState, Hook, StandIn, Traveller, held, is_concealed, is_wrapper

__all__ = ["cleaned", "ours_off"]

_HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_NOTES_OF_HOOKS = (
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)


def cleaned(state: dict[str, Any]) -> dict[str, Any]:
    """A module's attributes without what is ours."""
    clean = {
        name: value for name, value in state.items() if not isinstance(value, (CleanState, Hook, Traveller))
    }
    for value in state.values():
        if isinstance(value, Traveller):
            clean.update(value.left())
    forward = state.get("forward")
    if isinstance(forward, StandIn):
        clean.pop("forward")
        if (own := forward.own()) is not None:
            clean["forward"] = own
    children = state.get("_modules")
    if children and any(map(is_wrapper, children.values())):
        clean["_modules"] = type(children)((name, held(child)) for name, child in children.items())
    return clean | _tables_without_ours(state)


def _tables_without_ours(state: dict[str, Any]) -> dict[str, Any]:
    """The tables that hold torchtap's hooks, without these."""
    ours = {
        key
        for table in _HOOK_TABLES
        for key, hook in (state.get(table) or {}).items()
        if isinstance(hook, (Hook, Traveller))
    }
    return {
        table: OrderedDict((key, hook) for key, hook in state[table].items() if key not in ours)
        for table in (*_HOOK_TABLES, *_NOTES_OF_HOOKS)
        if ours and state.get(table)
    }


@contextmanager
def ours_off(model: nn.Module) -> Iterator[None]:
    """A block in which the model's modules do not have torchtap's hooks."""
    taken: list[tuple[dict[str, Any], str, Any]] = []
    for module in model.modules():
        attributes = module.__dict__
        if is_concealed(attributes):
            clean = cleaned(attributes)
            for table in (*_HOOK_TABLES, *_NOTES_OF_HOOKS):
                taken.append((attributes, table, attributes[table]))
                attributes[table] = clean[table]
    try:
        yield
    finally:
        for attributes, table, hooks in taken:
            attributes[table] = hooks
