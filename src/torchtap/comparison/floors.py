"""Learn each site's noise floor from the reference itself: runs that may differ only harmlessly.

The reference again, with one-ULP noise, in float64, in the target's lower precision, and with its weights moved by
the step of the target's quantizer. Each run is free and forced. Several batches add up: the largest floor counts.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor, nn

from torchtap.comparison.floor import Floor, default_floor, floor_from
from torchtap.comparison.measures import Measures
from torchtap.comparison.passes import Feed, Trace, TraceProbe, golden_copy
from torchtap.comparison.values import resolution
from torchtap.plan.sites import places

__all__ = ["Floors", "brief", "learn", "quantized_like", "weight_of"]

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
    columns: bool = (
        False  # scales belong to columns: weights that are stored input by output, as Conv1D has them
    )


@final
@dataclass(frozen=True, slots=True)
class Quantized:
    """A copy of the reference with well rounded weights, and what that rounding explains."""

    model: nn.Module
    precision: str
    allowed: float
    least_agreement: float


# Limits for a good quantization: relative L2 distance of the outputs, and share of equal argmax. They are chosen, not
# measured on a corpus. Fewer bits than four have no good quantization of this kind.
_GOOD = {8: (0.06, 0.85), 6: (0.1, 0.8), 4: (0.2, 0.7)}


def quantized_like(
    reference: nn.Module, target: nn.Module, names: Mapping[str, str] | None
) -> Quantized | None:
    """Return the reference with good quantized weights; None if the target is not quantized.

    The usual number of bits counts as intended. Rounding of a weight to at least as many bits is then expected.
    """
    schemes: dict[str, _Scheme] = {}
    small: dict[str, _Scheme] = {}  # of so few numbers that they tell nothing of what was meant
    for path, weight, module in _weights(reference, target, names):
        few = weight.numel() < _MANY
        scheme = _scheme_of(weight.detach(), module)
        if scheme is not None:
            (small if few and not scheme.inputs else schemes)[path] = scheme
    if not schemes:
        return None
    seen = [scheme.bits for scheme in schemes.values()]
    bits = max(sorted(set(seen)), key=seen.count)
    bits = next((each for each in sorted(_GOOD) if each >= bits), 8)
    # A scale for each tensor is a good quantization to eight bits, not to four.
    expected = {
        path: replace(
            scheme, bits=max(bits, scheme.bits), group=-1 if bits < 8 and not scheme.group else scheme.group
        )
        for path, scheme in (schemes | small).items()
    }
    copied = _rounded_copy(reference, expected)
    allowed, agreement = _GOOD[bits]
    return None if copied is None else Quantized(copied, f"int{bits}", allowed, agreement)


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
    """Return the scheme by which these numbers are integers times a step."""
    for group in _GROUPS:
        for columns in (False, True) if group and weight.dim() == 2 else (False,):
            parts = _grouped(_rows(weight, columns), group)
            found = None if parts is None else _levels(parts)
            if found is not None:
                return _Scheme(found[0], group, found[1], columns=columns)
    return None


def _rows(weight: Tensor, columns: bool) -> Tensor:
    return weight.t() if columns else weight.reshape(weight.shape[0], -1)


def _levels(parts: Tensor) -> tuple[int, bool] | None:
    """Return the bits of a lattice that every row lies on, and True if it is symmetric."""
    low, high = parts.amin(1, keepdim=True), parts.amax(1, keepdim=True)
    for bits in _BITS:
        step = parts.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
        if _on_lattice(parts / step.clamp(min=1e-30)):
            return bits, True
        step = (high - low) / (2**bits - 1)
        if _on_lattice((parts - low) / step.clamp(min=1e-30)):
            return bits, False
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
    rows = _rows(weight, scheme.columns)
    parts = _grouped(rows, scheme.group)
    assert parts is not None
    if scheme.symmetric:
        levels = 2 ** (scheme.bits - 1) - 1
        step = (parts.abs().amax(1, keepdim=True) / levels).clamp(min=1e-30)
        moved: Tensor = (parts / step).round() * step
    else:
        low, high = parts.amin(1, keepdim=True), parts.amax(1, keepdim=True)
        step = ((high - low) / (2**scheme.bits - 1)).clamp(min=1e-30)
        moved = ((parts - low) / step).round() * step + low
    return moved.reshape(rows.shape).t() if scheme.columns else moved.reshape(weight.shape)


def _with_rounded_inputs(forward: Callable[..., object]) -> Callable[..., Any]:
    def rounded(value: object) -> object:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        low, high = value.min().clamp(max=0.0), value.max().clamp(min=0.0)
        step = ((high - low) / 127.0).clamp(min=1e-30)  # torch keeps one bit in reserve
        return ((value - low) / step).round() * step + low

    return lambda *args, **kwargs: forward(*(rounded(value) for value in args), **kwargs)


_ANOTHER = 0.02  # relative; no rounding of float32 was seen to come near it


@final
@dataclass(eq=False)
class Floors:
    """What the reference's own runs showed, by site."""

    free: dict[str, Floor] = field(default_factory=dict)
    forced: dict[str, Floor] = field(default_factory=dict)
    unsound: set[str] = field(default_factory=set)  # sites where forcing itself changes the reference
    unstable: set[str] = field(default_factory=set)  # sites whose shape or presence changes with rounding
    sources: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    forwards: int = 0
    precision: str = ""  # the target's, if it is quantized
    allowed: float = 0.0  # distance of outputs that this precision explains
    least_agreement: float = 0.0  # share of equal argmax that it leaves

    @property
    def quantized(self) -> bool:
        """True if the target's weights are rounded to few bits."""
        return bool(self.precision)


