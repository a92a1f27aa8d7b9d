"""Faults and harmless changes that fit any model: the modules to change are found by their type, at three depths.

Each plant gets a deep copy of a model and a depth between 0 and 1, changes one module, and returns the path of the
module that is now wrong, or ``None`` when the model has no place for it. Nothing here knows of the comparison.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["EVERYWHERE_FAULTS", "EVERYWHERE_HARMLESS", "Everywhere"]

Everywhere = Callable[[nn.Module, float], "str | None"]


def _is_linear(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    kinds = ("Linear", "Conv1D", "Conv2d")
    return type(module).__name__ in kinds and isinstance(weight, Tensor) and weight.dim() >= 2


def _is_norm(module: nn.Module) -> bool:
    return "Norm" in type(module).__name__ and isinstance(getattr(module, "weight", None), Tensor)


def _is_activation(module: nn.Module) -> bool:
    return not list(module.children()) and any(
        word in type(module).__name__ for word in ("GELU", "SiLU", "ReLU", "Activation")
    )


def _pick(model: nn.Module, depth: float, fits: Callable[[nn.Module], bool]) -> tuple[str, Any] | None:
    found = [(path, module) for path, module in model.named_modules() if path and fits(module)]
    return found[min(len(found) - 1, int(depth * len(found)))] if found else None


def _wrapped(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Let a module return something else of its first result."""
    plain = module.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        out = plain(*args, **kwargs)
        return change(out) if isinstance(out, Tensor) else type(out)((change(out[0]), *out[1:]))

    module.forward = types.MethodType(forward, module)  # type: ignore[method-assign]


