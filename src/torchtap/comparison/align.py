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
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import final

import numpy as np
import numpy.typing as npt

from torchtap.comparison.rules import PairingRule, rule_from
from torchtap.plan.names import (
    is_inside,
    join_path,
    kind_of,
    last_part,
    parent_path,
    path_of,
    paths_around,
    read_name,
    without_wrappers,
)

__all__ = [
    "Alignment",
    "KnownSite",
    "Node",
    "Pair",
    "Paired",
    "Signatures",
    "Unaligned",
    "align",
    "match_nodes",
    "part_of",
    "plain_module",
]

_VALUE, _WEIGHT, _NEAR_WEIGHT, _NAME, _LAST_NAME, _TYPE, _NUMBERS, _SHAPE = (
    6.0,
    4.0,
    2.0,
    4.0,
    1.0,
    1.0,
    0.5,
    0.5,
)
_LEAST = 1.5  # what two leaves have to have in common
_SAME = 2e-3  # relative distance up to which two signatures are the same
_NEAR = 0.2
_IMPOSSIBLE = -1e9

Floats = npt.NDArray[np.float64]


@final
@dataclass(frozen=True, slots=True)
class Node:
    """A module as far as the alignment knows it."""

    path: str
    order: int  # place of its first output in the order of execution
    shape: tuple[int, ...] | None = None  # of its first output, without axes of one element
    value: tuple[float, ...] | None = None  # signature of its first output; the first number is its size
    weight: tuple[float, ...] | None = (
        None  # signature of its largest own parameter: elements, size, absolute sum
    )
    type_name: str = ""
    leaf: bool = True


_Feature = Callable[[Node], object]


@final
@dataclass(frozen=True, slots=True)
class Paired:
    """Two modules that are one, and why."""

    reference: str
    target: str
    why: str


def match_nodes(
    reference: Sequence[Node], target: Sequence[Node], fixed: Mapping[str, str] | None = None
) -> list[Paired]:
    """Pair modules; ``fixed`` pairs (reference path to target path) are given and kept."""
    work = _Work(sorted(reference, key=_by_order), sorted(target, key=_by_order), dict(fixed or {}))
    work.leaves()
    work.out_of_order()
    work.containers()
    work.by_value()
    return work.found()


def _by_order(node: Node) -> tuple[int, str]:
    return node.order, node.path


@final
class _Work:
    def __init__(self, reference: list[Node], target: list[Node], fixed: dict[str, str]) -> None:
        self.reference, self.target = reference, target
        self.pairs: dict[str, str] = {}
        self.why: dict[str, str] = {}
        self.taken: set[str] = set()
        known = {node.path for node in reference}, {node.path for node in target}
        for left, right in fixed.items():
            if left in known[0] and right in known[1]:
                self.pair(left, right, "a rule")
        if "" in known[0] and "" in known[1]:
            self.pair("", "", "the model itself")

    def pair(self, left: str, right: str, why: str) -> None:
        if left not in self.pairs and right not in self.taken:
            self.pairs[left] = right
            self.why[left] = why
            self.taken.add(right)

    def free(self, leaf: bool | None = None) -> tuple[list[Node], list[Node]]:
        return (
            [n for n in self.reference if n.path not in self.pairs and (leaf is None or n.leaf == leaf)],
            [n for n in self.target if n.path not in self.taken and (leaf is None or n.leaf == leaf)],
        )

    def leaves(self) -> None:
        left, right = self.free(leaf=True)
        if not left or not right:
            return
        scores = _Scores(left, right)
        for i, j in _best_path(scores.total):
            if scores.total[i, j] >= _LEAST:
                self.pair(left[i].path, right[j].path, scores.why(i, j))

    def out_of_order(self) -> None:
        """Leaves that were computed in another order: each the other's only one with the same weights or value."""
        left, right = self.free(leaf=True)
        if not left or not right:
            return
        scores = _Scores(left, right)
        strong = scores.total >= _WEIGHT
        for i, j in zip(*np.nonzero(strong), strict=True):
            if strong[i].sum() == 1 and strong[:, j].sum() == 1:
                self.pair(left[i].path, right[j].path, scores.why(int(i), int(j)) + ", in another order")

    def containers(self) -> None:
        """Containers that hold the same leaves; the smallest of each side first."""
        left, right = self.free(leaf=False)
        inside_left = {node.path: {p for p in self.pairs if is_inside(p, node.path)} for node in left}
        inside_right = {
            node.path: {p for p, q in self.pairs.items() if is_inside(q, node.path)} for node in right
        }
        scored = [
            (-_shared_inside(a, b, inside_left[a.path], inside_right[b.path]), a.order, b.order, a, b)
            for a, b in product(left, right)
        ]
        for score, _, _, a, b in sorted(scored, key=lambda entry: entry[:3]):
            if -score > 0.34 and self._fits_the_tree(a.path, b.path):
                self.pair(a.path, b.path, f"{min(-score, 1.0):.0%} of the same modules inside")

    def _fits_the_tree(self, left: str, right: str) -> bool:
        """Return True if what is around and inside one is around and inside the other."""
        for mine, theirs in self.pairs.items():
            if not mine or not theirs:
                continue
            if is_inside(mine, left) and is_inside(right, theirs):
                return False
            if is_inside(left, mine) and is_inside(theirs, right):
                return False
        return True

    def by_value(self) -> None:
        """A leaf of one side may be a container of the other; the value that leaves it says so."""
        left, right = self.free()
        if not left or not right:
            return
        agree = _value_matrix(left, right)
        for i, j in zip(*np.nonzero(agree), strict=True):
            a, b = left[i], right[j]
            alone = agree[i].sum() == 1 and agree[:, j].sum() == 1
            if alone and _shapes_fit(a, b) and self._fits_the_tree(a.path, b.path):
                self.pair(a.path, b.path, "the same values")

    def found(self) -> list[Paired]:
        order = {node.path: n for n, node in enumerate(self.reference)}
        pairs = [Paired(left, right, self.why[left]) for left, right in self.pairs.items()]
        return sorted(pairs, key=lambda pair: order.get(pair.reference, -1))


