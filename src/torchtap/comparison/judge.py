"""Decide from evidence which site differs first and whose fault it is. Pure: no model, no file, no torch.

`judge` is a generator. It yields the next experiment that would settle a question, receives its answer (None if the
source cannot run it: recordings never can), and returns the verdict. Live and recorded comparison use the same judge.

Rules, in the order in which they decide:
- a site is wrong if its error is over its floor, its shape differs, it is absent, or its module was not called;
- the author of an output is the module itself, of an input the module that made the call;
- a module is wrong *alone* (local) if it returns something over its floor when given the reference's inputs. A
  recording shows that only if the inputs were recorded and agree;
- what is wrong alone but does not leave the module around it (a norm folded into a convolution, permuted units) is
  compensated, not wrong;
- if every module is right alone, the rest is accumulated rounding. It counts only far beyond its floor;
- a verdict is *certain* only if its proof ran: nothing was skipped, and with the reference's values in place of the
  culprit's everything after it agrees.

Not here: running models (`live`), reading recordings (`recorded`), sentences (`words`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, final

from torchtap.comparison.align import KnownSite, Unaligned
from torchtap.comparison.floor import NO_FLOOR, Floor
from torchtap.comparison.measures import Measures
from torchtap.comparison.result import (
    AGREES,
    COMPARED,
    FirstDifference,
    FunctionAnswer,
    Origin,
    Outcome,
    Row,
    Status,
)
from torchtap.comparison.words import cannot_tell, counted, differs, differs_as_a_whole, same
from torchtap.plan.names import (
    is_inside,
    join_path,
    kind_of,
    parent_path,
    path_of,
    paths_around,
    read_name,
)

__all__ = [
    "Evidence",
    "Experiment",
    "MissingSite",
    "Oddity",
    "OddityKind",
    "Replace",
    "Widen",
    "around",
    "decide",
    "doubts",
    "gradient_missing",
    "judge",
    "judged_without_experiments",
    "missing_evidence",
    "note_of",
    "results_agree",
    "status_of",
]

# Factor over its floor from which accumulated rounding is named although every module is right alone.
DRIFT = 100.0
_MORE = 8.0  # share of a difference by which a compensated fault is enlarged
_ALIKE = 1.5  # ratio up to which two responses count as proportional
_LEAST_COVERAGE = 0.5
_NOT_COMPARED = {
    "unreadable": "cannot be read",
    "other shape": "with another shape",
    "not comparable": "cannot be compared",
}
_FORWARD = frozenset({"input", "output", "attention"})
_GRADIENTS = frozenset({"grad_output", "grad_input", "param_grad"})
# The kind of value from which a module computes another.
_GIVEN = {"output": "input", "grad_input": "grad_output", "param_grad": "grad_output"}

OddityKind = Literal["shape", "absent", "extra", "not called", "argument", "in place"]


@final
@dataclass(frozen=True, slots=True)
class Oddity:
    """A difference that no number measures: a shape, an absent value, a call that was or was not made."""

    site: str
    at: int  # place in the reference's order of execution
    author: str | None  # the module whose code made it; None: the user's own call
    kind: OddityKind
    why: str


@final
@dataclass(frozen=True, slots=True)
class MissingSite:
    """A site that one recording has and the other should have."""

    site: str
    side: str  # the side that has it
    place: int  # in that side's order
    why: str


@final
@dataclass(frozen=True, slots=True)
class Replace:
    """Experiment: run the target with the reference's values at ``sites``; ``share`` of each difference stays.

    The answer maps each site to its `Measures`.
    """

    sites: frozenset[str]
    share: float = 0.0


@final
@dataclass(frozen=True, slots=True)
class Widen:
    """Experiment: judge float32 copies of two 16-bit models. The answer is the set of wrong modules."""


Experiment = Replace | Widen
Verdict = tuple[tuple[Row, ...], FirstDifference | None]
Judging = Generator[Experiment, Any, Verdict]


@final
@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """Everything the judge knows. Only ``rows`` is needed; a recording has little else."""

    rows: Sequence[Row]  # one for each site of the reference, in order of execution
    authors: Mapping[str, str | None] = field(default_factory=dict)
    floors: Mapping[str, Floor] = field(default_factory=dict)  # of values computed freely
    alone: Mapping[str, tuple[Measures, Floor]] = field(default_factory=dict)  # on the reference's inputs
    incomplete: Collection[str] = ()  # sites of ``alone`` whose module had an input of its own
    oddities: Sequence[Oddity] = ()
    numbers: Collection[str] = ()  # sites that hold real or complex numbers
    unpaired: Sequence[str] = ()  # modules of the reference without a partner
    ran_alone: bool = False
    identical: bool = False
    quantized: bool = False
    missing: MissingSite | None = None
    open_inputs: Collection[str] = ()  # modules with an input that only one side recorded


@final
@dataclass(frozen=True, slots=True)
class _Fault:
    """A value that is wrong alone, or an oddity."""

    site: str
    at: int
    author: str | None
    oddity: Oddity | None = None


def judge(found: Evidence) -> Judging:
    """Return the rows with their origins and the first difference; yield the experiments this needs."""
    rows = list(found.rows)
    if found.identical:
        return tuple(rows), None
    faults = sorted(_faults(found), key=lambda fault: (fault.at, fault.oddity is None, fault.site))
    settled = yield from _compensated(found, faults, rows)
    local = {fault.site for fault in faults}
    blamed = [fault for fault in faults if fault.site not in settled]
    rows = [_with_origin(row, local, settled, found.ran_alone) for row in rows]
    if blamed:
        first = yield from _first_blamed(found, blamed, rows)
        return tuple(rows), first
    if settled and results_agree(rows):
        # Values between two compensated modules differ as they must.
        return tuple(replace(r, status="compensated") if r.status == "diverged" else r for r in rows), None
    if found.ran_alone:
        far = next((row for row in rows if row.status == "diverged" and row.excess > DRIFT), None)
        return tuple(rows), None if far is None else _first_at(far, found, "accumulated", "possible")
    return tuple(rows), _first_of_rows(rows, found)


def judged_without_experiments(found: Evidence) -> Verdict:
    """Return the verdict of a source that can run nothing."""
    judging = judge(found)
    try:
        next(judging)
        while True:
            judging.send(None)
    except StopIteration as done:
        verdict: Verdict = done.value
        return verdict


def status_of(measures: Measures, floor: Floor) -> tuple[Status, float]:
    """Return a site's status and its error as a multiple of what its floor allows."""
    if measures.nothing_finite and not measures.masks_differ and max(measures.nans):
        return "not comparable", 0.0
    if measures.identical:
        return "equal", 0.0
    excess = floor.excess(measures)
    return ("diverged" if excess > 1.0 else "within"), excess


