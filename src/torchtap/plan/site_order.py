"""In which order the values of a step come about, told from the names of their sites. Text only: no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torchtap.plan.names import kind_of, paths_around, read_name

__all__ = ["OrderKey", "execution_order", "in_passing_order", "passes_modules"]

# A step's causes before its effects: parameters as the forward uses them; forward values, as they pass; the numbers
# that the program logs of them, a loss above all; gradients, which pass the other way; then what the step ends with.
_FORWARD, _BACKWARD = 0, 2
_PHASE = {
    "param": -1,
    "value": 1,
    "grad_output": _BACKWARD,
    "grad_input": _BACKWARD,
    "param_grad_local": 3,
    "param_grad_accumulated": 3,
    "param_grad_unclipped": 4,
    "param_grad": 5,
    "buffer": 6,
    "update": 6,
    "optim_state": 6,
    "lr": 6,
}


def in_passing_order(names: Iterable[str]) -> list[str]:
    """Sites in the order in which their values come about, given in the order in which forward passes them.

    Parameters are there before the forward; gradients pass in reverse; what a step leaves behind comes last.
    """
    groups: dict[int, list[str]] = {}
    for name in names:
        groups.setdefault(_PHASE.get(kind_of(name), _FORWARD), []).append(name)
    groups.get(_BACKWARD, []).reverse()
    return [name for phase in sorted(groups) for name in groups[phase]]


def passes_modules(name: str) -> bool:
    """Whether the place of a value follows from the module that it passes, not from its kind alone."""
    return _PHASE.get(kind_of(name), _FORWARD) in (_FORWARD, _BACKWARD)


class OrderKey(NamedTuple):
    """Sorts sites by execution."""

    phase: int
    call: int
    trail: tuple[float, ...]
    listed: int


def execution_order(sites: Sequence[str]) -> dict[str, OrderKey]:
    """A sorting key for each site: modules as they are listed, a module's input before and its output after
    everything inside it, further calls after the first, gradients in reverse."""
    place: dict[str, int] = {}
    names = [read_name(site) for site in sites]
    for name in names:
        for path in (*reversed(tuple(paths_around(name.path))), name.path):
            place.setdefault(path, len(place))
    keys: dict[str, OrderKey] = {}
    for listed, (site, name) in enumerate(zip(sites, names, strict=True)):
        way = [name.path, *paths_around(name.path)][:-1] if name.path else []
        trail: tuple[float, ...] = tuple(place[path] for path in reversed(way))
        phase = _PHASE.get(name.kind, _FORWARD)
        if phase == _BACKWARD:
            trail = tuple(-each for each in trail)
        late = name.kind in ("output", "grad_input")
        edge = float("inf") if late else float("-inf")
        keys[site] = OrderKey(phase, name.call, (*trail, edge), listed)
    return keys
