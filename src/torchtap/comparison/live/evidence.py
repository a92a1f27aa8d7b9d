"""Gather everything that decides about two live eager models: passes, floors, and what each module does alone.

The passes, each one forward: the reference recorded; the target beside it, free; then, unless the two are
identical, the reference's own harmless runs (`floors`), each free and forced; the target forced; and, once a culprit
is known, the target with the culprit's value replaced.

Not here: what follows from it (`verdict`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from torchtap.comparison.align.pairing import Alignment, Pair
from torchtap.comparison.align.rules import PairingRule
from torchtap.comparison.live.floors import Floors, brief, learn
from torchtap.comparison.live.matching import match_models
from torchtap.comparison.live.oddities import Oddity
from torchtap.comparison.live.parameters import usual_dtype
from torchtap.comparison.live.passes import TraceProbe
from torchtap.comparison.live.tracing import Feed, Trace, record
from torchtap.comparison.measure.dtypes import resolution
from torchtap.comparison.measure.measures import Measures
from torchtap.errors import CompareError
from torchtap.plan.sites import places

__all__ = ["PassEvidence", "gather", "heal"]


@final
@dataclass(eq=False)
class PassEvidence:
    """What the passes showed, by the reference's site names."""

    reference: nn.Module
    target: nn.Module
    feed: Feed
    target_feed: Feed
    trace: Trace
    alignment: Alignment
    names: dict[str, str] | None  # target module path -> reference module path; None: the same
    free: dict[str, Measures] = field(default_factory=dict)
    forced: dict[str, Measures] = field(default_factory=dict)
    free_oddities: list[Oddity] = field(default_factory=list)
    forced_oddities: list[Oddity] = field(default_factory=list)
    unproven: set[str] = field(default_factory=set)  # sites at which forcing was not complete
    floors: Floors = field(default_factory=Floors)
    basis: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    ran_forced: bool = False
    replaced: dict[str, Tensor] = field(default_factory=dict)  # the target's own values where others stood in
    forwards: int = 0
    lowered_to: str = ""  # the target's lower precision, where the reference was run in that too
    from_full: dict[str, float] = field(
        default_factory=dict
    )  # relative L2 from the reference in its own precision

    @property
    def identical(self) -> bool:
        """Whether every value that passed was the same in both."""
        return not self.free_oddities and all(
            m.identical and not m.nothing_finite for m in self.free.values()
        )


def gather(
    reference: nn.Module,
    target: nn.Module,
    feed: Feed,
    *,
    rules: tuple[str | PairingRule, ...] = (),
    forced: bool = True,
    keep: Callable[[str], bool] | None = None,
    target_feed: Feed | None = None,
) -> PassEvidence:
    """Run both models as often as it takes to know what each module of the target does."""
    target_feed = target_feed or feed
    original, full_feed = reference, feed
    trace, reference, feed, lowered = _record_reference(
        reference, _lowered(reference, target), feed, target_feed, keep
    )
    names, alignment, trace, listing = _module_names(reference, target, target_feed, trace, rules)
    found = PassEvidence(original, target, feed, target_feed, trace, alignment, names, forwards=1 + listing)
    beside = TraceProbe(trace, names, brief=False)
    _run("the target", lambda: beside.free(target, target_feed))
    found.free, found.free_oddities = beside.measures, beside.oddities
    found.forwards += 1
    if not found.free and not found.free_oddities:
        raise CompareError(
            "no value of the target could be paired with one of the reference; "
            "a rule such as 'model.*=*' says which names belong together"
        )
    if lowered:
        found.lowered_to = str(usual_dtype(target)[0]).removeprefix("torch.")
        found.from_full = _distances(found, full_feed)
        found.basis.append(f"the reference in {found.lowered_to}")
    if found.identical:
        found.basis.append("none needed: every value is the same")
        return found
    floors = learn(reference, original, target, trace, feed, beside.dtypes, forced=forced, names=names)
    found.floors = floors
    found.basis += floors.sources
    found.problems += floors.problems
    found.forwards += floors.forwards
    if forced:
        _force(found)
    return found


def _distances(found: PassEvidence, feed: Feed) -> dict[str, float]:
    """How far a target of lower precision is from the reference as it is: what the precision itself costs."""
    if found.names is not None:
        return {}
    try:
        probe = TraceProbe(record(found.reference, feed), None, brief=False)
        probe.free(found.target, found.target_feed)
    except Exception:  # it is told beside the verdict, which does not need it
        return {}
    found.forwards += 2
    return {site: measures.rel_l2 for site, measures in probe.measures.items()}


def _force(found: PassEvidence) -> None:
    try:
        probe = TraceProbe(found.trace, found.names).forced(found.target, found.target_feed)
    except Exception as error:
        found.problems.append(f"the target does not run on the reference's values: {brief(error)}")
        return
    found.forced, found.forced_oddities = probe.measures, probe.oddities
    found.unproven = probe.unproven
    found.ran_forced = True
    found.forwards += 1


def heal(found: PassEvidence, sites: set[str], share: float = 0.0) -> TraceProbe:
    """Run the target with the reference's values put in place at some sites; ``share`` of the difference stays."""
    found.forwards += 1
    return TraceProbe(found.trace, found.names).healed(found.target, found.target_feed, sites, share)


def _lowered(reference: nn.Module, target: nn.Module) -> nn.Module | None:
    """The reference in the target's precision, when all of the target is in one that is lower."""
    (mine, _), (theirs, whole) = usual_dtype(reference), usual_dtype(target)
    if mine is None or theirs is None or not whole or not resolution(theirs) > resolution(mine):
        return None
    try:
        return copy.deepcopy(reference).to(theirs)
    except Exception:  # what cannot be copied is compared as it is
        return None


def _record_reference(
    reference: nn.Module,
    lowered: nn.Module | None,
    feed: Feed,
    target_feed: Feed,
    keep: Callable[[str], bool] | None,
) -> tuple[Trace, nn.Module, Feed, bool]:
    if lowered is not None:
        try:
            return record(lowered, target_feed, keep=keep), lowered, target_feed, True
        except Exception:  # a forward that insists on a dtype of its own
            pass
    return _run("the reference", lambda: record(reference, feed, keep=keep)), reference, feed, False


def _module_names(
    reference: nn.Module, target: nn.Module, feed: Feed, trace: Trace, rules: tuple[str | PairingRule, ...]
) -> tuple[dict[str, str] | None, Alignment, Trace, int]:
    """Which module of the target is which of the reference; how many forwards it took to find out."""
    mine = {place.path for place in places(reference)}
    theirs = {place.path for place in places(target)}
    if mine == theirs and not rules:
        pairs = tuple(Pair(n, e.site, e.site, "name") for n, e in enumerate(trace.events))
        return None, Alignment(pairs, ()), trace, 0
    listed = _run("the target", lambda: record(target, feed))
    matched = match_models(reference, trace, target, listed, rules)
    return matched.names, matched.alignment, matched.trace, 1


def _run(who: str, run: Callable[[], Any]) -> Any:
    try:
        return run()
    except CompareError:
        raise
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise CompareError(f"{who} does not run on these inputs: {brief(error)}") from error