def note_of(measures: Measures) -> str:
    """Describe what is unusual about the values themselves; empty if nothing is."""
    if measures.masks_differ:
        both = zip(("reference", "target"), measures.nans, measures.infs, strict=True)
        sides = ", ".join(f"{nans + infs} in the {side}" for side, nans, infs in both)
        return f"NaN or infinite in {counted(measures.masks_differ, 'place')} of one side alone ({sides})"
    unfinite = measures.count - measures.compared
    if measures.nothing_finite and max(measures.nans):
        return "NaN or infinite everywhere in both"
    return f"{unfinite} places are not finite in both" if unfinite else ""


# Faults, and those that do not leave the module around them.


def _faults(found: Evidence) -> Iterator[_Fault]:
    """Yield what is wrong although everything before it was the reference's own."""
    order = {row.site: n for n, row in enumerate(found.rows)}
    for site, (measures, floor) in found.alone.items():
        if status_of(measures, floor)[0] == "diverged":
            yield _Fault(site, order[site], found.authors.get(site))
    for oddity in found.oddities:
        yield _Fault(oddity.site, oddity.at, oddity.author, oddity)


def _compensated(
    found: Evidence, faults: list[_Fault], rows: list[Row]
) -> Generator[Experiment, Any, set[str]]:
    """Return the faults that do not leave a module whose own outputs, computed freely, are right."""
    held = _held(faults, _right_modules(found, rows))
    settled = {fault.site for fault in faults if _makes_good(found, fault)}
    settled |= {fault.site for fault, _ in held if fault.oddity is not None}
    inside: dict[str, set[str]] = {}
    for fault, module in held:
        if fault.oddity is None:
            inside.setdefault(module, set()).add(fault.site)
    inside = {module: sites for module, sites in inside.items() if not sites <= settled}
    wrong = (yield Widen()) if inside else None
    for module, sites in inside.items():
        if wrong is not None:
            settled |= {fault.site for fault in faults if fault.site in sites and fault.author not in wrong}
        elif (yield from _cancels(found, module, frozenset(sites))):
            settled |= sites
    return settled