def learn(
    reference: nn.Module,
    original: nn.Module,
    target: nn.Module,
    trace: Trace,
    feed: Feed,
    dtypes: dict[str, torch.dtype],
    *,
    forced: bool,
    names: dict[str, str] | None,
) -> Floors:
    """Run the reference once for each kind of harmless difference.

    ``original`` is the reference as given; ``reference`` may be its copy in the target's precision.
    """
    work = _Work(trace.raw or trace, feed, forced)
    own = _usual_dtype(trace)
    meant = _intended_dtype(dtypes.values(), own)
    work.attempt("repeat", reference, None, None)
    work.attempt("one ULP", reference, 1, None)
    if not work.attempt("float64", original, None, torch.float64, widen=True):
        golden, why = golden_copy(original)
        if golden is None:
            work.found.problems.append(f"no float64 floor: {why}")
        else:
            work.attempt("float64", golden, None, torch.float64)
            del golden
    work.forget_another("float64", beside="one ULP")
    if meant != own:
        try:
            work.attempt("same dtype", copy.deepcopy(reference).to(meant), None, meant)
        except Exception as error:
            work.found.problems.append(f"no {meant} copy of the reference: {brief(error)}")
    rounded = quantized_like(original, target, names)
    if rounded is not None:
        work.attempt("quantizer's step", rounded.model, None, None)
        work.found.precision = rounded.precision
        work.found.allowed, work.found.least_agreement = rounded.allowed, rounded.least_agreement
    return work.finish(own, meant, trace)


