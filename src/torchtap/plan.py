"""What to look at: a tap is a selector, a schedule and a reduction; a plan is taps bound to one model's sites.

Binding does all the parsing and matching there is, once. Both are frozen: a plan can be printed, saved as JSON
and inspected before anything runs. No hook is set here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, final, overload

from torch import nn

from torchtap.errors import PlanError, SelectionError, TorchtapError
from torchtap.foreign_text import shown
from torchtap.names import KINDS, Kind
from torchtap.reduce.base import AnyReduction, Reduction, RowBlock
from torchtap.reduce.stats import Stats
from torchtap.reduce.stats_block import StatsBlock
from torchtap.schedule.base import NO_STEP, Always, Moment, Never, Schedule, schedule_of
from torchtap.sites import Place, Selectable, Selector, Site, places, selectors_of

if TYPE_CHECKING:
    from torchtap.budget import Budget

__all__ = ["LISTED_KINDS", "Plan", "Port", "Tap", "candidates", "make_plan", "tap"]

# Kinds whose leaves are known before the model runs.
_LISTED: dict[Kind, str] = {
    "param": "_parameters",
    "param_grad": "_parameters",
    "param_grad_local": "_parameters",
    "param_grad_accumulated": "_parameters",
    "param_grad_unclipped": "_parameters",
    "update": "_parameters",
    "optim_state": "_parameters",
    "buffer": "_buffers",
}


LISTED_KINDS = frozenset(_LISTED)


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
    per_consumer: bool = (
        False  # a grad_input is what this module sends back, not what all users of the value do
    )

    def wants(self, names: Iterable[Site]) -> bool:
        """Whether a site, its leaf and call known, is one of the tap's. ``names`` are all the names it has."""
        return any(s.picks(site) for site in names for s in self.selectors) and not any(
            s.picks(site) for site in names for s in self.exclude
        )

    @property
    def whole(self) -> bool:
        """Whether a port that it may want it wants with all leaves and calls, so that nothing is left to ask."""
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

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> Tap:
        """The tap that a `spec` describes."""
        from torchtap.budget import Budget
        from torchtap.reduce.registry import reduction_from_spec
        from torchtap.schedule.rules import schedule_from_spec

        for text in (*spec["selectors"], *spec["exclude"]):
            if not isinstance(text, str) or text.startswith("<"):
                raise PlanError(
                    f"the selector {text!r} was a module, a type or a function: a file does not hold it"
                )
        budget = spec.get("budget")
        return cls(
            selectors=selectors_of(spec["selectors"]),
            keep=reduction_from_spec(spec["keep"]),
            schedule=schedule_from_spec(spec["schedule"]),
            exclude=selectors_of(spec["exclude"]),
            alias=spec.get("alias"),
            budget=None if budget is None else Budget(**budget),
            per_consumer=bool(spec.get("per_consumer", False)),
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
    every: int | None = None,
    offset: int = 0,
    steps: Collection[int] | None = None,
    epochs: Collection[int] | None = None,
    batches: Collection[int] | None = None,
    first: int | None = None,
    when: Schedule | Callable[[Moment], bool] | None = None,
    phase: str | None = None,
    exclude: Selectable | Sequence[Selectable] | None = None,
    alias: str | None = None,
    budget: Budget | None = None,
    per_consumer: bool = False,
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
        schedule=schedule_of(
            every=every,
            offset=offset,
            steps=steps,
            epochs=epochs,
            batches=batches,
            first=first,
            when=when,
            phase=phase,
        ),
        exclude=selectors_of(exclude, kind),
        alias=alias,
        budget=budget,
        per_consumer=per_consumer,
    )


def _check_budget(budget: object) -> None:
    from torchtap.budget import Budget

    if not isinstance(budget, Budget):
        raise PlanError(
            f"budget={budget!r}: give a Budget, e.g. Budget(bytes=10 << 30) or Budget(share=0.05)"
        )


