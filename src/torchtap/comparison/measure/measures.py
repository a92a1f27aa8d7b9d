"""How far two values are apart: every measure in one walk over both, in float64.

It guarantees:
- the memory needed does not grow with the values (they are read in pieces of ``chunk`` elements);
- any two dtypes can be compared; each is taken at its exact value;
- NaN and infinities never leak into a measure: places where either side is not finite are left out of the
  sums and counted instead, and differing masks are reported. A number at the edge of its dtype (`finfo.min`, as
  attention masks have it) counts as an infinity;
- a large constant that both sides have in the same places (a mask of -1e9) does not drown the rest: the relative
  errors are those of the other elements;
- no values make it fail: extremes, infinities, subnormals, integers beyond 2^53;
- ``identical`` is true only when every element compares equal and every NaN meets a NaN.

Definitions, with r the reference, t the target and d = |t - r| over the places where both are finite:

    max_abs, mean_abs          of d
    max_rel, mean_rel          of d / (|r| + 1e-8)
    rel_l2, rel_linf           ||d|| / ||r||,  max d / max |r|        (0 when both are zero, inf when only r is)
    cosine                     t.r / (||t|| ||r||)                     (1 when both are zero, nan when one is)
    cosine_scaled              1 - 2 sum(t r) / sum(t^2 + r^2): a distance that also sees a wrong scale
    sqnr_db                    20 log10(||r|| / ||d||)                 (inf when d is zero)
    max_ulp, mean_ulp          d in units in the last place of r, at the coarser of the two dtypes
    within                     share of elements with d <= atol + rtol |r|
    histogram_distance         total variation between the two histograms of 64 bins over the common range,
                               of at most 2^16 elements, in evenly spaced stretches
    mismatched                 share of elements that are not equal

Not here: whether a distance matters (`floor`, `verdict`), where in the tensor it sits (`profile`).
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, final

import numpy as np
import numpy.typing as npt

from torchtap.comparison.measure.dtypes import coarser, extreme, resolution, ulp_step
from torchtap.comparison.measure.masks import same_spelling
from torchtap.comparison.measure.sums import Sums, native, numbers_of_bits
from torchtap.comparison.measure.values import CHUNK, Array, Comparable, Value, pieces, value_of
from torchtap.errors import CompareError

__all__ = ["Measures", "RunningMeasures", "measure", "threads", "unraveled"]

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
