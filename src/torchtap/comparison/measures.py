"""Values that come piece by piece and are never whole in memory, and their distance.

A piece is read, verified and measured while it is still in the cache, and the next is read meanwhile: large recordings
are compared at about the speed at which their bytes can be read, in a few megabytes, however large a single value is.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import prod
from types import ModuleType
from typing import Any, final

import numpy as np
import numpy.typing as npt

from torchtap.comparison.values import (
    CHUNK,
    FARTHEST,
    Array,
    Comparable,
    Value,
    coarser,
    extreme,
    pieces,
    resolution,
    same_spelling,
    ulp_step,
    value_of,
)
from torchtap.errors import CompareError, RunCorruptError
from torchtap.store.format.dtypes import BY_NAME

__all__ = [
    "PIECE_BYTES",
    "RELATIVE_GUARD",
    "Measures",
    "RunningMeasures",
    "Sums",
    "ValueStream",
    "can_stream",
    "measure",
    "measure_streams",
    "native",
    "numbers_of_bits",
    "threads",
    "unraveled",
]

RELATIVE_GUARD = 1e-8
Wide = npt.NDArray[np.float64]


def _load() -> ModuleType | None:
    try:
        import torchtap.comparison._distance as _distance  # type: ignore[import-not-found]
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
        """Return True if a piece may hold numbers that stand for infinities; its squares say so."""
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


_HISTOGRAM_BINS = 64
_HISTOGRAM_ELEMENTS = 1 << 16
_HISTOGRAM_STRETCH = 1 << 12
_DROWNS = 100.0  # a constant so many times as large as the rest is a mask's
_PER_THREAD = 1 << 21  # elements that are worth a thread of their own


@final
@dataclass(frozen=True, slots=True)
class Measures:
    """The distance of a target from its reference. Every field is a plain number."""

    count: int
    compared: int  # elements where both sides are finite
    identical: bool
    max_abs: float
    mean_abs: float
    max_rel: float
    mean_rel: float
    rel_l2: float
    rel_linf: float
    cosine: float
    cosine_scaled: float
    sqnr_db: float
    max_ulp: float
    mean_ulp: float
    within: float
    histogram_distance: float
    mismatched: float
    worst: tuple[int, ...]  # index of the largest |t - r|
    worst_reference: float
    worst_target: float
    reference_l2: float
    reference_absmax: float
    nans: tuple[int, int]  # (reference, target)
    infs: tuple[int, int]
    masks_differ: int  # places where one side is not finite and the other is, or differently so

    @property
    def nothing_finite(self) -> bool:
        """True when there was something to compare but no place where both sides are finite."""
        return self.count > 0 and self.compared == 0

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON-ready data."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def measure(
    reference: Comparable,
    target: Comparable,
    *,
    atol: float | None = None,
    rtol: float | None = None,
    chunk: int = CHUNK,
    brief: bool = False,
) -> Measures:
    """Measure how far ``target`` is from ``reference``. Both must have the same shape.

    ``atol`` and ``rtol`` matter for ``within`` alone; their defaults follow the coarser dtype. With ``brief`` only
    what a verdict needs is computed: the relative errors, ULP distance, share within and histograms stay NaN.
    """
    if tuple(reference.shape) != tuple(target.shape):
        raise CompareError(
            f"shapes differ: reference {tuple(reference.shape)}, target {tuple(target.shape)}; "
            "a rule with permute, slice or reshape can bring them together"
        )
    mine, theirs = value_of(reference), value_of(target)
    blank = partial(_blank, mine.dtype, theirs.dtype, atol, rtol, brief)
    left, right = _alike(mine, theirs)
    if left.shape != right.shape:
        raise CompareError(
            f"this rank's parts differ in shape: reference {tuple(left.shape)}, target {tuple(right.shape)}; "
            "compare tensors that are distributed alike, or whole ones"
        )
    distance = 0.0 if brief or not left.size else _histogram_distance(_sample(left), _sample(right))
    found = _amount(_add_up(blank, left, right, chunk), left.shape, distance)
    if resolution(mine.dtype) == resolution(theirs.dtype) == 0.0:
        return _exactly(found, left, right)
    if not found.identical and found.reference_absmax >= _DROWNS:
        return _without_constants(found, left, right)
    return found


def _alike(mine: Value, theirs: Value) -> tuple[Array, Array]:
    """Both as real numbers; a real number beside a complex one has no imaginary part, masks are spelled alike."""
    if mine.is_complex != theirs.is_complex:
        mine, theirs = (Value(value.array + 0j, value.dtype) for value in (mine, theirs))
    return same_spelling(mine.real(), theirs.real())


def _exactly(found: Measures, left: Array, right: Array) -> Measures:
    """Integers are counted as they are: float64 cannot tell neighbours beyond 2^53 apart."""
    if left.dtype != right.dtype or left.dtype == np.bool_:
        return found
    if found.reference_absmax < 2.0**53 or not found.identical:
        return found
    unequal = int((left != right).sum())
    if not unequal:
        return found
    share = unequal / found.count
    return replace(
        found,
        identical=False,
        mismatched=share,
        rel_l2=share,
        rel_linf=share,
        within=1.0 - share,
        max_abs=1.0,
    )


def _without_constants(found: Measures, left: Array, right: Array) -> Measures:
    """The relative errors of the elements that are not a mask's constant, where such a constant drowns them."""
    at_most = np.abs(left) >= 0.5 * found.reference_absmax
    equal = at_most & (left == right)
    masked = int(equal.sum())
    if masked < 2 or masked != int(at_most.sum()) or len(np.unique(left[equal])) > 2:
        return found
    rest = ~equal & np.isfinite(left) & np.isfinite(right)
    r, t = left[rest].astype(np.float64), right[rest].astype(np.float64)
    if not r.size or float(np.abs(r).max()) * _DROWNS > found.reference_absmax:
        return found
    size, largest = float(np.linalg.norm(r)), float(np.abs(r).max())
    return replace(
        found,
        rel_l2=_ratio(float(np.linalg.norm(t - r)), size),
        rel_linf=_ratio(float(np.abs(t - r).max()), largest),
        reference_l2=size,
        reference_absmax=largest,
    )


