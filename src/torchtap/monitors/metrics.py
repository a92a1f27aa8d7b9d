"""Metrics of a `ModuleMonitor`: their tables, and the plan that records them.

A metric is the name of a statistic (``"l2"``, ``"rms"`` …) or a function. Statistics of a value share one pass over
it; a function is called with the value. Guarantees:
- module outputs are recorded by a `Watch`: its taps are one `Stats` for all statistics and one `Answers` per function;
- results stay on their device until the step ends;
- a function that fails raises a `MetricError` that names the metric and the site.

Not here: steps, references and parameters (`module_monitor`), keys and files (`metric_storage`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple, final

import numpy as np
import torch
from torch import Tensor, nn

from torchtap import Moment, Reduction, Selector, Site, Stats, Tap, tap, watch
from torchtap._torch import version_of
from torchtap._torch_distributed import local_part
from torchtap.errors import MetricError, MonitorError
from torchtap.reduce.moments import STATISTICS
from torchtap.reduce.reduction import outside_transforms
from torchtap.reduce.stats import StatsBlock
from torchtap.spi import Name, ScalarBlock, StepRecord

__all__ = ["Found", "InHand", "Metric", "MetricRegistry", "MetricTable", "OutputWatch", "leaf_name"]

Aggregate = Callable[[Tensor], Any]
Listed = dict[str, tuple[re.Pattern[str], Any, Aggregate | None]]
_ANSWER, _COUNT = "answer of ", "count of "  # prefixes of an `Answers` result


class Metric(NamedTuple):
    """One metric. ``function`` is the name of a statistic or a function of one or two tensors."""

    name: str
    pattern: re.Pattern[str]
    function: Any
    aggregate: Aggregate | None

    @property
    def is_statistic(self) -> bool:
        """Return True if the core's kernel computes this metric."""
        return isinstance(self.function, str)

    def matches(self, names: Iterable[str]) -> bool:
        """Return True if the pattern matches the start of one of the names."""
        return any(self.pattern.match(name) for name in names)

    def answer(self, *values: Tensor) -> Tensor | float:
        """Call the function with detached tensors. Return a number or a detached tensor in memory of its own."""
        # A collective in a metric would make ranks wait for each other, so it gets this rank's part.
        given = [each if type(each) is Tensor else local_part(each) for each in values]
        versions = [version_of(each) for each in given]
        try:
            answer = self.function(*given)
        except Exception as error:
            raise self.failure(f"raised {error!r}", values[0]) from error
        if versions != [version_of(each) for each in given]:
            raise self.failure("changed the value in place; let it work on a copy", values[0])
        if isinstance(answer, Tensor):
            # A view may show memory of the value, which can change before the step ends.
            shared = answer._is_view() or any(answer is each for each in given)
            return answer.detach().clone() if shared else answer.detach()
        if isinstance(answer, (bool, int, float, np.generic)):
            return float(answer)
        raise self.failure(f"returned a {type(answer).__name__}, not a number or a tensor", values[0])

    def failure(self, problem: str, value: Tensor) -> MetricError:
        """Return the error for a metric that failed on a value."""
        return MetricError(f"metric {self.name!r} {problem} (value of shape {tuple(value.shape)})")


@final
@dataclass(frozen=True)
class Answers(Reduction[list[list[Any]]]):
    """Keep the answers of functions: their mean and number, or all of them if a metric has an aggregation."""

    name: ClassVar[str] = "answers"
    metrics: tuple[Metric, ...]

    @outside_transforms
    def update(self, state: list[list[Any]] | None, value: Tensor) -> list[list[Any]]:
        if state is None:
            return [[metric.answer(value)] for metric in self.metrics]
        for answers, metric in zip(state, self.metrics, strict=True):
            answers.append(metric.answer(value))
        return state

    def merge(self, left: list[list[Any]], right: list[list[Any]]) -> list[list[Any]]:
        return [before + after for before, after in zip(left, right, strict=True)]

    def result(self, state: list[list[Any]]) -> dict[str, float | Tensor]:
        found: dict[str, float | Tensor] = {}
        for metric, answers in zip(self.metrics, state, strict=True):
            if metric.aggregate is not None:
                found[_ANSWER + metric.name] = torch.cat(
                    [torch.as_tensor(each).flatten() for each in answers]
                )
                continue
            count = sum(each.numel() if isinstance(each, Tensor) else 1 for each in answers)
            total = sum(_total(each) for each in answers)
            found[_ANSWER + metric.name] = total / count if count else float("nan")
            found[_COUNT + metric.name] = float(count)
        return found

    def spec(self) -> dict[str, object]:
        return {"reduction": self.name, "metrics": [metric.name for metric in self.metrics]}


