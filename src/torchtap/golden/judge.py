"""Compare a run with its golden: the same function or not, the first module that differs, and why.

The order of execution decides. The first value over its noise floor is the output of a module whose inputs agree, so
that module made it, or the input of one, so the calling module made it. The model's outputs decide whether it is the
same function: a value inside that differs while they agree was computed in another way, and is no failure. Two things
fail although the outputs agree: a difference too small to reach them, and changed weights that the inputs do not use.
"""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import final

import numpy as np

from torchtap import Comparison
from torchtap.comparison.result import FirstDifference, Row, Status
from torchtap.errors import CompareError
from torchtap.golden.observe import Observation
from torchtap.golden.sketch import Sketch, epsilon
from torchtap.golden.store import Golden
from torchtap.spi import Name

__all__ = ["MARGIN", "Verdict", "judge"]

MARGIN, _MARGIN_16_BIT = 8.0, 3.0  # as in `torchtap.compare`
_LEAST = 0.5  # share of a unit in the last place below which no floor is
_SMALL = 1e-3  # a way to compute the same differs by more than this somewhere inside
_WEIGHTS = 16.0  # units in the last place by which initial weights differ between processors
_KNOWN = 4.0  # how much sooner a module is suspected whose settings changed
_REST = re.compile(r"( step (\d+))?( again \d+)?( \(\w+\))?$")  # what follows the name of a site
_AROUND = {"value": "(loss)", "param_grad": "(step)", "update": "(optimizer)", "buffer": ""}


@final
@dataclass(frozen=True, slots=True)
class _Site:
    """A value of the golden beside the same value now."""

    key: str
    now: str
    old: Sketch
    new: Sketch
    parent: str | None
    floor: float
    error: float = math.inf
    excess: float = math.inf

    @property
    def name(self) -> Name:
        return _name(self.now)

    @property
    def step(self) -> str | None:
        found = _REST.search(self.key)
        return found and found[2]

    @property
    def decides(self) -> bool:
        return self.name.kind in _AROUND or self.now.startswith(":output")


