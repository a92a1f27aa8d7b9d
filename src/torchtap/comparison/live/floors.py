"""Learn each site's noise floor from the reference itself: runs that may differ only harmlessly.

The reference again, with one-ULP noise, in float64, in the target's lower precision, and with its weights moved by
the step of the target's quantizer. Each run is free and forced. Several batches add up: the largest floor counts.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import final

import torch
from torch import nn

from torchtap.comparison.live.passes import TraceProbe
from torchtap.comparison.live.quantizers import quantized_like
from torchtap.comparison.live.tracing import Feed, Trace, golden_copy
from torchtap.comparison.measure.dtypes import resolution
from torchtap.comparison.measure.floor import Floor, floor_from
from torchtap.comparison.measure.measures import Measures

__all__ = ["Floors", "brief", "learn"]


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
    """Run the reference as often as there are harmless differences to learn from.

    ``original`` is the reference as it was given, where ``reference`` is its copy in the target's precision.
    """
    work = _Work(trace, feed, forced)
    own = _usual_dtype(trace)
    meant = _intended_dtype(dtypes.values(), own)
    work.attempt("repeat", reference, None, None)
    work.attempt("one ULP", reference, 1, None)
    golden, why = golden_copy(original)
    if golden is None:
        work.found.problems.append(f"no float64 floor: {why}")
    else:
        work.attempt("float64", golden, None, torch.float64)
        work.forget_another("float64", beside="one ULP")
        del golden
    if meant != own:
        try:
            work.attempt("same dtype", copy.deepcopy(reference).to(meant), None, meant)
        except Exception as error:
            work.found.problems.append(f"no {meant} copy of the reference: {brief(error)}")
    rounded = quantized_like(original, target, names)
    if rounded is not None:
        work.attempt("quantizer's step", rounded, None, None)
    return work.finish(own, meant)


@final
class _Work:
    def __init__(self, trace: Trace, feed: Feed, forced: bool) -> None:
        self.trace, self.feed, self.forced = trace, feed, forced
        self.found = Floors()
        self.free: dict[str, dict[str, Measures]] = {}
        self.alone: dict[str, dict[str, Measures]] = {}

    def attempt(self, source: str, model: nn.Module, noise: int | None, cast: torch.dtype | None) -> None:
        """One harmless run, free and forced."""
        probe = TraceProbe(self.trace)
        try:
            self.free[source] = probe.free(model, self.feed, noise=noise, cast=cast).measures
            self.found.unstable |= {odd.site for odd in probe.oddities}
            self.found.forwards += 1
            if self.forced:
                self.alone[source] = probe.forced(model, self.feed, noise=noise, cast=cast).measures
                self.found.forwards += 1
        except Exception as error:
            self.free.pop(source, None)
            self.found.problems.append(f"no {source} floor: {brief(error)}")

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

    def finish(self, own: torch.dtype, meant: torch.dtype) -> Floors:
        found = self.found
        for site, value in self.trace.values.items():
            dtype = meant if value.dtype.is_floating_point and meant != own else value.dtype
            found.free[site] = _floor(self.free, site, value.dtype, dtype)
            found.forced[site] = _floor(self.alone, site, value.dtype, dtype)
        # Forcing a model's own values into it must change nothing; where it does, forcing proves nothing.
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
    return floor if floor is not None else Floor(0.0, 0.0, ())


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