def _makes_good(found: Evidence, fault: _Fault) -> bool:
    """Return True if a value that is wrong on the reference's inputs is right on the target's own.

    The module makes good for another one: a merged LoRA, a norm folded into it. A small fault of its own would be about
    as large in both.
    """
    if fault.oddity is not None:
        return False
    row = found.rows[fault.at]
    return row.status in ("equal", "within") and found.alone[fault.site][0].rel_l2 > _MORE * row.error


def _held(faults: list[_Fault], right: Collection[str]) -> list[tuple[_Fault, str]]:
    """Return faults with the smallest module around them that is right.

    Around a wrong number that is a larger module; around an oddity also the module that made it, unless it changed a
    value in place: such a change does not leave a module by its outputs.
    """
    found = []
    for fault in faults:
        itself = fault.oddity is not None and fault.oddity.kind != "in place"
        module = next((each for each in around(fault.author, itself=itself) if each in right), None)
        if module is not None:
            found.append((fault, module))
    return found


def around(author: str | None, *, itself: bool) -> list[str]:
    """Return the modules around a module, smallest first, the model last; with ``itself`` the module too."""
    if author is None:
        return [""]
    return [author, *paths_around(author)] if itself else list(paths_around(author))


def _right_modules(found: Evidence, rows: Sequence[Row]) -> set[str]:
    """Return the modules that turn the reference's inputs into the reference's outputs in the free pass.

    A number must be among the outputs: chosen indices may agree by chance. If an input differs and the outputs agree,
    the module makes good for one before it, so a larger one is right.
    """
    outputs: dict[str, list[Row]] = {}
    for row in rows:
        if row.kind == "output":
            outputs.setdefault(row.module, []).append(row)
    given_others = {row.module for row in rows if row.kind == "input" and row.status == "diverged"}
    return {
        module
        for module, borders in outputs.items()
        if module not in given_others
        and all(row.status in ("equal", "within") for row in borders)
        and any(row.site in found.numbers for row in borders)
    }


def _cancels(found: Evidence, module: str, sites: frozenset[str]) -> Generator[Experiment, Any, bool]:
    """Return True if the differences at these sites, inside a module that returns the right thing, are harmless.

    The target runs again with a share of the difference:

        half of it    wrong, although none and all of it are right: it is undone further on. Harmless
        8 times it    wrong, or the opposite of -8 times it: the fault is real and was too small to be seen
                      otherwise the arithmetic does not depend on it. Harmless
    """
    borders = [row.site for row in found.rows if row.module == module and row.kind == "output"]

    def wrong(after: Mapping[str, Measures]) -> bool:
        return any(
            site in after and status_of(after[site], found.floors.get(site, NO_FLOOR))[0] == "diverged"
            for site in borders
        )

    for share in (0.0, 0.5):
        after = yield Replace(sites, share)
        if after is None or wrong(after):
            return True
    more = yield Replace(sites, _MORE)
    less = yield Replace(sites, -_MORE)
    if more is None or less is None:
        return True
    if wrong(more) or wrong(less):
        return False
    return not any(_opposite(more.get(site), less.get(site)) for site in borders)


