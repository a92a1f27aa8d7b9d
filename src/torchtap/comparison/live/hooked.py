"""Show every call of every module of a live eager model to a visitor, in passes that leave no trace.

`steady` gives back buffers, gradients and random state as they were.

Not here: hooks (`hooks`), what a visitor does with the values (`passes`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torchtap._torch import pytree
from torchtap.hooks.structure import map_leaves
from torchtap.hooks.visit import Stop, Visiting, Visitor
from torchtap.plan.sites import places

__all__ = ["fresh", "steady", "visiting"]


def visiting(model: nn.Module, visitor: Visitor, only: Callable[[str], bool] | None = None) -> Visiting:
    """Every call of every module of a model for a visitor; all passes of the block are counted in one row."""
    stops = [Stop(place.path, place.module) for place in places(model) if only is None or only(place.path)]
    return Visiting(model, visitor, stops, passes_apart=False)


@contextmanager
def steady(model: nn.Module) -> Iterator[None]:
    """Run passes of a model that leave no trace: buffers and the random state are put back at the end."""
    kept = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    with torch.random.fork_rng(), torch.no_grad():
        try:
            yield
        finally:
            for name, buffer in model.named_buffers():
                before = kept.get(name)
                if before is not None and before.shape == buffer.shape:
                    buffer.copy_(before)


def fresh(tree: object) -> Any:
    """A copy of inputs that a forward may change without the next pass noticing."""
    if isinstance(tree, Tensor):
        return tree.detach().clone().requires_grad_(tree.requires_grad)
    if isinstance(tree, (tuple, list, Mapping)) or type(tree) in pytree.SUPPORTED_NODES:
        return map_leaves(tree, lambda _, tensor: fresh(tensor))
    try:
        return copy.deepcopy(tree)
    except Exception:  # an object without a copy is handed over as it is, as a plain call would
        return tree
