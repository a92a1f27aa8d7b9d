"""The sums that every measure is made of, added up piece by piece over two tensors.

By the native kernel where it was built (one read of the memory, no temporaries), else by torch operations on small
pieces. Both leave out the places where either side is not finite, and count them; a test holds that they agree.

A number at the edge of its dtype (`finfo.min` in an attention mask) stands for an infinity and is counted as one: its
square would drown every other element, and the same mask has another value in another dtype.

Not here: what the sums amount to (`measures`).
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import final

import torch
from torch import Tensor

__all__ = ["EXTREME", "RELATIVE_GUARD", "Sums", "native"]

RELATIVE_GUARD = 1e-8

native: ModuleType | None
try:
    from torchtap.comparison.measure import _distance as native  # type: ignore[attr-defined,no-redef]
except ImportError:  # not built: the same sums, more slowly
    native = None

# The numbers by which `_distance.c` knows the dtypes; any other comes through a float64 copy of the piece.
_CODES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}


# From where on a number stands for an infinity, by dtype. Squares of float64 overflow from 1e154 on.
EXTREME = {
    torch.float64: 1e140,
    torch.float32: 1e29,
    torch.bfloat16: 1e29,
    torch.float16: 0.98 * torch.finfo(torch.float16).max,
}


@final
class Sums:
    """What is known of two tensors so far."""

    def __init__(
        self,
        ulp: tuple[float, float],
        atol: float,
        rtol: float,
        brief: bool,
        limits: tuple[float, float] = (EXTREME[torch.float64], EXTREME[torch.float64]),
    ) -> None:
        self.ulp_relative, self.ulp_smallest = ulp
        self.limits = limits  # from where on a number of either side stands for an infinity
        self.atol, self.rtol = atol, rtol
        self.brief = brief
        self.count = self.compared = self.unequal = self.within = self.masks_differ = 0
        self.nans, self.infs = [0, 0], [0, 0]
        self.dd = self.rr = self.tt = self.tr = 0.0
        self.sum_abs = self.sum_rel = self.sum_ulp = 0.0
        self.max_rel = self.max_ulp = self.absmax = 0.0
        self.max_abs = -1.0
        self.worst = 0
        self.worst_values = (math.nan, math.nan)
        self._scratch: Tensor | None = None

    def add(self, offset: int, reference: Tensor, target: Tensor) -> None:
        """Take one more piece: flat, of one length, ``offset`` elements after the beginning."""
        self.count += reference.numel()
        if native is not None:
            self._add_native(offset, self._readable(reference, 0), self._readable(target, 1))
        else:
            self._add_by_torch(offset, reference, target)

    def merge(self, other: Sums) -> None:
        """Add what another walk over later pieces found."""
        for name in (
            "count", "compared", "unequal", "within", "masks_differ",
            "dd", "rr", "tt", "tr", "sum_abs", "sum_rel", "sum_ulp",
        ):  # fmt: skip
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("max_rel", "max_ulp", "absmax"):
            setattr(self, name, max(getattr(self, name), getattr(other, name)))
        self.nans = [a + b for a, b in zip(self.nans, other.nans, strict=True)]
        self.infs = [a + b for a, b in zip(self.infs, other.infs, strict=True)]
        if other.max_abs > self.max_abs:
            self.max_abs, self.worst, self.worst_values = other.max_abs, other.worst, other.worst_values

    def _readable(self, piece: Tensor, row: int) -> Tensor:
        if piece.dtype in _CODES and piece.device.type == "cpu" and piece.is_contiguous():
            return piece
        kept = self._room(piece.numel())[row]
        return kept.copy_(piece)

    def _room(self, size: int) -> list[Tensor]:
        if self._scratch is None or self._scratch.shape[1] < size:
            self._scratch = torch.empty(2 if native is not None else 5, size, dtype=torch.float64)
        return [row[:size] for row in self._scratch]

    def _add_native(self, offset: int, r: Tensor, t: Tensor) -> None:
        assert native is not None
        whole = self.ulp_relative == 0.0
        scale = 1.0 if whole else 1.0 / self.ulp_relative
        floor = 1.0 if whole else self.ulp_smallest * scale
        numbers, counts, odd = native.measure(
            r.data_ptr(), _CODES[r.dtype], t.data_ptr(), _CODES[t.dtype], r.numel(),
            self.atol, self.rtol, scale, floor, int(whole),
        )  # fmt: skip
        rr, tt, tr, dd, sum_abs, sum_rel, sum_ulp, max_abs, max_rel, max_ulp, absmax, worst_r, worst_t = (
            numbers
        )
        compared, unequal, within, masks_differ, worst = counts
        if masks_differ or self._extreme(rr, tt):
            self._add_guarded(offset, r.to(torch.float64, copy=True), t.to(torch.float64, copy=True))
            return
        self.rr, self.tt, self.tr, self.dd = self.rr + rr, self.tt + tt, self.tr + tr, self.dd + dd
        self.sum_abs, self.sum_rel, self.sum_ulp = (
            self.sum_abs + sum_abs,
            self.sum_rel + sum_rel,
            self.sum_ulp + sum_ulp,
        )
        self.max_rel, self.max_ulp = max(self.max_rel, max_rel), max(self.max_ulp, max_ulp)
        self.absmax = max(self.absmax, absmax)
        self.compared += compared
        self.unequal += unequal
        self.within += within
        self.masks_differ += masks_differ
        self.nans = [self.nans[0] + odd[0], self.nans[1] + odd[1]]
        self.infs = [self.infs[0] + odd[2], self.infs[1] + odd[3]]
        if max_abs > self.max_abs:
            self.max_abs, self.worst, self.worst_values = max_abs, offset + worst, (worst_r, worst_t)

    def _add_by_torch(self, offset: int, reference: Tensor, target: Tensor) -> None:
        r, t, d, a, b = self._room(reference.numel())
        r.copy_(reference)
        t.copy_(target)
        rr, tt = float(torch.dot(r, r)), float(torch.dot(t, t))
        if self._extreme(rr, tt):
            self._add_guarded(offset, r.clone(), t.clone())
            return
        self._add_finite(offset, r, t, d, a, b, rr, tt, None)

    def _extreme(self, rr: float, tt: float) -> bool:
        """Whether a piece may hold numbers that stand for infinities; its squares say so."""
        return not (rr < self.limits[0] ** 2 and tt < self.limits[1] ** 2)

    def _add_guarded(self, offset: int, r: Tensor, t: Tensor) -> None:
        """A piece with NaN, infinities or extremes: count them and leave them out."""
        for value, limit in zip((r, t), self.limits, strict=True):
            value[value >= limit] = math.inf
            value[value <= -limit] = -math.inf
        for side, value in enumerate((r, t)):
            self.nans[side] += int(torch.isnan(value).sum())
            self.infs[side] += int(torch.isinf(value).sum())
        finite_r, finite_t = torch.isfinite(r), torch.isfinite(t)
        both = finite_r & finite_t
        same = (r == t) | (torch.isnan(r) & torch.isnan(t))
        outside = ~both
        differing = int((outside & ~same).sum())
        self.masks_differ += differing
        self.unequal += differing
        keep = both.nonzero().squeeze(1)
        if not keep.numel():
            return
        r, t = r[keep], t[keep]
        rr, tt = float(torch.dot(r, r)), float(torch.dot(t, t))
        scratch = torch.empty(3, r.numel(), dtype=torch.float64)
        self._add_finite(offset, r, t, scratch[0], scratch[1], scratch[2], rr, tt, keep)

    def _add_finite(
        self,
        offset: int,
        r: Tensor,
        t: Tensor,
        d: Tensor,
        a: Tensor,
        b: Tensor,
        rr: float,
        tt: float,
        places: Tensor | None,
    ) -> None:
        size = r.numel()
        self.compared += size
        self.rr += rr
        self.tt += tt
        torch.sub(t, r, out=d)
        dd = float(torch.dot(d, d))
        torch.abs(r, out=a)
        self.absmax = max(self.absmax, float(a.max()))
        if dd == 0.0 and not bool(d.any()):
            self.tr += rr
            self.within += size
            if self.max_abs < 0.0:
                self._note_worst(0.0, offset, 0, r, t, places)
            return
        self.dd += dd
        self.tr += float(torch.dot(t, r))
        d.abs_()
        largest = d.max()
        if float(largest) > self.max_abs:
            self._note_worst(float(largest), offset, int(d.argmax()), r, t, places)
        self.sum_abs += float(d.sum())
        self.unequal += int(torch.count_nonzero(d))
        if self.brief:
            return
        torch.mul(a, self.rtol, out=b).add_(self.atol)
        self.within += int(torch.count_nonzero(torch.le(d, b)))
        torch.add(a, RELATIVE_GUARD, out=b)
        torch.div(d, b, out=b)
        self.max_rel = max(self.max_rel, float(b.max()))
        self.sum_rel += float(b.sum())
        # The exponent bits alone of a float64 are the power of two at or below it.
        a.view(torch.int64).bitwise_and_(0x7FF0000000000000)
        a.mul_(self.ulp_relative).clamp_(min=self.ulp_smallest)
        torch.div(d, a, out=b)
        self.max_ulp = max(self.max_ulp, float(b.max()))
        self.sum_ulp += float(b.sum())

    def _note_worst(
        self, distance: float, offset: int, at: int, r: Tensor, t: Tensor, places: Tensor | None
    ) -> None:
        self.max_abs = distance
        self.worst = offset + (at if places is None else int(places[at]))
        self.worst_values = (float(r[at]), float(t[at]))