def _opposite(more: Measures | None, less: Measures | None) -> bool:
    """Return True if two differences are opposite in sign and alike in size: a proportional response, not rounding."""
    if more is None or less is None or not more.worst or more.worst != less.worst:
        return False
    up, down = more.worst_target - more.worst_reference, less.worst_target - less.worst_reference
    return up * down < 0.0 and _alike(abs(up), abs(down)) and _alike(more.rel_l2, less.rel_l2)


def _alike(one: float, other: float) -> bool:
    return 0.0 < max(one, other) <= _ALIKE * min(one, other)


def results_agree(rows: Sequence[Row]) -> bool:
    """Return True if the model's own results were compared and agree."""
    results = [row for row in rows if row.module == "" and row.kind == "output"]
    return bool(results) and all(row.status in AGREES for row in results)


def _with_origin(row: Row, local: set[str], settled: set[str], known: bool) -> Row:
    if row.site in settled and row.status in ("diverged", "within"):
        return replace(row, status="compensated", origin="local")
    if row.status == "diverged":
        return replace(row, origin="local" if row.site in local else ("inherited" if known else "unknown"))
    if row.site in local and row.status == "within" and row.site not in settled:
        # Wrong alone, though by chance not in the free pass.
        return replace(row, status="diverged", origin="local")
    return row


# The first difference.


def _first_blamed(
    found: Evidence, blamed: list[_Fault], rows: list[Row]
) -> Generator[Experiment, Any, FirstDifference]:
    fault = blamed[0]
    if found.quantized:  # among modules that are all rounded a little, the one that stands out most
        fault = max(blamed, key=lambda each: _excess(found, each))
    others = tuple(
        author
        for author in dict.fromkeys(each.author for each in blamed)
        if author and author != fault.author
    )
    blank = FirstDifference(
        site=fault.site,
        module=fault.author or "",
        index=fault.at,
        error=float("nan"),
        floor=float("nan"),
        origin="structure",
        sure="likely",
        others=others,
    )
    if fault.oddity is not None:
        return replace(blank, what=fault.oddity.why)
    sites = frozenset(each.site for each in blamed if each.oddity is None)
    after = yield Replace(sites)
    wrong = [row.site for row in rows if row.status == "diverged" and row.site not in sites]
    healed = None
    if after is not None:
        healed = all(
            site in after and status_of(after[site], found.floors.get(site, NO_FLOOR))[0] != "diverged"
            for site in wrong
        )
    measures, floor = found.alone[fault.site]
    return replace(
        blank,
        error=measures.rel_l2,
        floor=floor.l2,
        origin="local",
        sure="certain" if healed and _proven(found, fault, blamed, rows) else "likely",
        healed=healed,
        evidence="on the reference's own inputs",
    )


def _excess(found: Evidence, fault: _Fault) -> float:
    if fault.oddity is not None or fault.author is None:
        return -1.0
    return status_of(*found.alone[fault.site])[1]


def _proven(found: Evidence, fault: _Fault, blamed: list[_Fault], rows: list[Row]) -> bool:
    """Return True if nothing speaks against certainty.

    Against it: oddities, an input without a partner, a module around the fault that returns the right thing, and
    modules inside the accused one without a partner: one of those may be wrong.
    """
    if any(each.oddity is not None for each in blamed) or fault.site in found.incomplete:
        return False
    right = _right_modules(found, rows)
    if any(module in right for module in around(fault.author, itself=False)):
        return False
    return not any(is_inside(path, fault.author or "") for path in found.unpaired)


def _first_at(
    row: Row, found: Evidence, origin: Origin, sure: Literal["likely", "possible"]
) -> FirstDifference:
    return FirstDifference(
        site=row.site,
        module=found.authors.get(row.site) or row.module,
        index=row.index,
        error=row.error,
        floor=row.floor,
        origin=origin,
        sure=sure,
    )


