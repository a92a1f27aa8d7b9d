"""Compare a run with its golden: the same function or not, the first module that differs, and why.

The order of execution decides. The first value over its noise floor is the output of a module whose inputs agree, so
that module made it, or the input of one, so the calling module made it. The model's outputs decide whether it is the
same function, those of a training its loss, gradients and updates: a value inside that differs while they agree was
computed in another way, and is no failure. Two things fail although the outputs agree: a difference too small to reach
them, and changed weights that the inputs do not use.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import numpy as np

from torchtap import Comparison
from torchtap.comparison.align import KnownSite, align
from torchtap.comparison.explain import factor
from torchtap.comparison.floor import LEAST, MARGIN, MARGIN_16_BIT
from torchtap.comparison.result import FirstDifference, Row
from torchtap.comparison.values import resolution
from torchtap.errors import CompareError
from torchtap.golden.observe import Observation
from torchtap.golden.sketch import Sketch
from torchtap.spi import Name

__all__ = ["Verdict", "judge"]

_SMALL = 1e-3  # a way to compute the same differs by more than this somewhere inside
_WEIGHTS = 16.0  # units in the last place by which initial weights differ between processors
_KNOWN = 4.0  # how much sooner a module is suspected whose settings changed
_AROUND = {"value": "(loss)", "param_grad": "(step)", "update": "(optimizer)", "buffer": ""}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer of a check. Printing it gives the whole message."""

    name: str
    layer: str | None  # the module to blame, or "(inputs)", "(loss)", "(optimizer)", "(step)"; None if same
    site: str
    cause: str
    same_function: bool
    notes: tuple[str, ...]
    basis: str  # of the noise floor
    rows: tuple[Row, ...]

    @property
    def same(self) -> bool:
        """Return True if the check passes."""
        return self.layer is None

    def __str__(self) -> str:
        if self.layer is None:
            return "\n  ".join([f"golden {self.name!r}: same function", *self.notes])
        what = "same function on these inputs, but" if self.same_function else "a different function:"
        first = f"golden {self.name!r}: {what} first difference in {self.layer or 'the model itself'}"
        return "\n  ".join([first, f"site:  {self.site}", f"cause: {self.cause}", *self.notes])

    def to_html(self, path: Path) -> Path:
        """Write a report that needs no other file."""
        row = next((row for row in self.rows if row.target_site == self.site), None)
        first = row and FirstDifference(
            site=self.site, module=self.layer or "", index=row.index, error=row.error, floor=row.floor,
            origin="local", sure="likely", what=self.cause,
        )  # fmt: skip
        return Comparison(
            reference=f"golden {self.name}", target="this model", rows=self.rows, first=first, verdict=str(self),
            basis=self.basis, problems=self.notes, outcome="same" if self.same else "differs",
        ).to_html(path)  # fmt: skip


def judge(
    golden: Observation, seen: Observation, floors: dict[str, float], basis: str, notes: list[str]
) -> Verdict:
    """Return the verdict. ``floors`` are those of the golden and those measured here, whichever is larger."""
    case, total = _Case(golden, seen, floors), len(golden.sites)
    over = [row for row in case.rows if row.excess > 1]
    results = (":output",) if not golden.steps else ()
    same = not any(row.kind in _AROUND or row.target_site.startswith(results) for row in over)
    paired, first = len(case.pairs), case.first()
    if not same and seen.model != golden.model and paired < 0.5 * total:
        raise CompareError(
            f"golden {golden.name!r} was recorded from another class, {golden.model}; {paired} of its {total} "
            f"sites are in this {seen.model}. Give this model a name of its own, or accept it"
        )
    notes = [f"{total - paired} of {total} sites are not there", *notes] if paired < total else [*notes]
    if same and first is not None and (first.error > _SMALL or golden.steps):
        notes.append(f"{len(over)} values inside are computed in another way, first {first.target_site}")
        first = None
    layer, site, cause = None, "", ""
    differing = {row.module for row in over if row.kind == "output"}
    if first is not None:
        layer, site = case.blamed(first), first.target_site
        cause = "; ".join(case.causes(first, layer))
    elif unused := [name for name in case.changed if Name.read(name).path not in differing]:
        layer, site = Name.read(unused[0]).path, unused[0]
        cause = f"{case.weights(unused)}; these inputs do not use it"
    rows = (replace(row, status="compensated") if same and row.excess > 1 else row for row in case.rows)
    return Verdict(name=golden.name, layer=layer, site=site, cause=cause, same_function=same, notes=tuple(notes),
                   basis=basis, rows=tuple(rows))  # fmt: skip


