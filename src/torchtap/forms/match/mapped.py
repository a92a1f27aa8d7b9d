"""Use a map of sites: which of its sites a plan asks for, and which modules the form does not tell."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from torch import nn

from torchtap.forms.match.site_map import FoundValue, SiteMap
from torchtap.forms.stand_ins import skeleton
from torchtap.spi import ModulePath, Name, reasons

if TYPE_CHECKING:
    from torchtap.spi import Receiver

__all__ = ["mapped_sites", "with_paths"]

# A gradient has the place of the value that it belongs to.
_VALUE_OF = {"grad_input": "input", "grad_output": "output"}


def mapped_sites(
    site_map: SiteMap, receiver: Receiver, without: Collection[tuple[str, str]]
) -> list[tuple[str, str]]:
    """``(site without its call, key of its value)`` for what a plan asks for and does not get in another way.

    What the map misses is noted with the receiver, for the coverage.
    """
    asked = {(port.port.site.path, port.kind) for port in receiver.ports.values()} - set(without)
    kinds_of: dict[tuple[str, str], list[str]] = {}
    for path, asked_kind in asked:
        kinds_of.setdefault((path, _VALUE_OF.get(asked_kind, asked_kind)), []).append(asked_kind)
    calls: dict[tuple[str, str, str], list[tuple[int, FoundValue]]] = {}
    for site, found in site_map.sites.items():
        name = Name.read(site)
        calls.setdefault((name.path, name.kind, name.leaf), []).append((name.call, found))
    chosen: list[tuple[str, str]] = []
    for (path, value_kind, leaf), numbered in calls.items():
        certain = _certain(numbered)
        for kind in kinds_of.get((path, value_kind), ()):
            chosen += [(str(Name(path, kind, leaf)), found.at) for found in certain]
            for number, _ in sorted(numbered, key=lambda each: each[0])[len(certain) :]:
                receiver.missing[str(Name(path, kind, leaf, number))] = reasons.UNCERTAIN_CALL
    for site, reason in site_map.missing.items():
        name = Name.read(site)
        for kind in kinds_of.get((name.path, name.kind), ()):
            receiver.missing[str(Name(name.path, kind, name.leaf, name.call))] = reason
    return chosen


def _certain(numbered: list[tuple[int, FoundValue]]) -> list[FoundValue]:
    """The calls up to the first that is missing or comes out of order: calls are counted as their values come."""
    certain: list[FoundValue] = []
    for number, found in sorted(numbered, key=lambda each: each[0]):
        if number != len(certain) or (certain and found.order < certain[-1].order):
            break
        certain.append(found)
    return certain


def with_paths(tree: nn.Module, site_map: SiteMap) -> nn.Module:
    """The modules of a form, with stand-ins for those that only the map knows."""
    present = {path for path, _ in tree.named_modules(remove_duplicate=False)}
    absent = [path for path in site_map.classes if path not in present]
    stand_ins = dict(skeleton(absent, classes=site_map.classes).named_modules())
    for path in sorted(absent, key=len):
        parent = tree
        for name in ModulePath(path).parent.parts:
            parent = parent._modules[name] or parent
        if type(parent).__name__ != "RecursiveScriptModule" and ModulePath(path).name not in parent._modules:
            parent._modules[ModulePath(path).name] = stand_ins[path]
    return tree
