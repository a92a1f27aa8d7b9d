"""Find the embedding and the blocks of a model by its structure alone: Hugging Face, plain, or somebody's own.

Blocks are the largest lists of like modules that are not inside one another; the embedding is what the model says
its input embedding is, else its first ``nn.Embedding``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, final

from torch import nn

from torchtap.errors import SelectionError
from torchtap.forms.attach import tree_of
from torchtap.plan.names import is_inside, join_path, paths_around
from torchtap.plan.sites import Place, places

__all__ = ["LayerNames", "final_norm", "find_layers"]

# A list of blocks counts beside the largest one when it holds this share of its parameters or more: the stages of a
# convolutional network and the two halves of an encoder-decoder do, a list of adapters or heads does not.
_SHARE = 0.05


@final
@dataclass(frozen=True, slots=True)
class LayerNames:
    """Where a model's layers are: paths of modules, in the order in which they are listed."""

    embedding: str | None
    blocks: tuple[str, ...]


def find_layers(model: object) -> LayerNames:
    """The embedding and the blocks of a model; an error when there is no list of like modules to be found."""
    found = places(tree_of(model))  # in forms that have no modules any more, what stands in for them
    lists = {place.path: (place, _like_children(place.module)) for place in found}
    lists = {path: each for path, each in lists.items() if each[1]}
    outer = [each for path, each in lists.items() if not any(is_inside(path, other) for other in lists)]
    if not outer:
        raise SelectionError(
            f"{type(model).__name__} has no list of like modules that could be its blocks; "
            "name them with layers=[...], for example layers=['encoder.*:output']"
        )
    sizes = [sum(p.numel() for p in place.module.parameters()) for place, _ in outer]
    blocks = [
        join_path(place.path, name)
        for (place, children), size in zip(outer, sizes, strict=True)
        if size >= _SHARE * max(sizes)
        for name in children
    ]
    return LayerNames(_embedding(model, found), tuple(blocks))


def final_norm(model: object, names: LayerNames) -> str | None:
    """The norm that the last block's output goes through outside the blocks, as far as the modules' order tells."""
    found = {place.path: place.module for place in places(tree_of(model))}
    way = [names.blocks[-1], *paths_around(names.blocks[-1])]
    for inner, outer in pairwise(way):
        children = [join_path(outer, name) for name in found[outer]._modules] if outer in found else []
        if inner not in children or inner == names.blocks[-1]:
            continue
        for path in children[children.index(inner) + 1 :]:
            if path in found and "norm" in _class_name(found[path]).lower():
                return path
    return None


def _like_children(module: nn.Module) -> list[str]:
    """The names of a list's members when they are two or more modules of one class that have parameters."""
    children = {name: child for name, child in module._modules.items() if child is not None}
    if len(children) < 2 or not all(map(str.isdigit, children)):
        return []
    if len(set(map(_class_name, children.values()))) != 1:
        return []
    # A list of bare layers (a plain stack of Linear) is not a list of blocks unless there is nothing better.
    return list(children) if any(any(True for _ in child.parameters()) for child in children.values()) else []


def _class_name(module: nn.Module) -> str:
    """The class that a module was written as, also after scripting."""
    return str(getattr(module, "original_name", type(module).__qualname__))


def _embedding(model: object, found: list[Place]) -> str | None:
    ask: Callable[[], Any] | None = getattr(model, "get_input_embeddings", None)
    if callable(ask):
        try:
            said = ask()
        except (NotImplementedError, AttributeError, TypeError):  # models may leave it unimplemented
            said = None
        for place in found:
            if place.module is said:
                return place.path
    for place in found:
        if _class_name(place.module) in ("Embedding", "EmbeddingBag"):
            return place.path
    return None
