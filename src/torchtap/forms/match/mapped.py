"""Use a map of sites: which of its sites a plan asks for, and which modules the form does not tell."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from torch import nn

from torchtap.forms.match.site_map import SiteMap
from torchtap.forms.op.channel import absolute, marked
from torchtap.forms.stand_ins import skeleton
from torchtap.spi import ModulePath, Name

if TYPE_CHECKING:
    from torchtap.spi import Receiver

__all__ = ["mapped_sites", "with_paths"]


def mapped_sites(
    site_map: SiteMap, receiver: Receiver, without: Collection[tuple[str, str]]
) -> list[tuple[str, str]]:
    """``(site with the mark of its call, key of its value)`` for what a plan asks for and does not get otherwise.

    What the map misses is noted with the receiver, for the coverage.
    """
    asked = {(port.port.site.path, port.kind) for port in receiver.ports.values()} - set(without)
    calls: dict[str, int] = {}  # of each module in a pass
    for site in (*site_map.sites, *site_map.missing):
        name = Name.read(site)
        calls[name.path] = max(calls.get(name.path, 0), name.call + 1)
    chosen: list[tuple[str, str]] = []
    for site, found in site_map.sites.items():
        name = Name.read(site)
        if (name.path, name.kind) in asked:
            mark = absolute(name.call, calls[name.path])
            chosen.append((marked(str(name._replace(call=0)), mark), found.at))
    for site, reason in site_map.missing.items():
        if Name.read(site)[:2] in asked:
            receiver.form.missing[site] = reason
    return chosen


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
