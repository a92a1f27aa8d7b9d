"""From what two live models showed to a verdict: which site diverges first, and whose fault it is.

Rules, in the order in which they decide:
- a site is wrong when its error is over its floor, when its shape is another, when it is absent, or when its module
  was not called; the first one is the earliest in order of execution;
- the author of an output is the module itself, of an input the module that made the call;
- a module is wrong *on its own* (local) when, handed the reference's inputs, it returns something over its floor. It
  counts only where all of its inputs could be handed over;
- what is wrong on its own but does not leave the module around it (a norm folded into a convolution, units in
  another order, a key's bias before a softmax) is compensated, not wrong: the smallest module around it returns
  what the reference's returns;
- when every module is right on its own, what is left is rounding that accumulates. It counts as a divergence only
  when it is far beyond what the reference does to itself under one-ULP noise;
- *certain* is a verdict whose proof ran: nothing was skipped, and with the reference's values in place of the
  culprit's everything after it agrees.

Not here: running models (`live`), reading recordings (`recorded`), words (`words`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Literal, final

from torchtap.comparison.judge.compensation import around, cancels, right_modules
from torchtap.comparison.judge.result import AGREES, FirstDifference, Origin, Row
from torchtap.comparison.judge.status import note_of, status_of
from torchtap.comparison.live.evidence import PassEvidence, heal
from torchtap.comparison.live.matching import part_of, plain_module
from torchtap.comparison.live.oddities import Oddity
from torchtap.comparison.live.parameters import differing_parameters, whose_parameters
from torchtap.comparison.live.relations import relation
from torchtap.comparison.live.tracing import TracedValue
from torchtap.comparison.live.twins import in_float32
from torchtap.comparison.measure.floor import Floor
from torchtap.comparison.measure.measures import Measures
from torchtap.comparison.measure.profile import Profile, locate
from torchtap.errors import CompareError
from torchtap.plan.names import is_inside, path_of

__all__ = ["judge_live"]

# How far beyond its floor accumulated rounding has to be, with every module right on its own, to be named.
DRIFT = 100.0


@final
@dataclass(frozen=True, slots=True)
class _Fault:
    """Something that is wrong on its own: a value over its floor, or an oddity."""

    site: str
    at: int
    author: str | None
    oddity: Oddity | None = None


def judge_live(found: PassEvidence) -> tuple[tuple[Row, ...], FirstDifference | None]:
    """The rows and the first divergence of two live models."""
    rows = list(_rows(found))
    if found.identical:
        return tuple(rows), None
    events = {event.site: event for event in found.trace.events}
    faults = sorted(_faults(found, events), key=lambda fault: (fault.at, fault.oddity is None, fault.site))
    settled = _compensated(found, faults, rows)
    local = {fault.site for fault in faults}
    blamed = [fault for fault in faults if fault.site not in settled]
    rows = [_with_origin(row, local, settled, found.ran_forced) for row in rows]
    if blamed:
        return tuple(rows), _first_blamed(found, blamed, rows)
    if settled and _results_agree(rows):
        return tuple(map(_forgiven, rows)), None
    first = _first_drift if found.ran_forced else _first_free
    return tuple(rows), first(rows, events)


def _forgiven(row: Row) -> Row:
    """Values between two compensated modules differ as they must."""
    return replace(row, status="compensated") if row.status == "diverged" else row


def _rows(found: PassEvidence) -> Iterator[Row]:
    """One row for each site of the reference, whatever became of it; further ones for what only the target has."""
    odd = {oddity.site: oddity for oddity in reversed(found.free_oddities)}
    unpaired = {each.site for each in found.alignment.unaligned if each.side == "reference"}
    theirs = {} if found.names is None else {pair.reference: pair.target for pair in found.alignment.pairs}
    for index, event in enumerate(found.trace.events):
        measures = found.free.get(event.site)
        if measures is not None:
            yield _measured(found, index, event, measures, theirs.get(event.site, event.site))
        elif event.site not in unpaired:
            yield _unmeasured(index, event, odd.get(event.site), found.names is not None)


def _measured(found: PassEvidence, index: int, event: TracedValue, measures: Measures, theirs: str) -> Row:
    floor = found.floors.free.get(event.site, Floor(0.0, 0.0, ()))
    status, excess = status_of(measures, floor)
    alone, alone_floor = found.forced.get(event.site), found.floors.forced.get(event.site)
    if event.site in found.floors.unsound or event.site in found.unproven:
        alone = None
    return Row(
        index=index,
        site=event.site,
        target_site=theirs,
        module=event.module,
        kind=event.kind,
        status=status,
        error=measures.rel_l2,
        floor=floor.l2,
        excess=excess,
        local_error=None if alone is None else alone.rel_l2,
        local_floor=None if alone is None or alone_floor is None else alone_floor.l2,
        measures=measures,
        note=note_of(measures),
    )


def _unmeasured(index: int, event: TracedValue, oddity: Oddity | None, ported: bool) -> Row:
    reshaped = oddity is not None and oddity.kind == "shape"
    return Row(
        index=index,
        site=event.site,
        target_site=event.site,
        module=event.module,
        kind=event.kind,
        status="other shape" if reshaped else "missing",
        error=float("nan"),
        floor=float("nan"),
        excess=float("nan"),
        note=oddity.why
        if oddity is not None
        else ("no such argument" if ported else "the target did not pass here"),
    )


def _faults(found: PassEvidence, events: dict[str, TracedValue]) -> Iterator[_Fault]:
    """What is wrong although everything before it was the reference's own."""
    order = {site: n for n, site in enumerate(events)}
    for site, measures in found.forced.items():
        if site in found.floors.unsound or site in found.unproven:
            continue
        if status_of(measures, found.floors.forced[site])[0] == "diverged":
            yield _Fault(site, order[site], events[site].author)
    oddities = found.forced_oddities if found.ran_forced else found.free_oddities
    for oddity in oddities:
        if oddity.site not in found.floors.unstable:
            yield _Fault(oddity.site, oddity.at, oddity.author, oddity)


