"""The gradient of one value, read where autograd computes it and without changing how.

Hooks go on the node that made the value, not on the tensor: a later in-place op gives the tensor another node
and another value. If the value is a view (``nn.Linear`` returns one for three dimensions and more), an in-place
op takes its node out of the graph; the gradient then passes the node of the view's base.

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

__all__ = [
    "Ask",
    "ask_at_its_node",
    "ask_for_gradient",
    "ask_while_traced",
    "nothing",
    "of_the_view",
    "release_leaves",
]


class Ask(Protocol):
    """Calls ``take(*bound, gradient)`` once autograd has the gradient of ``value``; None where nothing flows back."""

    def __call__(self, value: Tensor, take: Callable[..., None], *bound: Any) -> None: ...


def ask_at_its_node(value: Tensor, take: Callable[..., None], *bound: Any) -> None:
    """Call ``take`` with what flows back through the node that made ``value``, and through no other."""
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
    """Call ``take`` with the gradient of ``value`` once autograd has it."""
    base = base_of(value)
    if base is None or value.grad_fn is None or base.grad_fn is None or not _covers(value, base):
        ask_at_its_node(value, take, *bound)
        return
    asked = _ViewGradient(value, partial(take, *bound), _counter(value))
    hear_gradient(value, asked.at_value)
    hear_gradient(base, asked.at_base)


def ask_while_traced(value: Tensor, take: Callable[[Tensor], None]) -> None:
    """The same while AOT autograd traces: it takes the gradients of inputs without running their nodes."""
    base = base_of(value)
    if base is None or base.grad_fn is None or not _covers(value, base):
        value.register_hook(take)
        return
    asked = _ViewGradient(value, take, value)  # traced values have no memory to hold
    value.register_hook(asked.at_value)
    position = base.output_nr
    base.grad_fn.register_prehook(lambda gradients: asked.at_base(gradients[position]))


def _counter(value: Tensor) -> Tensor:
    """A tensor that counts the changes of a value in place, and holds no memory of it."""
    counter = value.detach()
    counter.data = nothing(value.dtype, value.device)
    return counter


@cache
def nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor without elements."""
    return torch.empty(0, dtype=dtype, device=device)


def _covers(value: Tensor, base: Tensor) -> bool:
    """Whether the view shows all of a plainly laid out base, so that the base's gradient is the view's."""
    return (
        value.numel() == base.numel()
        and value.storage_offset() == base.storage_offset()
        and base.is_contiguous()
    )


@final
class _ViewGradient:
    """Listens at a view's node and at its base's. The base is reached last, and counts if the view was not because it
    was changed in place; a view that nothing used has no gradient, whatever its base has.
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
    """The gradient of a view, from that of the base that it shows all of."""
    plain = gradient.contiguous()
    return plain.as_strided(shape, strides, plain.storage_offset())
