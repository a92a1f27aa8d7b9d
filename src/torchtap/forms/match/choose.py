"""Give each site of the eager model the value of a form that it is.

Both ran on the same inputs, forward and backward, and forward on others. Two tensors may have the same bytes and be
different values: a copy, a mask of ones. So a candidate has the same bytes on both inputs and, if the eager value has a
gradient, the same gradient. Of several, the one at the right place in the graph: what leaves the same module call, then
what was made in it, then what is nearest in the order of execution. A form that rounds otherwise has no equal value;
there a near one that leaves the same module call counts, then the only one of its shape.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from torchtap.forms.match.prints import Print, by_digest
from torchtap.forms.match.site_map import FoundValue, How, SiteMap
from torchtap.spi import Name, reasons

__all__ = ["CallKeys", "EagerValues", "FormValues", "choose"]


@final
@dataclass(frozen=True)
class CallKeys:
    """One module call of a form: the keys of the values that go in, are made inside, and go out."""

    entering: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()
    leaving: tuple[str, ...] = ()
    given: tuple[str, ...] = ()  # of what goes in: that which was certainly an argument
    returned: tuple[str, ...] = ()  # of what goes out: that which was certainly returned


@final
@dataclass(frozen=True)
class FormValues:
    """Every value of a form by key, in the order of execution, and the module calls."""

    form: str  # a digest of its graph
    prints: Mapping[str, Print]
    calls: Mapping[tuple[str, int], CallKeys]  # by path and number of the call
    again: Mapping[str, Print] = field(default_factory=dict)  # on other inputs
    gradients: Mapping[str, Print] = field(default_factory=dict)


@final
@dataclass(frozen=True)
class EagerValues:
    """Every input and output of the eager model by site, in the order of execution."""

    prints: Mapping[str, Print]
    again: Mapping[str, Print] = field(default_factory=dict)  # on other inputs
    gradients: Mapping[str, Print] | None = None  # by the site of the value; None if there was no backward


def choose(eager: EagerValues, values: FormValues, classes: Mapping[str, str]) -> SiteMap:
    """The map from eager sites, in the order of execution, to a form's values."""
    choice = _Choice(eager, values)
    sites: dict[str, FoundValue] = {}
    missing: dict[str, str] = {}
    later: list[str] = []
    for site in eager.prints:
        found = choice.equal(site)
        if found is None:
            later.append(site)
        else:
            sites[site] = found
    for site in later:
        found = choice.near(site) or choice.by_position(site)
        if found is None:
            missing[site] = reasons.NO_EQUAL
        else:
            sites[site] = found
    ordered = {site: sites[site] for site in eager.prints if site in sites}
    for site in eager.prints:
        name = Name.read(site)
        gradient = str(name._replace(kind=f"grad_{name.kind}"))
        if choice.has_gradient(site) and site in missing:
            missing[gradient] = missing[site]
        elif choice.has_gradient(site) and choice.gradient_is_known(site, sites[site].at):
            ordered[gradient] = sites[site]
        elif choice.has_gradient(site):
            missing[gradient] = reasons.NO_EQUAL_GRADIENT
    return SiteMap(values.form, ordered, missing, choice.ambiguous, dict(classes))