def _compensated(found: PassEvidence, faults: list[_Fault], rows: list[Row]) -> set[str]:
    """Faults that do not leave a module whose own outputs, in the free pass, are right."""
    held = _held(faults, right_modules(found, rows))
    settled = {fault.site for fault, _ in held if fault.oddity is not None}
    inside: dict[str, set[str]] = {}
    for fault, module in held:
        if fault.oddity is None:
            inside.setdefault(module, set()).add(fault.site)
    blamed = _blamed_in_float32(found) if inside else None
    for module, sites in inside.items():
        if blamed is not None:
            settled |= {fault.site for fault in faults if fault.site in sites and fault.author not in blamed}
        elif cancels(found, module, sites):
            settled |= sites
    return settled


def _held(faults: list[_Fault], right: Collection[str]) -> list[tuple[_Fault, str]]:
    """Faults with the smallest module around them that is right.

    A module around a wrong number has to be a larger one; of an oddity also the module that made it, unless it was
    changed in place: that does not leave a module by its outputs.
    """
    found = []
    for fault in faults:
        itself = fault.oddity is not None and fault.oddity.kind != "in place"
        module = next((each for each in around(fault.author, itself=itself) if each in right), None)
        if module is not None:
            found.append((fault, module))
    return found


def _blamed_in_float32(found: PassEvidence) -> set[str] | None:
    """The modules that are wrong in float32 twins of models in 16 bits; ``None`` where there are no twins."""
    wide = in_float32(found)
    if wide is None:
        return None
    first = judge_live(wide)[1]
    return set() if first is None else {first.module, *first.others}


def _results_agree(rows: list[Row]) -> bool:
    results = [row for row in rows if row.module == "" and row.kind == "output"]
    return bool(results) and all(row.status in AGREES for row in results)


def _with_origin(row: Row, local: set[str], settled: set[str], known: bool) -> Row:
    if row.site in settled and row.status in ("diverged", "within"):
        return replace(row, status="compensated", origin="local")
    if row.status == "diverged":
        return replace(row, origin="local" if row.site in local else ("inherited" if known else "unknown"))
    if row.site in local and row.status == "within" and row.site not in settled:
        # Wrong on its own, though by chance not in the free pass.
        return replace(row, status="diverged", origin="local")
    return row


def _first_blamed(found: PassEvidence, blamed: list[_Fault], rows: list[Row]) -> FirstDifference:
    fault = blamed[0]
    if fault.oddity is not None:
        return _first_odd(found, fault, fault.oddity, blamed)
    if fault.author is None:
        raise CompareError(
            f"the two models were not given the same inputs: {fault.site} differs before anything ran"
        )
    module = fault.author
    if any("quantizer" in source for source in found.floors.sources):
        fault, module = _worst(found, blamed)
    healed, own = _replace(found, blamed, fault, rows)
    holder, parameters = whose_parameters(
        found.reference, found.target, plain_module(module), found.names, {row.module for row in rows}
    )
    return FirstDifference(
        site=fault.site,
        module=_reported(found, module, fault.site, own) if holder == plain_module(module) else holder,
        index=fault.at,
        error=found.forced[fault.site].rel_l2,
        floor=found.floors.forced[fault.site].l2,
        origin="local",
        sure="certain" if healed and _proven(found, fault, blamed, rows) else "likely",
        where=own,
        parameters=parameters,
        healed=healed,
        others=_other_authors(blamed, module),
        evidence="on the reference's own inputs",
        what=relation(found, fault.site),
    )


