"""The sums that every measure is made of, added up piece by piece over two arrays.

By the native kernel where it was built (one read of the memory, no temporaries), else by numpy on small pieces. Both
leave out the places where either side is not finite, and count them; a test holds that they agree.

A number at the edge of its dtype (`finfo.min` in an attention mask) stands for an infinity and is counted as one: its
square would drown every other element, and the same mask has another value in another dtype.

Not here: what the sums amount to (`measures`).
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import final

import numpy as np
import numpy.typing as npt

from torchtap.comparison.measure.dtypes import FARTHEST
from torchtap.comparison.measure.values import Array
from torchtap.errors import CompareError

__all__ = ["RELATIVE_GUARD", "Sums", "native", "numbers_of_bits"]

RELATIVE_GUARD = 1e-8
Wide = npt.NDArray[np.float64]


def _load() -> ModuleType | None:
    try:
        from torchtap.comparison.measure import _distance  # type: ignore[attr-defined]
    except ImportError:  # not built: the same sums, more slowly
        return None
    return _distance if hasattr(_distance, "sums") else None  # a build of an older source is as good as none


native = _load()

# The numbers by which `_distance.c` knows what it reads; anything else comes through a float64 copy of the piece.
_CODES = {np.dtype(np.float32): 0, np.dtype(np.float64): 1}
_BITS = 2  # bfloat16 as it lies in a file
_EXPONENT = np.int64(0x7FF0000000000000)


def numbers_of_bits(bits: Array) -> npt.NDArray[np.float32]:
    """The numbers that the bits of bfloat16 stand for."""
    wide = bits.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


@final
class Sums:
    """What is known of two arrays so far.

    ``bits`` says of either side that its pieces are not numbers but the bits of bfloat16, as a file holds them.
    """

    def __init__(
        self,
        ulp: tuple[float, float],
        atol: float,
        rtol: float,
        brief: bool,
        limits: tuple[float, float] = (FARTHEST, FARTHEST),
        bits: tuple[bool, bool] = (False, False),
    ) -> None:
        self.ulp_relative, self.ulp_smallest = ulp
        self.limits = limits  # from where on a number of either side stands for an infinity
        self.bits = bits
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

    def add(self, offset: int, reference: Array, target: Array) -> None:
        """Take one more piece: flat, of one length, ``offset`` elements after the beginning."""
        if reference.size != target.size:
            raise CompareError(f"pieces of {reference.size} and {target.size} elements have no distance")
        self.count += reference.size
        if native is not None:
            self._add_native(offset, reference, target)
        else:
            self._add_by_numpy(offset, self._wide(reference, 0), self._wide(target, 1))

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

    def _wide(self, piece: Array, side: int) -> Wide:
        """A float64 copy of a piece's numbers."""
        return (numbers_of_bits(piece) if self.bits[side] else piece).astype(np.float64)

    def _readable(self, piece: Array, side: int) -> tuple[Array, int]:
        """A piece as the kernel can read it, and by which number the kernel knows it."""
        if piece.flags.c_contiguous and piece.flags.aligned:
            if self.bits[side]:
                return piece, _BITS
            code = _CODES.get(piece.dtype)
            if code is not None:
                return piece, code
        return self._wide(piece, side), _CODES[np.dtype(np.float64)]

    def _add_native(self, offset: int, reference: Array, target: Array) -> None:
        assert native is not None
        whole = self.ulp_relative == 0.0
        scale = 1.0 if whole else 1.0 / self.ulp_relative
        floor = 1.0 if whole else self.ulp_smallest * scale
        (r, code_r), (t, code_t) = self._readable(reference, 0), self._readable(target, 1)
        numbers, counts, odd, exponent = native.sums(
            r.ctypes.data, code_r, t.ctypes.data, code_t, r.size,
            self.atol, self.rtol, scale, floor, int(whole),
        )  # fmt: skip
        rr, tt, tr, dd, sum_abs, sum_rel, sum_ulp, max_abs, max_rel, max_ulp, absmax, worst_r, worst_t = (
            numbers
        )
        compared, unequal, within, masks_differ, worst = counts
        if masks_differ or self._extreme(exponent, rr, tt):
            self._add_guarded(offset, self._wide(reference, 0), self._wide(target, 1))
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

    def _add_by_numpy(self, offset: int, r: Wide, t: Wide) -> None:
        with np.errstate(all="ignore"):
            squares = (float(r @ r), float(t @ t), float(t @ r))
            if 1e-250 < squares[0] + squares[1] < 1e300 and not self._extreme(0, squares[0], squares[1]):
                self._add_finite(offset, r, t, (0, *squares), None)
            else:
                self._add_guarded(offset, r, t)

    def _extreme(self, exponent: int, rr: float, tt: float) -> bool:
        """Whether a piece may hold numbers that stand for infinities; its squares say so."""
        sizes = (math.sqrt(square) * 2.0**exponent for square in (rr, tt))
        return not all(size < limit for size, limit in zip(sizes, self.limits, strict=True))

    def _add_guarded(self, offset: int, r: Wide, t: Wide) -> None:
        """A piece with NaN, infinities or what stands for them, which are counted and left out, or with squares
        beyond float64. The piece is the caller's to give away."""
        with np.errstate(all="ignore"):
            beyond = (np.abs(r) >= self.limits[0]) | (np.abs(t) >= self.limits[1])
            numbers = self.limits[0] == self.limits[1] and bool(beyond.all())
            # Where every number is that large, and of one dtype, they are numbers and no mask.
            if not (numbers and bool((np.isfinite(r) & np.isfinite(t)).all())):
                for value, limit in zip((r, t), self.limits, strict=True):
                    value[value >= limit] = math.inf
                    value[value <= -limit] = -math.inf
            for side, value in enumerate((r, t)):
                self.nans[side] += int(np.isnan(value).sum())
                self.infs[side] += int(np.isinf(value).sum())
            both = np.isfinite(r) & np.isfinite(t)
            same = (r == t) | (np.isnan(r) & np.isnan(t))
            differing = int((~both & ~same).sum())
            self.masks_differ += differing
            self.unequal += differing
            keep = np.flatnonzero(both)
            if not keep.size:
                return
            r, t = r[keep], t[keep]
            exponent = math.frexp(max(float(np.abs(r).max()), float(np.abs(t).max())))[1]
            exponent = max(-1000, min(1000, exponent)) if abs(exponent) > 400 else 0
            u, v = r * 2.0**-exponent, t * 2.0**-exponent
            self._add_finite(offset, r, t, (exponent, float(u @ u), float(v @ v), float(u @ v)), keep)

    def _add_finite(
        self,
        offset: int,
        r: Wide,
        t: Wide,
        squares: tuple[int, float, float, float],
        places: npt.NDArray[np.intp] | None,
    ) -> None:
        exponent, rr, tt, tr = squares
        self.compared += r.size
        apart = t * 2.0**-exponent - r * 2.0**-exponent
        dd = float(apart @ apart)
        self._add_squares(exponent, rr, tt, tr, dd)
        size = np.abs(r)
        self.absmax = max(self.absmax, float(size.max()))
        distance = np.abs(t - r)
        if dd == 0.0 and not distance.any():
            self.within += r.size
            if self.max_abs < 0.0:
                self._note_worst(0.0, offset, 0, r, t, places)
            return
        at = int(distance.argmax())
        if float(distance[at]) > self.max_abs:
            self._note_worst(float(distance[at]), offset, at, r, t, places)
        self.sum_abs += float(distance.sum())
        self.unequal += int(np.count_nonzero(distance))
        if self.brief:
            return
        self.within += int(np.count_nonzero(distance <= self.rtol * size + self.atol))
        relative = distance / (size + RELATIVE_GUARD)
        self.max_rel = max(self.max_rel, float(relative.max()))
        self.sum_rel += float(relative.sum())
        # The exponent bits alone of a float64 are the power of two at or below it.
        below = (size.view(np.int64) & _EXPONENT).view(np.float64)
        steps = distance / np.maximum(below * self.ulp_relative, self.ulp_smallest)
        self.max_ulp = max(self.max_ulp, float(steps.max()))
        self.sum_ulp += float(steps.sum())

    def _note_worst(
        self, distance: float, offset: int, at: int, r: Wide, t: Wide, places: npt.NDArray[np.intp] | None
    ) -> None:
        self.max_abs = distance
        self.worst = offset + (at if places is None else int(places[at]))
        self.worst_values = (float(r[at]), float(t[at]))