def _first_of_rows(rows: Sequence[Row], found: Evidence) -> FirstDifference | None:
    """Return the earliest row that differs, by value or shape, or the missing site before it."""
    at = next((n for n, row in enumerate(rows) if row.status in ("diverged", "other shape")), None)
    missing = found.missing
    if missing is not None and (
        at is None or (missing.side == "reference" and missing.place < rows[at].index)
    ):
        return _first_missing(missing)
    if at is None:
        return None
    row, earlier = rows[at], rows[:at]
    agreed = next((each.site for each in reversed(earlier) if each.status in AGREES), None)
    local = _inputs_agree(row, rows) and (row.kind == "input" or row.module not in found.open_inputs)
    stands_out = (row.status == "other shape" or row.excess > 4) and all(
        each.status != "unreadable" for each in earlier
    )
    first = FirstDifference(
        site=row.site,
        module=_author(row, rows),
        index=row.index,
        error=row.error,
        floor=row.floor,
        origin="local" if local else "unknown",
        sure="likely" if (local or agreed is not None) and stands_out else "possible",
        evidence="its inputs agree" if local and row.kind != "input" else "",
        after=agreed,
    )
    if row.status == "other shape":
        return replace(first, origin="structure", what=row.note)
    return replace(first, contained=_container_that_agrees(row, rows))


def _first_missing(missing: MissingSite) -> FirstDifference:
    name = read_name(missing.site)
    return FirstDifference(
        site=missing.site,
        module=name.path if name.kind != "input" else parent_path(name.path),
        index=missing.place,
        error=float("nan"),
        floor=float("nan"),
        origin="structure",
        sure="likely",
        what=f"the {'gradient' if name.kind in _GRADIENTS else 'value'} {missing.why}",
    )


def gradient_missing(first: FirstDifference, step: int) -> FirstDifference:
    """Return the verdict on a parameter's gradient that is missing from a step of a training on."""
    name = read_name(first.site)
    why = first.what.removeprefix("the gradient ").removesuffix(" from here on")
    what = f"the gradient of `{join_path(name.path, name.leaf)}` {why}"
    return replace(first, origin="update", step=step, what=what)


def _inputs_agree(row: Row, rows: Sequence[Row]) -> bool:
    """Return True if everything the value was computed from was recorded and agrees.

    An input that only one side recorded, or that could not be compared, leaves the question open.
    """
    if row.kind == "input":
        return True
    given = _GIVEN.get(row.kind)
    inputs = [each for each in rows if each.module == row.module and each.kind == given]
    return bool(inputs) and all(each.status in AGREES for each in inputs)


def _container_that_agrees(row: Row, rows: Sequence[Row]) -> str | None:
    """Return the smallest module around a value whose outputs all agree: the difference does not leave it."""
    if row.kind not in _FORWARD:
        return None
    for outer in paths_around(row.module):
        outputs = [r for r in rows if r.module == outer and r.kind == "output" and r.status in COMPARED]
        if outputs and all(r.status != "diverged" for r in outputs):
            return outer
    return None


def _author(row: Row, rows: Sequence[Row]) -> str:
    """Return the module whose code made a value: of an output the module, of an input the one around it."""
    if row.kind != "input":
        return row.module
    known = {other.module for other in rows}
    return next((outer for outer in paths_around(row.module) if outer in known), "")


def missing_evidence(
    unaligned: Sequence[Unaligned],
    left: Sequence[KnownSite],
    right: Sequence[KnownSite],
    seen_before: tuple[set[str], set[str]],
) -> MissingSite | None:
    """Return the first site, in order, whose absence on the other side means something.

    It does if both sides had it at an earlier step, or if it is a gradient and the other side recorded gradients of
    that module.
    """
    found = []
    sides = (("reference", left, right, seen_before[1]), ("target", right, left, seen_before[0]))
    for side, mine, theirs, before in sides:
        places = {site.name: n for n, site in enumerate(mine)}
        kinds = {kind_of(site.name) for site in theirs}
        paths = {path_of(site.name) for site in theirs}
        other = "target" if side == "reference" else "reference"
        for site in (each.site for each in unaligned if each.side == side):
            kind = kind_of(site)
            if site in before:
                found.append(MissingSite(site, side, places[site], f"is missing in the {other} from here on"))
            elif kind in _GRADIENTS and kind in kinds and path_of(site) in paths:
                found.append(MissingSite(site, side, places[site], f"is missing in the {other}"))
    return min(found, key=lambda missing: (missing.place, missing.side), default=None)


