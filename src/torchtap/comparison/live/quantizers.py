"""How far a good quantizer moves a model: the reference with its weights rounded as the target's evidently are.

A target counts as quantized where its weights lie on an even lattice (integers times one step for each tensor, row
or group) or its modules are torch's quantized ones. The step is taken from the *reference's* weights, so that a
wrong scale in the target does not excuse itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from torchtap.plan.sites import places

__all__ = ["quantized_like", "weight_of"]

_BITS = (8, 4, 6, 3, 2)
_GROUPS = (0, -1, 32, 64, 128, 16)  # the whole tensor, a row, so many columns
_MANY, _SOME = 64, 8  # fewer numbers lie on some lattice by chance; far fewer always do
_OFF_LATTICE = 0.03  # of a step; rounding of the scale itself


@final
@dataclass(frozen=True, slots=True)
class _Scheme:
    bits: int
    group: int
    symmetric: bool
    inputs: bool = False  # whether activations are rounded to eight bits as well


def quantized_like(
    reference: nn.Module, target: nn.Module, names: Mapping[str, str] | None
) -> nn.Module | None:
    """A copy of the reference with good quantized weights; ``None`` when the target is not quantized.

    Modules of torch's quantization were meant. Weights that only lie on a lattice were when half of them do; fewer are
    a suspicion.
    """
    schemes: dict[str, _Scheme] = {}
    small: dict[str, _Scheme] = {}  # of so few numbers that they tell nothing of what was meant
    weights = 0
    for path, weight, module in _weights(reference, target, names):
        few = weight.numel() < _MANY
        weights += not few
        scheme = _scheme_of(weight.detach(), module)
        if scheme is not None:
            (small if few and not scheme.inputs else schemes)[path] = scheme
    meant = any(scheme.inputs for scheme in schemes.values())
    if not schemes or not (meant or 2 * len(schemes) >= weights):
        return None
    return _rounded_copy(reference, schemes | small)


def _weights(
    reference: nn.Module, target: nn.Module, names: Mapping[str, str] | None
) -> Iterator[tuple[str, Tensor, nn.Module]]:
    """The reference's weights that could have been quantized, with their module in the target."""
    mine = {place.path: place.module for place in places(reference)}
    for place in places(target):
        path = place.path if names is None else names.get(place.path, "\0")
        weight = getattr(mine.get(path), "weight", None)
        if isinstance(weight, Tensor) and weight.is_floating_point() and weight.dim() >= 2:
            yield path, weight, place.module


def _rounded_copy(reference: nn.Module, schemes: Mapping[str, _Scheme]) -> nn.Module | None:
    try:
        copied = copy.deepcopy(reference)
    except Exception:  # a model that cannot be copied has no such floor
        return None
    with torch.no_grad():
        for path, scheme in schemes.items():
            module: Any = copied.get_submodule(path)
            module.weight.copy_(_rounded(module.weight, scheme))
            if scheme.inputs:
                module.forward = _with_rounded_inputs(module.forward)
    return copied


def _scheme_of(weight: Tensor, module: nn.Module) -> _Scheme | None:
    kind = f"{type(module).__module__}.{type(module).__name__}"
    theirs = weight_of(module)
    if "quantized" in kind and callable(getattr(module, "weight", None)):
        stored = module.weight()  # type: ignore[operator]
        rows = stored.qscheme() in (torch.per_channel_affine, torch.per_channel_symmetric)
        return _Scheme(8, -1 if rows else 0, True, inputs=True)
    if theirs is None or theirs.shape != weight.shape or torch.equal(theirs, weight):
        return None
    return _lattice(theirs.float())


def weight_of(module: object) -> Tensor | None:
    """A module's weight as plain numbers."""
    weight = getattr(module, "weight", None)
    if callable(weight) and not isinstance(weight, Tensor):
        weight = weight()
    if not isinstance(weight, Tensor):
        return None
    if weight.is_quantized:
        return weight.dequantize()
    if weight.is_floating_point():
        return weight.detach()
    for name in ("scale", "scales", "weight_scale"):
        scale = getattr(module, name, None)
        if isinstance(scale, Tensor):
            return weight.detach().float() * scale.reshape(-1, *([1] * (weight.dim() - 1)))
    return None


def _lattice(weight: Tensor) -> _Scheme | None:
    """The scheme by which these numbers are integers times a step."""
    rows = weight.reshape(weight.shape[0], -1)
    for group in _GROUPS:
        parts = _grouped(rows, group)
        if parts is None:
            continue
        for bits in _BITS:
            levels = 2 ** (bits - 1) - 1
            step = parts.abs().amax(1, keepdim=True) / levels
            if _on_lattice(parts / step.clamp(min=1e-30)):
                return _Scheme(bits, group, True)
            low, high = parts.amin(1, keepdim=True), parts.amax(1, keepdim=True)
            step = (high - low) / (2**bits - 1)
            if _on_lattice((parts - low) / step.clamp(min=1e-30)):
                return _Scheme(bits, group, False)
    return None


def _grouped(rows: Tensor, group: int) -> Tensor | None:
    if group == 0:
        return rows.reshape(1, -1)
    if group == -1:
        return rows
    return rows.reshape(-1, group) if rows.shape[1] % group == 0 and rows.shape[1] > group else None


def _on_lattice(steps: Tensor) -> bool:
    return steps.numel() >= _SOME and bool(((steps - steps.round()).abs() < _OFF_LATTICE).all())


def _rounded(weight: Tensor, scheme: _Scheme) -> Tensor:
    rows = weight.reshape(weight.shape[0], -1)
    parts = _grouped(rows, scheme.group)
    assert parts is not None
    if scheme.symmetric:
        levels = 2 ** (scheme.bits - 1) - 1
        step = (parts.abs().amax(1, keepdim=True) / levels).clamp(min=1e-30)
        moved: Tensor = (parts / step).round() * step
        return moved.reshape(weight.shape)
    low, high = parts.amin(1, keepdim=True), parts.amax(1, keepdim=True)
    step = ((high - low) / (2**scheme.bits - 1)).clamp(min=1e-30)
    shifted: Tensor = ((parts - low) / step).round() * step + low
    return shifted.reshape(weight.shape)


def _with_rounded_inputs(forward: Callable[..., object]) -> Callable[..., Any]:
    def rounded(value: object) -> object:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        low, high = value.min().clamp(max=0.0), value.max().clamp(min=0.0)
        step = ((high - low) / 127.0).clamp(min=1e-30)  # torch keeps one bit in reserve
        return ((value - low) / step).round() * step + low

    return lambda *args, **kwargs: forward(*(rounded(value) for value in args), **kwargs)
