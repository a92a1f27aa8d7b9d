"""What is known of a run's sites without reading their numbers. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from torchtap.plan.names import read_name, site_name

if TYPE_CHECKING:
    from torchtap.store.read.reader import Run

__all__ = ["ChartedSite", "described", "places"]


@final
@dataclass(frozen=True, slots=True)
class ChartedSite:
    """One site."""

    name: str
    index: int  # in execution order
    module: str
    kind: str
    leaf: str
    call: int
    module_class: str
    source: str
    shape: tuple[int, ...] | None
    dtype: str


def described(names: Iterable[str], facts: Mapping[str, Mapping[str, Any]]) -> list[ChartedSite]:
    """The places of these sites, in this order. A leaf or a further call has what is known of its bare site."""
    found = []
    for index, name in enumerate(names):
        module, kind, leaf, call = read_name(name)
        known = {**facts.get(site_name(module, kind), {}), **facts.get(name, {})}
        found.append(
            ChartedSite(
                name,
                index,
                module,
                kind,
                leaf,
                call,
                str(known.get("class") or ""),
                str(known.get("source") or ""),
                _shape(known.get("shape")),
                str(known.get("dtype") or ""),
            )
        )
    return found


def places(run: Run) -> list[ChartedSite]:
    """Every site of a run in execution order."""
    return described(run.sites(), run.site_facts())


def _shape(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, (list, tuple)) or len(value) > 64 or not all(isinstance(n, int) for n in value):
        return None
    return tuple(value)
