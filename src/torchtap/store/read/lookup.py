"""Finding one thing in a run by name, and what to say when it is not there."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from typing import Any

from torchtap.errors import SelectionError
from torchtap.plan.names import path_of, site_name
from torchtap.store.read.clock import Timeline
from torchtap.store.read.part import Part
from torchtap.store.read.results import TensorRef
from torchtap.store.read.stored_tensors import StoredTensor
from torchtap.store.write.tensors import TensorName

__all__ = [
    "described_sites",
    "find_tensor",
    "no_such_site",
    "no_such_statistic",
    "no_such_tensor",
    "only_statistic",
    "spelled_out",
]


def find_tensor(
    parts: Sequence[Part],
    timeline: Timeline,
    site: str,
    step: int | None,
    field: str,
    reduction: str | None,
    phase: str,
) -> StoredTensor | None:
    """The first tensor of that name at a step; without ``step``, the one of the largest step."""

    def is_it(name: TensorName) -> bool:
        if (name.site, name.phase, name.field) != (site, phase, field):
            return False
        return step in (None, name.step) and reduction in (None, name.reduction)

    found: list[StoredTensor] = []
    for number, part in enumerate(parts):
        for name in reversed(part.tensor_names):
            if step is not None and not name.low <= step <= name.high:
                continue
            tensors = [tensor for tensor in part.tensors_in(name) if is_it(tensor.name)]
            here = [tensor for tensor in tensors if timeline.shown(number, tensor.name.step, phase)]
            if here:
                found += here
                break  # segments follow the training, so that older ones have smaller steps
    return max(found, key=lambda tensor: (tensor.name.step, -tensor.name.copy), default=None)


def no_such_tensor(site: str, step: int | None, field: str, stored: Sequence[TensorRef]) -> SelectionError:
    """``stored`` are the tensors that the site does have."""
    fields = sorted({ref.field for ref in stored})
    steps = sorted({ref.step for ref in stored if ref.field == field})
    if not steps:
        keep = "Histogram" if field in ("counts", "edges") else "Full"
        has = f"the fields {', '.join(fields)}" if fields else f"numbers only: record it with keep={keep}()"
        return SelectionError(f"{site!r} has no stored tensor with the field {field!r}; it has {has}")
    near = [str(other) for other in sorted(steps, key=lambda other: abs(other - (step or 0)))[:3]]
    return SelectionError(
        f"{site!r} has no {field!r} at step {step}; the nearest steps are {', '.join(near)}",
        nearest=tuple(near),
    )


def spelled_out(site: str, known: Collection[str]) -> str:
    """The full name of a site that may be written as a module's path or as the name of a logged number."""
    if site not in known and ":" not in site:
        for name in (site_name(site, "output"), site_name("", "value", site)):
            if name in known:
                return name
    return site


def only_statistic(site: str, known: Sequence[str]) -> str:
    """The statistic that is meant where none is named: the only one, or the value of a logged number."""
    if len(known) == 1 or "value" in known:
        return "value" if "value" in known else known[0]
    raise SelectionError(f"{site!r} has several statistics, name one: {', '.join(known) or 'tensors only'}")


def no_such_site(site: str, known: Collection[str]) -> SelectionError:
    of_module = tuple(name for name in known if path_of(name) == site)[:3]
    near = of_module or tuple(difflib.get_close_matches(site, known, n=3, cutoff=0.3))
    hint = f"the nearest are {', '.join(map(repr, near))}" if near else "run.sites() lists them"
    return SelectionError(f"the run has no site {site!r} among its {len(known)}; {hint}", nearest=near)


def no_such_statistic(owner: str, statistic: str, known: Sequence[str]) -> SelectionError:
    near = tuple(difflib.get_close_matches(statistic, known, n=3, cutoff=0.3))
    has = ", ".join(known) or "tensors only"
    return SelectionError(f"{owner} has no statistic {statistic!r}; it has {has}", nearest=near)


def described_sites(listed: object) -> dict[str, dict[str, Any]]:
    """A list of sites' facts by name; whatever in it is not such facts is left out."""
    return {
        site["name"]: site
        for site in (listed if isinstance(listed, list) else [])
        if isinstance(site, dict) and isinstance(site.get("name"), str)
    }
