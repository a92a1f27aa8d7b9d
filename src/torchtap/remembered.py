"""What binding a capture's selectors to a model has found, remembered for the next capture of the same model.

Small models are looked into thousands of times with the same words. It guarantees:
- a memory is used only while the model has the same modules of the same classes under the same names, and no part of
  it was compiled;
- a memory holds no module: names and weak references, so that a model goes when its last user lets go of it.

Only text is remembered: a selector that is a function may answer otherwise next time. Parameters and buffers are bound
anew each time, since they are known by their identity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, final, overload
from weakref import WeakKeyDictionary, ref

from torch import nn

from torchtap.plan import LISTED_KINDS, Plan, Port, Tap
from torchtap.sites import Place, Site

__all__ = ["remember", "remembered"]

_MOST = 8  # different captures of one model


@final
class _Shape:
    """Which modules a model has, and how they hang together."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self._modules = [ref(module) for module in modules]
        self._types = list(map(type, modules))
        self._names, children = _children(modules)
        self._children = [None if child is None else ref(child) for child in children]

    def modules_of(self) -> list[nn.Module] | None:
        """The modules, if they are what they were."""
        modules: list[Any] = [each() for each in self._modules]
        if list(map(type, modules)) != self._types:  # also where one is gone
            return None
        names, children = _children(modules)
        if names != self._names or children != [each and each() for each in self._children]:
            return None
        return None if any(map(_may_be_compiled, modules)) else modules


def _children(modules: Sequence[nn.Module]) -> tuple[list[str], list[nn.Module | None]]:
    tables = [module._modules for module in modules]
    return list(chain.from_iterable(tables)), list(chain.from_iterable(map(_values, tables)))


_values: Callable[[dict[str, nn.Module | None]], Iterable[nn.Module | None]] = dict.values


def _may_be_compiled(module: nn.Module) -> bool:
    """Whether a module has what ``module.compile()`` or another forward leaves among its own attributes."""
    own = module.__dict__
    return "_compiled_call_impl" in own or "forward" in own


@final
@dataclass(frozen=True, slots=True)
class _Memory:
    shape: _Shape
    taps: tuple[Tap, ...]
    ports: tuple[tuple[int, tuple[Site, ...], tuple[int, ...]], ...]  # a module's number, names, taps
    places: tuple[tuple[int, str, tuple[str, ...]], ...]  # a module's number, path, other paths

    def plan(self) -> Plan | None:
        modules = self.shape.modules_of()
        if modules is None:
            return None
        ports = []
        for number, names, taps in self.ports:
            module = modules[number]
            sites = tuple(Site(name.path, name.kind, name.leaf, 0, module) for name in names)
            ports.append(Port(sites, taps))
        return Plan(self.taps, tuple(ports), _LatePlaces(modules, self.places))


@final
class _LatePlaces(Sequence[Place]):
    """The places of a model at the time of a capture, made when somebody asks for one."""

    def __init__(
        self, modules: list[nn.Module], listed: tuple[tuple[int, str, tuple[str, ...]], ...]
    ) -> None:
        self._modules, self._listed = modules, listed
        self._made: list[Place] | None = None

    def _all(self) -> list[Place]:
        if self._made is None:
            modules = self._modules
            self._made = [Place(path, modules[number], others) for number, path, others in self._listed]
        return self._made

    def __len__(self) -> int:
        return len(self._all())

    @overload
    def __getitem__(self, index: int) -> Place: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Place]: ...
    def __getitem__(self, index: int | slice) -> Place | Sequence[Place]:
        return self._all()[index]

    def __iter__(self) -> Iterator[Place]:
        return iter(self._all())


_OF_MODELS: WeakKeyDictionary[nn.Module, dict[tuple[object, ...], _Memory]] = WeakKeyDictionary()


def remembered(model: object, taps: tuple[object, ...], keep: object) -> Plan | None:
    """The plan of an earlier capture with the same words, for the model as it is; None where there is none."""
    if not isinstance(model, nn.Module) or (known := _OF_MODELS.get(model)) is None:
        return None
    key = _key(taps, keep)
    memory = None if key is None else known.get(key)
    if memory is None:
        return None
    plan = memory.plan()
    if plan is None:
        del _OF_MODELS[model]
    return plan


def remember(model: object, taps: tuple[object, ...], keep: object, plan: Plan) -> None:
    """Keep what was found, where it can be told again from the model alone."""
    key = _key(taps, keep)
    if key is None or not isinstance(model, nn.Module):
        return
    memory = _memory_of(model, plan)
    if memory is None:
        return
    known = _OF_MODELS.setdefault(model, {})
    if len(known) >= _MOST:
        known.clear()
    known[key] = memory


def _memory_of(model: nn.Module, plan: Plan) -> _Memory | None:
    """A plan by the numbers of the model's modules; None where it holds more than these tell."""
    numbers = {id(module): number for number, module in enumerate(model.modules())}
    if any(id(place.module) not in numbers for place in plan.places):
        return None
    if any(port.site.kind in LISTED_KINDS for port in plan.ports):
        return None
    ports = tuple(
        (
            numbers[id(port.site.module)],
            tuple(Site(name.path, name.kind, name.leaf) for name in port.names),
            port.taps,
        )
        for port in plan.ports
    )
    listed = tuple((numbers[id(place.module)], place.path, place.other_paths) for place in plan.places)
    return _Memory(_Shape(model), plan.taps, ports, listed)


def _key(taps: tuple[object, ...], keep: object) -> tuple[object, ...] | None:
    """What was asked for, if it is nothing but words."""
    return (taps, repr(keep)) if all(isinstance(each, str) for each in taps) else None
