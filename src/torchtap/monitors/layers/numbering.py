"""Which layers are recorded, and the number of each: 0 is what enters the blocks, N what the N-th block returns.

A part of a model keeps its number: block 30 is ``layer_31`` also when it is recorded alone, so that its file can be
compared with one from a recording of all layers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import final

from torchtap.errors import SelectionError
from torchtap.monitors.layers.names import LayerNames, find_layers
from torchtap.plan.names import is_inside, parent_path, parse_name, path_of, site_name

__all__ = ["ChosenLayers"]

# How an entry of ``layers`` asks for what enters the first block.
_EMBEDDING = "embedding"


@final
class ChosenLayers:
    """What was asked for: everything, some blocks by index, or selectors."""

    def __init__(self, model: object, asked: Sequence[int | str] | None) -> None:
        self._all = asked is None
        by_index = asked is None or any(isinstance(each, int) or each == _EMBEDDING for each in asked)
        self.names: LayerNames | None = find_layers(model) if by_index else _found(model)
        everything = (_EMBEDDING, *range(len(self.names.blocks))) if self.names else ()
        wanted = tuple(asked) if asked is not None else everything
        self._selectors = [each for each in wanted if isinstance(each, str) and each != _EMBEDDING]
        self.with_embedding = _EMBEDDING in wanted
        self.blocks = [self._block(each) for each in wanted if not isinstance(each, str)]

    @property
    def are_blocks(self) -> bool:
        """Whether nothing but blocks, and what enters them, was asked for."""
        return not self._selectors

    def _block(self, index: int) -> str:
        assert self.names is not None
        count = len(self.names.blocks)
        if isinstance(index, bool) or not -count <= index < count:
            raise SelectionError(f"layers has {index!r}: this model has {count} blocks, 0 to {count - 1}")
        return self.names.blocks[index]

    def selectors(self) -> list[str]:
        """For a plan: everything that may be needed."""
        chosen = [site_name(path, "output") for path in self.blocks]
        if self.with_embedding and self.names is not None:
            chosen.append(site_name(self.names.blocks[0], "input"))
            if self.names.embedding is not None:
                chosen.append(site_name(self.names.embedding, "output"))
        # A path without a dot would match at any depth; as a regular expression it means the top level alone.
        return self._selectors + [
            site if parent_path(path_of(site)) else f"re:{_escaped(site)}" for site in chosen
        ]

    def in_order(self, sites: Sequence[str]) -> list[int]:
        """Positions of the layers among sites in their order of execution: one for each call, the entering one first.

        Of a value with several leaves the first counts. Where what enters the blocks was asked for, it is their input,
        or the embedding's output where that did not come.
        """
        first: dict[tuple[str, str, int], int] = {}
        for position, site in enumerate(sites):
            name = parse_name(site)
            first.setdefault((name.path, name.kind, name.call), position)
        if self._selectors or self.names is None:
            return list(first.values())
        blocks = set(self.blocks)
        chosen = [at for (path, kind, _), at in first.items() if path in blocks and kind == "output"]
        if self.with_embedding:
            entering = first.get((self.names.blocks[0], "input", 0))
            if entering is None and self.names.embedding is not None:
                entering = first.get((self.names.embedding, "output", 0))
            if entering is not None:
                chosen.insert(0, entering)
        return chosen

    def numbers(self, sites: Sequence[str]) -> tuple[int, ...]:
        """The number of each layer. Where the model does not say, layers are counted as they come."""
        own = [self._own_number(site) for site in sites]
        known = [number for number in own if number is not None]
        if not self._all and len(known) == len(own) and len(set(known)) == len(known):
            return tuple(known)
        start = 0 if own and own[0] == 0 else 1
        return tuple(range(start, start + len(own)))

    def _own_number(self, site: str) -> int | None:
        if self.names is None:
            return None
        name = parse_name(site)
        blocks = self.names.blocks
        if name.path == self.names.embedding or (name.path == blocks[0] and name.kind == "input"):
            return 0
        for index, block in enumerate(blocks):
            if name.path == block or is_inside(name.path, block):
                # A model that goes through its blocks again goes on counting.
                return name.call * len(blocks) + index + 1
        return None


def _found(model: object) -> LayerNames | None:
    try:
        return find_layers(model)
    except SelectionError:  # selectors then say all that is known
        return None


def _escaped(site: str) -> str:
    return re.escape(site) + r"(\..*)?(#\d+)?"
