"""Run two live eager models as often as it takes to know what each module of the target does, and judge them.

The passes, each one forward: the reference, recorded; the target beside it, free; then, unless the two are identical,
harmless runs of the reference (`floors`), each free and forced; the target forced; and the experiments that the judge
yields.

Not here: one pass (`passes`), what follows from it (`judge`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor, nn

from torchtap.comparison.align import Alignment, Pair, part_of, plain_module
from torchtap.comparison.causes import differing_parameters, relation, usual_dtype, whose_parameters
from torchtap.comparison.explain import Profile, locate
from torchtap.comparison.floor import NO_FLOOR, Floor
from torchtap.comparison.floors import Floors, brief, learn
from torchtap.comparison.judge import Evidence, Experiment, Oddity, Verdict, Widen, judge, note_of, status_of
from torchtap.comparison.match import match_models
from torchtap.comparison.measures import Measures, measure
from torchtap.comparison.passes import Feed, Trace, TraceProbe, record
from torchtap.comparison.result import FirstDifference, FunctionAnswer, Row
from torchtap.comparison.rules import PairingRule
from torchtap.comparison.values import resolution
from torchtap.errors import CompareError
from torchtap.hooks.leaves import map_leaves
from torchtap.plan.names import path_of
from torchtap.plan.sites import places

__all__ = ["PassEvidence", "as_batches", "function_answer", "gather", "gather_batches", "judge_live"]

_NARROW = 1e-4  # from this resolution on a dtype has 16 bits or fewer


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
    beside: TraceProbe  # the target, free
    alone: TraceProbe | None = None  # the target, forced
    floors: Floors = field(default_factory=Floors)
    basis: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    replaced: dict[str, Tensor] = field(default_factory=dict)  # the target's own values where others stood in
    forwards: int = 0
    lowered_to: str = ""  # the target's lower precision, if the reference was run in it too
    from_full: dict[str, float] = field(
        default_factory=dict
    )  # distance from the reference in its own precision

    @property
    def identical(self) -> bool:
        """True if every value was the same in both."""
        return not self.beside.oddities and all(
            m.identical and not m.nothing_finite for m in self.beside.measures.values()
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
    beside = TraceProbe(trace, names, brief=False)
    _run("the target", lambda: beside.free(target, target_feed))
    found = PassEvidence(
        original, target, feed, target_feed, trace, alignment, names, beside, forwards=2 + listing
    )
    if not beside.measures and not beside.oddities:
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
    found.alone = probe
    found.forwards += 1


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


def judge_live(found: PassEvidence) -> Verdict:
    """Run the judge and its experiments; return the rows and the first difference with its cause."""
    judging = judge(_evidence(found))
    try:
        experiment = next(judging)
        while True:
            experiment = judging.send(_answer(found, experiment))
    except StopIteration as done:
        rows, first = done.value
    return rows, None if first is None else _explained(found, rows, first)


def _answer(found: PassEvidence, experiment: Experiment) -> Any:
    """Run an experiment; None if the target does not run so."""
    if isinstance(experiment, Widen):
        wide = _in_float32(found)
        first = None if wide is None else judge_live(wide)[1]
        return None if wide is None else set() if first is None else {first.module, *first.others}
    found.forwards += 1
    probe = TraceProbe(found.trace, found.names)
    try:
        probe.healed(found.target, found.target_feed, experiment.sites, experiment.share)
    except Exception:  # the target may refuse values that are not its own; the judge goes on without
        return None
    if experiment.share == 0.0:
        found.replaced = probe.replaced
    return probe.measures


def _evidence(found: PassEvidence) -> Evidence:
    """Return what the passes showed in the form that the judge reads."""
    alone, floors = found.alone, found.floors
    measured = {} if alone is None else alone.measures
    skipped = floors.unsound | (set() if alone is None else alone.unproven)
    oddities = found.beside.oddities if alone is None else alone.oddities
    makers = found.beside.makers
    return Evidence(
        rows=tuple(_rows(found)),
        authors={e.site: (makers.get(e.site, (e.author,))[0] or e.author) for e in found.trace.events},
        floors=floors.free,
        alone={
            site: (measures, floors.forced.get(site, NO_FLOOR))
            for site, measures in measured.items()
            if site not in skipped
        },
        incomplete=set() if alone is None else alone.incomplete,
        oddities=[odd for odd in oddities if odd.site not in floors.unstable],
        numbers={
            site
            for site, value in found.trace.values.items()
            if value.is_floating_point() or value.is_complex()
        },
        unpaired=[path_of(each.site) for each in found.alignment.unaligned if each.side == "reference"],
        ran_alone=alone is not None,
        identical=found.identical,
        quantized=floors.quantized,
    )


def _rows(found: PassEvidence) -> Iterator[Row]:
    """Yield one row for each site of the reference that has a partner."""
    odd = {oddity.site: oddity for oddity in reversed(found.beside.oddities)}
    unpaired = {each.site for each in found.alignment.unaligned if each.side == "reference"}
    theirs = {} if found.names is None else {pair.reference: pair.target for pair in found.alignment.pairs}
    for index, event in enumerate(found.trace.events):
        measures = found.beside.measures.get(event.site)
        blank = Row(
            index=index,
            site=event.site,
            target_site=theirs.get(event.site, event.site),
            module=event.module,
            kind=event.kind,
            status="missing",
            error=float("nan"),
            floor=float("nan"),
            excess=float("nan"),
        )
        if measures is not None:
            yield _measured(found, blank, measures)
        elif event.site not in unpaired:
            yield _unmeasured(blank, odd.get(event.site), found.names is not None)


def _measured(found: PassEvidence, blank: Row, measures: Measures) -> Row:
    floor = found.floors.free.get(blank.site, NO_FLOOR)
    status, excess = status_of(measures, floor)
    alone, alone_floor = None, found.floors.forced.get(blank.site)
    if found.alone is not None and blank.site not in found.floors.unsound | found.alone.unproven:
        alone = found.alone.measures.get(blank.site)
    return replace(
        blank,
        status=status,
        error=measures.rel_l2,
        floor=floor.l2,
        excess=excess,
        local_error=None if alone is None else alone.rel_l2,
        local_floor=None if alone is None or alone_floor is None else alone_floor.l2,
        measures=measures,
        note=note_of(measures),
    )


def _unmeasured(blank: Row, oddity: Oddity | None, ported: bool) -> Row:
    if oddity is not None:
        return replace(blank, status="other shape" if oddity.kind == "shape" else "missing", note=oddity.why)
    return replace(blank, note="no such argument" if ported else "the target did not pass here")


# The cause of the first difference.


def _explained(found: PassEvidence, rows: Sequence[Row], first: FirstDifference) -> FirstDifference:
    """Add the place of the error inside the value, the parameters that differ, and the target's own name."""
    if (
        first.origin == "local"
        and first.module == ""
        and found.beside.makers.get(first.site, ("",))[0] is None
    ):
        raise CompareError(
            f"the two models were not given the same inputs: {first.site} differs before anything ran"
        )
    makers = (found.alone or found.beside).makers
    theirs = makers.get(first.site, (None, None))[1] if found.names is not None else None
    module = plain_module(first.module)
    if theirs is not None and found.names is not None and found.names.get(theirs) != first.module:
        # A module that hands on its own input is to blame for it, not the one that made the value. A Sequential has
        # no code of its own that could be wrong.
        inside = {place.path: place.module for place in places(found.target)}
        partners = [path for path, name in found.names.items() if name == first.module and path]
        theirs = next((path for path in partners if not isinstance(inside.get(path), nn.Sequential)), theirs)
    first = replace(
        first,
        module=module,
        others=tuple(dict.fromkeys(map(plain_module, first.others))),
        in_target="" if theirs is None or theirs == module else theirs or "the model itself",
    )
    if first.origin == "structure":
        return replace(
            first, parameters=differing_parameters(found.reference, found.target, module, found.names)
        )
    if first.origin != "local":
        return first
    reference, own = found.trace.values[first.site], found.replaced.get(first.site)
    where = None
    if own is not None and own.numel() == reference.numel():
        order = found.trace.layouts.get(path_of(first.site))
        if order is not None and reference.shape[-1] == len(order):
            reference = reference.index_select(-1, order.to(reference.device))
        own = own.reshape(reference.shape)
        where = locate(reference, own)
        if order is None:
            first = replace(first, what=relation(found.reference, found.trace, first.site, own))
    author = next(event.author for event in found.trace.events if event.site == first.site)
    holder, parameters = whose_parameters(
        found.reference, found.target, module, found.names, {row.module for row in rows}
    )
    named = _part_with_error(found, author or "", first.site, where) if holder == module else holder
    return replace(first, module=named or module, where=where, parameters=parameters)


