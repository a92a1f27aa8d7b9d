"""Gather everything that decides about two live eager models: passes, floors, and what each module does alone.

The passes, each one forward: the reference recorded; the target beside it, free; then, unless the two are
identical, the reference again (repeat), with one-ULP noise, and in float64, each free and forced; the target
forced; and, once a culprit is known, the target with the culprit's value replaced.

Not here: what follows from it (`verdict`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from torchtap.comparison.align.pairing import Alignment, KnownSite, Pair, Unaligned, align
from torchtap.comparison.align.rules import Rule
from torchtap.comparison.live.passes import Probe
from torchtap.comparison.live.tracing import Event, Feed, Trace, golden_copy, record
from torchtap.comparison.measure.floor import Floor, floor_from, intended_dtype
from torchtap.comparison.measure.measures import Measures
from torchtap.errors import CompareError
from torchtap.sites import places

__all__ = ["Evidence", "differing_parameters", "gather", "heal", "missing"]


@final
@dataclass(eq=False)
class Evidence:
    """What the passes showed, by the reference's site names."""

    reference: nn.Module
    target: nn.Module
    feed: Feed
    target_feed: Feed
    trace: Trace
    alignment: Alignment
    names: dict[str, str] | None  # target module path -> reference module path; None: the same
    free: dict[str, Measures] = field(default_factory=dict)
    unlike: dict[str, str] = field(default_factory=dict)
    forced: dict[str, Measures] = field(default_factory=dict)
    free_floors: dict[str, Floor] = field(default_factory=dict)
    forced_floors: dict[str, Floor] = field(default_factory=dict)
    unsound: set[str] = field(default_factory=set)  # sites where forcing itself changes the reference
    basis: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    forwards: int = 0

    @property
    def identical(self) -> bool:
        """Whether every value that passed was the same in both."""
        return not self.unlike and all(m.identical and not m.nothing_finite for m in self.free.values())


def gather(
    reference: nn.Module,
    target: nn.Module,
    feed: Feed,
    *,
    rules: tuple[str | Rule, ...] = (),
    forced: bool = True,
    keep: Callable[[str], bool] | None = None,
    target_feed: Feed | None = None,
) -> Evidence:
    """Run both models as often as it takes to know what each module of the target does."""
    trace = _run("the reference", lambda: record(reference, feed, keep=keep))
    target_feed = target_feed or feed
    names, alignment, listing = _module_names(reference, target, target_feed, trace, rules)
    found = Evidence(reference, target, feed, target_feed, trace, alignment, names, forwards=1 + listing)
    beside = Probe(trace, names, brief=False)
    _run("the target", lambda: beside.free(target, target_feed))
    found.free, found.unlike, dtypes = beside.measures, beside.unlike, beside.dtypes
    found.forwards += 1
    if not found.free and not found.unlike:
        raise CompareError(
            "no value of the target could be paired with one of the reference; "
            "a rule such as 'model.*=*' says which names belong together"
        )
    if found.identical:
        found.basis.append("none needed: every value is the same")
        return found
    _learn_floors(found, dtypes, forced)
    if forced:
        try:
            found.forced = Probe(trace, names).forced(target, target_feed).measures
            found.forwards += 1
        except Exception as error:
            found.problems.append(f"the target does not run on the reference's values: {_brief(error)}")
    return found


def heal(found: Evidence, sites: set[str]) -> Probe:
    """Run the target with the reference's values put in place at some sites."""
    found.forwards += 1
    return Probe(found.trace, found.names).healed(found.target, found.target_feed, sites)


def _learn_floors(found: Evidence, dtypes: dict[str, torch.dtype], forced: bool) -> None:
    """Learn, from differences that are known to be harmless, how large a difference may be at each site."""
    reference, feed, trace = found.reference, found.feed, found.trace
    own = _usual_dtype(trace)
    meant = intended_dtype(dtypes.values(), own)
    free: dict[str, dict[str, Measures]] = {}
    alone: dict[str, dict[str, Measures]] = {}

    def attempt(
        source: str, model: nn.Module, noise: int | None, cast: torch.dtype | None, exact: bool
    ) -> None:
        try:
            free[source] = Probe(trace).free(model, feed, noise=noise, cast=cast).measures
            found.forwards += 1
            if forced:
                alone[source] = Probe(trace).forced(model, feed, noise=noise, cast=cast).measures
                found.forwards += 1
        except Exception as error:
            free.pop(source, None)
            found.problems.append(f"no {source} floor: {_brief(error)}")

    attempt("repeat", reference, None, None, True)
    attempt("one ULP", reference, 1, None, False)
    golden, why = golden_copy(reference)
    if golden is None:
        found.problems.append(f"no float64 floor: {why}")
    else:
        attempt("float64", golden, None, torch.float64, False)
        del golden
    if meant != own:
        try:
            attempt("same dtype", copy.deepcopy(reference).to(meant), None, meant, False)
        except Exception as error:
            found.problems.append(f"no {meant} copy of the reference: {_brief(error)}")
    for site, value in trace.values.items():
        dtype = meant if value.dtype.is_floating_point and meant != own else value.dtype
        found.free_floors[site] = _floor(free, site, value.dtype, dtype)
        found.forced_floors[site] = _floor(alone, site, value.dtype, dtype)
    # Forcing a model's own values into it must change nothing; where it does, forcing proves nothing.
    steady = {site for site, m in free.get("repeat", {}).items() if m.identical}
    found.unsound = {
        site for site, m in alone.get("repeat", {}).items() if site in steady and not m.identical
    }
    found.basis = [f"{source} of the reference" for source in free]