def _total(answer: Tensor | float) -> Tensor | float:
    """Return the sum over an answer. It stays a tensor on a device, so that nothing waits for it."""
    if isinstance(answer, float):
        return answer
    if answer.is_cpu and answer.ndim == 0 and not answer.is_complex():
        return float(answer.tolist())  # type: ignore[arg-type]
    return _wide(answer).sum()


def _wide(value: Tensor) -> Tensor:
    value = value.abs() if value.is_complex() else value
    return value.to(torch.float32 if value.device.type == "mps" else torch.float64)  # MPS has no float64


# -- tables ----------------------------------------------------------------------------------------------------


@final
class MetricTable:
    """All metrics of one sort. ``listed`` maps a name to ``(pattern, function, aggregation)``."""

    def __init__(self, sort: str) -> None:
        self.sort = sort  # "activation", "parameter_difference" …
        self.listed: Listed = {}
        self._at: dict[tuple[str, ...], tuple[Metric, ...]] = {}

    def add(self, name: str, function: Any, pattern: str, aggregate: Aggregate | None = None) -> None:
        """Add a metric. Its name must be new."""
        title = f"{self.sort.replace('_', ' ').capitalize()} metric {name}"
        if name in self.listed:
            raise MonitorError(f"{title} already exists. Give it another name.")
        if isinstance(function, str):
            if function not in STATISTICS or aggregate is not None:
                raise MonitorError(
                    f"{title}: {function!r} is not one of the statistics {', '.join(STATISTICS)}"
                    if aggregate is None
                    else f"{title}: a statistic is of all values of a step and takes no aggregation function"
                )
        elif not callable(function):
            raise MonitorError(f"{title}: {function!r} is neither a function nor the name of a statistic")
        try:
            compiled = re.compile(pattern)
        except re.error as error:
            raise MonitorError(f"{title}: {pattern!r} is not a regular expression: {error}") from error
        self.listed[name] = (compiled, function, aggregate)
        self._at.clear()

    def __iter__(self) -> Iterator[Metric]:
        return (Metric(name, *listed) for name, listed in self.listed.items())

    def at(self, *names: str) -> tuple[Metric, ...]:
        """Return the metrics that apply to a place with these names."""
        known = self._at.get(names)
        if known is None:
            known = self._at[names] = tuple(metric for metric in self if metric.matches(names))
        return known


class MetricRegistry:
    """The five tables of a monitor. A pattern is matched against the start of formatted names."""

    def __init__(self) -> None:
        sorts = ("activation", "activation_difference", "parameter", "parameter_difference", "gradient")
        self._tables = {sort: MetricTable(sort) for sort in sorts}

    @property
    def activation_metrics(self) -> Listed:
        """Return ``{name: (pattern, function, aggregation)}``. The four properties below do the same."""
        return self._tables["activation"].listed

    @property
    def activation_difference_metrics(self) -> Listed:
        return self._tables["activation_difference"].listed

    @property
    def parameter_metrics(self) -> Listed:
        return self._tables["parameter"].listed

    @property
    def parameter_difference_metrics(self) -> Listed:
        return self._tables["parameter_difference"].listed

    @property
    def gradient_metrics(self) -> Listed:
        return self._tables["gradient"].listed

    def _metric_added(self) -> None:
        """React to a new metric of outputs."""

    def add_activation_metric(
        self,
        metric_name: str,
        metric_fn: Callable[[Tensor], object] | str,
        metric_regex: str = ".*",
        metric_aggregation_fn: Aggregate | None = None,
    ) -> None:
        """Add a metric of module outputs, logged as ``activation/{module}/{metric}``.

            monitor.add_activation_metric("l2", "l2")                        # a statistic: one pass for all of them
            monitor.add_activation_metric("rows", lambda x: x.norm(dim=-1))  # any function, averaged over its elements

        metric_fn: a function of a tensor that returns a number or a tensor, or the name of a statistic: ``count``,
            ``mean``, ``std``, ``min``, ``max``, ``absmax``, ``l1``, ``l2``, ``rms``, ``zeros``, ``nans``, ``infs``.
        metric_regex: applies the metric to modules whose name it matches.
        metric_aggregation_fn: combines all answers of a step, one flat tensor; their mean is logged by default.

        Raises `MonitorError` if the name is taken or the function, statistic or pattern is not valid.
        """
        self._tables["activation"].add(metric_name, metric_fn, metric_regex, metric_aggregation_fn)
        self._metric_added()

    def add_activation_difference_metric(
        self,
        metric_name: str,
        metric_fn: Callable[[Tensor, Tensor], object] | str,
        metric_regex: str = ".*",
        metric_aggregation_fn: Aggregate | None = None,
    ) -> None:
        """Add a metric of an output and the reference's, logged as ``activation_difference/{module}/{metric}``.

        A statistic is of the difference of both.
        """
        self._tables["activation_difference"].add(metric_name, metric_fn, metric_regex, metric_aggregation_fn)
        self._metric_added()

    def add_parameter_metric(
        self, metric_name: str, metric_fn: Callable[[Tensor], object] | str, metric_regex: str = ".*"
    ) -> None:
        """Add a metric of parameters, logged as ``parameter/{parameter}/{metric}``."""
        self._tables["parameter"].add(metric_name, metric_fn, metric_regex)

    def add_parameter_difference_metric(
        self, metric_name: str, metric_fn: Callable[[Tensor, Tensor], object] | str, metric_regex: str = ".*"
    ) -> None:
        """Add a metric of a parameter and the reference's, logged as ``parameter_difference/{parameter}/{metric}``."""
        self._tables["parameter_difference"].add(metric_name, metric_fn, metric_regex)

    def add_gradient_metric(
        self, metric_name: str, metric_fn: Callable[[Tensor], object] | str, metric_regex: str = ".*"
    ) -> None:
        """Add a metric of gradients, logged as ``gradient/{parameter}/{metric}``."""
        self._tables["gradient"].add(metric_name, metric_fn, metric_regex)


