"""From measured sites to a verdict: which site diverges first, whose fault it is, and one sentence about it.

Rules, in the order in which they decide:
- a site diverges when its error is over its floor; the first one is the earliest in order of execution;
- the author of an output is the module itself, of an input the module that made the call;
- a module is wrong *on its own* (local) when, handed the reference's inputs, it returns something over its floor;
- modules that are wrong on their own but whose differences cancel (a norm folded into a convolution, units in
  another order) are compensated, not wrong: the smallest module around them returns what the reference's returns;
- when every module is right on its own, what is left is rounding that accumulates. It counts as a divergence only
  when it is far beyond what the reference does to itself under one-ULP noise.

Not here: running models (`live`), reading recordings (`recorded`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from torchtap.comparison.judge.result import First, Row, Status
from torchtap.comparison.live.evidence import Evidence, differing_parameters, heal
from torchtap.comparison.live.tracing import Event
from torchtap.comparison.measure.floor import Floor
from torchtap.comparison.measure.measures import Measures
from torchtap.comparison.measure.profile import Profile, locate
from torchtap.errors import CompareError
from torchtap.names import is_inside, paths_around

__all__ = ["judge_live", "sentence", "status_of"]

# How far beyond its floor accumulated rounding has to be, with every module right on its own, to be named.
DRIFT = 100.0


def status_of(measures: Measures, floor: Floor) -> tuple[Status, float]:
    """A site's status and its excess over the floor."""
    if measures.nothing_finite and not measures.masks_differ:
        return "not finite", 0.0
    if measures.identical:
        return "equal", 0.0
    excess = floor.excess(measures)
    return ("diverged" if excess > 1.0 else "within"), excess


def judge_live(found: Evidence) -> tuple[tuple[Row, ...], First | None]:
    """The rows and the first divergence of two live models."""
    rows = [row for n, event in enumerate(found.trace.events) if (row := _row(found, n, event)) is not None]
    if found.identical:
        return tuple(rows), None
    order = {event.site: n for n, event in enumerate(found.trace.events)}
    events = {event.site: event for event in found.trace.events}
    local = sorted(_local_faults(found), key=order.__getitem__)
    settled = _compensated(found, [events[site] for site in local])
    rows = [_with_origin(row, local, settled, bool(found.forced)) for row in rows]
    blamed = [site for site in local if site not in settled]
    if blamed:
        return tuple(rows), _first_local(found, blamed, events, order, rows)
    if found.forced:
        return tuple(rows), _first_drift(rows, events, settled)
    return tuple(rows), _first_free(rows, events)


def _row(found: Evidence, index: int, event: Event) -> Row | None:
    measures = found.free.get(event.site)
    if measures is None:
        return None
    floor = found.free_floors.get(event.site, Floor(0.0, 0.0, ()))
    status, excess = status_of(measures, floor)
    alone, alone_floor = found.forced.get(event.site), found.forced_floors.get(event.site)
    if event.site in found.unsound:
        alone = None
    return Row(
        index=index,
        site=event.site,
        target_site=event.site,
        module=event.module,
        kind=event.kind,
        status=status,
        error=measures.rel_l2,
        floor=floor.l2,
        excess=excess,
        local_error=None if alone is None else alone.rel_l2,
        local_floor=None if alone is None or alone_floor is None else alone_floor.l2,
        measures=measures,
        note=_mask_note(measures),
    )


def _mask_note(measures: Measures) -> str:
    if measures.masks_differ:
        return f"NaN or inf in {measures.masks_differ} places of one side alone"
    unfinite = measures.count - measures.compared
    return f"{unfinite} places are not finite in both" if unfinite else ""


def _local_faults(found: Evidence) -> list[str]:
    """Sites that are over their floor although everything before them was the reference's own."""
    faults = []
    for site, measures in found.forced.items():
        if site not in found.unsound and status_of(measures, found.forced_floors[site])[0] == "diverged":
            faults.append(site)
    return faults


def _compensated(found: Evidence, faults: list[Event]) -> set[str]:
    """Faults that cancel inside a module whose own outputs, in the free pass, are right."""
    settled: set[str] = set()
    authors = {event.author for event in faults if event.author is not None}
    around = sorted({outer for author in authors for outer in paths_around(author)}, key=len, reverse=True)
    for module in around:
        inside = [
            e for e in faults if e.author is not None and _within(e.author, module) and e.site not in settled
        ]
        if len({event.author for event in inside}) < 2:
            continue
        borders = [e.site for e in found.trace.events if e.module == module and e.kind == "output"]
        if borders and all(
            site in found.free
            and status_of(found.free[site], found.free_floors[site])[0] in ("equal", "within")
            for site in borders
        ):
            settled |= {event.site for event in inside}
    return settled


def _within(path: str, module: str) -> bool:
    return module == "" or is_inside(path, module)


def _with_origin(row: Row, local: list[str], settled: set[str], known: bool) -> Row:
    if row.site in settled:
        return replace(row, status="compensated", origin="local")
    if row.status == "diverged":
        return replace(row, origin="local" if row.site in local else ("inherited" if known else "unknown"))
    if row.site in local:
        # Wrong on its own, though by chance not in the free pass.
        return replace(row, status="diverged", origin="local")
    return row