def _blank(
    reference: str,
    target: str,
    atol: float | None,
    rtol: float | None,
    brief: bool,
    bits: tuple[bool, bool] = (False, False),
) -> Sums:
    digits = coarser(reference, target)
    step = resolution(digits)
    return Sums(
        ulp=ulp_step(digits),
        atol=step if atol is None else atol,
        rtol=8 * step if rtol is None else rtol,
        brief=brief,
        limits=(extreme(reference), extreme(target)),
        bits=bits,
    )


@final
class RunningMeasures:
    """Measures of values that come piece by piece: `add` each piece in order, then ask for the `result`.

    Pieces of bfloat16 are its bits, as they lie in a file.
    """

    def __init__(self, shape: tuple[int, ...], reference: str, target: str) -> None:
        self._shape = shape
        self._bits = reference == "bfloat16", target == "bfloat16"
        self._sums = _blank(reference, target, None, None, False, self._bits)
        self._starts = _stretches(math.prod(shape))
        self._samples: tuple[list[npt.NDArray[np.float64]], list[npt.NDArray[np.float64]]] = ([], [])

    def add(self, offset: int, reference: Array, target: Array) -> None:
        """Take the next piece: flat, ``offset`` elements after the beginning."""
        self._sums.add(offset, reference, target)
        end = offset + reference.size
        while self._starts and self._starts[0] < end:
            at = max(self._starts.pop(0) - offset, 0)
            for kept, bits, piece in zip(self._samples, self._bits, (reference, target), strict=True):
                part = piece[at : at + _HISTOGRAM_STRETCH]
                kept.append((numbers_of_bits(part) if bits else part).astype(np.float64))

    def result(self) -> Measures:
        """What all pieces amount to."""
        left, right = (np.concatenate(kept) if kept else np.empty(0) for kept in self._samples)
        return _amount(self._sums, self._shape, _histogram_distance(left, right) if left.size else 0.0)


def threads() -> int:
    """As many as torch may use; without torch as many as OpenMP would."""
    torch = sys.modules.get("torch")
    if torch is not None:
        return int(torch.get_num_threads())
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdigit() and int(asked) else len(os.sched_getaffinity(0))


