"""How far two tensors are apart: every measure in one walk over both, in float64.

It guarantees:
- the memory needed does not grow with the tensors (they are read in pieces of ``chunk`` elements);
- any two dtypes can be compared; each is taken at its exact value;
- NaN and infinities never leak into a measure: places where either side is not finite are left out of the
  sums and counted instead, and differing masks are reported;
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
                               of at most 2^18 evenly spaced elements
    mismatched                 share of elements that are not equal

Not here: whether a distance matters (`floor`, `verdict`), where in the tensor it sits (`profile`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from torchtap.comparison.chunks import CHUNK, as_real, pieces
from torchtap.errors import CompareError

__all__ = ["Measures", "coarser", "measure", "resolution"]

_HISTOGRAM_BINS = 64
_HISTOGRAM_ELEMENTS = 1 << 18
_RELATIVE_GUARD = 1e-8


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


def resolution(dtype: torch.dtype) -> float:
    """The relative distance of neighbouring numbers of a dtype; 0 for integers and booleans."""
    if dtype.is_complex:
        dtype = torch.empty(0, dtype=dtype).real.dtype
    if not dtype.is_floating_point:
        return 0.0
    return torch.finfo(dtype).eps


def coarser(left: torch.dtype, right: torch.dtype) -> torch.dtype:
    """Of two dtypes the one with fewer digits (an integer counts as exact)."""
    return left if resolution(left) >= resolution(right) else right


def measure(
    reference: Tensor,
    target: Tensor,
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
    if reference.shape != target.shape:
        raise CompareError(
            f"shapes differ: reference {tuple(reference.shape)}, target {tuple(target.shape)}; "
            "a rule with permute, slice or reshape can bring them together"
        )
    digits = coarser(reference.dtype, target.dtype)
    step = resolution(digits)
    walk = _Walk(
        ulp=_ulp_step(digits),
        atol=step if atol is None else atol,
        rtol=8 * step if rtol is None else rtol,
        histogram=_Histogram(),
        brief=brief,
    )
    left, right = as_real(reference), as_real(target)
    if left.device != right.device and left.numel() <= chunk:
        left, right = left.cpu(), right.cpu()
    stride = max(1, -(-left.numel() // _HISTOGRAM_ELEMENTS))
    if left.numel() and not brief:
        walk.histogram.fit(left, right, stride)
    for offset, (r, t) in pieces(left, right, chunk=chunk):
        walk.take(offset, r, t)
    return walk.result(left.shape, stride)


def _ulp_step(dtype: torch.dtype) -> tuple[float, float]:
    """(spacing relative to the power of two below a number, smallest spacing) of a dtype."""
    if dtype.is_complex:
        dtype = torch.empty(0, dtype=dtype).real.dtype
    if not dtype.is_floating_point:
        return 0.0, 1.0
    info = torch.finfo(dtype)
    return info.eps, max(info.smallest_normal * info.eps, 5e-324)


class _Histogram:
    """Two histograms over one range; the range comes from the sampled elements themselves."""

    def __init__(self) -> None:
        self.distance = 0.0

    def fit(self, left: Tensor, right: Tensor, stride: int) -> None:
        """Sample both sides at the same places and compare how their values are spread."""
        r = _sample(left, stride)
        t = _sample(right, stride)
        if torch.equal(r, t):
            return
        both = torch.isfinite(r) & torch.isfinite(t)
        r, t = r[both], t[both]
        if not r.numel():
            self.distance = math.nan
            return
        low = min(float(r.min()), float(t.min()))
        high = max(float(r.max()), float(t.max()))
        if low == high or not math.isfinite(high - low):
            return
        counts = [torch.histc((x - low) / (high - low), _HISTOGRAM_BINS, 0.0, 1.0) for x in (r, t)]
        self.distance = float((counts[0] - counts[1]).abs().sum()) / (2 * r.numel())


def _sample(value: Tensor, stride: int) -> Tensor:
    if value.is_contiguous():
        return value.view(-1)[::stride].to("cpu", torch.float64)
    # A strided view has no flat form without a copy; index arithmetic picks the same logical elements.
    flat = torch.arange(0, value.numel(), stride)
    index = torch.unravel_index(flat, value.shape) if value.dim() else ()
    return (value[index] if value.dim() else value.reshape(1)).to("cpu", torch.float64)


class _Walk:
    """The sums of one comparison. Scratch is allocated once, sized by the first piece."""

    def __init__(
        self, ulp: tuple[float, float], atol: float, rtol: float, histogram: _Histogram, brief: bool
    ) -> None:
        self.brief = brief
        self.ulp_relative, self.ulp_smallest = ulp
        self.atol, self.rtol = atol, rtol
        self.histogram = histogram
        self.count = self.compared = self.unequal = self.within = self.masks_differ = 0
        self.nans, self.infs = [0, 0], [0, 0]
        self.dd = self.rr = self.tt = self.tr = 0.0
        self.sum_abs = self.sum_rel = self.sum_ulp = 0.0
        self.max_rel = self.max_ulp = self.absmax = 0.0
        self.max_abs = -1.0
        self.worst = 0
        self.worst_values = (math.nan, math.nan)
        self.scratch: Tensor | None = None

    def take(self, offset: int, reference: Tensor, target: Tensor) -> None:
        size = reference.numel()
        self.count += size
        if self.scratch is None or self.scratch.shape[1] < size:
            self.scratch = torch.empty(5, size, dtype=torch.float64)
        r, t, d, a, b = (row[:size] for row in self.scratch)
        r.copy_(reference)
        t.copy_(target)
        rr, tt = float(torch.dot(r, r)), float(torch.dot(t, t))
        if not (math.isfinite(rr) and math.isfinite(tt)):
            self._take_guarded(offset, r.clone(), t.clone())
            return
        self._take_finite(offset, r, t, d, a, b, rr, tt, None)

    def _take_guarded(self, offset: int, r: Tensor, t: Tensor) -> None:
        """A piece with NaN, infinities, or squares beyond float64: count the first two and leave them out."""
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
        self._take_finite(offset, r, t, scratch[0], scratch[1], scratch[2], rr, tt, keep)

    def _take_finite(
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
        torch.add(a, _RELATIVE_GUARD, out=b)
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

    def result(self, shape: torch.Size, stride: int) -> Measures:
        seen = self.compared
        nan_if_brief = math.nan if self.brief else 0.0
        max_abs = max(self.max_abs, 0.0) if seen else math.nan
        reference_l2, difference_l2 = math.sqrt(self.rr), math.sqrt(self.dd)
        return Measures(
            count=self.count,
            compared=seen,
            identical=self.unequal == 0,
            max_abs=max_abs,
            mean_abs=_share(self.sum_abs, seen),
            max_rel=self.max_rel + nan_if_brief if seen else math.nan,
            mean_rel=_share(self.sum_rel, seen) + nan_if_brief,
            rel_l2=_ratio(difference_l2, reference_l2) if seen else math.nan,
            rel_linf=_ratio(max_abs, self.absmax) if seen else math.nan,
            cosine=_cosine(self.tr, self.tt, self.rr, self.unequal == 0) if seen else math.nan,
            cosine_scaled=_share(self.dd, self.tt + self.rr) if self.tt + self.rr else 0.0,
            sqnr_db=_decibel(reference_l2, difference_l2) if seen else math.nan,
            max_ulp=self.max_ulp + nan_if_brief if seen else math.nan,
            mean_ulp=_share(self.sum_ulp, seen) + nan_if_brief,
            within=_share(self.within, self.count) + nan_if_brief,
            histogram_distance=self.histogram.distance + nan_if_brief,
            mismatched=_share(self.unequal, self.count) if self.count else 0.0,
            worst=_unravel(self.worst, shape) if seen else (),
            worst_reference=self.worst_values[0],
            worst_target=self.worst_values[1],
            reference_l2=reference_l2,
            reference_absmax=self.absmax,
            nans=(self.nans[0], self.nans[1]),
            infs=(self.infs[0], self.infs[1]),
            masks_differ=self.masks_differ,
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
    return 20 * math.log10(signal / noise) if signal else -math.inf


def _unravel(flat: int, shape: torch.Size) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(shape):
        index.append(flat % size)
        flat //= size
    return tuple(reversed(index))
