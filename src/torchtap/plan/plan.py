"""A plan: taps bound to one model's sites.

Binding does all the matching there is, once. A plan is frozen: it can be printed, saved as JSON and inspected before
anything runs. No hook is set here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, final

from torch import nn

from torchtap.errors import PlanError
from torchtap.plan.names import KINDS, Kind
from torchtap.plan.sites import Place, Selectable, Site, places
from torchtap.plan.tap import Tap, tap
from torchtap.reduce.reduction import AnyReduction
from torchtap.schedule.base import NO_STEP, Always, Moment, Never

if TYPE_CHECKING:
    from torchtap.plan.cost import Cost
    from torchtap.plan.operators import OperatorCalls

__all__ = ["LISTED_KINDS", "Plan", "Port", "candidates", "make_plan"]

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

    def operator_calls(self) -> OperatorCalls | None:
        """Return what runs the plan's operators (``path/function``) in place of their functions; None without one."""
        if not any("/" in port.site.path for port in self.ports):
            return None
        from torchtap.plan.operators import Operator, OperatorCalls

        modules = [port.site.module for port in self.ports]
        found = [module for module in modules if isinstance(module, Operator)]
        return OperatorCalls(self.places, found) if found else None

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
    def in_rows(self) -> list[bool]:
        """For each tap, True if it keeps a row of a `StatsBlock`."""
        return [each.keep.in_rows for each in self.taps]

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
        from torchtap.plan.plan_text import taps_from_json

        return make_plan(model, taps_from_json(text))

    def to_json(self) -> str:
        """The plan as JSON text: taps with their schedules and reductions, and the places they are bound to."""
        return json.dumps(self.spec(), indent=2)

    def cost(self, values: Mapping[str, Any] | None = None) -> Cost:
        """Estimate the memory, disk and time of one recorded step.

            plan = tt.make_plan(model, [tt.tap("*:output"), tt.tap("*:update")])
            with tt.capture(model, "*:output") as seen:
                model(x)
            print(plan.cost(seen))

        values: tensors by site name, such as a capture of the same model: activations have their sizes. Without it, the
            kinds whose sizes are not known before a pass are listed in ``Cost.unknown``.
        """
        from torchtap.plan.cost import cost_of

        return cost_of(self, values or {})

    def spec(self) -> dict[str, object]:
        """The plan as plain data."""
        return {
            "taps": [each.spec() for each in self.asked],
            "ports": [{"site": port.site.name, "taps": list(port.taps)} for port in self.ports],
        }

    def __str__(self) -> str:
        from torchtap.plan.plan_text import described

        return described(self)


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
    from torchtap.reduce.elements import Full

    return Full()


def make_plan(
    model: nn.Module,
    taps: Plan | Iterable[Plan | Tap | Selectable | Sequence[Tap]],
    keep: AnyReduction | Sequence[AnyReduction] | None = None,
    *,
    all_match: bool = True,
) -> Plan:
    """Bind taps, or another model's plan, to a model. A bare selector keeps ``keep``, else whole tensors.

    A selector that picks nothing is an error, unless not ``all_match``.
    """
    asked = list(_taps_of(taps, keep))
    if not asked:
        raise PlanError("a plan needs at least one tap, e.g. tap('*:output')")
    found_places = tuple(places(model))
    texts = [selector.text for each in asked for selector in each.selectors]
    operators: Sequence[Place] = ()
    if any("/" in text for text in texts):
        from torchtap.plan.operators import operator_places

        operators = operator_places(found_places, texts)
    paths = {path for place in found_places for path in (place.path, *place.other_paths)}
    bound = tuple(each.meant_in(paths) for each in asked)
    below, fallbacks = _fallbacks(bound)
    wanted_by: dict[tuple[Site, ...], list[int]] = {}
    for index, each in enumerate(bound):
        for names in _matched(each, found_places, all_match, operators):
            wanted_by.setdefault(names, []).extend((index, *fallbacks.get(index, ())))
    _check_aliases([each.alias for each in bound if each.alias])
    ports = tuple(Port(names, tuple(taps)) for names, taps in wanted_by.items())
    return Plan((*bound, *below), ports, found_places, fallbacks)


def _matched(
    asked: Tap, found_places: tuple[Place, ...], all_match: bool, operators: Sequence[Place] = ()
) -> list[tuple[Site, ...]]:
    """The ports that a tap wants, each with its names. With ``all_match`` every selector has to pick one.

    An operator is wanted only by a selector that names one: ``*`` stands for modules.
    """
    kinds = frozenset().union(*(s.kinds for s in asked.selectors))
    matched = [names for names in candidates(found_places, kinds) if asked.may_want(names)]
    named = replace(asked, selectors=tuple(s for s in asked.selectors if "/" in s.text))
    matched += [names for names in candidates(operators, kinds) if named.may_want(names)]
    sites = [site for names in matched for site in names]
    for selector in asked.selectors if all_match else ():
        if not any(map(selector.picks_port, sites)):
            from torchtap.plan.plan_text import picks_nothing

            raise picks_nothing(selector, found_places)
    if asked.alias and len(matched) > 1:
        from torchtap.plan.plan_text import picks_several

        raise picks_several(asked, matched)
    return matched


def _check_aliases(aliases: list[str]) -> None:
    if repeated := {alias for alias in aliases if aliases.count(alias) > 1}:
        raise PlanError(
            f"alias {sorted(repeated)[0]!r} is used by more than one tap; an alias has to be unique"
        )


def _fallbacks(asked: Sequence[Tap]) -> tuple[list[Tap], dict[int, tuple[int, ...]]]:
    """The taps that take the place of those whose budget is spent, and where they will stand in the plan."""
    taps: list[Tap] = []
    standing: dict[int, tuple[int, ...]] = {}
    if all(each.budget is None or not each.budget.limits for each in asked):
        return taps, standing
    from torchtap.plan.budget import lesser

    for index, each in enumerate(asked):
        if each.budget is not None and each.budget.limits:
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
