"""What is said of a plan: its text, how its JSON is read, and why a selector does not do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from torchtap.errors import PlanError, SelectionError, TorchtapError
from torchtap.plan.budget import Budget
from torchtap.plan.names import no_such_site
from torchtap.plan.plan import Plan, candidates
from torchtap.plan.sites import Place, Selector, Site, selectors_of
from torchtap.plan.tap import Tap
from torchtap.reduce.reduction import reduction_from_spec
from torchtap.sanitize import parse_json, shown
from torchtap.schedule.rules import schedule_from_spec

__all__ = ["described", "picks_nothing", "picks_several", "taps_from_json"]


def described(plan: Plan) -> str:
    """Each tap of a plan, and some of its places."""
    lines = [f"plan: {len(plan.asked)} taps on {len(plan.ports)} places"]
    for index, each in enumerate(plan.asked):
        places = [port.site.name for port in plan.ports if index in port.taps]
        some = ", ".join(places[:4]) + (f" … ({len(places)})" if len(places) > 4 else "")
        chosen = " ".join(str(s) for s in each.selectors)
        within = "" if each.budget is None else f"  within {each.budget.spec()}"
        lines.append(f"  {index}: {chosen}  keep {each.keep.spec()}  when {each.schedule.spec()}{within}")
        lines.append(f"     {some}")
    return shown("\n".join(lines), 100_000, lines=True)


def taps_from_json(text: str) -> list[Tap]:
    """The taps of a plan that `Plan.to_json` wrote."""
    try:
        return [_tap_from_spec(each) for each in parse_json(text)["taps"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, TorchtapError):
            raise
        said = shown(f"{type(error).__name__}: {error}")
        raise PlanError(f"this is not the JSON of a plan: {said}") from None


def _tap_from_spec(spec: Mapping[str, Any]) -> Tap:
    """The tap that `Tap.spec` describes."""
    for text in (*spec["selectors"], *spec["exclude"]):
        if not isinstance(text, str) or text.startswith("<"):
            raise PlanError(
                f"the selector {text!r} was a module, a type or a function: a file does not hold it"
            )
    budget = spec.get("budget")
    return Tap(
        selectors=selectors_of(spec["selectors"]),
        keep=reduction_from_spec(spec["keep"]),
        schedule=schedule_from_spec(spec["schedule"]),
        exclude=selectors_of(spec["exclude"]),
        alias=spec.get("alias"),
        budget=None if budget is None else Budget(**budget),
        per_consumer=bool(spec.get("per_consumer", False)),
    )


def picks_several(asked: Tap, matched: list[tuple[Site, ...]]) -> PlanError:
    """An alias stands for one place."""
    some = ", ".join(names[0].name for names in matched[:3])
    return PlanError(
        f"alias {asked.alias!r} stands for one place, but {asked.selectors[0].text!r} picks {len(matched)}: "
        f"{some} …; use a narrower selector or no alias"
    )


def picks_nothing(selector: Selector, found: Sequence[Place]) -> SelectionError:
    """Nothing in the model has such a name: which are near, and how else it may have been meant."""
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
    return no_such_site(selector.text, [site.name for site in sites], "this model's", advice)
