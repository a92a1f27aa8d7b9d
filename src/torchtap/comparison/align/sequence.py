"""Which module of one model is which of another, as a problem of two sequences.

Both models' modules stand in their order of execution. A pair of modules has a score, made of what they have in
common; the best monotone alignment of the leaves is taken, then leaves that were computed in another order but
agree beyond doubt, then the containers, by the leaves inside them.

What counts, best first: the values that left them; their weights, up to a transpose; their names; their types; the
numbers in their paths; their shapes. Nothing is random and nothing depends on hashing: the same two models are
always aligned the same way. Each pair says what it rests on.

Not here: how values and weights become signatures (`live.matching`, `recorded.matching`), rules (`rules`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import final

import numpy as np
import numpy.typing as npt

from torchtap.plan.names import is_inside, last_part, paths_around

__all__ = ["Node", "Paired", "match_nodes"]

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
        """Whether what is around and inside one is around and inside the other."""
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