@final
class _Work:
    def __init__(self, trace: Trace, feed: Feed, forced: bool) -> None:
        self.trace, self.feed, self.forced = trace, feed, forced
        self.found = Floors()
        self.free: dict[str, dict[str, Measures]] = {}
        self.alone: dict[str, dict[str, Measures]] = {}

    def attempt(
        self,
        source: str,
        model: nn.Module,
        noise: int | None,
        cast: torch.dtype | None,
        *,
        widen: bool = False,
    ) -> bool:
        """Run the model free and forced, and keep the measures; return False if it does not run so.

        With ``widen`` each module's parameters are cast while it runs, so that no copy of the model is needed. That
        fails if a module uses parameters of another; such a failure is not reported.
        """
        probe = TraceProbe(self.trace, widen=widen)
        try:
            self.free[source] = probe.free(model, self.feed, noise=noise, cast=cast).measures
            self.found.unstable |= {odd.site for odd in probe.oddities}
            self.found.forwards += 1
            if self.forced:
                self.alone[source] = probe.forced(model, self.feed, noise=noise, cast=cast).measures
                self.found.forwards += 1
        except Exception as error:
            self.free.pop(source, None)
            if not widen:
                self.found.problems.append(f"no {source} floor: {brief(error)}")
            return False
        return True

    def forget_another(self, source: str, beside: str) -> None:
        """A copy whose results have nothing to do with the model's teaches nothing: it was run in another way."""
        measured, rounding = self.free.get(source, {}), self.free.get(beside, {})
        results = [event.site for event in self.trace.events if event.module == "" and event.kind == "output"]
        if any(
            site in measured
            and site in rounding
            and _finite(measured[site].rel_l2) > max(_ANOTHER, 1000 * _finite(rounding[site].rel_l2))
            for site in results
        ):
            del self.free[source]
            self.alone.pop(source, None)
            self.found.problems.append(f"no {source} floor: the {source} copy returns something else")

    def finish(self, own: torch.dtype, meant: torch.dtype, shown: Trace) -> Floors:
        """Return the floors of all sites of ``shown``; a merged or cut value has the floor of its sources."""
        found = self.found
        for site, value in self.trace.values.items():
            dtype = meant if value.dtype.is_floating_point and meant != own else value.dtype
            found.free[site] = _floor(self.free, site, value.dtype, dtype)
            found.forced[site] = _floor(self.alone, site, value.dtype, dtype)
        for site, sources in shown.derived.items():
            for floors in (found.free, found.forced):
                floors[site] = _derived([floors[each] for each in sources], shown, site, sources)
        # Forcing a model's own values into it must change nothing; if it does, forcing proves nothing.
        steady = {site for site, m in self.free.get("repeat", {}).items() if m.identical}
        found.unsound = {
            site for site, m in self.alone.get("repeat", {}).items() if site in steady and not m.identical
        }
        found.sources = [f"{source} of the reference" for source in self.free]
        return found


def _floor(
    harmless: dict[str, dict[str, Measures]], site: str, reference: torch.dtype, target: torch.dtype
) -> Floor:
    floor = floor_from(((source, found.get(site)) for source, found in harmless.items()), reference, target)
    return floor if floor is not None else default_floor(reference, target)


def _derived(floors: list[Floor], trace: Trace, site: str, sources: tuple[str, ...]) -> Floor:
    """Return a bound for a value made of others: the largest floor, scaled if the value is a part of a larger one."""
    raw = (trace.raw or trace).values
    size = float(trace.values[site].double().norm())
    whole = max(float(raw[each].double().norm()) for each in sources)
    times = max(1.0, whole / size) if size else 1.0
    return Floor(
        times * max(each.l2 for each in floors),
        times * max(each.linf for each in floors),
        floors[0].sources,
        max(each.margin for each in floors),
    )


def _finite(number: float) -> float:
    return number if math.isfinite(number) else 0.0


def _usual_dtype(trace: Trace) -> torch.dtype:
    seen = [value.dtype for value in trace.values.values() if value.dtype.is_floating_point]
    return max(sorted(set(seen), key=str), key=seen.count) if seen else torch.float32


def _intended_dtype(dtypes: Iterable[torch.dtype], own: torch.dtype) -> torch.dtype:
    """The precision that a target is evidently meant to have.

    A lower precision than the reference's that a quarter of the sites or more have was chosen; in fewer places it
    is a suspicion, and must be measured at the reference's precision.
    """
    floating = [dtype for dtype in dtypes if dtype.is_floating_point]
    chosen = own
    for dtype in set(floating):
        if resolution(dtype) > resolution(chosen) and 4 * floating.count(dtype) >= len(floating):
            chosen = dtype
    return chosen


def brief(error: BaseException) -> str:
    """An error in one line."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"
