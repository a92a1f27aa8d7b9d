"""Pair the sites of two recordings, and say of every site that found no partner why.

The ways, strongest first; a site that one of them paired is left alone by the later ones:

1. ``rule``       a rule of the user renames the reference's site to the target's
2. ``name``       the same name
3. ``wrapper``    the same name once the names of wrapper modules are left out (``_orig_mod``, ``module`` ...)
4. ``prefix``     the same name below one common prefix that only one side has (``model.layers.0`` and ``layers.0``);
                  one name in common is a coincidence and no prefix
5. ``sequence``   the best alignment of what is left, by values, weights, names and shapes (`sequence`)
6. ``structure``  between neighbours that are already paired, both sides have the same sequence of kinds and shapes

It guarantees:
- a site is in at most one pair, and every site is either in a pair or in ``unaligned`` with a reason;
- pairs come in the reference's order of execution;
- the same sites are always paired the same way.

Not here: the values (`measures`), the changes that rules make to them (`rules`).
"""

from __future__ import annotations

import difflib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import final

from torchtap.comparison.align.rules import PairingRule, rule_from
from torchtap.comparison.align.sequence import Node, match_nodes
from torchtap.plan.names import kind_of, path_of, paths_around, read_name, without_wrappers

__all__ = ["Alignment", "KnownSite", "Pair", "Signatures", "Unaligned", "align"]

# ``(on the reference's side, site) -> a few numbers of its value``, or ``None`` when there is no value to look at.
Signatures = Callable[[bool, str], "tuple[float, ...] | None"]


@final
@dataclass(frozen=True, slots=True)
class KnownSite:
    """What is known of a site without reading its value."""

    name: str
    shape: tuple[int, ...] | None = None
    dtype: str | None = None


@final
@dataclass(frozen=True, slots=True)
class Pair:
    """One site in both recordings."""

    index: int  # place in the reference's order of execution
    reference: str
    target: str
    how: str
    rule: PairingRule | None = None


@final
@dataclass(frozen=True, slots=True)
class Unaligned:
    """A site that only one side has, or a rule that paired nothing."""

    site: str
    side: str  # "reference", "target" or "rule"
    why: str


@final
@dataclass(frozen=True, slots=True)
class Alignment:
    """Which site is which, and what is left over."""

    pairs: tuple[Pair, ...]
    unaligned: tuple[Unaligned, ...]


def align(
    reference: Sequence[KnownSite],
    target: Sequence[KnownSite],
    rules: Iterable[str | PairingRule] = (),
    *,
    signatures: Signatures | None = None,
) -> Alignment:
    """Pair the sites of two recordings, each given in its order of execution."""
    work = _Work(reference, target)
    unused = work.by_rules([rule_from(rule) for rule in rules])
    work.by_key(lambda name: name, "name")
    work.by_key(_unwrapped, "wrapper")
    work.by_prefix()
    work.by_sequence(signatures)
    work.by_structure()
    return work.finish(unused)