# -- results ---------------------------------------------------------------------------------------------------


class Found(NamedTuple):
    """The result of a metric: a number with its weight, or all answers if the metric has an aggregation."""

    key: str
    value: float | Tensor
    weight: float = 1.0
    aggregate: Aggregate | None = None


@final
class InHand:
    """Results that do not pass a hook: statistics of parameters, gradients and heads, and numbers of a check."""

    def __init__(self) -> None:
        self._found: list[Found] = []
        self._block = StatsBlock(64, scratch=1)
        self._wanted: list[tuple[str, int, int]] = []  # key, row, column
        self._rows = 0

    def add(self, found: Found) -> None:
        """Add a number."""
        self._found.append(found)

    def measure(self, value: Tensor, keys: Mapping[str, str]) -> None:
        """Measure a value. ``keys`` maps each wanted key to a statistic."""
        row = self._rows
        self._rows += 1
        if row == len(self._block):
            self._block.grow(2 * row)
        if not self._block.take_any(row, value):
            self._block.measure_into(row, 0, value.detach())
        self._wanted += [(key, row, STATISTICS.index(statistic)) for key, statistic in keys.items()]

    def drain(self) -> Iterator[Found]:
        """Yield every number since the last call."""
        found, self._found = self._found, []
        yield from found
        if not self._wanted:
            return
        numbers = self._block.results()
        wanted, self._wanted, self._rows = self._wanted, [], 0
        self._block.reset()
        self._block.forget()
        for key, row, column in wanted:
            yield Found(key, float(numbers[row, column]))


def leaf_name(module_name: str, leaf: str) -> str:
    """Return the name of one tensor of an output that has several: ``lstm[1.0]``."""
    return f"{module_name}[{leaf}]" if leaf else module_name


