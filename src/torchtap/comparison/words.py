"""The verdict in words: the outcome, what was found first, and how much could be compared."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from torchtap.comparison.explain import Profile
from torchtap.comparison.result import AGREES, COMPARED, FirstDifference, FunctionAnswer, Row
from torchtap.plan.names import parent_path, path_of, read_name

__all__ = ["cannot_tell", "counted", "covered", "differs", "differs_as_a_whole", "in_target", "named", "same"]


def counted(number: int, word: str) -> str:
    """A number of things."""
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def named(module: str) -> str:
    """A module in a sentence."""
    return f"`{module}`" if module else "the model's own forward"


def in_target(first: FirstDifference, rows: Sequence[Row]) -> str:
    """Return the target's name of the first difference's module: the same, unless the two have names of their own."""
    if first.in_target:
        return "" if first.in_target == "the model itself" else first.in_target
    for row in rows:
        if row.module == first.module and row.target_site != row.site:
            return path_of(row.target_site)
    seen = next((row for row in rows if row.site == first.site), None)
    if seen is None or seen.target_site == seen.site:
        return first.module
    theirs = path_of(seen.target_site)
    called = seen.kind == "input" and seen.module.partition("[")[0] != first.module
    return parent_path(theirs) if called else theirs  # of an input: whoever made the call


def covered(compared: int, total: int) -> str:
    """How much was compared."""
    if compared == total:
        return f"all {total} sites were compared"
    return (
        f"{compared} of {total} sites could be compared ({compared / total:.0%})"
        if total
        else "no site was compared"
    )


def same(rows: Sequence[Row], total: int, also: str = "", function: FunctionAnswer | None = None) -> str:
    """The verdict when nothing is over its floor and enough was compared."""
    agree = [row for row in rows if row.status in AGREES]
    equal = sum(row.status == "equal" for row in agree)
    settled = list(dict.fromkeys(row.module for row in rows if row.status == "compensated"))
    if settled:
        names = ", ".join(map(named, settled[:4])) + (" ..." if len(settled) > 4 else "")
        text = (
            f"No divergence: differences inside ({names}) cancel out before they leave the module around them"
        )
    elif equal == len(agree):
        text = f"No divergence: all {equal} compared sites are identical"
    else:
        text = f"No divergence: all {len(agree)} compared sites agree within their noise floors ({equal} identical)"
    rest = "" if len(agree) == total else f"; {covered(len(agree), total)}"
    inside = "" if function is None or not settled else f" They compute {function}, but differ inside."
    return f"{text}{also}{rest}.{inside}"


def cannot_tell(rows: Sequence[Row], total: int, why: Sequence[str]) -> str:
    """The verdict when nothing is over its floor, but too much is missing to call it the same."""
    compared = sum(row.status in COMPARED for row in rows)
    reasons = "; ".join(why[:3]) + (f"; and {len(why) - 3} more reasons" if len(why) > 3 else "")
    agree = "what was compared agrees" if compared else "nothing was compared"
    return f"Cannot tell: {covered(compared, total)}, and {agree}, but {reasons}."


def differs(
    first: FirstDifference, rows: Sequence[Row], total: int, function: FunctionAnswer | None = None
) -> str:
    """The verdict when something differs."""
    if first.origin == "update":
        return f"From step {first.step} on {first.what}. This is {first.sure}."
    at = "" if first.step is None else f"at step {first.step}, "
    told = [
        at + _where(first, first.where, _unfinite(first, rows), in_target(first, rows)),
        ", ".join(first.parameters[:3]),
        *_reach(first),
    ]
    compared = sum(row.status in COMPARED for row in rows)
    if compared != total:
        told.append(covered(compared, total))
    text = "; ".join(part for part in told if part)
    also = "" if function is None else f" They compute {function}."
    return f"{text[0].upper()}{text[1:]}. This is {first.sure}.{also}"


def differs_as_a_whole(rows: Sequence[Row], total: int, function: FunctionAnswer) -> str:
    """Return the verdict when no module stands out, and the outputs are too far apart for their precision."""
    compared = sum(row.status in COMPARED for row in rows)
    rest = "" if compared == total else f"; {covered(compared, total)}"
    return f"They compute {function}. No module stands out: all are about as imprecise{rest}."


def _reach(first: FirstDifference) -> Iterator[str]:
    """How far a difference goes, and whether it is alone."""
    if first.contained is not None:
        inside = f"`{first.contained}`" if first.contained else "the model"
        yield f"the difference does not leave {inside}, whose output agrees"
    if first.others:
        yield f"{len(first.others)} more wrong on their own: {', '.join(first.others[:4])}"
    elif first.healed:
        yield "with the reference's value in its place everything after it agrees"


def _unfinite(first: FirstDifference, rows: Sequence[Row]) -> str:
    """What is told of a site whose NaN and infinities are not in the same places: no number says it."""
    row = next((row for row in rows if row.site == first.site), None)
    return row.note if row is not None and row.measures is not None and row.measures.masks_differ else ""


def _where(first: FirstDifference, profile: Profile | None, unfinite: str, theirs: str) -> str:
    site = read_name(first.site)
    name = f"the logged {site.leaf}" if site.kind == "value" else named(first.module)
    if theirs != first.module and site.kind != "value":
        name += f" (in the target {named(theirs)})"
    where = f", {profile}" if profile is not None else ""
    if first.origin == "structure":
        return f"{name} does something else: at {first.site} {first.what}"
    size = unfinite or _size(first)
    if first.origin == "local":
        because = f" ({first.evidence})" if first.evidence else ""
        return f"{name} is wrong on its own{because}: {first.site} differs, {size}{where}"
    if first.origin == "accumulated":
        return f"every module is right on its own, but rounding adds up to {first.site} differing ({size}{where})"
    if first.origin == "inherited":
        return f"{name} only passes on an error that it was given, first seen at {first.site} ({size}{where})"
    text = f"{name} is the first to differ, at {first.site} ({size}{where})"
    return text if first.after is None else f"{text}; {first.after} before it still agrees"


def _size(first: FirstDifference) -> str:
    what = f"it is {first.what}, " if first.what else ""
    if not math.isfinite(first.error) or first.error == 0.0:
        return f"{what}NaN or infinite in places of one side alone" if not first.what else first.what
    return f"{what}relative error {first.error:.2g} over a floor of {first.floor:.2g}"