def _shared_inside(a: Node, b: Node, in_a: set[str], in_b: set[str]) -> float:
    """The share of leaves that two containers have in common, a little more where they are alike themselves."""
    both = len(in_a & in_b)
    if not both or not _shapes_fit(a, b):
        return 0.0
    return (
        both / len(in_a | in_b) + 0.1 * _values_agree(a, b) + 0.02 * (last_part(a.path) == last_part(b.path))
    )


@final
class _Scores:
    """What each pair of nodes has in common, as numbers and in words."""

    def __init__(self, left: list[Node], right: list[Node]) -> None:
        prefixes = _prefix_of([n.path for n in left], [n.path for n in right])
        same, near, possible = _weight_matrices(left, right)

        def equal(of_left: _Feature, of_right: _Feature | None = None) -> npt.NDArray[np.bool_]:
            return _equal([*map(of_left, left)], [*map(of_right or of_left, right)])

        named = equal(lambda n: _without(n.path, prefixes[0]), lambda n: _without(n.path, prefixes[1]))
        scored: tuple[tuple[str, float, npt.NDArray[np.bool_]], ...] = (
            ("the same values", _VALUE, _value_matrix(left, right)),
            ("the same name", _NAME, named),
            ("the same last name", _LAST_NAME, equal(lambda n: last_part(n.path))),
            ("the same type", _TYPE, equal(lambda n: n.type_name or "?", lambda n: n.type_name or "??")),
            ("the same numbers in the name", _NUMBERS, equal(lambda n: _numbers(n.path))),
            ("the same shape", _SHAPE, equal(lambda n: n.shape)),
            ("the same weights", _WEIGHT, same),
            ("nearly the same weights", _NEAR_WEIGHT, near & ~same),
        )
        self.parts = {name: part for name, _, part in scored}
        total = np.zeros((len(left), len(right)))
        for _, worth, part in scored:
            total += worth * part
        unlike = np.array([[not _shapes_fit(a, b) for b in right] for a in left])
        total[unlike & ~named] = _IMPOSSIBLE
        total[~possible & ~named] = _IMPOSSIBLE
        self.total: Floats = total

    def why(self, i: int, j: int) -> str:
        return ", ".join(name for name, part in self.parts.items() if part[i, j]) or "their order"


def _best_path(score: Floats) -> list[tuple[int, int]]:
    """The monotone pairs with the largest sum of scores; gaps cost nothing."""
    rows, columns = score.shape
    best = np.zeros((rows + 1, columns + 1))
    gain = np.maximum(score, 0.0)
    for i in range(1, rows + 1):
        diagonal = best[i - 1, :-1] + gain[i - 1]
        best[i, 1:] = np.maximum.accumulate(np.maximum(diagonal, best[i - 1, 1:]))
    pairs = []
    i, j = rows, columns
    while i and j:
        if best[i, j] == best[i - 1, j]:
            i -= 1
        elif best[i, j] == best[i, j - 1]:
            j -= 1
        else:
            pairs.append((i - 1, j - 1))
            i, j = i - 1, j - 1
    return pairs[::-1]


def _equal(left: Sequence[object], right: Sequence[object]) -> npt.NDArray[np.bool_]:
    numbers: dict[object, int] = {}
    a, b = (
        np.array(
            [
                -1 - n if each is None else numbers.setdefault(each, len(numbers))
                for n, each in enumerate(side)
            ]
        )
        for side in (left, right)
    )
    found: npt.NDArray[np.bool_] = (a[:, None] == b[None, :]) & (a[:, None] >= 0)
    return found


