"""Find everything that a session may have left behind: on a model, on tensors, in torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.nn.utils import clip_grad
from torch.optim import optimizer as optimizers

__all__ = ["Residue", "whole_state"]


def whole_state(model: nn.Module, tensors: Iterable[Tensor] = ()) -> dict[str, Any]:
    """Return all that hooks and patches change: of each module, parameter and tensor, and of torch itself."""
    found: dict[str, Any] = {"mode": torch.is_grad_enabled(), "functions": _functions_of_torch()}
    for name, each in model.named_modules():
        tables = {key: tuple(value) for key, value in each.__dict__.items() if key.endswith("hooks")}
        plain = {key: id(value) for key, value in each.__dict__.items() if key not in tables}
        plain |= {key: _kind(each.__dict__[key]) for key in ("_parameters", "_buffers", "_modules")}
        found[f"module {name}"] = (type(each), tables, plain)
    named = [*model.named_parameters(), *((f"tensor {number}", each) for number, each in enumerate(tensors))]
    for name, tensor in named:
        found[f"hooks of {name}"] = (
            _hooks(tensor._backward_hooks),
            _hooks(getattr(tensor, "_post_accumulate_grad_hooks", None)),
            tuple(tensor.__dict__),
        )
    for owner in (modules, optimizers):
        for name, value in vars(owner).items():
            if name.startswith("_global_") and isinstance(value, dict):
                found[f"{owner.__name__}.{name}"] = tuple(value.items())
    return found


def _hooks(table: Any) -> Any:
    """Return the hooks of a tensor; a table that is empty is told from none."""
    return None if table is None else tuple(table.items())


def _kind(table: Any) -> Any:
    return type(table), tuple((name, id(value)) for name, value in table.items())


def _functions_of_torch() -> dict[str, int]:
    """Return the functions of torch that sessions replace while they are open."""
    places = {
        "GradScaler.step": torch.amp.GradScaler.__dict__.get("step"),
        "GradScaler.unscale_": torch.amp.GradScaler.__dict__.get("unscale_"),
        "clip_grad": getattr(clip_grad, "_group_tensors_by_device_and_dtype", None),
        "Module.__call__": nn.Module.__dict__["__call__"],
        "Module.train": nn.Module.__dict__["train"],
        "Tensor.backward": Tensor.backward,
        "attention": nn.functional.scaled_dot_product_attention,
        "autograd.grad": torch.autograd.grad,
        "autograd.backward": torch.autograd.backward,
    }
    return {name: id(each) for name, each in places.items()}


class Residue:
    """Compare a model, tensors and torch before and after a block; ``left`` names each difference."""

    def __init__(self, model: nn.Module, *tensors: Tensor) -> None:
        self._model, self._tensors = model, tensors
        self._before = whole_state(model, tensors)

    @property
    def left(self) -> list[str]:
        now = whole_state(self._model, self._tensors)
        return [name for name in {**self._before, **now} if self._before.get(name) != now.get(name)]