@final
class Port(NamedTuple):
    """A site as far as it is known before the model runs, and the taps that may want what passes there.

    ``names`` has the site first and then the further names that a shared module or tied parameter goes by.
    """

    names: tuple[Site, ...]
    taps: tuple[int, ...]

    @property
    def site(self) -> Site:
        return self.names[0]


@final
@dataclass(frozen=True)
class Plan:
    """Taps bound to one model.

    After the taps that were asked for come those that take their place when a budget is spent; no clock makes
    them live. ``fallbacks`` has them by the tap that has the budget, the dearest first.
    """

    taps: tuple[Tap, ...]
    ports: tuple[Port, ...]
    places: Sequence[Place] = field(repr=False)
    fallbacks: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    @cached_property
    def asked(self) -> tuple[Tap, ...]:
        """The taps that were asked for."""
        return self.taps[: len(self.taps) - sum(map(len, self.fallbacks.values()))]

    def live(self, moment: Moment) -> frozenset[int]:
        """Indices of the taps that are live at a moment."""
        if self.always is not None:
            return self.always
        return frozenset(index for index, each in enumerate(self.taps) if each.schedule.live(moment))

    @cached_property
    def always(self) -> frozenset[int] | None:
        """The taps that are live, where that is the same at every moment."""
        if not all(isinstance(each.schedule, (Always, Never)) for each in self.taps):
            return None
        return frozenset(index for index, each in enumerate(self.taps) if isinstance(each.schedule, Always))

    def earliest(self, moment: Moment) -> int:
        """A step from this one on before which no tap is live, as far as the schedules can look ahead."""
        return min((each.schedule.earliest(moment) for each in self.taps), default=NO_STEP)

    @cached_property
    def whole(self) -> frozenset[int]:
        """The taps that keep whole tensors."""
        return frozenset(index for index, each in enumerate(self.taps) if each.keep.whole)

    @cached_property
    def wants_all(self) -> list[bool]:
        """For each tap, whether it wants all that comes to its ports."""
        return [each.whole for each in self.taps]

    @cached_property
    def block(self) -> type[RowBlock]:
        """What holds the rows of all sites."""
        return next((each.keep.block for each in self.taps if each.keep.block is not None), StatsBlock)

    @cached_property
    def in_rows(self) -> list[bool]:
        """For each tap, whether what it keeps is a row of the block."""
        return [each.keep.block is self.block for each in self.taps]

    @cached_property
    def by_phase(self) -> bool:
        """Whether other taps may be live in one phase of a step than in another."""
        return any(each.schedule.by_phase for each in self.taps)

    @cached_property
    def kinds(self) -> frozenset[Kind]:
        """The kinds that the taps ask for, as far as the model has them."""
        return frozenset(port.site.kind for port in self.ports)

    @cached_property
    def reads_state(self) -> bool:
        """Whether anything is asked for that the model or its optimizer holds, and that no call passes on."""
        return not self.kinds.isdisjoint((*_LISTED, "lr"))

    @cached_property
    def keys(self) -> list[str]:
        """What each tap keeps, in words: equal reductions have equal keys."""
        return [repr(each.keep) for each in self.taps]

    @cached_property
    def keeps_outputs(self) -> bool:
        """Whether all that is asked for are modules' outputs, each whole and as it is."""
        if self.kinds != {"output"} or not all(each.whole and each.keep.whole for each in self.taps):
            return False
        return all(each.keep == _whole_tensors() for each in self.taps)

    @cached_property
    def aliases(self) -> dict[str, str]:
        """Alias to the bare name of the site that it stands for."""
        return {
            self.taps[index].alias or "": port.site.name
            for port in self.ports
            for index in port.taps
            if self.taps[index].alias
        }

    @cached_property
    def other_names(self) -> dict[str, str]:
        """Each further bare name of a shared module or tied parameter to its first."""
        return {other.name: port.site.name for port in self.ports for other in port.names[1:]}

    @classmethod
    def from_json(cls, text: str, model: nn.Module) -> Plan:
        """A plan that `to_json` wrote, bound to a model. Its places are found anew."""
        try:
            read = json.loads(text)
            taps = [Tap.from_spec(each) for each in read["taps"]]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if isinstance(error, TorchtapError):
                raise
            said = shown(f"{type(error).__name__}: {error}")
            raise PlanError(f"this is not the JSON of a plan: {said}") from None
        return make_plan(model, taps)

    def to_json(self) -> str:
        """The plan as JSON text: taps with their schedules and reductions, and the places they are bound to."""
        return json.dumps(self.spec(), indent=2)

    def spec(self) -> dict[str, object]:
        """The plan as plain data."""
        return {
            "taps": [each.spec() for each in self.asked],
            "ports": [{"site": port.site.name, "taps": list(port.taps)} for port in self.ports],
        }

    def __str__(self) -> str:
        lines = [f"plan: {len(self.asked)} taps on {len(self.ports)} places"]
        for index, each in enumerate(self.asked):
            places_of_tap = [port.site.name for port in self.ports if index in port.taps]
            some = ", ".join(places_of_tap[:4]) + (
                f" … ({len(places_of_tap)})" if len(places_of_tap) > 4 else ""
            )
            chosen = " ".join(str(s) for s in each.selectors)
            within = "" if each.budget is None else f"  within {each.budget.spec()}"
            lines.append(f"  {index}: {chosen}  keep {each.keep.spec()}  when {each.schedule.spec()}{within}")
            lines.append(f"     {some}")
        return "\n".join(lines)


