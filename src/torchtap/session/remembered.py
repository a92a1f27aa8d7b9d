"""What binding a capture's selectors to a model has found, remembered for the next capture of the same model.

Small models are looked into thousands of times with the same words. It guarantees:
- a memory is used only while the model has the same modules of the same classes under the same names, and no part of
  it was compiled;
- a memory holds no module: names and weak references, so that a model goes when its last user lets go of it. Whoever
  is given a remembered plan is given the modules, too, and holds them for as long as it asks the plan.

Only text and plain data are remembered: a function may answer otherwise next time, or hold the model. Parameters and
buffers are bound anew each time, since they are known by their identity.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, final, overload
from weakref import WeakKeyDictionary, ref

from torch import nn

from torchtap.plan.plan import LISTED_KINDS, Plan, Port
from torchtap.plan.sites import Place, Site
from torchtap.reduce.kernel import native
from torchtap.store.write.pool import HostPool, pool_of

__all__ = ["remember", "remembered"]

_MOST = 8  # different captures of one model


# What ``module.compile()`` or another forward leaves among a module's own attributes.
_FOREIGN = ("_compiled_call_impl", "forward")
# A checkout may still hold the build of an older source, without it.
_same_modules = getattr(native, "same_modules", None)


@final
class _Shape:
    """Which modules a model has, and how they hang together."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        numbers = {id(module): number for number, module in enumerate(modules)}
        tables = [module._modules for module in modules]
        self._modules = [ref(module) for module in modules]
        self._types = list(map(type, modules))
        self._counts = list(map(len, tables))
        self._names = [name for table in tables for name in table]
        self._children = [numbers.get(id(child), -1) for table in tables for child in table.values()]

    def modules_of(self) -> list[nn.Module] | None:
        """The modules, if they are what they were. Asked by each capture, so that native code looks where it can."""
        if _same_modules is not None:
            known = self._modules, self._types, self._counts, self._names, self._children
            same: list[nn.Module] | None = _same_modules(*known)
            return same
        modules: list[Any] = [each() for each in self._modules]
        if list(map(type, modules)) != self._types:  # also where one is gone
            return None
        tables = [module._modules for module in modules]
        if (
            list(map(len, tables)) != self._counts
            or [name for each in tables for name in each] != self._names
        ):
            return None
        children = [child for table in tables for child in table.values()]
        if children != [None if number < 0 else modules[number] for number in self._children]:
            return None
        return None if any(name in module.__dict__ for module in modules for name in _FOREIGN) else modules


@final
class _WeakPlaces(Sequence[Place]):
    """The places of a model, made for whoever asks: they hold their modules, this does not."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._listed = [(place.path, ref(place.module), place.other_paths) for place in places]

    def __len__(self) -> int:
        return len(self._listed)

    @overload
    def __getitem__(self, index: int) -> Place: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Place]: ...
    def __getitem__(self, index: int | slice) -> Place | Sequence[Place]:
        if isinstance(index, slice):
            return [_place(*each) for each in self._listed[index]]
        return _place(*self._listed[index])

    def __iter__(self) -> Iterator[Place]:
        return (_place(*each) for each in self._listed)


def _place(path: str, held: ref[nn.Module], others: tuple[str, ...]) -> Place:
    module = held()
    assert module is not None, "whoever uses a plan that was remembered holds the model's modules"
    return Place(path, module, others)


@final
class _Memory:
    """All plans of one model as it was when the first of them was made."""

    def __init__(self, model: nn.Module) -> None:
        self.shape = _Shape(model)
        self.pool = pool_of(model)
        self.plans: dict[tuple[object, ...] | None, Plan] = {}


_OF_MODELS: WeakKeyDictionary[nn.Module, _Memory] = WeakKeyDictionary()


def remembered(
    model: object, taps: tuple[object, ...], keep: object
) -> tuple[Plan, list[nn.Module], HostPool] | None:
    """The plan of an earlier capture with the same words, for the model as it is; None where there is none.

    The plan does not hold the model's modules. Whoever uses it does: here they are, and the memory that it has used.
    """
    if not isinstance(model, nn.Module) or (memory := _OF_MODELS.get(model)) is None:
        return None
    plan = memory.plans.get(_key(taps, keep))
    if plan is None:
        return None
    modules = memory.shape.modules_of()
    if modules is None:
        _OF_MODELS.pop(model, None)
        return None
    return plan, modules, memory.pool


def remember(model: object, taps: tuple[object, ...], keep: object, plan: Plan) -> None:
    """Keep what was found, where it can be told again from the model alone."""
    key = _key(taps, keep)
    if key is None or not isinstance(model, nn.Module) or not plan.kinds.isdisjoint(LISTED_KINDS):
        return
    if not {id(place.module) for place in plan.places} <= set(map(id, model.modules())):
        return
    memory = _OF_MODELS.get(model)
    if memory is None or memory.shape.modules_of() is None or len(memory.plans) >= _MOST:
        memory = _OF_MODELS[model] = _Memory(model)
    ports = tuple(Port(tuple(map(_held_weakly, port.names)), port.taps) for port in plan.ports)
    memory.plans[key] = Plan(plan.taps, ports, _WeakPlaces(plan.places))


def _held_weakly(site: Site) -> Site:
    assert site.module is not None
    return Site(site.path, site.kind, site.leaf, 0, ref(site.module))


def _key(taps: tuple[object, ...], keep: object) -> tuple[object, ...] | None:
    """What was asked for, if it is words and plain data: a function may hold the model, or answer otherwise later."""
    for each in taps:
        if not isinstance(each, str):
            return None
    if keep is None:
        return taps, None
    kept = tuple(keep) if isinstance(keep, (list, tuple)) else (keep,)
    return (taps, kept) if all(map(_is_plain, kept)) else None


def _is_plain(keep: object) -> bool:
    if keep is None:
        return True
    if not is_dataclass(keep):
        return False
    held = [getattr(keep, each.name) for each in fields(keep)]
    return all(isinstance(each, Hashable) and not callable(each) for each in held)
