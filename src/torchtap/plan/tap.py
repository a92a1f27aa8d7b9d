"""A tap, one sentence of a plan: which sites, what is kept of them, and when.

Text is parsed here, once. A tap is frozen and has a JSON form.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, final, overload

from torchtap.errors import PlanError
from torchtap.plan.names import KINDS, Kind
from torchtap.plan.sites import Selectable, Selector, Site, selectors_of
from torchtap.reduce.reduction import AnyReduction, Reduction
from torchtap.reduce.stats import Stats
from torchtap.schedule.base import Always, Schedule, schedule_of

if TYPE_CHECKING:
    from torchtap.plan.budget import Budget

__all__ = ["Tap", "tap"]


@final
@dataclass(frozen=True, slots=True)
class Tap:
    """One sentence of a plan: what to look at, what to keep of it, and when."""

    selectors: tuple[Selector, ...]
    keep: AnyReduction
    schedule: Schedule = field(default_factory=Always)
    exclude: tuple[Selector, ...] = ()
    alias: str | None = None
    budget: Budget | None = None
    # A grad_input is what this module sends back, not what all users of the value do.
    per_consumer: bool = False

    def wants(self, names: Iterable[Site]) -> bool:
        """Whether a site, its leaf and call known, is one of the tap's. ``names`` are all the names it has."""
        return any(s.picks(site) for site in names for s in self.selectors) and not any(
            s.picks(site) for site in names for s in self.exclude
        )

    @property
    def whole(self) -> bool:
        """True if no selector names a leaf or a call, so that matching the port is enough."""
        return all(selector.whole for selector in (*self.selectors, *self.exclude))

    def may_want(self, names: Iterable[Site]) -> bool:
        """Whether a port can have sites of this tap, judged before the model runs."""
        return any(s.picks_port(port) for port in names for s in self.selectors) and not any(
            s.whole and s.picks_port(port) for port in names for s in self.exclude
        )

    def meant_in(self, paths: Collection[str]) -> Tap:
        """The tap as it is meant in a model with these modules."""
        selectors = tuple(selector.meant_in(paths) for selector in self.selectors)
        return replace(
            self, selectors=selectors, exclude=tuple(each.meant_in(paths) for each in self.exclude)
        )

    def spec(self) -> dict[str, object]:
        """The tap as JSON."""
        return {
            "selectors": [s.text for s in self.selectors],
            "exclude": [s.text for s in self.exclude],
            "keep": self.keep.spec(),
            "schedule": self.schedule.spec(),
            "alias": self.alias,
            "budget": None if self.budget is None else self.budget.spec(),
            **({"per_consumer": True} if self.per_consumer else {}),
        }


@overload
def tap(
    selector: Selectable | Sequence[Selectable],
    keep: AnyReduction | type[AnyReduction] | None = None,
    **options: Any,
) -> Tap: ...


@overload
def tap(
    selector: Selectable | Sequence[Selectable], keep: Sequence[AnyReduction], **options: Any
) -> list[Tap]: ...


@overload
def tap(
    selector: Selectable | Sequence[Selectable],
    keep: AnyReduction | Sequence[AnyReduction],
    **options: Any,
) -> Tap | list[Tap]: ...


def tap(
    selector: Selectable | Sequence[Selectable],
    keep: AnyReduction | type[AnyReduction] | Sequence[AnyReduction] | None = None,
    **options: Any,
) -> Tap | list[Tap]:
    """A tap in one line: ``tap("blocks.*:output", keep=Stats(), every=10)``. Statistics are kept by default.

    When: ``every``, ``offset``, ``steps``, ``epochs``, ``batches``, ``first``, ``phase``, ``when``; live where all that
    are given agree. ``kind`` is meant where a selector names none. ``exclude`` has selectors of what is left out,
    ``alias`` a name for the one site, ``budget`` a limit. A list of reductions makes a tap for each of them.

    ``per_consumer``: a ``grad_input`` is the gradient that this module alone sends back, as torch's full backward hooks
    give it. Otherwise it is the gradient of the value, the sum over all modules that use it. Eager models only.
    """
    if isinstance(keep, (list, tuple)):
        return [_one_tap(selector, each, **options) for each in keep]
    return _one_tap(selector, keep, **options)  # type: ignore[arg-type]


def _one_tap(
    selector: Selectable | Sequence[Selectable],
    keep: AnyReduction | type[AnyReduction] | None = None,
    *,
    kind: Kind = "output",
    exclude: Selectable | Sequence[Selectable] | None = None,
    alias: str | None = None,
    budget: Budget | None = None,
    per_consumer: bool = False,
    **when: Any,
) -> Tap:
    if kind not in KINDS:
        raise PlanError(f"kind={kind!r}: the kinds are {', '.join(KINDS)}")
    if isinstance(keep, type):
        keep = keep()
    if keep is not None and not isinstance(keep, Reduction):
        raise PlanError(f"keep={keep!r}: give a reduction, e.g. keep=Stats() or keep=Full()")
    if budget is not None:
        _check_budget(budget)
    selectors = selectors_of(selector, kind)
    if not selectors:
        raise PlanError("a tap needs at least one selector")
    return Tap(
        selectors=selectors,
        keep=Stats() if keep is None else keep,
        schedule=_schedule_of(when),
        exclude=selectors_of(exclude, kind),
        alias=alias,
        budget=budget,
        per_consumer=per_consumer,
    )


def _schedule_of(when: dict[str, Any]) -> Schedule:
    known = list(schedule_of.__kwdefaults__ or ())
    for name in when:
        if name not in known:
            others = "kind, exclude, alias, budget, per_consumer"
            raise PlanError(f"a tap has no option {name!r}: there are {', '.join(known)}, {others}")
    return schedule_of(**when)


def _check_budget(budget: object) -> None:
    from torchtap.plan.budget import Budget

    if not isinstance(budget, Budget):
        raise PlanError(
            f"budget={budget!r}: give a Budget, e.g. Budget(bytes=10 << 30) or Budget(share=0.05)"
        )
