"""What a comparison found: rows, the first divergence, one sentence. Plain frozen data and its outputs.

Not here: how it was found (`front`, `live`, `verdict`), how it is drawn (`table`, `html`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, final

from torchtap.comparison.align import Pair, Unaligned
from torchtap.comparison.explain import Profile
from torchtap.comparison.measures import Measures
from torchtap.display import drawn

if TYPE_CHECKING:
    from rich.table import Table

__all__ = [
    "AGREES",
    "COMPARED",
    "STATISTICS_ONLY",
    "Comparison",
    "Confidence",
    "FirstDifference",
    "FunctionAnswer",
    "Origin",
    "Outcome",
    "Row",
    "Status",
]

# What becomes of a site: compared (the first four), or not, and why. A site that only one side has is in `unaligned`.
Status = Literal[
    "equal",
    "within",
    "diverged",
    "compensated",
    "missing",
    "other shape",
    "unreadable",
    "not comparable",
    "unknown part",  # of a whole that lies on several ranks
]
Origin = Literal["local", "inherited", "accumulated", "structure", "update", "unknown"]
Outcome = Literal["same", "differs", "cannot tell"]
Confidence = Literal["high", "medium", "low", "none"]
COMPARED: frozenset[str] = frozenset({"equal", "within", "diverged", "compensated"})
STATISTICS_ONLY = "statistics only"  # the note of a row that rests on them
_WELL_COVERED = 0.75  # share of the sites that "same" with high confidence needs
AGREES: frozenset[str] = frozenset({"equal", "within", "compensated"})


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One site. ``error`` and ``floor`` are relative L2; ``excess`` above 1 means over the floor."""

    index: int
    site: str
    target_site: str
    module: str
    kind: str
    status: Status
    error: float
    floor: float
    excess: float
    origin: Origin | None = None  # of a site that diverged
    step: int | None = None
    local_error: float | None = None  # on the reference's own inputs
    local_floor: float | None = None
    how: str = "name"
    note: str = ""
    measures: Measures | None = None

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready data; numbers that JSON does not have become text."""
        data = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "measures"}
        data["measures"] = None if self.measures is None else self.measures.as_dict()
        return data


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FirstDifference:
    """The first divergence in order of execution.

    ``site`` is where it was seen; ``module`` is the module whose own code made that value: for an output the
    module itself, for an input the one that called it.
    """

    site: str
    module: str
    index: int
    error: float
    floor: float
    origin: Origin
    sure: Literal["certain", "likely", "possible"]
    step: int | None = None
    where: Profile | None = None
    parameters: tuple[str, ...] = ()  # its own parameters and buffers that differ
    healed: bool | None = None  # whether the rest agrees with the reference's value in place; None: not tried
    others: tuple[str, ...] = ()  # further modules that are wrong on their own
    after: str | None = None  # the last site before it that agrees
    contained: str | None = None  # the smallest module around it whose output agrees all the same
    evidence: str = ""  # what "local" rests on, in words
    what: str = ""  # what differs where it is no number: a shape, an absent value, a call that was not made
    in_target: str = ""  # the target's name of ``module``, if it differs
    source: str = ""  # where the code of its forward is, ``file.py:12 (Block.forward)``; of live models only

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready data."""
        data = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "where"}
        data["where"] = None
        if self.where is not None:
            data["where"] = {
                "text": str(self.where),
                "elements": [
                    {"index": e.index, "reference": e.reference, "target": e.target}
                    for e in self.where.elements
                ],
            }
        return data


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionAnswer:
    """Answer to the question whether both models compute the same function, from their outputs alone."""

    same: bool
    distance: float  # relative L2 of the outputs, at the positions that count
    allowed: float  # the largest distance that the precision explains
    precision: str  # of the target: "float32", "bfloat16", "int8", "int4" ...
    agreement: float | None = (
        None  # share of positions with the same argmax; None for outputs that are no logits
    )
    positions: str = ""  # which positions count, if not all

    def __str__(self) -> str:
        text = f"{'the same' if self.same else 'a different'} function at {self.precision} precision"
        text += f" (outputs {self.distance:.2g} apart, {self.allowed:.2g} allowed"
        if self.agreement is not None:
            text += f", argmax agrees at {self.agreement:.1%}"
        return text + (f", at {self.positions})" if self.positions else ")")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The result of `torchtap.compare`. Printing it gives the verdict; ``outcome`` is one of three words."""

    reference: str
    target: str
    rows: tuple[Row, ...]
    first: FirstDifference | None
    verdict: str
    basis: str  # what the noise floor rests on
    unaligned: tuple[Unaligned, ...] = ()
    problems: tuple[str, ...] = ()
    forwards: int = 0
    steps: tuple[int, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    outcome: Outcome = "cannot tell"
    function: FunctionAnswer | None = None  # None if the model's outputs were not compared
    pairing: tuple[Pair, ...] = ()  # which site is which, and why

    @property
    def confidence(self) -> Confidence:
        """Return what the outcome rests on.

        "high": a proof, or equal values at three quarters of the sites or more. "medium": values within a floor, or
        fewer sites. "low": statistics alone. "none": the outcome is "cannot tell".
        """
        if self.outcome == "cannot tell":
            return "none"
        decisive = self._decisive()
        if 2 * sum(row.note == STATISTICS_ONLY for row in decisive) > len(decisive):
            return "low"
        if self.first is not None:
            return "high" if self.first.sure == "certain" else "medium"
        if self.coverage < _WELL_COVERED:
            return "medium"
        equal = all(row.status == "equal" for row in decisive)
        return "high" if equal or self.forwards > 0 else "medium"

    def _decisive(self) -> list[Row]:
        """The rows that the outcome rests on."""
        if self.first is not None:
            return [row for row in self.rows if row.site == self.first.site]
        return [row for row in self.rows if row.status in COMPARED]

    @property
    def compared(self) -> int:
        """How many sites were compared."""
        return sum(row.status in COMPARED for row in self.rows)

    @property
    def total(self) -> int:
        """How many sites there are on either side: those in both once, and those that only one has."""
        return len(self.rows) + sum(each.side != "rule" for each in self.unaligned)

    @property
    def coverage(self) -> float:
        """The share of all sites that could be compared."""
        return self.compared / self.total if self.total else 0.0

    @property
    def same(self) -> bool:
        """Return True if they are the same: everything that decides was compared, and nothing is over its floor."""
        return self.outcome == "same"

    @property
    def diverged(self) -> bool:
        """Return True if they differ. When they do not, they may still be impossible to tell: ask `outcome`."""
        return self.outcome == "differs"

    def __str__(self) -> str:
        return self.verdict

    def __repr__(self) -> str:
        return f"Comparison({self.outcome}, {self.compared} of {self.total} sites: {self.verdict})"

    def _repr_html_(self) -> str:
        return str(drawn("comparison", self))

    def row(self, site: str) -> Row:
        """The row of one site, by the reference's name for it."""
        for row in self.rows:
            if row.site == site:
                return row
        from torchtap.plan.names import no_such_site

        raise no_such_site(site, [row.site for row in self.rows], "the compared")

    def explain_alignment(self) -> str:
        """Which site was taken for which, one line each, with what that rests on."""
        from torchtap.comparison.table import explained

        return explained(self)

    def table(self, *, every: bool = False) -> Table:
        """A table for the terminal; with ``every`` also the rows between the first, the worst and the last."""
        from torchtap.comparison.table import draw

        return draw(self, every=every)

    def to_html(self, path: str | Path) -> Path:
        """Write a report that needs no other file and no network."""
        from torchtap.comparison.page import page

        Path(path).write_text(page(self), encoding="utf-8")
        return Path(path)

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain data."""
        return {
            "reference": self.reference,
            "target": self.target,
            "verdict": self.verdict,
            "outcome": self.outcome,
            "confidence": self.confidence,
            "diverged": self.diverged,
            "compared": self.compared,
            "total": self.total,
            "function": None if self.function is None else asdict(self.function),
            "floor_basis": self.basis,
            "forwards": self.forwards,
            "steps": list(self.steps),
            "first": None if self.first is None else self.first.as_dict(),
            "rows": [row.as_dict() for row in self.rows],
            "unaligned": [{"site": u.site, "side": u.side, "why": u.why} for u in self.unaligned],
            "problems": list(self.problems),
            **({"facts": dict(self.facts)} if self.facts else {}),
        }

    def to_json(self, path: str | Path | None = None) -> str:
        """The result as JSON text, written to ``path`` when one is given. NaN and infinities become text."""
        text = json.dumps(plain(self.as_dict()), indent=1, allow_nan=False)
        if path is not None:
            Path(path).write_text(text + "\n", encoding="utf-8")
        return text


def plain(value: object) -> Any:
    """Data with every NaN and infinity as text, which JSON has no numbers for."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value