def _taps_of(asked: Any, keep: Any) -> Iterator[Tap]:
    """Single taps, of whatever asks for some: a plan, taps, several taps at once, bare selectors."""
    if isinstance(asked, Plan):
        yield from asked.asked
    elif isinstance(asked, Tap):
        yield asked
    elif isinstance(asked, Iterable) and not isinstance(asked, (str, nn.Module, type)):
        for each in asked:
            yield from _taps_of(each, keep)
    else:
        yield from _taps_of(tap(asked, _whole_tensors() if keep is None else keep), keep)


def _whole_tensors() -> AnyReduction:
    from torchtap.reduce.full import Full

    return Full()


def make_plan(
    model: nn.Module,
    taps: Plan | Iterable[Plan | Tap | Selectable | Sequence[Tap]],
    keep: AnyReduction | Sequence[AnyReduction] | None = None,
    *,
    all_match: bool = True,
) -> Plan:
    """Bind taps, or another model's plan, to a model. A bare selector keeps what ``keep`` says, else whole tensors.

    A selector that picks nothing is an error, unless not ``all_match``.
    """
    asked = list(_taps_of(taps, keep))
    if not asked:
        raise PlanError("a plan needs at least one tap, e.g. tap('*:output')")
    found_places = tuple(places(model))
    paths = {path for place in found_places for path in (place.path, *place.other_paths)}
    bound = tuple(each.meant_in(paths) for each in asked)
    below, fallbacks = _fallbacks(bound)
    wanted_by: dict[tuple[Site, ...], list[int]] = {}
    for index, each in enumerate(bound):
        for names in _matched(each, found_places, all_match):
            wanted_by.setdefault(names, []).extend((index, *fallbacks.get(index, ())))
    _check_aliases([each.alias for each in bound if each.alias])
    ports = tuple(Port(names, tuple(taps)) for names, taps in wanted_by.items())
    return Plan((*bound, *below), ports, found_places, fallbacks)


def _matched(asked: Tap, found_places: tuple[Place, ...], all_match: bool) -> list[tuple[Site, ...]]:
    """The ports that a tap wants, each with its names. With ``all_match`` every selector has to pick one."""
    kinds = frozenset().union(*(s.kinds for s in asked.selectors))
    matched = [names for names in candidates(found_places, kinds) if asked.may_want(names)]
    sites = [site for names in matched for site in names]
    for selector in asked.selectors if all_match else ():
        if not any(map(selector.picks_port, sites)):
            raise _picks_nothing(selector, found_places)
    if asked.alias and len(matched) > 1:
        raise _picks_several(asked, matched)
    return matched


