"""Which numbers and tensors a sink takes, and what it calls them.

Names put kind and statistic first and the module last, ``output.mean/blocks.0.attn``: tools that group by
the part before the slash then show one statistic of all modules side by side. Numbers of any phase but training have
the phase before that, ``eval.output.mean/blocks.0.attn``. Choosing is done once for each grid, not for each step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import numpy.typing as npt

from torchtap import Selector, Site
from torchtap.errors import PlanError, SelectionError
from torchtap.plan.sites import Selectable
from torchtap.registry import Registry
from torchtap.sanitize import shown
from torchtap.spi import Consumer, Name, ScalarBlock, StepRecord, TensorItem

__all__ = ["SINKS", "Choice", "label", "make_sink", "place_of", "sink_names"]


def place_of(name: str) -> tuple[str, str]:
    """A site's kind, and the rest of its name: ``blocks.0:output.1#2`` gives ``("output", "blocks.0.1#2")``."""
    if ":" not in name:  # an alias
        return name, "model"
    path, kind, leaf, call = Name.read(name)
    place = ".".join(part for part in (path, leaf) if part) or "model"
    return kind or "value", f"{place}#{call}" if call else place


def label(site: str, statistic: str, phase: str = "train") -> str:
    """Return the name of a number for tools that group by the part before the slash."""
    kind, place = place_of(site)
    name = f"{kind}/{place}" if kind == statistic == "value" else f"{kind}.{statistic}/{place}"
    return name if phase == "train" else f"{phase}.{name}"


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """The selected part of one grid: positions in its flattened values, and their names."""

    block_sites: tuple[str, ...]
    block_statistics: tuple[str, ...]
    positions: npt.NDArray[np.intp]
    site_rows: npt.NDArray[np.intp]
    labels: list[str]


