"""Read gradients where autograd computes them, without changing the computation.

Hooks are on the node that made the value, not on the tensor: a later in-place op gives the tensor another node and
another value. If the value is a view (``nn.Linear`` returns one for three and more dimensions), an in-place op takes
its node out of the graph. The gradient then passes the node of the view's base.

A leaf tensor (a parameter that is given to a module, an adversarial input) has no node and outlives its graph. Its
hook is removed with the first gradient, or by `release_leaves` when the step is over.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Protocol, final
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from torchtap._torch import base_of, drop_empty_hooks, hear_gradient, version_of

__all__ = ["Ask", "ask_at_its_node", "ask_for_gradient", "ask_while_traced", "own_view", "release_leaves"]


class Ask(Protocol):
    """Call ``take(*bound, gradient)`` when autograd has the gradient of ``value``; None if nothing flows back."""

    def __call__(self, value: Tensor, take: Callable[..., None], *bound: Any) -> None: ...


def ask_at_its_node(value: Tensor, take: Callable[..., None], *bound: Any) -> None:
    """Call ``take`` with the gradient that flows through the node that made ``value``."""
    if value.grad_fn is None:
        _ask_a_leaf(value, getattr(take, "__self__", take), partial(take, *bound))
    else:
        hear_gradient(value, partial(take, *bound))


# By who takes the gradients: the leaves that have a hook, and what removes it.
_on_leaves: WeakKeyDictionary[object, list[tuple[ref[Tensor], RemovableHandle]]] = WeakKeyDictionary()


def _ask_a_leaf(value: Tensor, owner: object, take: Callable[[Tensor], None]) -> None:
    def once(gradient: Tensor) -> None:
        handle.remove()  # the next backward is another pass's
        take(gradient)

    handle = value.register_hook(once)
    _on_leaves.setdefault(owner, []).append((ref(value), handle))


def release_leaves(owner: object) -> None:
    """Remove the hooks on leaf tensors whose gradients this owner takes."""
    for leaf, handle in _on_leaves.pop(owner, ()):
        handle.remove()
        value = leaf()
        if value is not None:
            drop_empty_hooks(value)


def ask_for_gradient(value: Tensor, take: Callable[..., None], *bound: Any) -> None:
    """Call ``take(*bound, gradient)`` when autograd has the gradient of ``value``."""
    base = base_of(value)
    if base is None or value.grad_fn is None or base.grad_fn is None or not _covers(value, base):
        ask_at_its_node(value, take, *bound)
        return
    asked = _ViewGradient(value, partial(take, *bound), _counter(value))
    hear_gradient(value, asked.at_value)
    hear_gradient(base, asked.at_base)


def ask_while_traced(value: Tensor, take: Callable[[Tensor], None]) -> None:
    """Do the same while AOT autograd traces, which computes gradients of inputs without running their nodes."""
    base = base_of(value)
    if base is None or base.grad_fn is None or not _covers(value, base):
        value.register_hook(take)
        return
    asked = _ViewGradient(value, take, value)  # traced values have no memory to hold
    value.register_hook(asked.at_value)
    position = base.output_nr
    base.grad_fn.register_prehook(lambda gradients: asked.at_base(gradients[position]))


def _counter(value: Tensor) -> Tensor:
    """Return a tensor that counts the in-place changes of a value without holding its memory."""
    counter = value.detach()
    counter.data = nothing(value.dtype, value.device)
    return counter


@cache
def nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor without elements."""
    return torch.empty(0, dtype=dtype, device=device)


def _covers(value: Tensor, base: Tensor) -> bool:
    """Return True if a view covers all of a contiguous base, so that the base's gradient is the view's."""
    return (
        value.numel() == base.numel()
        and value.storage_offset() == base.storage_offset()
        and base.is_contiguous()
    )


@final
class _ViewGradient:
    """Read the gradient of a view at its node, or at its base's if the view was changed in place.

    The base is reached last. A view that nothing used has no gradient, whatever its base has.
    """

    __slots__ = ("_changes", "_counter", "_shape", "_strides", "_take", "_taken")

    def __init__(self, value: Tensor, take: Callable[[Tensor], None], counter: Tensor) -> None:
        self._take = take
        self._counter, self._changes = counter, version_of(counter)
        self._taken = False
        self._shape, self._strides = value.shape, value.stride()

    def at_value(self, gradient: Tensor | None) -> None:
        if gradient is not None:
            self._taken = True
            self._take(gradient)

    def at_base(self, gradient: Tensor | None) -> None:
        taken, self._taken = self._taken, False  # a retained graph may be gone through again
        if gradient is not None and not taken and version_of(self._counter) != self._changes:
            self._take(of_the_view(gradient, self._shape, self._strides))


def of_the_view(gradient: Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """Return the gradient of a view from that of its base."""
    plain = gradient.contiguous()
    return plain.as_strided(shape, strides, plain.storage_offset())


def own_view(_: str, value: Tensor) -> Tensor:
    """Return a view of a value, whose gradient is the part of the value's that the view's users send back."""
    return value.view_as(value) if value.requires_grad and torch.is_grad_enabled() else value