class _Work:
    """The pairing while it goes on."""

    def __init__(self, reference: Sequence[KnownSite], target: Sequence[KnownSite]) -> None:
        self.reference = list(reference)
        self.target = list(target)
        self.place = {site.name: n for n, site in enumerate(self.target)}
        self.paired: dict[int, tuple[int, str, PairingRule | None]] = {}
        self.taken: set[int] = set()

    def free(self) -> tuple[list[int], list[int]]:
        return (
            [n for n in range(len(self.reference)) if n not in self.paired],
            [n for n in range(len(self.target)) if n not in self.taken],
        )

    def pair(self, left: int, right: int, how: str, rule: PairingRule | None = None) -> None:
        self.paired[left] = (right, how, rule)
        self.taken.add(right)

    def by_rules(self, rules: list[PairingRule]) -> list[PairingRule]:
        used: set[int] = set()
        for n, site in enumerate(self.reference):
            for at, rule in enumerate(rules):
                name = rule.rename(site.name)
                place = None if name is None else self.place.get(name)
                if place is not None and place not in self.taken:
                    self.pair(n, place, "rule", rule)
                    used.add(at)
                    break
        return [rule for at, rule in enumerate(rules) if at not in used]

    def by_key(self, key: Callable[[str], str], how: str) -> None:
        left, right = self.free()
        reference, target = defaultdict(list), defaultdict(list)
        for n in left:
            reference[key(self.reference[n].name)].append(n)
        for n in right:
            target[key(self.target[n].name)].append(n)
        for name, places in reference.items():
            if len(places) == 1 and len(target.get(name, ())) == 1:
                self.pair(places[0], target[name][0], how)

    def by_prefix(self) -> None:
        """Try each prefix that only one side has, the one that pairs most names first."""
        for _ in range(3):
            left, right = self.free()
            names = (
                [_unwrapped(self.reference[n].name) for n in left],
                [_unwrapped(self.target[n].name) for n in right],
            )
            best = _best_prefix(set(names[0]), set(names[1]))
            if best is None:
                return
            prefix, on_reference = best
            mine = {
                name.removeprefix(prefix) if on_reference else name: n
                for name, n in zip(names[0], left, strict=True)
            }
            for name, place in zip(names[1], right, strict=True):
                partner = mine.pop(name if on_reference else name.removeprefix(prefix), None)
                if partner is not None:
                    self.pair(partner, place, "prefix")

    def by_sequence(self, signatures: Signatures | None) -> None:
        """Align the modules whose outputs are left, then pair what else is known of each."""
        left, right = self.free()
        if not left or not right:
            return
        mine, theirs = (
            self._nodes(self.reference, signatures, True),
            self._nodes(self.target, signatures, False),
        )
        known: dict[str, str] = {}
        for n, (place, _, _) in self.paired.items():
            known.setdefault(path_of(self.reference[n].name), path_of(self.target[place].name))
        for paired in match_nodes(mine, theirs, known):
            if paired.reference not in known:
                self._pair_module(paired.reference, paired.target, paired.why)

    def _nodes(self, sites: list[KnownSite], signatures: Signatures | None, reference: bool) -> list[Node]:
        paths = [path_of(site.name) for site in sites]
        outer = {around for path in paths for around in paths_around(path)}
        free = set(self.free()[0 if reference else 1])
        found: dict[str, Node] = {}
        for order, (site, path) in enumerate(zip(sites, paths, strict=True)):
            if kind_of(site.name) != "output" or path in found:
                continue
            looked_at = None if signatures is None or order not in free else signatures(reference, site.name)
            found[path] = Node(path, order, _without_ones(site.shape), looked_at, leaf=path not in outer)
        return list(found.values())

    def _pair_module(self, mine: str, theirs: str, why: str) -> None:
        left, right = self.free()
        there = {read_name(self.target[n].name): n for n in right if path_of(self.target[n].name) == theirs}
        for n in left:
            name = read_name(self.reference[n].name)
            if name.path != mine:
                continue
            same = name._replace(path=theirs)
            if same not in there:
                same = next((other for other in there if other.kind == name.kind), same)
            if same in there and _shapes_fit(self.reference[n], self.target[there[same]]):
                self.pair(n, there.pop(same), why)

    def by_structure(self) -> None:
        """Pair the stretches between already paired sites when kinds and shapes run the same on both sides."""
        anchors = [(-1, -1)]
        for left in sorted(self.paired):
            right = self.paired[left][0]
            if right > anchors[-1][1]:  # sites whose order differs are no fixed points
                anchors.append((left, right))
        anchors.append((len(self.reference), len(self.target)))
        for (left_start, right_start), (left_end, right_end) in pairwise(anchors):
            lefts = [n for n in range(left_start + 1, left_end) if n not in self.paired]
            rights = [n for n in range(right_start + 1, right_end) if n not in self.taken]
            if lefts and rights:
                self._pair_stretch(lefts, rights)

    def _pair_stretch(self, lefts: list[int], rights: list[int]) -> None:
        """Pair two stretches that run the same; of others, what stands in each of them once."""
        left_signs = [_signature(self.reference[n]) for n in lefts]
        right_signs = [_signature(self.target[n]) for n in rights]
        if None in left_signs or None in right_signs:
            return
        if left_signs == right_signs:
            for a, b in zip(lefts, rights, strict=True):
                self.pair(a, b, "structure")
            return
        counts = Counter(left_signs), Counter(right_signs)
        for a, sign in zip(lefts, left_signs, strict=True):
            if counts[0][sign] == 1 and counts[1][sign] == 1:
                self.pair(a, rights[right_signs.index(sign)], "structure")

    def finish(self, unused: list[PairingRule]) -> Alignment:
        pairs = tuple(
            Pair(n, self.reference[n].name, self.target[right].name, how, rule)
            for n, (right, how, rule) in sorted(self.paired.items())
        )
        left, right = self.free()
        others = [self.target[n] for n in right], [self.reference[n] for n in left]
        missing = [
            Unaligned(self.reference[n].name, "reference", _why(self.reference[n], self.target, others[0]))
            for n in left
        ]
        missing += [
            Unaligned(self.target[n].name, "target", _why(self.target[n], self.reference, others[1]))
            for n in right
        ]
        missing += [
            Unaligned(str(rule), "rule", "this rule paired nothing; it reads reference name=target name")
            for rule in unused
        ]
        return Alignment(pairs, tuple(missing))


