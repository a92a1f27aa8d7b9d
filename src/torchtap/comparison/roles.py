"""Pair the arguments and results of one module call of two models by what they mean, not by their position.

A port may name and order its arguments differently, pass a complex table where the reference passes cosines and sines,
or build a mask elsewhere. Each tensor gets a role from its dtype, range and values:

    mask       booleans, 0/1 integers, or 0 and a very negative number
    positions  integers that count up along the last axis
    ids        other integers
    rotary     cosines, sines or complex numbers of size 1
    weights    rows that add up to 1 (attention, routing)
    number     everything else: hidden states, caches, logits

Values are paired within a role. A value without a partner is left alone: it can never be blamed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, final

import torch
from torch import Tensor

__all__ = ["Role", "RolePairs", "alike", "pair_by_role", "role_of"]

Role = Literal["mask", "positions", "ids", "rotary", "weights", "number"]
_FORBIDS = -9000.0  # the mildest number seen to mean "do not look"
_MOST = 1 << 22  # elements beyond which the values are not inspected
_NEAR = 1e-4  # relative distance up to which two tables or masks are the same


@final
@dataclass(slots=True, eq=False)
class RolePairs:
    """Which value is which of the reference's."""

    sites: dict[str, str] = field(default_factory=dict)  # leaf here -> the reference's site
    derived: dict[str, tuple[Tensor, Tensor]] = field(
        default_factory=dict
    )  # site -> both values in one layout
    unpaired: bool = False  # whether a value other than positions and ids has no partner


def role_of(value: Tensor) -> Role:
    """Return what a tensor seems to be."""
    if value.dtype == torch.bool:
        return "mask"
    if value.numel() == 0 or value.numel() > _MOST:
        return "number" if value.is_floating_point() or value.is_complex() else "ids"
    if value.is_complex():
        return "rotary" if bool(((value.abs() - 1.0).abs() < 1e-3).all()) else "number"
    if not value.is_floating_point():
        return _integer_role(value)
    wide = value.detach().float()
    hidden = wide <= _FORBIDS
    if bool(hidden.any()) and bool((hidden | (wide == 0)).all()):
        return "mask"
    if wide.dim() >= 3 and bool((wide >= 0).all()) and bool(((wide.sum(-1) - 1.0).abs() < 1e-3).all()):
        return "weights"
    return "rotary" if _is_table(wide) else "number"


def _integer_role(value: Tensor) -> Role:
    if bool(((value == 0) | (value == 1)).all()) and value.dim() >= 2 and bool((value == 1).any()):
        return "mask"
    last = value if value.dim() else value.reshape(1)
    steps = last[..., 1:] - last[..., :-1]
    return "positions" if last.shape[-1] > 1 and bool((steps == 1).all()) else "ids"


def _is_table(wide: Tensor) -> bool:
    """Return True for cosines or sines by position: bounded by 1, and 1 or 0 all along the first position."""
    shape = [n for n in wide.shape if n != 1]
    if not 2 <= len(shape) <= 3 or bool((wide.abs() > 1.001).any()):
        return False
    if shape[-1] == 2 and len(shape) == 3:  # cosine and sine side by side
        pairs = wide.reshape(shape)
        return bool(((pairs.square().sum(-1) - 1.0).abs() < 1e-3).all())
    first = wide.reshape(-1, *shape[-2:])[:, 0]
    return bool((first == 1).all()) or bool((first == 0).all() and (wide != 0).any())


def pair_by_role(
    found: Sequence[tuple[str, Tensor]], expected: Sequence[tuple[str, str]], values: Mapping[str, Tensor]
) -> RolePairs:
    """Pair the tensors of a call with the reference's of the same call."""
    mine: dict[Role, list[tuple[str, Tensor]]] = {}
    theirs: dict[Role, list[tuple[str, str]]] = {}
    for leaf, value in found:
        mine.setdefault(role_of(value), []).append((leaf, value))
    for leaf, site in expected:
        theirs.setdefault(role_of(values[site]), []).append((leaf, site))
    pairs = RolePairs()
    for role in ("number", "weights", "ids", "positions"):
        _pair_numbers(mine.get(role, []), theirs.get(role, []), values, pairs)
    _pair_tables(mine.get("rotary", []), theirs.get("rotary", []), values, pairs)
    _pair_masks(mine.get("mask", []), theirs.get("mask", []), values, pairs)
    pairs.unpaired = any(
        leaf not in pairs.sites for role in ("number", "weights", "mask") for leaf, _ in mine.get(role, [])
    ) or ("rotary" in mine and not _is_paired(theirs.get("rotary", []), pairs))
    return pairs


def _is_paired(sites: Sequence[tuple[str, str]], pairs: RolePairs) -> bool:
    taken = {*pairs.sites.values(), *pairs.derived}
    return any(site in taken for _, site in sites)