def _name(key: str) -> Name:
    return Name.read(_REST.sub("", key))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer of a check. Printing it gives the whole message."""

    name: str
    layer: str | None = (
        None  # the module to blame, or "(inputs)", "(loss)", "(optimizer)", "(step)"; None if same
    )
    site: str = ""
    cause: str = ""
    same_function: bool = True
    notes: tuple[str, ...] = ()
    basis: str = ""  # of the noise floor
    sites: list[_Site] = field(default_factory=list, repr=False)

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
        over: Status = "compensated" if self.same_function else "diverged"
        rows = tuple(
            Row(index=index, site=each.key, target_site=each.now, module=each.name.path, kind=each.name.kind,
                status="equal" if each.error == 0 else over if each.excess > 1 else "within",
                error=each.error, floor=each.floor, excess=each.excess)
            for index, each in enumerate(self.sites)
        )  # fmt: skip
        first = next((row for row in rows if row.target_site == self.site), None)
        difference = first and FirstDifference(
            site=self.site, module=self.layer or "", index=first.index, error=first.error, floor=first.floor,
            origin="local", sure="likely", what=self.cause,
        )  # fmt: skip
        return Comparison(
            reference=f"golden {self.name}", target="this model", rows=rows, first=difference, verdict=str(self),
            basis=self.basis, problems=self.notes, outcome="same" if self.same else "differs",
        ).to_html(path)  # fmt: skip


def judge(golden: Golden, seen: Observation, floors: dict[str, float], basis: str) -> Verdict:
    """Return the verdict. ``floors`` are those of the golden and those measured here, whichever is larger."""
    old = golden.seen.sites
    pairs = _pairs(golden.seen, seen)
    paths = {_name(before).path: _name(now).path for before, now in pairs.items()}
    settings = _settings(golden.seen, seen, paths)
    sites = _sites(golden, seen, pairs, paths, settings, floors)
    missing = [key for key in old if key.startswith(":output") and key not in pairs]
    same = not missing and not any(site.excess > 1 and site.decides for site in sites)
    found = seen.modules[""].partition("(")[0]
    if not same and found != golden.model and len(pairs) < 0.5 * len(old):
        raise CompareError(
            f"golden {golden.name!r} was recorded from another class, {golden.model}; {len(pairs)} of its {len(old)} "
            f"sites are in this {found}. Give this model a name of its own, or accept it"
        )
    first, notes = _first(sites), []
    if len(pairs) < len(old):
        notes.append(f"{len(old) - len(pairs)} of {len(old)} sites are not there")
    if same and first is not None and (first.error > _SMALL or golden.steps):
        inside = sum(site.excess > 1 for site in sites)
        notes.append(f"{inside} values inside are computed in another way, first {first.now}")
        first = None
    changed = _changed(golden, seen, paths)
    layer, site, cause = None, "", ""
    if first is not None:
        layer, site = _blamed(first, sites, changed, settings), first.now
        cause = "; ".join(_causes(first, layer, golden, seen, changed, settings))
    elif missing:
        layer, site, cause = "", missing[0], "the model does not return it"
    elif unused := [name for name in changed if _agrees(name, sites)]:
        layer, site, cause = (
            _owner(unused[0]),
            unused[0],
            f"{_weights(unused, changed)}; these inputs do not use it",
        )
    return Verdict(name=golden.name, layer=layer, site=site, cause=cause, same_function=same, notes=tuple(notes),
                   basis=basis, sites=sites)  # fmt: skip


def _pairs(old: Observation, new: Observation) -> dict[str, str]:
    """Return which site is which: by name, and renamed ones by their order, kind and shape."""
    pairs = {key: key for key in old.sites if key in new.sites}
    left, right = (
        [key for key in one.sites if key not in two.sites] for one, two in ((old, new), (new, old))
    )
    kinds = [[(_name(key).kind, seen.sites[key].sketch.shape) for key in keys] for keys, seen in
             ((left, old), (right, new))]  # fmt: skip
    for start, other, count in difflib.SequenceMatcher(
        None, kinds[0], kinds[1], autojunk=False
    ).get_matching_blocks():
        pairs.update(zip(left[start : start + count], right[other : other + count], strict=True))
    return {key: pairs[key] for key in old.sites if key in pairs}


def _sites(
    golden: Golden, seen: Observation, pairs: dict[str, str], paths: dict[str, str], settings: dict[str, str],
    floors: dict[str, float],
) -> list[_Site]:  # fmt: skip
    """Measure every site in the golden's order of execution."""
    found, results = [], iter(seen.results)
    for key, (old, parent) in golden.seen.sites.items():
        name, floor = _name(key), max(floors.get(key, 0.0), _LEAST * epsilon(old.dtype))
        if key in pairs:
            now = seen.sites[pairs[key]]
            known = _KNOWN if _name(pairs[key]).path in settings and name.kind == "output" else 1.0
            found.append(_measured(_Site(key, pairs[key], old, now.sketch, now.parent, floor), known))
        elif "grad" in name.kind and name.path in paths:
            found.append(_Site(key, f"{key} (missing)", old, old, parent, floor))
        if key.startswith(":output") and (result := next(results, None)) is not None:
            found.append(_measured(_Site(key, f"{key} (compiled)", old, result, None, floor), 1.0))
    return found


def _measured(site: _Site, known: float) -> _Site:
    narrow = epsilon(site.old.dtype) > 1e-4
    error, allowed = site.old.distance(site.new), site.floor * (_MARGIN_16_BIT if narrow else MARGIN / known)
    return replace(site, error=error, excess=error / allowed if allowed else math.inf if error else 0.0)


def _settings(old: Observation, new: Observation, paths: dict[str, str]) -> dict[str, str]:
    """Return the modules whose settings changed, by their names now, and how."""
    found = {}
    for path, text in old.modules.items():
        now = new.modules.get(paths.get(path, path), text)
        before, after = (set(re.split(r", |[()]", each.rpartition(" ")[0])) - {""} for each in (text, now))
        if before != after:
            words = [", ".join(sorted(each)) or "none" for each in (before - after, after - before)]
            found[paths.get(path, path)] = f"settings: {words[0]} became {words[1]}"
    return found


def _changed(golden: Golden, seen: Observation, paths: dict[str, str]) -> dict[str, float]:
    """Return the parameters and buffers that changed, by their names now, with the relative distance."""
    found = {}
    for name, (digest, old) in golden.state.items():
        now = str(Name.parse(name)._replace(path=paths.get(_owner(name), _owner(name))))
        other, new = seen.state.get(now, (digest, old))
        error = old.distance(new) if other != digest and new.shape == old.shape else 0.0
        if error > _WEIGHTS * epsilon(old.dtype):
            found[now] = error
    return found


