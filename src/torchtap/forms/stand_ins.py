"""A tree of stand-in modules for a model of which only a graph is left.

A plan binds to modules. Where a form has no modules any more, or only some, these take their place: the same
paths, the parameters and buffers of the real thing, and the class as far as this process knows it, so that
selectors by type work and a site knows its source.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping

from torch import nn

from torchtap.spi import ModulePath

__all__ = ["find_class", "skeleton"]


def skeleton(
    paths: Iterable[str],
    known: Mapping[str, nn.Module] | None = None,
    classes: Mapping[str, object] | None = None,
) -> nn.Module:
    """Return a tree of stand-ins for these paths and their parents.

    ``known`` has modules that exist: a stand-in has their parameters and buffers. ``classes`` has the class of
    a path, or its dotted name.
    """
    known, classes = known or {}, classes or {}
    wanted = {"": None}
    for path in paths:
        for each in (*reversed(tuple(ModulePath(path).parents)), path):
            wanted[each] = None
    made: dict[str, nn.Module] = {}
    for path in sorted(wanted, key=lambda each: len(ModulePath(each).parts)):
        module = made[path] = _stand_in(classes.get(path))
        if path in known:
            _fill(module, known[path])
    for path in wanted:
        if path:
            at = ModulePath(path)
            made[at.parent]._modules[at.name] = made[path]
    return made[""]


def _fill(stand_in: nn.Module, real: nn.Module) -> None:
    """Give a stand-in what a real module holds."""
    for held in ("_parameters", "_buffers"):
        mapping = getattr(real, held)
        # The mapping itself where it is one, so that a parameter that is replaced later is still found.
        stand_in.__dict__[held] = mapping if isinstance(mapping, dict) else dict(mapping.items())
    if not isinstance(real, nn.Sequential) and _has_graph(real):
        # Its signature names the inputs, its graph the source.
        stand_in.__dict__["forward"] = real.forward


def _has_graph(module: object) -> bool:
    """Return True if a module has a graph of its own. A scripted list has the attribute, but raises."""
    try:
        return hasattr(module, "graph")
    except RuntimeError:
        return False


def _stand_in(described: object) -> nn.Module:
    base = described if isinstance(described, type) else find_class(described)
    if base is not None and issubclass(base, nn.Module):
        # Its own __init__ is left out: nothing of it is needed but its type and its forward's signature.
        module = base.__new__(base)
        nn.Module.__init__(module)
        return module
    name = str(described).rpartition(".")[2] if described else "Module"
    stand_in: type[nn.Module] = type(name, (nn.Module,), {"_torchtap_stand_in": True})
    return stand_in()


def find_class(dotted: object) -> type | None:
    """Return a class by its dotted name if this process has it; nothing is imported."""
    module_name, _, name = str(dotted or "").rpartition(".")
    found = getattr(sys.modules.get(module_name), name, None)
    if isinstance(found, type):
        return found
    # A class that was made in a function. Of several with one name, the newest.
    return _module_classes().get(str(dotted)) if "<locals>" in str(dotted) else None


def _module_classes() -> dict[str, type]:
    """Return every class of modules by its dotted name."""
    found: dict[str, type] = {}
    waiting: list[type] = [nn.Module]
    while waiting:
        each = waiting.pop(0)
        found[f"{each.__module__}.{each.__qualname__}"] = each
        waiting.extend(type.__subclasses__(each))
    return found