@final
class _Case:
    """A golden and a run, site by site."""

    def __init__(self, golden: Observation, seen: Observation, floors: dict[str, float]) -> None:
        self.golden, self.seen, self.pairs = golden, seen, _pairs(golden, seen)
        self.paths = {Name.read(old).path: Name.read(now).path for old, now in self.pairs.items()}
        self.settings, self.changed = dict(self._settings()), dict(self._changed())
        self.values: list[tuple[Sketch, Sketch]] = []  # of each row
        self.rows = list(self._rows(floors))

    def _rows(self, floors: dict[str, float]) -> Iterator[Row]:
        """Measure every site in the golden's order of execution."""
        results, plain = iter(self.seen.results), not self.golden.steps
        for key, old in self.golden.sites.items():
            name, floor = Name.read(key), max(floors.get(key, 0.0), LEAST * resolution(old.dtype))
            if now := self.pairs.get(key):
                yield self._row(key, now, old, self.seen.sites[now], floor)
            elif ("grad" in name.kind and name.path in self.paths) or (plain and key.startswith(":output")):
                yield self._row(key, key, old, replace(old, shape=(-1,)), floor, "missing")
            if key.startswith(":output") and (result := next(results, None)) is not None:
                yield self._row(key, key, old, result, floor, "compiled")

    def _row(self, key: str, now: str, old: Sketch, new: Sketch, floor: float, note: str = "") -> Row:
        name, error, step = Name.read(now), old.distance(new), key.partition(" step ")[2]
        known = _KNOWN if name.path in self.settings and name.kind == "output" else 1.0
        allowed = floor * (MARGIN_16_BIT if resolution(old.dtype) > 1e-4 else MARGIN / known)
        excess = error / allowed if allowed else math.inf if error else 0.0
        self.values.append((old, new))
        return Row(
            index=len(self.values) - 1, site=key, target_site=now, module=name.path, kind=name.kind,
            status="equal" if error == 0 else "diverged" if excess > 1 else "within",
            error=error, floor=floor, excess=excess, step=int(step or 0), note=note,
        )  # fmt: skip

    def _settings(self) -> Iterator[tuple[str, str]]:
        """Yield the modules whose settings changed, by their names now, and how."""
        for path, text in self.golden.modules.items():
            now = self.paths.get(path, path)
            both = (text, self.seen.modules.get(now, text))
            before, after = (set(re.split(r", |[()]", each.rpartition(" ")[0])) - {""} for each in both)
            if before != after:
                words = [", ".join(sorted(each)) or "none" for each in (before - after, after - before)]
                yield now, f"settings: {words[0]} became {words[1]}"

    def _changed(self) -> Iterator[tuple[str, float]]:
        """Yield the parameters and buffers that changed, by their names now, with the relative distance."""
        for key, old in self.golden.state.items():
            name = Name.read(key)
            now = str(name._replace(path=self.paths.get(name.path, name.path)))
            new = self.seen.state.get(now, old)
            error = old.distance(new) if new.digest != old.digest and new.shape == old.shape else 0.0
            if error > _WEIGHTS * resolution(old.dtype):
                yield now, error

    def first(self) -> Row | None:
        """Return the first row over its floor. One barely over it may inherit a difference that began just below."""
        first = next((row for row in self.rows if row.excess > 1), None)
        if first is not None and first.excess < 4:
            return next(row for row in self.rows if row.excess > first.excess / 4)
        return first

    def blamed(self, first: Row) -> str:
        """Return the module, or the part of the loop, whose own code or weights made the first difference."""
        kind, path = first.kind, first.module
        if kind in ("value", "update", "param_grad"):
            alike = [row.excess > 1 for row in self.rows if row.kind == kind and row.step == first.step]
            # One module's update is its own; those of many are made by what updates them.
            return _AROUND[kind] if kind == "value" or sum(alike) > 0.3 * len(alike) else path
        if kind.startswith("grad_"):
            return self._blamed_for_gradient(first)
        if kind == "input":
            parent = self.seen.sites[first.target_site].parent
            path = "(inputs)" if parent is None else parent
        called = {row.module for row in self.rows}
        owners = [Name.read(name).path for name in self.changed if path != "(inputs)"]
        # A weight that the module's own code uses, without calling the module that has it.
        inside = (each for each in owners if each not in called and (not path or each.startswith(f"{path}.")))
        return next(inside, None) or self._caller(path)

    def _caller(self, path: str) -> str:
        """Return the module that called this one with more or fewer tensors than before, else this one."""
        inputs = [[Name.read(key).path for key in seen.sites if Name.read(key).kind == "input"]
                  for seen in (self.golden, self.seen)]  # fmt: skip
        before, now = Counter(self.paths.get(each, each) for each in inputs[0]), Counter(inputs[1])
        parents = {Name.read(key).path: each.parent for key, each in self.seen.sites.items()}
        while path in parents and before[path] != now[path]:
            path = "(inputs)" if (above := parents[path]) is None else above
        return path

    def _blamed_for_gradient(self, first: Row) -> str:
        """Gradients flow backwards: the module that received the value computed its gradient, else the calling code."""
        mine = self.values[first.index][0].row
        same = [row for row in self.rows if np.array_equal(self.values[row.index][0].row, mine)]
        parent = self.golden.sites[first.site].parent or ""
        if any(row.module == "" and row.kind == "grad_output" for row in same):
            return "(loss)"
        if first.module in self.settings:
            return first.module
        if first.note == "missing":
            return parent
        return next((row.module for row in same if row.kind == "grad_input"), parent)

    def causes(self, first: Row, layer: str) -> Iterator[str]:
        """Yield everything that is known to have changed there."""
        old, new = self.values[first.index]
        constant, rest = factor(old.row[3:], new.row[3:])
        if first.note == "missing":
            yield "no gradient arrives any more" if "grad" in first.kind else "the model does not return it"
        elif old.shape != new.shape:
            yield f"shape {list(old.shape)} became {list(new.shape)}"
        elif new.infinite != old.infinite:
            yield f"{new.infinite} values are NaN or infinite, {old.infinite} in the golden"
        else:
            yield f"{first.error:.2g} from the golden, noise floor {first.floor:.2g}"
            if rest < 0.05 * abs(constant - 1):
                yield f"about {constant:.4g} × the golden's values"
        if old.dtype != new.dtype:
            yield f"{old.dtype} became {new.dtype}"
        if self.changed:
            own = [name for name in self.changed if Name.read(name).path == layer]
            yield self.weights(own) if own else f"weights changed elsewhere: {', '.join([*self.changed][:3])}"
        both = self.golden, self.seen
        if layer in self.settings:
            yield self.settings[layer]
        elif len({each.modules.get(layer, "").rpartition(" ")[2] for each in both}) == 2:
            yield "the code of its class changed"
        yield from (text for path, text in self.settings.items() if path[:1] == "(")
        if first.note == "compiled":
            yield "run eagerly it agrees"

    def weights(self, names: list[str]) -> str:
        """Describe how much the named weights changed."""
        listed = ", ".join(f"{name} by {self.changed[name]:.2g}" for name in names[:4])
        return f"weights changed: {listed}" + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _pairs(old: Observation, new: Observation) -> dict[str, str]:
    """Return which site is which. A module may be renamed, but not to a name that another one had."""
    left, right = ([KnownSite(key, s.shape, s.dtype) for key, s in seen.sites.items()] for seen in (old, new))
    pairs = ((pair.reference, pair.target) for pair in align(left, right).pairs)
    names = ((key, now, Name.read(key).path, Name.read(now).path) for key, now in pairs)
    return {key: now for key, now, before, path in names if path == before or path not in old.modules}