def _add_up(blank: Callable[[], Sums], left: Array, right: Array, chunk: int) -> Sums:
    """The sums of both, by several threads when there is enough for each."""
    workers = left.size // _PER_THREAD if native is not None else 1
    workers = workers if workers < 2 else min(threads(), workers)
    if workers < 2 or not (left.flags.c_contiguous and right.flags.c_contiguous):
        return _add_range(blank(), left, right, 0, chunk)
    flat_left, flat_right = left.reshape(-1), right.reshape(-1)
    bounds = [n * left.size // workers for n in range(workers + 1)]
    with ThreadPoolExecutor(workers) as pool:
        parts = list(
            pool.map(
                lambda bound: _add_range(
                    blank(), flat_left[bound[0] : bound[1]], flat_right[bound[0] : bound[1]], bound[0], chunk
                ),
                pairwise(bounds),
            )
        )
    for part in parts[1:]:
        parts[0].merge(part)
    return parts[0]


def _add_range(sums: Sums, left: Array, right: Array, start: int, chunk: int) -> Sums:
    for offset, r, t in pieces(left, right, chunk):
        sums.add(start + offset, r, t)
    return sums


def _histogram_distance(r: npt.NDArray[np.float64], t: npt.NDArray[np.float64]) -> float:
    """How differently the values are spread, whatever their places: both sides sampled at the same elements."""
    both = np.isfinite(r) & np.isfinite(t)
    r, t = r[both], t[both]
    if not r.size:
        return math.nan
    low, high = float(min(r.min(), t.min())), float(max(r.max(), t.max()))
    if low == high or not math.isfinite(high - low):
        return 0.0
    bins = [np.minimum((x - low) * (_HISTOGRAM_BINS / (high - low)), _HISTOGRAM_BINS - 1) for x in (r, t)]
    counts = [np.bincount(places.astype(np.int64), minlength=_HISTOGRAM_BINS) for places in bins]
    return float(np.abs(counts[0] - counts[1]).sum()) / (2 * r.size)


def _stretches(total: int) -> list[int]:
    """Where the stretches begin that are sampled of so many elements."""
    if total <= _HISTOGRAM_ELEMENTS:
        return list(range(0, total, _HISTOGRAM_STRETCH))
    stretches = _HISTOGRAM_ELEMENTS // _HISTOGRAM_STRETCH
    return [n * (total - _HISTOGRAM_STRETCH) // (stretches - 1) for n in range(stretches)]


def _sample(value: Array) -> npt.NDArray[np.float64]:
    """At most so many elements, in evenly spaced stretches: few pages are touched however large the value is."""
    if value.size <= _HISTOGRAM_ELEMENTS:
        return value.reshape(-1).astype(np.float64)
    starts = _stretches(value.size)
    if value.flags.c_contiguous:
        flat = value.reshape(-1)
        parts = [flat[start : start + _HISTOGRAM_STRETCH] for start in starts]
    else:  # a strided view has no flat form without a copy; index arithmetic finds the same elements
        places = (np.arange(start, start + _HISTOGRAM_STRETCH) for start in starts)
        parts = [value[np.unravel_index(place, value.shape)] for place in places]
    return np.concatenate([part.astype(np.float64) for part in parts])


def _amount(sums: Sums, shape: tuple[int, ...], histogram_distance: float) -> Measures:
    seen = sums.compared
    nan_if_brief = math.nan if sums.brief else 0.0

    def if_seen(number: float) -> float:
        return number if seen else math.nan

    max_abs = if_seen(max(sums.max_abs, 0.0))
    reference_l2, difference_l2 = math.sqrt(sums.rr), math.sqrt(sums.dd)
    rel_linf = _ratio(max_abs, sums.absmax)
    # Squares of the smallest numbers are zero; the largest error then speaks for all.
    rel_l2 = _ratio(difference_l2, reference_l2) if sums.dd > 0.0 < sums.rr else rel_linf
    return Measures(
        count=sums.count,
        compared=seen,
        identical=sums.unequal == 0,
        max_abs=max_abs,
        mean_abs=_share(sums.sum_abs, seen),
        max_rel=if_seen(sums.max_rel + nan_if_brief),
        mean_rel=_share(sums.sum_rel, seen) + nan_if_brief,
        rel_l2=if_seen(rel_l2),
        rel_linf=if_seen(rel_linf),
        cosine=if_seen(_cosine(sums.tr, sums.tt, sums.rr, sums.unequal == 0)),
        cosine_scaled=_share(sums.dd, sums.tt + sums.rr) if sums.tt + sums.rr else 0.0,
        sqnr_db=if_seen(_decibel(reference_l2, difference_l2)),
        max_ulp=if_seen(sums.max_ulp + nan_if_brief),
        mean_ulp=_share(sums.sum_ulp, seen) + nan_if_brief,
        within=_share(sums.within, sums.count) + nan_if_brief,
        histogram_distance=histogram_distance + nan_if_brief,
        mismatched=_share(sums.unequal, sums.count) if sums.count else 0.0,
        worst=unraveled(sums.worst, shape) if seen else (),
        worst_reference=sums.worst_values[0],
        worst_target=sums.worst_values[1],
        reference_l2=reference_l2 * 2.0**sums.exponent,
        reference_absmax=sums.absmax,
        nans=(sums.nans[0], sums.nans[1]),
        infs=(sums.infs[0], sums.infs[1]),
        masks_differ=sums.masks_differ,
    )


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def _ratio(part: float, whole: float) -> float:
    if part == 0.0:
        return 0.0
    return part / whole if whole else math.inf


def _cosine(tr: float, tt: float, rr: float, identical: bool) -> float:
    if identical:
        return 1.0
    if tt == 0.0 or rr == 0.0:
        return 1.0 if tt == rr else math.nan
    return max(-1.0, min(1.0, tr / (math.sqrt(tt) * math.sqrt(rr))))


def _decibel(signal: float, noise: float) -> float:
    if noise == 0.0:
        return math.inf
    return 20 * (math.log10(signal) - math.log10(noise)) if signal else -math.inf


def unraveled(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Where in a tensor of this shape the element with this number is."""
    index: list[int] = []
    for size in reversed(shape):
        index.append(flat % size)
        flat //= size
    return tuple(reversed(index))


PIECE_BYTES = 1 << 20  # a few of them stay in a core's caches


def can_stream(dtype: str) -> bool:
    """Return True if bytes of a dtype can be measured as they lie in a file."""
    stored = BY_NAME.get(dtype)
    return dtype == "bfloat16" or (
        stored is not None and stored.numpy is not None and not dtype.startswith("complex")
    )


@final
@dataclass(frozen=True, slots=True)
class ValueStream:
    """A value's shape and dtype, and its bytes in order. A piece is overwritten by the next but one."""

    shape: tuple[int, ...]
    dtype: str
    pieces: Iterator[memoryview]

    def arrays(self) -> Iterator[Array]:
        """The elements in order, flat; those of bfloat16 as their bits."""
        kind = np.dtype("<u2" if self.dtype == "bfloat16" else (BY_NAME[self.dtype].numpy or "u1"))
        for piece in self.pieces:
            yield np.frombuffer(piece, kind.newbyteorder("<"))


def measure_streams(reference: ValueStream, target: ValueStream) -> Measures:
    """The same as `measure`, of two streams of one shape."""
    if threads() < 2:
        return _measure(reference, target, reference.arrays(), target.arrays())
    with ThreadPoolExecutor(2) as pool:
        return _measure(reference, target, _ahead(reference.arrays(), pool), _ahead(target.arrays(), pool))


def _ahead(pieces: Iterator[Array], pool: ThreadPoolExecutor) -> Iterator[Array]:
    """The same pieces; while one is looked at, another thread reads the next."""
    coming = pool.submit(next, pieces, None)
    while (piece := coming.result()) is not None:
        coming = pool.submit(next, pieces, None)
        yield piece


def _measure(
    reference: ValueStream, target: ValueStream, left: Iterator[Array], right: Iterator[Array]
) -> Measures:
    tally = RunningMeasures(reference.shape, reference.dtype, target.dtype)
    empty = np.empty(0)
    r, t, offset = empty, empty, 0
    total = prod(reference.shape)
    while offset < total:
        r = r if r.size else next(left, empty)
        t = t if t.size else next(right, empty)
        size = min(r.size, t.size)
        if size == 0:
            raise RunCorruptError(f"a stored tensor ended after {offset} of its {total} elements")
        tally.add(offset, r[:size], t[:size])
        r, t, offset = r[size:], t[size:], offset + size
    for rest in (left, right):  # reaching the end of a stream is what verifies it
        if next(rest, None) is not None:
            raise RunCorruptError(f"a stored tensor goes on after its {total} elements")
    return tally.result()
