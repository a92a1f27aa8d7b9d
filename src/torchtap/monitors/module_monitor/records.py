"""From a monitor's keys to the sites of a run, and back; and the way of each step to the run folder and to sinks.

``activation/fc1/mean`` is the statistic ``mean`` of the site ``fc1:output``; parameters, gradients and tuple leaves
have their sites likewise, so that runs of a monitor can be compared and viewed as any other. A key that has no
site is a value of the root: ``:value.<key>``. `site_of` and `key_of` are each other's inverse.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, final

import numpy as np

from torchtap.monitors.module_monitor.naming import ROOT
from torchtap.plan.names import last_part, parent_path, read_name, site_name
from torchtap.rank_identity import identity
from torchtap.session.model_tree import environment
from torchtap.session.outlets import Outlets
from torchtap.store.record import Consumer, ScalarBlock, StepRecord
from torchtap.store.write.writer import RunWriter

__all__ = ["StepKeeper", "key_of", "site_of"]

_KINDS = {"activation": "output", "parameter": "param", "gradient": "param_grad"}
_PREFIXES = {kind: prefix for prefix, kind in _KINDS.items()}


@lru_cache(maxsize=1 << 16)
def site_of(key: str) -> tuple[str, str]:
    """``(site, statistic)`` of a monitor's key."""
    prefix, _, rest = key.partition("/")
    place, _, statistic = rest.rpartition("/")
    kind = _KINDS.get(prefix)
    if kind and place and statistic and not set(":#") & set(place):
        if kind == "output":
            site = _output_site(place)
        else:
            site = site_name(parent_path(place), kind, last_part(place))
        if key_of(site, statistic) == key:
            return site, statistic
    return f":value.{key}", "value"


def _output_site(place: str) -> str:
    """The site of ``fc1``, ``lstm[1.0]``, ``[root module]`` or ``[root module][0]``."""
    if place.startswith(ROOT):
        return site_name("", "output", place.removeprefix(ROOT).strip("[]"))
    module, _, leaf = place.partition("[")
    return site_name(module, "output", leaf.removesuffix("]"))


def key_of(site: str, statistic: str) -> str:
    """A monitor's key from where a run has it."""
    path, kind, leaf, _ = read_name(site)
    if kind == "value":
        return leaf
    if kind == "output":
        return f"activation/{path or ROOT}{f'[{leaf}]' if leaf else ''}/{statistic}"
    return f"{_PREFIXES.get(kind, kind)}/{f'{path}.' if path else ''}{leaf}/{statistic}"


def _label(site: str, statistic: str, phase: str) -> str:
    """What a number is called in TensorBoard and its like: the monitor's own key."""
    key = key_of(site, statistic)
    return key if phase == "train" else f"{phase}.{key}"


@final
class _Told:
    """A function that is called with ``(step, metrics)``, as a consumer of records."""

    def __init__(self, function: Callable[[int, dict[str, object]], None]) -> None:
        self._function = function
        self.name = getattr(function, "__name__", type(function).__name__)
        self.metrics: dict[str, Any] = {}  # of the newest step; a record has only those that are numbers

    def write(self, record: StepRecord) -> None:
        self._function(record.step, dict(self.metrics))

    def close(self) -> None:
        pass


@final
class StepKeeper:
    """Hands each finished step on. A sink that fails costs its own numbers, not the training."""

    def __init__(
        self,
        run: str | os.PathLike[str] | None,
        sinks: Sequence[Consumer | Callable[[int, dict[str, object]], None]],
    ) -> None:
        self._writer = None if run is None else _writer_of(run)
        self._told = [_Told(sink) for sink in sinks if not isinstance(sink, Consumer)]
        consumers = [sink for sink in sinks if isinstance(sink, Consumer)]
        for sink in consumers:
            name_by = getattr(sink, "name_by", None)
            if name_by is not None:
                name_by(_label)
        writers = [] if self._writer is None else [self._writer]
        self._outlets = Outlets([*writers, *consumers, *self._told], strict=False)
        self._grids: dict[tuple[str, ...], tuple[tuple[tuple[str, ...], str, list[int]], ...]] = {}

    @property
    def has_run(self) -> bool:
        """Whether there is a run folder."""
        return self._writer is not None

    def keep(self, step: int, metrics: dict[str, Any], *, training: bool) -> None:
        """Hand one step's numbers on."""
        for each in self._told:
            each.metrics = metrics
        self._outlets.write(self._record(step, metrics, "train" if training else "eval"))

    def _record(self, step: int, metrics: dict[str, object], phase: str) -> StepRecord:
        numbers = {key: value for key, value in metrics.items() if isinstance(value, (int, float, np.number))}
        keys = tuple(numbers)
        grids = self._grids.get(keys)
        if grids is None:
            grids = self._grids[keys] = _grids(keys)
        values = np.fromiter(numbers.values(), dtype=np.float64, count=len(numbers))
        blocks = tuple(
            ScalarBlock(sites, (statistic,), values[places].reshape(-1, 1))
            for sites, statistic, places in grids
        )
        return StepRecord(step, None, None, phase, time.time(), blocks, ())

    def read_back(self) -> dict[int, dict[str, float]]:
        """Every step that is in the run, ``{step: {key: value}}``."""
        from torchtap.store.read.reader import open_run

        assert self._writer is not None
        self._writer.flush()
        run = open_run(self._writer.folder, attempt=self._writer.attempt)
        found: dict[int, dict[str, float]] = {}
        for site in run.sites():
            for statistic in run.statistics(site):
                series = run.series(site, statistic)
                for step, value in zip(series.steps.tolist(), series.values.tolist(), strict=True):
                    found.setdefault(step, {})[key_of(site, statistic)] = value
        return dict(sorted(found.items()))

    def close(self) -> None:
        """Close the run and every sink."""
        self._outlets.close()


def _writer_of(run: str | os.PathLike[str]) -> RunWriter:
    manifest = {
        "created": datetime.datetime.now(datetime.UTC).isoformat(),
        "sites": [],
        "plan": {"monitor": "ModuleMonitor"},
        "environment": environment(),
    }
    here = identity()
    return RunWriter(run, manifest=manifest, rank=here.rank, world=here.world)


def _grids(keys: tuple[str, ...]) -> tuple[tuple[tuple[str, ...], str, list[int]], ...]:
    """For each statistic its sites and where their numbers are among the keys."""
    by_statistic: dict[str, tuple[list[str], list[int]]] = {}
    for place, key in enumerate(keys):
        site, statistic = site_of(key)
        sites, places = by_statistic.setdefault(statistic, ([], []))
        sites.append(site)
        places.append(place)
    return tuple((tuple(sites), statistic, places) for statistic, (sites, places) in by_statistic.items())