def alike(reference: Tensor, value: Tensor) -> bool:
    """Return True if two values can be laid over each other: the same axes but for those of one element, or the same
    rows under another batching."""
    if [n for n in reference.shape if n != 1] == [n for n in value.shape if n != 1]:
        return True
    return bool(
        reference.numel() == value.numel()
        and reference.dim() >= 2 <= value.dim()
        and reference.shape[-1] == value.shape[-1]
        and abs(reference.dim() - value.dim()) == 1
    )


def _pair_numbers(
    mine: list[tuple[str, Tensor]],
    theirs: list[tuple[str, str]],
    values: Mapping[str, Tensor],
    pairs: RolePairs,
) -> None:
    """Pair by name, then by the nearest value, then in order; only values that can be laid over each other."""
    left = dict(theirs)
    for leaf, value in mine:
        site = left.get(leaf)
        if site is not None and alike(values[site], value):
            pairs.sites[leaf] = left.pop(leaf)
    rest = [(leaf, value) for leaf, value in mine if leaf not in pairs.sites]
    for near in (True, False):
        for leaf, value in rest:
            fits = [name for name, site in left.items() if alike(values[site], value)]
            if near:
                fits = [name for name in fits if _apart(values[left[name]], value) < 0.5]
            if leaf not in pairs.sites and fits:
                pairs.sites[leaf] = left.pop(fits[0])


def _apart(reference: Tensor, value: Tensor) -> float:
    a, b = reference.detach().double().reshape(-1), value.detach().to(reference.device).double().reshape(-1)
    size = float(a.norm())
    return float((a - b).norm()) / size if size else float(b.norm())


def _pair_tables(
    mine: list[tuple[str, Tensor]],
    theirs: list[tuple[str, str]],
    values: Mapping[str, Tensor],
    pairs: RolePairs,
) -> None:
    """Pair rotary tables whatever their layout, as complex numbers for each position and frequency."""
    left = dict(theirs)
    same = [leaf for leaf, value in mine if leaf in left and values[left[leaf]].shape == value.shape]
    if mine and len(same) == len(mine) == len(theirs):
        pairs.sites.update({leaf: left[leaf] for leaf in same})
        return
    a, b = _table([values[site] for _, site in theirs]), _table([value for _, value in mine])
    if a is None or b is None or a.shape[-1] != b.shape[-1]:
        return
    rows = min(len(a), len(b))
    a, b = a[:rows], b[:rows].to(a.device)
    if _apart(torch.view_as_real(a), torch.view_as_real(b)) > _NEAR:
        pairs.derived[theirs[0][1]] = (a, b)
    else:
        pairs.derived[theirs[0][1]] = (a, a)


def _table(tensors: list[Tensor]) -> Tensor | None:
    """Return ``[positions, frequencies]`` complex numbers made of one or two tensors."""
    if not 1 <= len(tensors) <= 2:
        return None
    first = tensors[0].detach()
    if first.is_complex():
        whole = first
    elif len(tensors) == 2:
        cos, sin = (_halved(each.detach().float()) for each in tensors)
        if cos.shape != sin.shape:
            return None
        if float(cos.reshape(-1)[0]) == 0.0:
            cos, sin = sin, cos
        whole = torch.complex(cos, sin)
    elif first.shape[-1] == 2:
        whole = torch.view_as_complex(first.float().contiguous())
    else:
        return None
    shape = [n for n in whole.shape if n != 1]
    if len(shape) == 3:  # the same for each sample
        whole = whole.reshape(shape)[0]
    return whole.reshape(-1, whole.shape[-1]).to(torch.complex64)


def _halved(table: Tensor) -> Tensor:
    """Drop the second copy of each frequency, whichever way the two are laid out."""
    size = table.shape[-1]
    if size % 2 == 0 and torch.equal(table[..., : size // 2], table[..., size // 2 :]):
        return table[..., : size // 2]
    if size % 2 == 0 and torch.equal(table[..., 0::2], table[..., 1::2]):
        return table[..., 0::2]
    return table


def _pair_masks(
    mine: list[tuple[str, Tensor]],
    theirs: list[tuple[str, str]],
    values: Mapping[str, Tensor],
    pairs: RolePairs,
) -> None:
    """Pair masks over the same two last axes, whatever their spelling; axes that one of them lacks are repeated."""
    left = [site for _, site in theirs]
    for leaf, value in mine:
        for site in left:
            both = _masks(values[site], value)
            if both is None:
                continue
            left.remove(site)
            pairs.sites[leaf] = site
            if values[site].shape != value.shape:
                pairs.derived[site] = both
            break


def _masks(reference: Tensor, value: Tensor) -> tuple[Tensor, Tensor] | None:
    a, b = _hidden(reference), _hidden(value).to(reference.device)
    if a.dim() < 2 or b.dim() < 2 or a.shape[-2:] != b.shape[-2:]:
        return None
    try:
        a, b = torch.broadcast_tensors(a, b)
    except RuntimeError:
        return None
    if not torch.equal(a, b) and torch.equal(a, ~b):  # True means "look" in one of them
        b = ~b
    return a, b


def _hidden(mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return mask
    return mask.detach() <= _FORBIDS if mask.is_floating_point() else mask == 0