def one_weight(model: nn.Module, depth: float) -> str | None:
    found = _pick(model, depth, _is_linear)
    if found:
        weight = found[1].weight.data
        weight.view(-1)[weight.numel() // 3] += 0.2 * weight.abs().max()
    return found and found[0]


def scaled_weight(model: nn.Module, depth: float) -> str | None:
    found = _pick(model, depth, _is_linear)
    if found:
        found[1].weight.data.mul_(1.01)
    return found and found[0]


def swapped_rows(model: nn.Module, depth: float) -> str | None:
    found = _pick(model, depth, _is_linear)
    if found:
        weight = found[1].weight.data
        weight[[0, 1]] = weight[[1, 0]].clone()
    return found and found[0]


def wrong_bias(model: nn.Module, depth: float) -> str | None:
    # A key's bias changes nothing behind a softmax: that is no fault.
    keys = {id(m) for path, m in model.named_modules() if path.split(".")[-1] in ("k_proj", "key", "k")}
    found = _pick(
        model, depth, lambda m: _is_linear(m) and getattr(m, "bias", None) is not None and id(m) not in keys
    )
    if found:
        found[1].bias.data[0] += 0.05
    return found and found[0]


def wrong_epsilon(model: nn.Module, depth: float) -> str | None:
    found = _pick(model, depth, _is_norm)
    if found:
        for name in ("eps", "variance_epsilon"):
            if hasattr(found[1], name):
                setattr(found[1], name, 3e-3)
    return found and found[0]


def wrong_norm(model: nn.Module, depth: float) -> str | None:
    found = _pick(model, depth, _is_norm)
    if found:
        found[1].weight.data.fill_(1.0)
    return found and found[0]


def other_activation(model: nn.Module, depth: float) -> str | None:
    found = _pick(model, depth, _is_activation)
    if found:
        module = found[1]
        module.forward = types.MethodType(lambda self, x: torch.nn.functional.elu(x), module)
    return found and found[0]


def low_precision(model: nn.Module, depth: float) -> str | None:
    found = _pick(model, depth, _is_linear)
    if found:
        module = found[1]
        low = copy.deepcopy(module).bfloat16()
        module.forward = types.MethodType(lambda self, x: low(x.bfloat16()).to(x.dtype), module)
    return found and found[0]


def nan_in_one_place(model: nn.Module, depth: float) -> str | None:
    found = _pick(model, depth, _is_linear)
    if found:
        found[1].weight.data.view(-1)[0] = float("nan")
    return found and found[0]


def _is_container(module: nn.Module) -> bool:
    return any(_is_linear(child) for child in module.children()) and not isinstance(module, nn.ModuleList)


def container_scales(model: nn.Module, depth: float) -> str | None:
    """A fault in the code of a module that has others inside."""
    found = _pick(model, depth, _is_container)
    if found:
        _wrapped(found[1], lambda out: out * 1.02)
    return found and found[0]


def shifted_tokens(model: nn.Module, depth: float) -> str | None:
    found = _pick(model, depth, _is_container)
    if found:
        _wrapped(found[1], lambda out: out.roll(1, 1))
    return found and found[0]


# What changes nothing.


def untouched(model: nn.Module, depth: float) -> str | None:
    return ""


def wide_product(model: nn.Module, depth: float) -> str | None:
    """A matrix product in float64, rounded at the end."""
    found = _pick(model, depth, _is_linear)
    if found:
        module = found[1]
        wide = copy.deepcopy(module).double()
        module.forward = types.MethodType(lambda self, x: wide(x.double()).to(x.dtype), module)
    return found and found[0]


def summed_otherwise(model: nn.Module, depth: float) -> str | None:
    """A matrix product in two halves, the second first."""
    found = _pick(model, depth, lambda m: isinstance(m, nn.Linear))
    if found:

        def forward(self: nn.Linear, x: Tensor) -> Tensor:
            half = x.shape[-1] // 2
            out = x[..., half:] @ self.weight[:, half:].t() + x[..., :half] @ self.weight[:, :half].t()
            return out if self.bias is None else out + self.bias

        found[1].forward = types.MethodType(forward, found[1])
    return found and found[0]


def wide_norm(model: nn.Module, depth: float) -> str | None:
    found = _pick(model, depth, _is_norm)
    if found:
        module = found[1]
        wide = copy.deepcopy(module).double()
        module.forward = types.MethodType(lambda self, x, *rest: wide(x.double(), *rest).to(x.dtype), module)
    return found and found[0]


def whole_in_float64(model: nn.Module, depth: float) -> str | None:
    if any("Experts" in type(module).__name__ for module in model.modules()):
        return None  # torch has no grouped product in float64
    model.double()
    return ""


def whole_in_bfloat16(model: nn.Module, depth: float) -> str | None:
    model.bfloat16()
    return ""


def rounded_to_int8(model: nn.Module, depth: float) -> str | None:
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d)) or type(module).__name__ == "Conv1D":
            rows = module.weight.detach().flatten(1)
            scale = rows.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127.0
            module.weight.data.copy_(((rows / scale).round() * scale).view_as(module.weight))
    return ""


def wrapped_whole(model: nn.Module, depth: float) -> str | None:
    """Results passed through an identity that copies."""
    found = _pick(model, depth, _is_container)
    if found:
        _wrapped(found[1], lambda out: out.clone())
    return found and found[0]


EVERYWHERE_FAULTS: dict[str, Everywhere] = {
    "one weight": one_weight,
    "weight × 1.01": scaled_weight,
    "swapped rows": swapped_rows,
    "wrong bias": wrong_bias,
    "wrong epsilon": wrong_epsilon,
    "missing norm weight": wrong_norm,
    "other activation": other_activation,
    "bf16 in one layer": low_precision,
    "NaN in a weight": nan_in_one_place,
    "container × 1.02": container_scales,
    "shifted tokens": shifted_tokens,
}
EVERYWHERE_HARMLESS: dict[str, Everywhere] = {
    "untouched": untouched,
    "product in float64": wide_product,
    "another order of sums": summed_otherwise,
    "norm in float64": wide_norm,
    "all in float64": whole_in_float64,
    "all in bfloat16": whole_in_bfloat16,
    "weights in int8": rounded_to_int8,
    "copied results": wrapped_whole,
}