# The outcome.


def decide(
    first: FirstDifference | None,
    rows: Sequence[Row],
    unaligned: Sequence[Unaligned],
    *,
    live: bool,
    further: Sequence[str] = (),
    also: str = "",
    function: FunctionAnswer | None = None,
) -> tuple[Outcome, str]:
    """Return the outcome and its sentence. ``further`` lists reasons from outside the rows that forbid "same".

    The model's outputs decide as well: each site may be within what its precision explains, and all of them together
    a different function.

    "Same" needs that nothing is left that could differ: the model's results, or every site, were compared and agree;
    nothing was unreadable, of another shape or NaN everywhere; a site of one side alone lies inside a module whose
    output agrees; of recordings, every step is in both, neither is damaged, and half of the sites were compared.
    """
    total = len(rows) + sum(each.side != "rule" for each in unaligned)
    if first is not None:
        return "differs", differs(first, rows, total, function)
    if function is not None and not function.same and math.isfinite(function.distance):
        return "differs", differs_as_a_whole(rows, total, function)
    why = [*doubts(rows, unaligned, live=live), *further]
    if why:
        return "cannot tell", cannot_tell(rows, total, why)
    return "same", same(rows, total, also, function)


def doubts(rows: Sequence[Row], unaligned: Sequence[Unaligned], *, live: bool) -> list[str]:
    """Return the reasons why agreement of what was compared is not enough."""
    alone = [each for each in unaligned if each.side != "rule"]
    found: list[str] = []
    if not (live and results_agree(rows)):
        found += _not_compared(rows)
    parts = [row for row in rows if row.status == "unknown part" and not _made_good(row, rows)]
    if parts:
        found.append(
            f"{counted(len(parts), 'site')} of which parts lie on ranks, first {parts[0].site} ({parts[0].note})"
        )
    open_ = list(_one_sided(rows, alone))
    if open_:
        found.append(f"{counted(len(open_), 'site')} in one of them alone, first {open_[0]}")
    total, compared = len(rows) + len(alone), sum(row.status in AGREES for row in rows)
    if not compared:
        found.append("nothing at all could be compared")
    elif not live and compared < _LEAST_COVERAGE * total:
        found.append(f"{compared} of {total} sites are too few")
    return found


def _not_compared(rows: Sequence[Row]) -> Iterator[str]:
    for status, text in _NOT_COMPARED.items():
        hit = [row for row in rows if row.status == status]
        if hit:
            note = f" ({hit[0].note})" if hit[0].note else ""
            yield f"{counted(len(hit), 'site')} {text}, first {hit[0].site}{note}"


def _one_sided(rows: Sequence[Row], alone: Iterable[Unaligned]) -> Iterator[str]:
    """Yield the sites of one side alone that could have mattered otherwise than through a module that agrees."""
    outputs = [row for row in rows if row.kind == "output"]
    agree = {row.module for row in outputs if row.status in AGREES}
    agree -= {row.module for row in outputs if row.status not in AGREES}
    missing = [*(row.site for row in rows if row.status == "missing"), *(each.site for each in alone)]
    for site in missing:
        name = read_name(site)
        forward = name.kind in _FORWARD or name.kind == "value"
        if not forward or not any(path in agree for path in (name.path, *paths_around(name.path))):
            yield site


def _made_good(row: Row, rows: Sequence[Row]) -> bool:
    """Return True if a value that was not compared could only have mattered through something that agrees.

    A module's gradient matters through those of its parameters, a value through the output of a module around it.
    """
    if row.kind in _FORWARD or row.kind == "value":
        outside = {row.module, *paths_around(row.module)}
        outer = [
            each for each in rows if each.kind == "output" and each.module in outside and each is not row
        ]
    else:
        outer = [each for each in rows if each.kind == "param_grad" and each.module == row.module]
    return any(each.status in AGREES for each in outer) and all(each.status != "diverged" for each in outer)