def _floor(
    harmless: dict[str, dict[str, Measures]], site: str, reference: torch.dtype, target: torch.dtype
) -> Floor:
    floor = floor_from(((source, found.get(site)) for source, found in harmless.items()), reference, target)
    return floor if floor is not None else Floor(0.0, 0.0, ())


def _usual_dtype(trace: Trace) -> torch.dtype:
    seen = [value.dtype for value in trace.values.values() if value.dtype.is_floating_point]
    return max(set(seen), key=seen.count) if seen else torch.float32


def _module_names(
    reference: nn.Module, target: nn.Module, feed: Feed, trace: Trace, rules: tuple[str | Rule, ...]
) -> tuple[dict[str, str] | None, Alignment, int]:
    """Which module of the target is which of the reference; how many forwards it took to find out."""
    mine = {place.path for place in places(reference)}
    theirs = {place.path for place in places(target)}
    if mine == theirs and not rules:
        pairs = tuple(Pair(n, e.site, e.site, "name") for n, e in enumerate(trace.events))
        return None, Alignment(pairs, ()), 0
    listed = _run("the target", lambda: record(target, feed))
    alignment = align(_known(trace.events, trace.values), _known(listed.events, listed.values), rules)
    renamed = {theirs: mine for mine, theirs in alignment.module_names().items()}
    return renamed, alignment, 1


def _known(events: list[Event], values: dict[str, Tensor]) -> list[KnownSite]:
    return [KnownSite(event.site, tuple(values[event.site].shape)) for event in events]


def differing_parameters(found: Evidence, module: str) -> tuple[str, ...]:
    """A module's own parameters and buffers that are not the same in the target, each with how they differ."""
    theirs = module
    if found.names is not None:
        theirs = next((mine for mine, reference in found.names.items() if reference == module), module)
    try:
        left, right = _own(found.reference, module), _own(found.target, theirs)
    except AttributeError:
        return ()
    notes = []
    for name in dict.fromkeys([*left, *right]):
        a, b = left.get(name), right.get(name)
        if a is None or b is None:
            notes.append(f"{name} is only in the {'target' if a is None else 'reference'}")
        elif a.shape != b.shape:
            notes.append(
                f"{name} has shape {tuple(a.shape)} in the reference and {tuple(b.shape)} in the target"
            )
        elif not torch.equal(a, b.to(a.device, a.dtype)):
            unequal = int((a != b.to(a.device, a.dtype)).sum())
            notes.append(f"{name} differs in {unequal} of {a.numel()} elements")
    return tuple(notes)


def _own(model: nn.Module, path: str) -> dict[str, Tensor]:
    module = next((place.module for place in places(model) if path in (place.path, *place.other_paths)), None)
    if module is None:
        raise AttributeError(path)
    return {
        **{name: p.detach() for name, p in module.named_parameters(recurse=False)},
        **dict(module.named_buffers(recurse=False)),
    }


def _run(who: str, run: Callable[[], Any]) -> Any:
    try:
        return run()
    except CompareError:
        raise
    except Exception as error:
        raise CompareError(f"{who} does not run on these inputs: {_brief(error)}") from error


def _brief(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


def missing(found: Evidence) -> tuple[Unaligned, ...]:
    """Sites of the reference that the target never reached, and sites whose values cannot be measured."""
    seen = set(found.free) | set(found.unlike)
    known = {each.site for each in found.alignment.unaligned}
    gone = [
        Unaligned(event.site, "reference", "the target did not pass here")
        for event in found.trace.events
        if event.site not in seen and event.site not in known
    ]
    odd = [Unaligned(site, "reference", why) for site, why in found.unlike.items()]
    return (*found.alignment.unaligned, *odd, *gone)
