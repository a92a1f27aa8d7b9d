"""Copies of what the blocks of an eager model return, by one plain hook each.

This is for recordings that stay in memory: a hook costs what the one does that people write by hand. Recordings that
go to disk, and models in other forms, are taken by a watch. It guarantees:
- what is kept is a detached copy, taken before anything can change the value;
- only passes of the thread that began one count, and no repetition by an activation checkpoint.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from threading import get_ident
from typing import final

import torch
from torch import Tensor, nn

from torchtap._torch import innermost_transform
from torchtap.errors import ReductionError
from torchtap.hooks.arguments import Args, Kwargs
from torchtap.hooks.leaves import input_leaves, leaves
from torchtap.hooks.walker import Walker
from torchtap.monitors.layers.numbering import ChosenLayers
from torchtap.plan.names import parse_name, site_name
from torchtap.plan.sites import input_names, places
from torchtap.reduce import Full

__all__ = ["BlockCopies"]

_STRIDED = torch.strided
_NO_THREAD = -1


@final
class BlockCopies:
    """Hooks on blocks. Between `begin` and `end` they keep what passes in this thread."""

    def __init__(self, model: nn.Module, chosen: ChosenLayers) -> None:
        self._modules = {place.path: place.module for place in places(model)}
        self._chosen = chosen
        self._kept: list[tuple[str, Tensor]] = []
        self.thread: int | None = _NO_THREAD  # the walker asks
        self._walker = Walker(model, heard=self)

    def put_on(self) -> None:
        """Hooks go on."""
        names = self._chosen.names
        assert names is not None
        if self._chosen.with_embedding:
            first = names.blocks[0]
            self._walker.before(self._modules[first], first, self._entering, _leave_alone)
            if names.embedding is not None:
                self._after(names.embedding)
        for path in dict.fromkeys(self._chosen.blocks):
            self._after(path)

    def _after(self, path: str) -> None:
        stop = (path, site_name(path, "output"))
        self._walker.after(self._modules[path], stop, self._returned, _leave_alone)

    def take_off(self) -> None:
        """Hooks come off."""
        self._walker.leave()

    def begin(self) -> None:
        """A pass begins in this thread."""
        self._kept = []
        self.thread = get_ident()

    def end(self) -> tuple[list[str], list[Tensor]]:
        """The pass is over: sites in the order in which they passed, and their values on the host."""
        kept, self._kept, self.thread = self._kept, [], _NO_THREAD
        sites = [site for site, _ in kept]
        if len(set(sites)) < len(sites):
            sites = _with_calls(sites)
        return sites, [value if value.is_cpu else value.cpu() for _, value in kept]

    def _returned(self, stop: tuple[str, str], output: object) -> None:
        path, site = stop
        if type(output) is Tensor:
            self._keep(site, output)
        else:
            self._keep_first(path, "output", leaves(output))

    def _entering(self, path: str, args: Args, kwargs: Kwargs) -> None:
        self._keep_first(path, "input", input_leaves(input_names(self._modules[path]), args, kwargs))

    def _keep_first(self, path: str, kind: str, found: Iterator[tuple[str, Tensor]]) -> None:
        for leaf, value in found:
            self._keep(site_name(path, kind, leaf), value)
            return

    def _keep(self, site: str, value: Tensor) -> None:
        if type(value) is Tensor and value.layout is _STRIDED and innermost_transform() is None:
            # Detaching costs a third of a small copy, so only where there is something to detach from.
            self._kept.append((site, value.detach().clone() if value.requires_grad else value.clone()))
            return
        try:  # another kind of tensor, or one inside a transform
            kept = Full().result(Full().update(None, value))["value"]
            assert isinstance(kept, Tensor)
            self._kept.append((site, kept))
        except ReductionError as error:
            warnings.warn(f"{site} could not be recorded: {error}", RuntimeWarning, stacklevel=2)


def _leave_alone(*_: object) -> None:
    """What a compiler that follows the hooks finds: the recorder tells that such a pass brought nothing."""


def _with_calls(sites: list[str]) -> list[str]:
    """Names of further calls of a module in one pass."""
    calls: Counter[str] = Counter()
    named = []
    for site in sites:
        path, kind, leaf, _ = parse_name(site)
        named.append(site_name(path, kind, leaf, calls[site]))
        calls[site] += 1
    return named