def _part_with_error(found: PassEvidence, author: str, site: str, where: Profile | None) -> str:
    """Of several modules that the target fused, return the one that carries the error; empty if none does alone."""
    parts = part_of(author)
    if len(parts) == 1 or where is None:
        return ""
    axis = found.trace.values[site].dim() - 1
    channels = next((each for each in where.concentrations if each.axis == axis), None)
    if channels is None:
        return author
    size = channels.size // len(parts)
    hit = {position // size for position in channels.positions if size}
    return parts[min(hit)] if len(hit) == 1 and min(hit) < len(parts) else author


# The same function?


def function_answer(found: PassEvidence) -> FunctionAnswer | None:
    """Compare the model's own outputs at the positions that count, at the precision that the target has."""
    results = {
        site: value
        for site, value in found.beside.results.items()
        if value.is_floating_point() and site in found.trace.values
    }
    if not results:
        return None
    shown = found.trace.shown
    positions = "" if shown is None else f"the {int(shown.sum())} of {shown.numel()} positions that count"
    answers = []
    for site, value in results.items():
        reference = found.trace.values[site]
        mine = found.trace.counted(reference)
        theirs = found.trace.counted(value.reshape(reference.shape).to(reference.device))
        apart = measure(mine, theirs, brief=True).rel_l2
        floor = found.floors.free.get(site, NO_FLOOR)
        allowed = max(floor.l2 * floor.margin, found.floors.allowed)
        agreement = None
        if mine.dim() >= 2 and mine.shape[-1] > 2:
            agreement = float((mine.argmax(-1) == theirs.argmax(-1)).double().mean())
        close = apart <= allowed and (agreement is None or agreement >= found.floors.least_agreement)
        answers.append((close, apart, allowed, agreement))
    close, apart, allowed, agreement = min(answers, key=lambda each: (each[0], -each[1]))
    return FunctionAnswer(
        same=close,
        distance=apart,
        allowed=allowed,
        precision=found.floors.precision or found.lowered_to or "full",
        agreement=agreement,
        positions=positions,
    )


# 16 bits are too coarse to tell a difference that is undone further on from one that is real but small.


def _in_float32(found: PassEvidence) -> PassEvidence | None:
    """What both models show in float32; ``None`` when they are not in 16 bits, or do not run so."""
    dtypes = [value.dtype for value in found.trace.values.values() if value.is_floating_point()]
    narrow = sum(resolution(dtype) > _NARROW for dtype in dtypes)
    if 2 * narrow < len(dtypes):
        return None
    try:
        reference, target = copy.deepcopy(found.reference).float(), copy.deepcopy(found.target).float()
        return gather(reference, target, _wide(found.feed), target_feed=_wide(found.target_feed))
    except Exception:  # a forward that insists on its dtype leaves the question open
        return None


def _wide(feed: Feed) -> Feed:
    """The same inputs, their numbers in float32."""

    def widened(_: str, value: Tensor) -> Tensor:
        return value.float() if value.is_floating_point() else value

    return lambda model: feed(
        lambda *args, **kwargs: model(*map_leaves(args, widened), **map_leaves(kwargs, widened))
    )


def as_batches(inputs: object) -> list[object]:
    """A list is several batches; anything else is one."""
    if isinstance(inputs, list):
        if not inputs:
            raise CompareError(
                "inputs=[] has no batches; a list holds one entry for each, for example [(x,), (y,)]"
            )
        if not all(isinstance(each, (tuple, dict, Tensor)) or callable(each) for each in inputs):
            return [(inputs,)]  # a list of something else is the model's one argument
        return inputs
    return [inputs]


def gather_batches(
    reference: nn.Module,
    target: nn.Module,
    feeds: Sequence[tuple[Feed, Feed]],
    rules: tuple[str | PairingRule, ...],
    shadow: bool,
) -> list[PassEvidence]:
    """The evidence of each batch, with floors that hold for all of them."""
    found = [
        gather(reference, target, feed, rules=rules, forced=shadow, target_feed=theirs)
        for feed, theirs in feeds
    ]
    for which in ("free", "forced"):
        largest: dict[str, Floor] = {}
        for evidence in found:
            for site, floor in getattr(evidence.floors, which).items():
                largest[site] = _larger(largest.get(site), floor)
        for evidence in found:
            if evidence.floors.free:  # a batch that was identical learnt none and needs none
                setattr(evidence.floors, which, largest)
    return found


def _larger(known: Floor | None, floor: Floor) -> Floor:
    if known is None:
        return floor
    return replace(known, l2=max(known.l2, floor.l2), linf=max(known.linf, floor.linf))