def _picks_several(asked: Tap, matched: list[tuple[Site, ...]]) -> PlanError:
    some = ", ".join(names[0].name for names in matched[:3])
    return PlanError(
        f"alias {asked.alias!r} stands for one place, but {asked.selectors[0].text!r} picks {len(matched)}: "
        f"{some} …; use a narrower selector or no alias"
    )


def _check_aliases(aliases: list[str]) -> None:
    if repeated := {alias for alias in aliases if aliases.count(alias) > 1}:
        raise PlanError(
            f"alias {sorted(repeated)[0]!r} is used by more than one tap; an alias has to be unique"
        )


def _picks_nothing(selector: Selector, found: Sequence[Place]) -> SelectionError:
    if isinstance(selector.made_of[0], nn.Module):
        foreign = type(selector.made_of[0]).__name__
        return SelectionError(
            f"the {foreign} that was given is none of this model's {len(found)} modules: give one of its own, as "
            "in model.get_submodule(path), or its path"
        )
    sites = [site for names in candidates(found, selector.kinds) for site in names]
    if not sites:
        kinds = " or ".join(sorted(selector.kinds))
        return SelectionError(f"{selector.text!r} matches nothing: this model has no {kinds}")
    advice = "`torchtap sites` or tt.list_sites(model) lists them all."
    asked, kind = selector.made_of
    if isinstance(asked, str) and not asked.startswith("re:"):
        deeper = f"**.{asked}"
        if any(map(Selector.of(deeper, kind).picks_port, sites)):
            advice = f"A path with a dot in it begins at the model: {deeper!r} picks it at any depth."
    from torchtap.unmatched import no_such_site

    return no_such_site(selector.text, [site.name for site in sites], "this model's", advice)


def _fallbacks(asked: Sequence[Tap]) -> tuple[list[Tap], dict[int, tuple[int, ...]]]:
    """The taps that take the place of those whose budget is spent, and where they will stand in the plan."""
    taps: list[Tap] = []
    standing: dict[int, tuple[int, ...]] = {}
    if all(each.budget is None for each in asked):
        return taps, standing
    from torchtap.budget import lesser

    for index, each in enumerate(asked):
        if each.budget is not None:
            first = len(asked) + len(taps)
            taps += [replace(each, keep=keep, schedule=Never(), budget=None) for keep in lesser(each.keep)]
            standing[index] = tuple(range(first, len(asked) + len(taps)))
    return taps, standing


def candidates(
    found: Sequence[Place], kinds: frozenset[Kind] = frozenset(KINDS)
) -> Iterator[tuple[Site, ...]]:
    """Every site of a model as far as it is known before a run, each with all the names that it goes by.

    Parameters and buffers are listed leaf by leaf, the other kinds without one.
    """
    listed = {kind: _listed(found, kind, attribute) for kind, attribute in _LISTED.items() if kind in kinds}
    for place in found:
        for kind in KINDS:
            if kind in listed:
                yield from listed[kind].get(place.path, ())
            elif kind in kinds and (kind != "lr" or not place.path):  # learning rates are the whole model's
                paths = (place.path, *place.other_paths)
                yield tuple(Site(path, kind, module=place.module) for path in paths)


def _listed(found: Sequence[Place], kind: Kind, attribute: str) -> dict[str, list[tuple[Site, ...]]]:
    """Parameters or buffers by the path of the module that has them first; a tied one is listed once."""
    names_of: dict[int, list[Site]] = {}
    for place in found:
        for leaf, tensor in getattr(place.module, attribute).items():
            if tensor is not None:
                names_of.setdefault(id(tensor), []).extend(
                    Site(path, kind, leaf, module=place.module) for path in (place.path, *place.other_paths)
                )
    by_path: dict[str, list[tuple[Site, ...]]] = {}
    for names in names_of.values():
        by_path.setdefault(names[0].path, []).append(tuple(names))
    return by_path