def _value_matrix(left: list[Node], right: list[Node]) -> npt.NDArray[np.bool_]:
    return _close([n.value for n in left], [n.value for n in right], _SAME) & _equal(
        [n.shape for n in left], [n.shape for n in right]
    )


def _weight_matrices(left: list[Node], right: list[Node]) -> tuple[npt.NDArray[np.bool_], ...]:
    """Where weights are the same, where nearly, and where two nodes can be one at all."""
    a, b = ([None if n.weight is None else n.weight[1:] for n in side] for side in (left, right))
    sizes = [np.array([0.0 if n.weight is None else n.weight[0] for n in side]) for side in (left, right)]
    possible = sizes[0][:, None] == sizes[1][None, :]
    return _close(a, b, _SAME) & possible, _close(a, b, _NEAR) & possible, possible


def _close(
    left: Sequence[tuple[float, ...] | None], right: Sequence[tuple[float, ...] | None], tolerance: float
) -> npt.NDArray[np.bool_]:
    found = np.zeros((len(left), len(right)), dtype=bool)
    width = next((len(each) for each in (*left, *right) if each is not None), 0)
    if not width:
        return found
    blank = (np.nan,) * width
    a, b = (
        np.array(
            [each if each is not None and len(each) == width else blank for each in side], dtype=np.float64
        )
        for side in (left, right)
    )
    with np.errstate(invalid="ignore", over="ignore"):
        size = np.maximum(np.abs(a[:, None, 0]), np.abs(b[None, :, 0]))
        apart = np.abs(a[:, None, :] - b[None, :, :]).max(-1)
        found |= apart <= tolerance * size
    return found


def _values_agree(a: Node, b: Node) -> bool:
    return bool(_value_matrix([a], [b])[0, 0])


def _shapes_fit(a: Node, b: Node) -> bool:
    return a.shape is None or b.shape is None or a.shape == b.shape


def _numbers(path: str) -> tuple[int, ...] | None:
    found = tuple(int(part) for part in re.findall(r"\d+", path))
    return found or None


def _without(path: str, prefix: str) -> str:
    return path.removeprefix(prefix)


def _prefix_of(left: list[str], right: list[str]) -> tuple[str, str]:
    """A prefix that all of one side's names have and that pairs most of them with the other's once it is gone."""
    best = (_common(left, right), "", "")
    for hits, prefix in _prefixes(left, right):
        if hits > best[0]:
            best = (hits, prefix, "")
    for hits, prefix in _prefixes(right, left):
        if hits > best[0]:
            best = (hits, "", prefix)
    return best[1], best[2]


def _prefixes(names: list[str], others: list[str]) -> Iterator[tuple[int, str]]:
    """Prefixes of names, each with how many names of the other side are met without it."""
    outer = {around for name in names for around in list(paths_around(name))[-3:] if around}
    for prefix in sorted(f"{around}." for around in outer):
        hits = _common([name.removeprefix(prefix) for name in names], others)
        # One name in common is a coincidence, not a prefix.
        if hits >= max(2, len(names) // 4):
            yield hits, prefix


def _common(left: list[str], right: list[str]) -> int:
    return len(set(left) & set(right))


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
    work = _PairingWork(reference, target)
    unused = work.by_rules([rule_from(rule) for rule in rules])
    work.by_key(lambda name: name, "name")
    work.by_key(_unwrapped, "wrapper")
    work.by_prefix()
    work.by_sequence(signatures)
    work.by_structure()
    return work.finish(unused)


class _PairingWork:
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
            if same in there and _pairing_shapes_fit(self.reference[n], self.target[there[same]]):
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
        for prefix, hits in _pairing_prefixes(names, others).items()
        if hits >= least
    ]
    if not found:
        return None
    _, prefix, on_target = min(found)
    return prefix, not on_target


def _pairing_prefixes(names: set[str], others: set[str]) -> Counter[str]:
    """How many names become one of the others when a prefix is taken away, by prefix."""
    found: Counter[str] = Counter()
    for name in names:
        parts = read_name(name)
        for outer in list(paths_around(parts.path))[-4:]:
            prefix = f"{outer}."
            if outer and str(parts._replace(path=parts.path.removeprefix(prefix))) in others:
                found[prefix] += 1
    return found


def _pairing_shapes_fit(a: KnownSite, b: KnownSite) -> bool:
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


def plain_module(path: str) -> str:
    """The module's own name for a piece that was cut out of it."""
    return path.partition("[")[0]


def part_of(path: str) -> list[str]:
    """The modules that were joined under one name; the name itself when it is one module."""
    return [join_path(parent_path(path), part) for part in last_part(path).split("+")]