def _other_authors(blamed: list[_Fault], module: str) -> tuple[str, ...]:
    authors = dict.fromkeys(each.author for each in blamed)
    return tuple(plain_module(author) for author in authors if author and author != module)


def _proven(found: PassEvidence, fault: _Fault, blamed: list[_Fault], rows: list[Row]) -> bool:
    """Not when values are odd in other ways than by their numbers, nor when a module around the fault returns the right
    thing all the same, nor when modules inside the accused one have no partner: one of those may be wrong."""
    if any(each.oddity is not None for each in blamed):
        return False
    right = right_modules(found, rows)
    if any(module in right for module in around(fault.author, itself=False)):
        return False
    unpaired = (path_of(each.site) for each in found.alignment.unaligned if each.side == "reference")
    return not any(is_inside(path, fault.author or "") for path in unpaired)


def _worst(found: PassEvidence, blamed: list[_Fault]) -> tuple[_Fault, str]:
    """Among modules that are all rounded a little, the one that stands out most."""

    def excess(fault: _Fault) -> float:
        if fault.oddity is not None or fault.author is None:
            return -1.0
        return status_of(found.forced[fault.site], found.floors.forced[fault.site])[1]

    worst = max(blamed, key=excess)
    return worst, worst.author or ""


def _reported(found: PassEvidence, module: str, site: str, own: Profile | None) -> str:
    """A module's name as the reference has it; of several that the target fused, the one that carries the error."""
    parts = part_of(module)
    if len(parts) == 1 or own is None:
        return plain_module(module)
    channels = next(
        (c for c in own.concentrations if c.axis == len(found.trace.values[site].shape) - 1), None
    )
    if channels is None:
        return plain_module(parts[0]) if len(parts) == 1 else module
    size = channels.size // len(parts)
    hit = {position // size for position in channels.positions if size}
    return parts[min(hit)] if len(hit) == 1 and min(hit) < len(parts) else module


def _first_odd(found: PassEvidence, fault: _Fault, oddity: Oddity, blamed: list[_Fault]) -> FirstDifference:
    module = plain_module(fault.author or "")
    others = tuple(
        dict.fromkeys(f.author for f in blamed if f.author not in (None, fault.author) and f.author)
    )
    return FirstDifference(
        site=fault.site,
        module=module,
        index=fault.at,
        error=float("nan"),
        floor=float("nan"),
        origin="structure",
        sure="likely",
        parameters=differing_parameters(found.reference, found.target, module, found.names),
        others=tuple(plain_module(other) for other in others),
        what=oddity.why,
    )


def _replace(
    found: PassEvidence, blamed: list[_Fault], first: _Fault, rows: list[Row]
) -> tuple[bool | None, Profile | None]:
    """Whether everything agrees once the reference's values stand in for the culprits', and where in the first
    culprit's own value the error sits."""
    sites = {fault.site for fault in blamed if fault.oddity is None}
    try:
        after = heal(found, sites)
    except Exception:  # the target may refuse values that are not its own; the verdict then rests on the rest
        return None, None
    found.replaced = after.replaced
    wrong = [row.site for row in rows if row.status == "diverged" and row.site not in sites]
    healed = all(site in after.measures for site in wrong) and all(
        status_of(after.measures[site], found.floors.free[site])[0] != "diverged" for site in wrong
    )
    own = after.replaced.get(first.site)
    if own is None:
        return healed, None
    reference = found.trace.values[first.site]
    return healed, locate(reference, own.reshape(reference.shape))


def _first_drift(rows: list[Row], events: dict[str, TracedValue]) -> FirstDifference | None:
    far = next((r for r in rows if r.status == "diverged" and r.excess > DRIFT), None)
    return None if far is None else _first_at(far, events, "accumulated", "possible")


def _first_free(rows: list[Row], events: dict[str, TracedValue]) -> FirstDifference | None:
    row = next((row for row in rows if row.status == "diverged"), None)
    if row is None:
        return None
    return _first_at(row, events, "unknown", "likely" if row.excess > 4 else "possible")


def _first_at(
    row: Row, events: dict[str, TracedValue], origin: Origin, sure: Literal["likely", "possible"]
) -> FirstDifference:
    return FirstDifference(
        site=row.site,
        module=plain_module(events[row.site].author or row.module),
        index=row.index,
        error=row.error,
        floor=row.floor,
        origin=origin,
        sure=sure,
    )