def _first_local(
    found: Evidence, blamed: list[str], events: dict[str, Event], order: dict[str, int], rows: list[Row]
) -> First:
    site = blamed[0]
    module = events[site].author
    if module is None:
        raise CompareError(
            f"the two models were not given the same inputs: {site} differs before anything ran"
        )
    mine = {each for each in blamed if events[each].author == module}
    measures, floor = found.forced[site], found.forced_floors[site]
    others = tuple(
        dict.fromkeys(a for each in blamed if (a := events[each].author) not in (None, module) and a)
    )
    later = {row.site for row in rows if row.status == "diverged" and row.index > order[site]}
    healed, where = _replace(found, site, mine, later)
    return First(
        site=site,
        module=module,
        index=order[site],
        error=measures.rel_l2,
        floor=floor.l2,
        origin="local",
        sure="certain" if healed or others else "likely",
        where=where,
        parameters=differing_parameters(found, module),
        healed=healed,
        others=others,
        evidence="on the reference's own inputs",
    )


def _replace(
    found: Evidence, site: str, sites: set[str], later: set[str]
) -> tuple[bool | None, Profile | None]:
    """Whether everything later agrees once the reference's values stand in for the culprit's, and where in
    the culprit's own value the error sits."""
    try:
        after = heal(found, sites)
    except Exception:  # the target may refuse values that are not its own; the verdict then rests on the rest
        return None, None
    healed = all(
        status_of(after.measures[each], found.free_floors[each])[0] != "diverged"
        for each in later - sites
        if each in after.measures
    )
    own = after.replaced.get(site)
    return healed, None if own is None else locate(found.trace.values[site], own)


def _first_drift(rows: list[Row], events: dict[str, Event], settled: set[str]) -> First | None:
    far = next(
        (r for r in rows if r.status == "diverged" and r.excess > DRIFT and r.site not in settled), None
    )
    if settled or far is None:  # values between two compensated modules differ as they must
        return None
    return _first_at(far, events, "accumulated", "possible")


def _first_free(rows: list[Row], events: dict[str, Event]) -> First | None:
    row = next((row for row in rows if row.status == "diverged"), None)
    if row is None:
        return None
    return _first_at(row, events, "unknown", "likely" if row.excess > 4 else "possible")


def _first_at(
    row: Row,
    events: dict[str, Event],
    origin: Literal["accumulated", "unknown"],
    sure: Literal["likely", "possible"],
) -> First:
    return First(
        site=row.site,
        module=events[row.site].author or row.module,
        index=row.index,
        error=row.error,
        floor=row.floor,
        origin=origin,
        sure=sure,
    )


def sentence(
    first: First | None, rows: tuple[Row, ...], *, profile: Profile | None = None, left: int = 0
) -> str:
    """The verdict in words."""
    compared = [row for row in rows if row.status in ("equal", "within", "diverged", "compensated")]
    rest = f"; {left} could not be compared" if left else ""
    if first is None:
        same = sum(row.status == "equal" for row in compared)
        settled = [row for row in rows if row.status == "compensated"]
        if same == len(compared):
            return f"No divergence: all {same} compared sites are identical{rest}."
        text = f"No divergence: all {len(compared)} compared sites agree within their noise floors ({same} identical)"
        if settled:
            names = ", ".join(dict.fromkeys(row.module for row in settled))
            text = f"No divergence: differences inside ({names}) cancel out before they leave the module around them"
        return text + rest + "."
    name = f"`{first.module}`" if first.module else "the model's own forward"
    at = "" if first.step is None else f"at step {first.step}, "
    size = f"relative error {first.error:.2g} over a floor of {first.floor:.2g}"
    where = f", {profile}" if profile is not None else ""
    if first.origin == "local":
        because = f" ({first.evidence})" if first.evidence else ""
        text = f"{at}{name} is wrong on its own{because}: {first.site} differs, {size}{where}"
    elif first.origin == "accumulated":
        text = f"{at}every module is right on its own, but rounding adds up to {first.site} differing ({size}{where})"
    elif first.origin == "inherited":
        text = f"{at}{name} only passes on an error that it was given, first seen at {first.site} ({size}{where})"
    else:
        text = f"{at}{name} is the first to differ, at {first.site} ({size}{where})"
        if first.after is not None:
            text += f"; {first.after} before it still agrees"
    if first.parameters:
        text += f"; {', '.join(first.parameters[:3])}"
    if first.contained is not None:
        inside = f"`{first.contained}`" if first.contained else "the model"
        text += f"; the difference does not leave {inside}, whose output agrees"
    if first.healed and not first.others:
        text += "; with the reference's value in its place everything after it agrees"
    elif first.others:
        text += f"; {len(first.others)} more wrong on their own: {', '.join(first.others[:4])}"
    return text[0].upper() + text[1:] + f"{rest}. This is {first.sure}."
