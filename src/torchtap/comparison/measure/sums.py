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

from torchtap.errors import CompareError
from torchtap.reduce.memory import located
from torchtap.reduce.readable import readable

__all__ = ["EXTREME", "RELATIVE_GUARD", "Sums", "native"]

RELATIVE_GUARD = 1e-8


def _load() -> ModuleType | None:
    try:
        from torchtap.comparison.measure import _distance  # type: ignore[attr-defined]
    except ImportError:  # not built: the same sums, more slowly
        return None
    return _distance if hasattr(_distance, "sums") else None  # a build of an older source is as good as none


native = _load()

# The numbers by which `_distance.c` knows the dtypes; any other comes through a float64 copy of the piece.
_CODES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}


# From where on a number stands for an infinity, by dtype.
EXTREME = {
    torch.float64: 1e305,
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
        # Squares and products of 2**-exponent times the numbers: so that they neither overflow nor vanish.
        self.dd = self.rr = self.tt = self.tr = 0.0
        self.exponent = 0
        self.sum_abs = self.sum_rel = self.sum_ulp = 0.0
        self.max_rel = self.max_ulp = self.absmax = 0.0
        self.max_abs = -1.0
        self.worst = 0
        self.worst_values = (math.nan, math.nan)
        self._scratch: Tensor | None = None

    def add(self, offset: int, reference: Tensor, target: Tensor) -> None:
        """Take one more piece: flat, of one length, ``offset`` elements after the beginning."""
        if reference.numel() != target.numel():
            raise CompareError(
                f"pieces of {reference.numel()} and {target.numel()} elements have no distance"
            )
        self.count += reference.numel()
        if native is not None:
            self._add_native(offset, reference, target)
        else:
            self._add_by_torch(offset, reference, target)

    def merge(self, other: Sums) -> None:
        """Add what another walk over later pieces found."""
        for name in (
            "count", "compared", "unequal", "within", "masks_differ", "sum_abs", "sum_rel", "sum_ulp",
        ):  # fmt: skip
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self._add_squares(other.exponent, other.rr, other.tt, other.tr, other.dd)
        for name in ("max_rel", "max_ulp", "absmax"):
            setattr(self, name, max(getattr(self, name), getattr(other, name)))
        self.nans = [a + b for a, b in zip(self.nans, other.nans, strict=True)]
        self.infs = [a + b for a, b in zip(self.infs, other.infs, strict=True)]
        if other.max_abs > self.max_abs:
            self.max_abs, self.worst, self.worst_values = other.max_abs, other.worst, other.worst_values

    def _add_squares(self, exponent: int, rr: float, tt: float, tr: float, dd: float) -> None:
        """More sums of squares; of two scales the larger numbers' stays, beside which the smaller ones' are nothing."""
        if not (rr or tt or dd):
            return
        if not (self.rr or self.tt or self.dd):
            self.exponent = exponent
        by = (
            math.ldexp(1.0, max(-2000, -2 * abs(exponent - self.exponent)))
            if exponent != self.exponent
            else 1.0
        )
        if exponent > self.exponent:
            self.rr, self.tt, self.tr, self.dd = self.rr * by, self.tt * by, self.tr * by, self.dd * by
            self.exponent = exponent
        elif exponent < self.exponent:
            rr, tt, tr, dd = rr * by, tt * by, tr * by, dd * by
        self.rr, self.tt, self.tr, self.dd = self.rr + rr, self.tt + tt, self.tr + tr, self.dd + dd

    def _readable(self, piece: Tensor, row: int) -> tuple[int, Tensor, object]:
        """A piece's address, the piece as it can be read there, and what has to be held meanwhile."""
        if piece.dtype in _CODES and piece.is_contiguous():
            place = located(piece)
            if place is not None:
                return place[0], piece, place[1]
        kept = self._room(piece.numel())[row]
        kept.copy_(readable(piece))
        return kept.data_ptr(), kept, kept

    def _room(self, size: int) -> list[Tensor]:
        if self._scratch is None or self._scratch.shape[1] < size:
            self._scratch = torch.empty(2 if native is not None else 5, size, dtype=torch.float64)
        return [row[:size] for row in self._scratch]

    def _add_native(self, offset: int, reference: Tensor, target: Tensor) -> None:
        assert native is not None
        whole = self.ulp_relative == 0.0
        scale = 1.0 if whole else 1.0 / self.ulp_relative
        floor = 1.0 if whole else self.ulp_smallest * scale
        at_r, r, held_r = self._readable(reference, 0)
        at_t, t, held_t = self._readable(target, 1)
        numbers, counts, odd, exponent = native.sums(
            at_r, _CODES[r.dtype], at_t, _CODES[t.dtype], r.numel(),
            self.atol, self.rtol, scale, floor, int(whole),
        )  # fmt: skip
        del held_r, held_t  # only now: the kernel lets go of the interpreter
        rr, tt, tr, dd, sum_abs, sum_rel, sum_ulp, max_abs, max_rel, max_ulp, absmax, worst_r, worst_t = (
            numbers
        )
        compared, unequal, within, masks_differ, worst = counts
        if masks_differ or self._extreme(exponent, rr, tt):
            self._add_guarded(offset, r.to(torch.float64, copy=True), t.to(torch.float64, copy=True))
            return
        self._add_squares(exponent, rr, tt, tr, dd)
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
        r.copy_(readable(reference))
        t.copy_(readable(target))
        squares = (float(torch.dot(r, r)), float(torch.dot(t, t)), float(torch.dot(t, r)))
        if 1e-250 < squares[0] + squares[1] < 1e300 and not self._extreme(0, squares[0], squares[1]):
            self._add_finite(offset, r, t, (d, a, b), (0, *squares), None)
        else:
            self._add_guarded(offset, r.clone(), t.clone())

    def _extreme(self, exponent: int, rr: float, tt: float) -> bool:
        """Whether a piece may hold numbers that stand for infinities; its squares say so."""
        sizes = (math.sqrt(square) * 2.0**exponent for square in (rr, tt))
        return not all(size < limit for size, limit in zip(sizes, self.limits, strict=True))

    def _add_guarded(self, offset: int, r: Tensor, t: Tensor) -> None:
        """A piece with NaN, infinities or what stands for them, which are counted and left out, or with squares
        beyond float64."""
        beyond = (r.abs() >= self.limits[0]) | (t.abs() >= self.limits[1])
        # Where every number is that large, and of one dtype, they are numbers and no mask.
        if (
            self.limits[0] != self.limits[1]
            or not bool(beyond.all())
            or not bool((torch.isfinite(r) & torch.isfinite(t)).all())
        ):
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
        exponent = math.frexp(max(float(r.abs().max()), float(t.abs().max())))[1]
        exponent = max(-1000, min(1000, exponent)) if abs(exponent) > 400 else 0
        u, v = r * 2.0**-exponent, t * 2.0**-exponent
        squares = (float(torch.dot(u, u)), float(torch.dot(v, v)), float(torch.dot(u, v)))
        scratch = torch.empty(3, r.numel(), dtype=torch.float64)
        self._add_finite(offset, r, t, (scratch[0], scratch[1], scratch[2]), (exponent, *squares), keep)

    def _add_finite(
        self,
        offset: int,
        r: Tensor,
        t: Tensor,
        room: tuple[Tensor, Tensor, Tensor],
        squares: tuple[int, float, float, float],
        places: Tensor | None,
    ) -> None:
        size = r.numel()
        d, a, b = room
        exponent, rr, tt, tr = squares
        self.compared += size
        torch.sub(t, r, out=d)
        apart = d if exponent == 0 else t * 2.0**-exponent - r * 2.0**-exponent
        dd = float(torch.dot(apart, apart))
        self._add_squares(exponent, rr, tt, tr, dd)
        torch.abs(r, out=a)
        self.absmax = max(self.absmax, float(a.max()))
        if dd == 0.0 and not bool(d.any()):
            self.within += size
            if self.max_abs < 0.0:
                self._note_worst(0.0, offset, 0, r, t, places)
            return
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