@final
class Choice:
    """The selected sites and statistics; all of them by default."""

    def __init__(
        self, sites: Selectable | Sequence[Selectable] | None = None, statistics: Sequence[str] | None = None
    ) -> None:
        if sites is None:
            self._selectors: list[Selector] | None = None
        else:
            several = [sites] if isinstance(sites, str) or not isinstance(sites, Sequence) else sites
            self._selectors = [Selector.of(one) for one in several]
        self._statistics = None if statistics is None else frozenset(statistics)
        self._label: Callable[[str, str, str], str] = label
        self._met: set[str] = set()  # selectors and statistics that matched a record
        self._asked = False  # True after the first number
        self._parts: dict[tuple[int, int, str], _Part] = {}

    def name_by(self, label: Callable[[str, str, str], str]) -> None:
        """Name numbers by another function of site, statistic and phase."""
        self._label = label
        self._parts.clear()

    def takes(self, site: str) -> bool:
        """Return True if a site is selected."""
        if self._selectors is None:
            return True
        picking = [selector.text for selector in self._selectors if _picks(selector, site)]
        self._met.update(picking)
        return bool(picking)

    def takes_of(self, statistics: Sequence[str]) -> list[tuple[int, str]]:
        """Return the selected statistics of a grid, each with its column."""
        self._asked = True
        self._met.update(statistics)
        asked = self._statistics
        return [(column, name) for column, name in enumerate(statistics) if asked is None or name in asked]

    def tell_what_never_came(self, sink: str) -> None:
        """Warn about selected sites and statistics that no record contained."""
        asked = [f"site {each.text!r}" for each in self._selectors or () if each.text not in self._met]
        asked += [f"statistic {each!r}" for each in sorted((self._statistics or frozenset()) - self._met)]
        if asked and self._asked:
            warnings.warn(
                shown(
                    f"{sink} selects {', '.join(asked)}, and no record contained it: see which sites and statistics "
                    "the taps keep",
                    5000,
                    lines=True,
                ),
                RuntimeWarning,
                stacklevel=4,
            )

    def numbers(self, record: StepRecord) -> Iterator[tuple[list[str], npt.NDArray[np.float64]]]:
        """The names and values that are taken, grid by grid, of the sites that arrived."""
        for block in record.scalars:
            part = self._part(block, record.phase)
            values = block.values.reshape(-1)[part.positions]
            if block.present is None or block.present.all():
                yield part.labels, values
            else:
                here = block.present[part.site_rows]
                kept = np.flatnonzero(here).tolist()
                yield [part.labels[index] for index in kept], values[here]

    def by_name(self, record: StepRecord) -> dict[str, float]:
        """The numbers that are taken, by name."""
        found: dict[str, float] = {}
        for names, values in self.numbers(record):
            found.update(zip(names, values.tolist(), strict=True))
        return found

    def tensors(self, record: StepRecord) -> Iterator[TensorItem]:
        """The tensors that are taken."""
        for item in record.tensors:
            if self.takes(item.site):
                yield item

    def histograms(self, record: StepRecord) -> Iterator[tuple[str, TensorItem, TensorItem]]:
        """The histograms that are taken: name, counts, edges."""
        found: dict[str, dict[str, TensorItem]] = {}
        for item in self.tensors(record):
            if item.reduction == "histogram":
                found.setdefault(item.site, {})[item.field] = item
        for site, fields in found.items():
            if "counts" in fields and "edges" in fields:
                yield self._label(site, "histogram", record.phase), fields["counts"], fields["edges"]

    def _part(self, block: ScalarBlock, phase: str) -> _Part:
        identity = (id(block.sites), id(block.statistics), phase)
        part = self._parts.get(identity)
        if (
            part is None
            or part.block_sites is not block.sites
            or part.block_statistics is not block.statistics
        ):
            if len(self._parts) > 256:
                self._parts.clear()
            part = self._parts[identity] = self._make(block, phase)
        return part

    def _make(self, block: ScalarBlock, phase: str) -> _Part:
        columns = self.takes_of(block.statistics)
        rows = [(row, name) for row, name in enumerate(block.sites) if self.takes(name)]
        width = len(block.statistics)
        return _Part(
            block.sites,
            block.statistics,
            np.array([row * width + column for row, _ in rows for column, _ in columns], np.intp),
            np.array([row for row, _ in rows for _ in columns], np.intp),
            [self._label(site, statistic, phase) for _, site in rows for _, statistic in columns],
        )


def _picks(selector: Selector, site: str) -> bool:
    try:
        return selector.picks(Site.parse(site))
    except SelectionError:  # an alias: it can be selected by its own name
        return selector.text in (site, f"{site}:output")


SINKS = Registry(
    what="sink",
    group="torchtap.sinks",
    built_in={
        "jsonl": "torchtap.sinks.local:JsonLinesSink",
        "memory": "torchtap.sinks.local:MemorySink",
        "mlflow": "torchtap.sinks.trackers:MlflowSink",
        "tensorboard": "torchtap.sinks.trackers:TensorBoardSink",
        "trackio": "torchtap.sinks.trackers:TrackioSink",
        "wandb": "torchtap.sinks.trackers:WandbSink",
    },
    error=PlanError,
)


def sink_names() -> list[str]:
    """The names of all sinks there are, without importing them."""
    return SINKS.names()


def make_sink(spec: str, **options: Any) -> Consumer:
    """The sink that a text such as ``tensorboard:logs/`` stands for."""
    name, _, target = spec.partition(":")
    make = SINKS.load(name)
    if not target:
        if name in ("jsonl", "tensorboard"):
            raise PlanError(f"the sink {name!r} needs a place to write to, as in '{name}:some/path'")
        made: Consumer = make(**options)
    elif name == "memory":
        if not target.isdecimal():
            raise PlanError(f"the sink {spec!r}: say how many records to hold, as in 'memory:100'")
        made = make(int(target), **options)
    else:
        made = make(target, **options)
    return made