@final
class _Choice:
    """Remembers what was chosen: equal leaves of one call are given equal values in turn."""

    def __init__(self, eager: EagerValues, values: FormValues) -> None:
        self._eager = eager
        self._values = values
        self._order = {key: number for number, key in enumerate(values.prints)}
        self._equal = by_digest(values.prints.items())
        self._clock = -1  # the value that the site before was given
        self._given: dict[tuple[str, str, int], list[str]] = {}
        self.ambiguous: dict[str, tuple[str, ...]] = {}

    def has_gradient(self, site: str) -> bool:
        """Return True if the eager value has a gradient, or may have one."""
        gradients = self._eager.gradients
        return gradients is None or site in gradients

    def gradient_is_known(self, site: str, key: str) -> bool:
        """Return True if the gradient of a form's value is that of the eager one."""
        gradients = self._eager.gradients
        if gradients is None:
            return len(self._candidates(site)) == 1
        found = self._values.gradients.get(key)
        return found is not None and (
            found.digest == gradients[site].digest or found.is_near(gradients[site])
        )

    def _candidates(self, site: str) -> list[str]:
        """The values with the same bytes; of several those that are the same in other respects too."""
        found = self._equal.get(self._eager.prints[site].digest, [])
        gradients = self._eager.gradients
        again = self._eager.again.get(site)
        for is_alike in (
            lambda key: again is not None and again == self._values.again.get(key),
            lambda key: (
                gradients is not None
                and (
                    self.gradient_is_known(site, key)
                    if site in gradients
                    else key not in self._values.gradients
                )
            ),
            lambda key: (
                gradients is not None
                and site in gradients
                and gradients[site] == self._values.gradients.get(key)
            ),
        ):
            found = [key for key in found if is_alike(key)] or found  # type: ignore[no-untyped-call]
        return found

    def equal(self, site: str) -> FoundValue | None:
        """The value with the same bytes, if there is one."""
        candidates = self._candidates(site)
        if not candidates:
            return None
        name = Name.read(site)
        key = self._pick(site, name, candidates)
        self._given.setdefault((name.path, name.kind, name.call), []).append(key)
        self._clock = self._order[key]
        return FoundValue(key, "equal", self._clock)

    def _pick(self, site: str, name: Name, candidates: Sequence[str]) -> str:
        call = self._values.calls.get((name.path, name.call), CallKeys())
        given = self._given.get((name.path, name.kind, name.call), ())
        edge, inside = (call.entering, ()) if name.kind == "input" else (call.leaving, call.inside)
        here = [key for key in candidates if key in edge]
        if here:
            fresh = _without(here, given)
            if len(fresh) > 1:
                self.ambiguous[site] = tuple(here)
            return (fresh or here)[0]
        here = [key for key in candidates if key in inside]
        if here:
            return (_without(here, given) or here)[-1]
        if len(candidates) > 1:
            self.ambiguous[site] = tuple(candidates)
        return min(candidates, key=lambda key: (abs(self._order[key] - self._clock), self._order[key]))

    def near(self, site: str) -> FoundValue | None:
        """The value at the edge of the same module call that differs by rounding."""
        wanted = self._eager.prints[site]
        found = [key for key in self._edge(site) if self._values.prints[key].is_near(wanted)]
        return self._take(site, found, "near")

    def by_position(self, site: str) -> FoundValue | None:
        """The only value of this shape that was certainly returned, if the site is the only one of its shape."""
        eager = self._eager.prints
        looks = eager[site].looks
        name = Name.read(site)
        call = self._values.calls.get((name.path, name.call), CallKeys())
        certain = call.given if name.kind == "input" else call.returned
        alike = [each for each in _leaves_of(name, eager) if eager[each].looks == looks]
        found = [
            key for key in self._edge(site) if key in certain and self._values.prints[key].looks == looks
        ]
        return self._take(site, found, "position") if len(alike) == 1 else None

    def _edge(self, site: str) -> list[str]:
        name = Name.read(site)
        call = self._values.calls.get((name.path, name.call), CallKeys())
        given = self._given.get((name.path, name.kind, name.call), ())
        edge = call.entering if name.kind == "input" else call.leaving
        return [key for key in edge if key not in given and key in self._values.prints]

    def _take(self, site: str, found: Sequence[str], how: How) -> FoundValue | None:
        if len(found) != 1:
            return None
        name = Name.read(site)
        self._given.setdefault((name.path, name.kind, name.call), []).append(found[0])
        return FoundValue(found[0], how, self._order[found[0]])


def _leaves_of(name: Name, sites: Iterable[str]) -> list[str]:
    return [site for site in sites if _port(Name.read(site)) == _port(name)]


def _port(name: Name) -> tuple[str, str, int]:
    return name.path, name.kind, name.call


def _without(keys: Sequence[str], given: Collection[str]) -> list[str]:
    return [key for key in keys if key not in given]
