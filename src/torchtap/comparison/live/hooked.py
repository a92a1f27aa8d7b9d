"""Show every call of every module of a live eager model to a visitor, which may put other values in their place.

It guarantees:
- leaving the block removes every hook, also when the forward raised;
- `steady` gives back buffers, gradients and random state as they were;
- a visitor that returns ``None`` changes nothing.

Not here: what a visitor does with the values (`passes`), site names (`torchtap.sites`).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchtap.sites import input_names, places

__all__ = ["Call", "Hooked", "Visitor", "fresh", "rebuild", "steady"]


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One call of one module: where it is, which call of the pass, and who made it (``None`` for the user)."""

    path: str
    number: int
    parent: str | None
    input_names: tuple[str, ...] | None


class Visitor(Protocol):
    """Sees values go in and out. Either method may return a structure to use instead, or ``None``."""

    def arrive(
        self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """A module is about to run on these arguments."""

    def leave(self, call: Call, output: Any) -> Any:
        """A module returned this."""


@final
class Hooked:
    """The hooks of one visitor on one model, for the length of a block."""

    def __init__(self, model: nn.Module, visitor: Visitor, only: Callable[[str], bool] | None = None) -> None:
        self._model = model
        self._visitor = visitor
        self._only = only
        self._stack: list[Call] = []
        self._calls: dict[str, int] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        for place in places(self._model):
            if self._only is not None and not self._only(place.path):
                continue
            names = input_names(place.module)
            self._handles.append(
                place.module.register_forward_pre_hook(self._arrive(place.path, names), with_kwargs=True)
            )
            self._handles.append(place.module.register_forward_hook(self._leave(place.path)))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in reversed(self._handles):
            handle.remove()
        self._handles.clear()

    def _arrive(self, path: str, names: tuple[str, ...] | None) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            number = self._calls.get(path, 0)
            self._calls[path] = number + 1
            call = Call(path, number, self._stack[-1].path if self._stack else None, names)
            self._stack.append(call)
            return self._visitor.arrive(call, args, kwargs)

        return hook

    def _leave(self, path: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            # A module that a caller's own exception handling left half-way is still on the stack: drop it.
            while self._stack and self._stack[-1].path != path:
                self._stack.pop()
            if not self._stack:
                return None
            return self._visitor.leave(self._stack.pop(), output)

        return hook


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


def fresh(tree: Any) -> Any:
    """A copy of inputs that a forward may change without the next pass noticing."""
    if isinstance(tree, Tensor):
        return tree.detach().clone().requires_grad_(tree.requires_grad)
    if isinstance(tree, (tuple, list, Mapping)) or type(tree) in pytree.SUPPORTED_NODES:
        return rebuild(tree, lambda _, tensor: fresh(tensor))
    try:
        return copy.deepcopy(tree)
    except Exception:  # an object without a copy is handed over as it is, as a plain call would
        return tree


def rebuild(tree: Any, change: Callable[[str, Tensor], Tensor], prefix: str = "") -> Any:
    """The same structure with each tensor changed; ``change`` gets a tensor's name in the structure and itself."""
    if isinstance(tree, Tensor):
        return change(prefix, tree)
    if tree is None or isinstance(tree, (str, bytes, int, float)):
        return tree

    def child(key: Any, value: Any) -> Any:
        return rebuild(value, change, f"{prefix}.{key}" if prefix else str(key))

    if isinstance(tree, Mapping):
        changed = {key: child(key, value) for key, value in tree.items()}
        return _like_mapping(tree, changed)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(child(key, value) for key, value in zip(tree._fields, tree, strict=True)))
    if isinstance(tree, (list, tuple)):
        return type(tree)(child(key, value) for key, value in enumerate(tree))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        changed = {
            each.name: child(each.name, getattr(tree, each.name, None)) for each in dataclasses.fields(tree)
        }
        return _like_dataclass(tree, changed)
    if type(tree) in pytree.SUPPORTED_NODES:
        node = pytree.SUPPORTED_NODES[type(tree)]
        parts, context = node.flatten_fn(tree)
        return node.unflatten_fn([child(key, value) for key, value in enumerate(parts)], context)
    return tree


def _like_mapping(tree: Mapping[Any, Any], changed: dict[Any, Any]) -> Any:
    try:
        return type(tree)(changed)  # type: ignore[call-arg]
    except Exception:  # a mapping with a constructor of its own: copy it and set each entry
        copied: Any = copy.copy(tree)
        for key, value in changed.items():
            copied[key] = value
        return copied


def _like_dataclass(tree: Any, changed: dict[str, Any]) -> Any:
    copied = copy.copy(tree)
    for name, value in changed.items():
        object.__setattr__(copied, name, value)
    return copied
