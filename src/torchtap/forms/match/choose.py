"""Give each site of the eager model the value of a form that it is.

By value first: a value with the same bytes. Of several, the one at the right place in the graph: what leaves the same
module call, then what was made in it, then what is nearest in the order of execution. A form that rounds otherwise has
no equal value; there a near one that leaves the same module call counts, then the only one of its shape.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from torchtap.forms.match.prints import Print, by_digest
from torchtap.forms.match.site_map import FoundValue, How, SiteMap
from torchtap.spi import Name, reasons

__all__ = ["CallKeys", "FormValues", "choose"]


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
    """Every value of a form, from one run: its print by key, in the order of execution, and the module calls."""

    form: str  # a digest of its graph
    prints: Mapping[str, Print]
    calls: Mapping[tuple[str, int], CallKeys]  # by path and number of the call


def choose(eager: Mapping[str, Print], values: FormValues, classes: Mapping[str, str]) -> SiteMap:
    """The map from eager sites, in the order of execution, to a form's values."""
    choice = _Choice(values)
    sites: dict[str, FoundValue] = {}
    missing: dict[str, str] = {}
    later: list[str] = []
    for site, print_ in eager.items():
        found = choice.equal(site, print_)
        if found is None:
            later.append(site)
        else:
            sites[site] = found
    for site in later:
        found = choice.near(site, eager[site]) or choice.by_position(site, eager)
        if found is None:
            missing[site] = reasons.NO_EQUAL
        else:
            sites[site] = found
    ordered = {site: sites[site] for site in eager if site in sites}
    return SiteMap(values.form, ordered, missing, choice.ambiguous, dict(classes))


@final
class _Choice:
    """Remembers what was chosen: equal leaves of one call are given equal values in turn."""

    def __init__(self, values: FormValues) -> None:
        self._values = values
        self._order = {key: number for number, key in enumerate(values.prints)}
        self._equal = by_digest(values.prints.items())
        self._clock = -1  # the value that the site before was given
        self._given: dict[tuple[str, str, int], list[str]] = {}
        self.ambiguous: dict[str, tuple[str, ...]] = {}

    def equal(self, site: str, wanted: Print) -> FoundValue | None:
        """The value with the same bytes, if there is one."""
        candidates = self._equal.get(wanted.digest, [])
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

    def near(self, site: str, wanted: Print) -> FoundValue | None:
        """The value at the edge of the same module call that differs by rounding."""
        found = [key for key in self._edge(site) if self._values.prints[key].is_near(wanted)]
        return self._take(site, found, "near")

    def by_position(self, site: str, eager: Mapping[str, Print]) -> FoundValue | None:
        """The only value of this shape that was certainly returned, if the site is the only one of its shape."""
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
