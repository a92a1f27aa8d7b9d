"""What a diagnosis says: findings, and the rules that had nothing to judge by.

Plain frozen data; no run is read here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, final

from torchtap.sanitize import shown

__all__ = ["Coverage", "Evidence", "Finding", "Findings", "Severity", "Trust", "Unjudged", "Verdict"]

Severity = Literal["error", "warning", "info"]
# How a rule knows: an invariant that holds exactly, the run's own history, a limit that follows from a dtype or a
# structure, or a plain threshold.
Trust = Literal["invariant", "history", "limit", "threshold"]

_SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")
_TRUSTS: tuple[Trust, ...] = ("invariant", "history", "limit", "threshold")


@final
@dataclass(frozen=True, slots=True)
class Evidence:
    """A number that a finding rests on. Where it is a recorded one, site and statistic say which series to draw."""

    name: str
    value: float
    site: str = ""
    statistic: str = ""
    step: int | None = None


@final
@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that looks wrong, the place where it begins, and every place that it touches."""

    kind: str  # the rule's name
    severity: Severity
    site: str  # where it begins
    step: int | None  # the first step that shows it; None if no single step does
    value: float | None  # the number that decided
    message: str  # one sentence: what, where, how much
    advice: str  # what to change: a line of code where there is one
    sites: tuple[str, ...]  # every site concerned, ``site`` first
    causes: tuple[str, ...] = ()  # the likeliest first
    evidence: tuple[Evidence, ...] = ()
    trust: Trust = "threshold"
    symptoms: tuple[str, ...] = ()  # other findings that this one explains, a sentence each

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        return {**asdict(self), "sites": list(self.sites), "causes": list(self.causes),
                "symptoms": list(self.symptoms), "evidence": [asdict(each) for each in self.evidence]}  # fmt: skip

    @property
    def rank(self) -> tuple[int, int, int]:
        """Sorts findings: the gravest first, then the surest, then the earliest."""
        step = -1 if self.step is None else self.step
        return _SEVERITIES.index(self.severity), _TRUSTS.index(self.trust), step

    def __str__(self) -> str:
        return shown(f"{self.severity}: {self.message}", 5000)


# What a cause brings about. A finding is folded under a cause that is found no more than a few steps after it.
_NUMBERS = ("exploding", "fading", "growing-logits", "attention-collapse", "saturated", "near-overflow")
_SILENCE = ("dead", "dead-units", "constant", "collapsed", "zero-gradient", "vanishing", "underflow")
_COURSE = (
    "loss-diverged",
    "loss-spike",
    "at-chance",
    "nonfinite",
    "step-too-large",
    "step-too-small",
    "loss-scale",
)
_EFFECTS = (*_NUMBERS, *_SILENCE, *_COURSE)
_EXPLAINS: dict[str, tuple[str, ...]] = {
    "stale-gradient": _EFFECTS,
    "erased-gradient": ("nothing-learns", "update-zero", "at-chance", "zero-gradient", "step-too-small"),
    "foreign-optimizer": ("never-updated", "nothing-learns", "not-in-optimizer", "at-chance"),
    "unscaled-input": (*_EFFECTS, "first-loss", "init-too-large"),
    "init-too-large": (*_EFFECTS, "first-loss", "sharp-attention", "clipped-away"),
    "equal-rows": (*_SILENCE, "at-chance"),
    "constant-input": (*_SILENCE, "at-chance", "same-batch", "repeated-batch"),
    "loss-maximised": _EFFECTS,
    "loss-broadcasts": ("at-chance", "collapsed"),
    "one-class": (*_SILENCE, "at-chance"),
    "softmax-dimension": (*_SILENCE, "at-chance"),
    "probabilities-as-logits": ("at-chance", "vanishing", "step-too-small", *_SILENCE),
    "rate-zero": ("learning-rate-gone", "step-too-small", "update-zero", "at-chance", "lost-updates"),
    "learning-rate-gone": ("step-too-small", "update-zero", "at-chance"),
    "odd-hyper-parameters": (*_EFFECTS, "shrinking"),
    "step-too-large": (*_NUMBERS, *_SILENCE, "loss-diverged", "loss-spike", "nonfinite", "clipped-away"),
    "loss-diverged": (*_NUMBERS, *_SILENCE, "loss-spike", "nonfinite", "clipped-away"),
    "nonfinite": (*_NUMBERS, "collapsed", "loss-diverged", "loss-spike", "loss-scale", "step-too-large"),
    "clipped-away": ("step-too-small", "at-chance"),
    "update-zero": ("at-chance", "step-too-small", "lost-updates"),
    "lost-updates": ("update-zero", "step-too-small", "at-chance"),
    "shrinking": ("collapsed", "vanishing", "fading", "at-chance", "dead", "dead-units", "zero-gradient"),
    "dead": ("zero-gradient", "collapsed", "at-chance"),
    "dead-units": ("dead", "zero-gradient", "collapsed", "at-chance"),
    "saturated": ("zero-gradient", "fading", "vanishing", "at-chance"),
    "underflow": ("zero-gradient", "dead-units", "vanishing"),
    "frozen-moves": ("zero-gradient", "dead-units"),
    "gradient-cut": ("no-gradient", "never-called", "zero-gradient"),
    "repeated-batch": ("same-batch",),
    "loss-spike": ("nonfinite", "loss-diverged", "step-too-large", *_NUMBERS, *_SILENCE),
    "moments-reset": ("loss-spike", "optimizer-renewed"),
    "changed-outside": ("loss-spike", "moments-reset"),
}
_EXACT = ("nonfinite", "loss-spike", "moments-reset", "changed-outside")  # causes whose step is the first
_LATER = 16  # steps by which a cause may be found after what it explains