def _unwrapped(name: str) -> str:
    parts = read_name(name)
    return str(parts._replace(path=without_wrappers(parts.path)))


def _without_ones(shape: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if shape is None else tuple(n for n in shape if n != 1)


def _best_prefix(reference: set[str], target: set[str]) -> tuple[str, bool] | None:
    """The prefix that pairs most names once it is gone, and whether it is the reference's.

    One name in common is a coincidence. Of two prefixes with as many names the first in the alphabet is taken.
    """
    least = min(2, len(reference), len(target))
    found = [
        (-hits, prefix, not on_reference)
        for names, others, on_reference in ((reference, target, True), (target, reference, False))
        for prefix, hits in _prefixes(names, others).items()
        if hits >= least
    ]
    if not found:
        return None
    _, prefix, on_target = min(found)
    return prefix, not on_target


def _prefixes(names: set[str], others: set[str]) -> Counter[str]:
    """How many names become one of the others when a prefix is taken away, by prefix."""
    found: Counter[str] = Counter()
    for name in names:
        parts = read_name(name)
        for outer in list(paths_around(parts.path))[-4:]:
            prefix = f"{outer}."
            if outer and str(parts._replace(path=parts.path.removeprefix(prefix))) in others:
                found[prefix] += 1
    return found


def _shapes_fit(a: KnownSite, b: KnownSite) -> bool:
    return a.shape is None or b.shape is None or a.shape == b.shape


def _signature(site: KnownSite) -> tuple[str, tuple[int, ...]] | None:
    if site.shape is None:
        return None
    return kind_of(site.name), site.shape


def _why(site: KnownSite, everything_there: Sequence[KnownSite], unpaired_there: Sequence[KnownSite]) -> str:
    name = read_name(site.name)
    if name.call:
        calls = sum(1 for other in everything_there if read_name(other.name)[:3] == name[:3])
        if calls:
            return f"this is call {name.call + 1}, the other side has {calls}"
    near = difflib.get_close_matches(
        site.name, [other.name for other in unpaired_there[:2000]], n=1, cutoff=0.6
    )
    if not unpaired_there:
        return "no site of that name on the other side, and none there is left without a partner"
    if near:
        return f"no site of that name on the other side; the nearest is {near[0]!r} (a rule can pair them)"
    return "no site of that name on the other side"