def _first(sites: list[_Site]) -> _Site | None:
    """Return the first site over its floor. One barely over it may inherit a difference that began just below."""
    first = next((site for site in sites if site.excess > 1), None)
    if first is not None and first.excess < 4:
        return next(site for site in sites if site.excess > first.excess / 4)
    return first


def _owner(parameter: str) -> str:
    return Name.parse(parameter).path


def _agrees(parameter: str, sites: list[_Site]) -> bool:
    """Return True if the parameter's module returns the same as before, or was not called."""
    path = _owner(parameter)
    return all(site.excess <= 1 for site in sites if site.name.path == path and site.name.kind == "output")


def _blamed(first: _Site, sites: list[_Site], changed: dict[str, float], settings: dict[str, str]) -> str:
    """Return the module, or the part of the loop, whose own code or weights made the first difference."""
    kind, path = first.name.kind, first.name.path
    if kind in ("value", "update", "param_grad"):
        alike = [site.excess > 1 for site in sites if site.name.kind == kind and site.step == first.step]
        # One module's update is its own; those of many are made by what updates them.
        return _AROUND[kind] if kind == "value" or sum(alike) > 0.3 * len(alike) else path
    if kind.startswith("grad_"):
        return _blamed_for_gradient(first, sites, settings)
    if kind == "input":
        path = "(inputs)" if first.parent is None else first.parent
    called = {site.name.path for site in sites}
    owners = [_owner(name) for name in changed if path != "(inputs)" and _owner(name) not in called]
    # A weight that the module's own code uses, without calling the module that has it.
    return next((owner for owner in owners if path == "" or owner.startswith(f"{path}.")), path)


def _blamed_for_gradient(first: _Site, sites: list[_Site], settings: dict[str, str]) -> str:
    """Gradients flow backwards: the module that received this value computed its gradient, else the calling code."""
    same = [site.name for site in sites if np.array_equal(site.old.row, first.old.row)]
    if any(name.path == "" and name.kind == "grad_output" for name in same):
        return "(loss)"
    if first.name.path in settings:
        return first.name.path
    if first.now.endswith("(missing)"):
        return first.parent or ""
    return next((name.path for name in same if name.kind == "grad_input"), first.parent or "")


def _causes(
    first: _Site,
    layer: str,
    golden: Golden,
    seen: Observation,
    changed: dict[str, float],
    settings: dict[str, str],
) -> list[str]:
    """Return everything that is known to have changed there."""
    old, new, flags = first.old, first.new, golden.seen.flags
    found = [f"{first.error:.2g} from the golden, noise floor {first.floor:.2g}"]
    if old.shape != new.shape:
        found = [f"shape {list(old.shape)} became {list(new.shape)}"]
    elif new.infinite != old.infinite:
        found = [f"{new.infinite} values are NaN or infinite, {old.infinite} in the golden"]
    elif first.now.endswith("(missing)"):
        found = ["no gradient arrives any more"]
    elif (factor := _factor(old, new)) is not None:
        found.append(f"about {factor:.4g} × the golden's values")
    if old.dtype != new.dtype:
        found.append(f"{old.dtype} became {new.dtype}")
    if changed:
        own = [name for name in changed if _owner(name) == layer]
        found.append(
            _weights(own, changed) if own else f"weights changed elsewhere: {', '.join([*changed][:3])}"
        )
    if layer in settings:
        found.append(settings[layer])
    elif len({each.modules.get(layer, "").rpartition(" ")[2] for each in (golden.seen, seen)}) == 2:
        found.append("the code of its class changed")
    found += [
        f"{key}: {flags[key]} became {now}" for key, now in seen.flags.items() if flags.get(key, now) != now
    ]
    return [*found, "run eagerly it agrees"] if first.now.endswith("(compiled)") else found


def _factor(old: Sketch, new: Sketch) -> float | None:
    """Return the factor between two tensors, if that is all that differs."""
    before, after = old.row[3:], new.row[3:]
    factor = float(before @ after / (before @ before)) if before.any() else 1.0
    rest = float(np.linalg.norm(after - factor * before))
    return factor if rest < 0.05 * abs(factor - 1) * float(np.linalg.norm(before)) else None


def _weights(names: list[str], changed: dict[str, float]) -> str:
    listed = ", ".join(f"{name} by {changed[name]:.2g}" for name in names[:4])
    return f"weights changed: {listed}" + (f" and {len(names) - 4} more" if len(names) > 4 else "")