@final
class OutputWatch:
    """Record the activation metrics of a model's modules. ``names`` maps each module to its formatted name.

    Each step of the monitor is one or more steps of the watch. `drain` ends one and returns its results.
    """

    def __init__(self, model: nn.Module, names: Mapping[nn.Module, str], metrics: Iterable[Metric]) -> None:
        self._metrics = [each for each in metrics if any(map(partial(_may_pick, each), names.values()))]
        self._records: list[StepRecord] = []
        self._live = True
        self._pause: Any = None
        self._by_path = {}
        self._layouts: dict[int, tuple[ScalarBlock, list[tuple[str, int, int, int]]]] = {}
        taps = self._taps(names)
        self._watch = watch(model, None, taps, sinks=[self], strict=True, follow_model=True) if taps else None
        if self._watch is not None:
            self._by_path = {
                port.site.path: names[port.site.module]
                for port in self._watch.plan.ports
                if port.site.module is not None
            }

    def _taps(self, names: Mapping[nn.Module, str]) -> list[Tap]:
        def live(_: Moment) -> bool:
            return self._live

        taps: list[Tap] = []
        statistics = tuple(each for each in self._metrics if each.is_statistic)
        if statistics:
            taps.append(tap(_selector(names, statistics), Stats(), when=live))
        functions = [each for each in self._metrics if not each.is_statistic]
        for pattern in dict.fromkeys(each.pattern for each in functions):
            group = tuple(each for each in functions if each.pattern == pattern)
            taps.append(tap(_selector(names, group), Answers(group), when=live))
        return taps

    # -- steps -------------------------------------------------------------------------------------------------

    def begin(self, monitored: bool, silenced: bool) -> None:
        """Begin a step. The model carries hooks only if it is monitored."""
        if self._watch is None or (not monitored and not self._live):
            return
        self.set_recording(True)
        self._live = monitored
        self._watch.set_step(self._watch.step_number + 1)
        self.set_recording(monitored and not silenced)

    def set_recording(self, on: bool) -> None:
        """Record model calls from now on, or stop doing so."""
        if self._watch is None or on == (self._pause is None):
            return
        if on:
            pause, self._pause = self._pause, None
            pause.__exit__(None, None, None)
        else:
            self._pause = self._watch.paused()
            self._pause.__enter__()

    def drain(self, *, go_on: bool) -> list[Found]:
        """End the watch's step and return its results. With ``go_on``, begin another."""
        if self._watch is None:
            return []
        recording = self._pause is None
        self.set_recording(True)
        self._watch.end_step()
        if go_on:
            self._watch.set_step(self._watch.step_number + 1)
        self.set_recording(recording and go_on)
        records, self._records = self._records, []
        return [found for record in records for found in self._results(record)]

    def write(self, record: StepRecord) -> None:
        """Take a record of the watch."""
        self._records.append(record)

    def hint(self, topic: str, message: str) -> None:
        """Drop a hint of the watch: a monitor's step may hold no pass of the model."""

    def close(self) -> None:
        """Remove every hook."""
        if self._watch is not None:
            self._watch.close()

    # -- results -----------------------------------------------------------------------------------------------

    def _results(self, record: StepRecord) -> Iterator[Found]:
        for block in record.scalars:
            numbers, present = block.values.tolist(), block.present
            for key, row, column, weight in self._layout(block):
                if present is None or present[row]:
                    line = numbers[row]
                    yield Found(key, line[column], 1.0 if weight < 0 else line[weight])
        for item in record.tensors:
            name = item.field.removeprefix(_ANSWER)
            (metric,) = (each for each in self._metrics if each.name == name)
            yield Found(self._key(item.site, name), item.value, 1.0, metric.aggregate)

    def _layout(self, block: ScalarBlock) -> list[tuple[str, int, int, int]]:
        """Return the key, row, column and weight's column of each number. Blocks of equal shape share their names."""
        known = self._layouts.get(id(block.sites))
        if known is not None and known[0].sites is block.sites and known[0].statistics is block.statistics:
            return known[1]
        layout: list[tuple[str, int, int, int]] = []
        columns = {statistic: column for column, statistic in enumerate(block.statistics)}
        for row, site in enumerate(block.sites):
            if block.statistics == STATISTICS:
                place = self._place(site)
                layout += [
                    (self._key(site, each.name), row, columns[each.function], -1)
                    for each in self._metrics
                    if each.is_statistic and each.matches(place)
                ]
            else:
                layout += [
                    (
                        self._key(site, each.name),
                        row,
                        columns[_ANSWER + each.name],
                        columns[_COUNT + each.name],
                    )
                    for each in self._metrics
                    if _ANSWER + each.name in columns
                ]
        self._layouts[id(block.sites)] = (block, layout)
        return layout

    def _place(self, site: str) -> tuple[str, str]:
        parts = Name.read(site)
        name = self._by_path[parts.path]
        return name, leaf_name(name, parts.leaf)

    def _key(self, site: str, metric: str) -> str:
        return f"activation/{self._place(site)[1]}/{metric}"


def _may_pick(metric: Metric, name: str) -> bool:
    """Return True if a metric may apply to an output of this module. A bracket may name one of its tensors."""
    return metric.pattern.match(name) is not None or "[" in metric.pattern.pattern


def _selector(names: Mapping[nn.Module, str], metrics: tuple[Metric, ...]) -> Selector:
    def picks_port(site: Site) -> bool:
        name = None if site.module is None else names.get(site.module)
        return site.kind == "output" and name is not None and any(_may_pick(each, name) for each in metrics)

    def picks_leaf(site: Site) -> bool:
        assert site.module is not None
        name = names[site.module]
        return any(each.matches((name, leaf_name(name, site.leaf))) for each in metrics)

    title = f"modules with {', '.join(each.name for each in metrics)}"
    return Selector(title, picks_port, picks_leaf, kinds=frozenset({"output"}), whole=False)
