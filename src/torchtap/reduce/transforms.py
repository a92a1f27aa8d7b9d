"""Arithmetic on values inside of ``torch.func`` transforms, without becoming part of them.

Inside of ``vmap``, ``grad`` and the like, torch wraps whatever is computed; a state made of wrapped tensors would die
with the transform. ``outside_transforms`` runs an ``update`` as if there were none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar, cast

from torchtap._torch import innermost_transform, outside_of_transforms

__all__ = ["outside_transforms"]

Update = TypeVar("Update", bound=Callable[..., object])


def outside_transforms(update: Update) -> Update:
    """Decorates a function so that it computes outside of all transforms that are running."""

    @wraps(update)
    def computed_outside(*args: object, **kwargs: object) -> object:
        if innermost_transform() is None:
            return update(*args, **kwargs)
        with outside_of_transforms():
            return update(*args, **kwargs)

    return cast(Update, computed_outside)