def folded(found: Iterable[Finding]) -> list[Finding]:
    """Return the root causes, each with the findings that it explains as its symptoms.

    Competing causes keep the order of their rank. A cause inherits the severity of its gravest symptom.
    """
    ordered = sorted(found, key=lambda finding: finding.rank)
    explained: dict[int, int] = {}  # place of a symptom to that of its cause
    for place, finding in enumerate(ordered):
        for other, cause in enumerate(ordered):
            if (
                other != place
                and _explains(cause, finding)
                and not (_explains(finding, cause) and (place < other or explained.get(other) == place))
            ):
                explained[place] = other
                break
    kept: dict[int, list[Finding]] = {place: [] for place in range(len(ordered)) if place not in explained}
    for place in explained:
        root, seen = explained[place], {place}
        while root in explained and root not in seen:
            seen.add(root)
            root = explained[root]
        kept.setdefault(root, []).append(ordered[place])
    roots = []
    for place, symptoms in kept.items():
        root_cause = ordered[place]
        gravest = min([root_cause, *symptoms], key=lambda each: _SEVERITIES.index(each.severity)).severity
        texts = tuple(f"{each.kind}: {each.message}" for each in symptoms)
        roots.append(replace(root_cause, severity=gravest, symptoms=texts) if symptoms else root_cause)
    return sorted(roots, key=lambda finding: finding.rank)


def _explains(cause: Finding, symptom: Finding) -> bool:
    if cause.severity == "info" or symptom.kind not in _EXPLAINS.get(cause.kind, ()):
        return False
    later = 0 if cause.kind in _EXACT else _LATER
    return cause.step is None or symptom.step is None or cause.step <= symptom.step + later


@final
@dataclass(frozen=True, slots=True)
class Unjudged:
    """A rule that could not judge, and why: what was not recorded, or the error that it raised."""

    rule: str
    reason: str

    def __str__(self) -> str:
        return shown(f"{self.rule}: {self.reason}", 5000)


Verdict = Literal["problem", "healthy", "not judged"]


@final
@dataclass(frozen=True, slots=True)
class Coverage:
    """How much of a training was judged: rules, and steps by at least one of them."""

    judged: int = 0
    rules: int = 0
    seen: int = 0
    steps: int = 0

    @property
    def enough(self) -> bool:
        """Return True if silence means health: most rules judged, and most steps."""
        return self.rules > 0 and 2 * self.judged >= self.rules and 2 * self.seen >= self.steps > 0

    def __str__(self) -> str:
        return f"{self.judged} of {self.rules} rules judged, {self.seen:,} of {self.steps:,} steps"


@final
class Findings(list[Finding]):
    """Findings, the gravest first, with what was judged (``coverage``) and what was not (``unjudged``)."""

    def __init__(
        self,
        found: Iterable[Finding] = (),
        unjudged: Iterable[Unjudged] = (),
        coverage: Coverage | None = None,
    ) -> None:
        super().__init__(folded(found))
        self.unjudged = tuple(unjudged)
        self.coverage = coverage or Coverage()

    @property
    def verdict(self) -> Verdict:
        """Return "problem" if there is an error or a warning, else "healthy" if enough was judged."""
        if any(each.severity != "info" for each in self):
            return "problem"
        return "healthy" if self.coverage.enough else "not judged"

    def summary(self) -> str:
        """Return one line: the verdict, what was judged, and what was not."""
        grave = [each for each in self if each.severity != "info"]
        said = {
            "problem": f"{len(grave)} problem{'s' * (len(grave) != 1)} found",
            "healthy": "no problem found",
            "not judged": "not judged: too little was recorded to call this training healthy",
        }[self.verdict]
        left = [each.rule for each in self.unjudged]
        more = f" and {len(left) - 6} more" if len(left) > 6 else ""
        without = f"; not judged: {', '.join(left[:6])}{more}" if left else ""
        return f"{said}: {self.coverage}{without}"

    def __repr__(self) -> str:
        lines = [f"{each.severity}: {each.kind}: {each.message}" for each in self[:20]]
        more = [f"and {len(self) - 20} more"] if len(self) > 20 else []
        return "\n".join([*lines, *more, self.summary()])

    def _repr_html_(self) -> str:
        from torchtap.display import drawn

        return str(drawn("findings", self))
