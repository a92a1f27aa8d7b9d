"""The five sorts of metrics that a monitor has, the calls that add them, and which of them apply where.

Patterns are matched once for each place.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, final

from torch import Tensor

from torchtap.errors import MonitorError
from torchtap.monitors.module_monitor.expressions import Reading, recognise
from torchtap.monitors.module_monitor.ledger import BoundMetrics, PlacedMetric

__all__ = ["MetricRegistry", "MetricTable"]

Listed = dict[str, tuple[re.Pattern[str], Callable[..., Any], Callable[..., Any] | None]]


@final
class MetricTable:
    """All metrics of one sort. ``listed`` maps a name to ``(pattern, function, aggregation)``."""

    def __init__(self, sort: str, subject: str, *, arguments: int = 1, scalar: bool = False) -> None:
        self.listed: Listed = {}
        self._sort = sort  # "Activation metric" ...: for errors
        self._subject = subject
        self._arguments = arguments
        self._scalar = scalar
        self._readings: dict[str, Reading] = {}
        self._bounds: dict[tuple[str, str], BoundMetrics] = {}
        self.edition = 0  # grows with every metric: whoever keeps a binding sees that it is an old one

    def add(
        self,
        name: str,
        function: Callable[..., object],
        pattern: str,
        aggregate: Callable[..., object] | None = None,
    ) -> None:
        """Add a metric; its name has to be new."""
        if name in self.listed:
            raise MonitorError(f"{self._sort} {name} already exists. Give it another name.")
        if not callable(function):
            raise MonitorError(f"{self._sort} {name}: {function!r} is not a function")
        try:
            compiled = re.compile(pattern)
        except re.error as error:
            raise MonitorError(
                f"{self._sort} {name}: {pattern!r} is not a regular expression: {error}"
            ) from error
        self.listed[name] = (compiled, function, aggregate)
        self._readings[name] = recognise(function, self._arguments)
        self._bounds.clear()
        self.edition += 1

    def at(self, prefix: str, place: str, *spellings: str) -> BoundMetrics:
        """The metrics whose pattern matches one of the spellings, logged as ``prefix/place/metric``."""
        bound = self._bounds.get((prefix, place))
        if bound is None:
            metrics = [
                PlacedMetric(
                    f"{prefix}/{place}/{name}", name, place, function, aggregate, self._readings[name]
                )
                for name, (pattern, function, aggregate) in self.listed.items()
                if any(pattern.match(spelling) for spelling in spellings or (place,))
            ]
            bound = BoundMetrics(place, self._subject, metrics, self._scalar)
            self._bounds[prefix, place] = bound
        return bound


class MetricRegistry:
    """Metrics by name. A name is added once for each sort; its pattern is matched against the start of names."""

    def __init__(self) -> None:
        self._activations = MetricTable("Activation metric", "activations")
        self._activation_differences = MetricTable(
            "Activation difference metric", "activation differences", arguments=2
        )
        self._parameters = MetricTable("Parameter metric", "parameter", scalar=True)
        self._parameter_differences = MetricTable(
            "Parameter difference metric", "parameter difference", arguments=2, scalar=True
        )
        self._gradients = MetricTable("Gradient metric", "gradient of", scalar=True)

    @property
    def activation_metrics(self) -> Listed:
        """Name to ``(pattern, function, aggregation)``; so are the four others."""
        return self._activations.listed

    @property
    def activation_difference_metrics(self) -> Listed:
        return self._activation_differences.listed

    @property
    def parameter_metrics(self) -> Listed:
        return self._parameters.listed

    @property
    def parameter_difference_metrics(self) -> Listed:
        return self._parameter_differences.listed

    @property
    def gradient_metrics(self) -> Listed:
        return self._gradients.listed

    def _metric_added(self) -> None:
        """A metric of outputs was added."""

    def add_activation_metric(
        self,
        metric_name: str,
        metric_fn: Callable[[Tensor], object],
        metric_regex: str = ".*",
        metric_aggregation_fn: Callable[[Tensor], object] | None = None,
    ) -> None:
        """A metric of module outputs, logged as ``activation/{module}/{metric}``."""
        self._activations.add(metric_name, metric_fn, metric_regex, metric_aggregation_fn)
        self._metric_added()

    def add_activation_difference_metric(
        self,
        metric_name: str,
        metric_fn: Callable[[Tensor, Tensor], object],
        metric_regex: str = ".*",
        metric_aggregation_fn: Callable[[Tensor], object] | None = None,
    ) -> None:
        """A metric of an output and the reference's, logged as ``activation_difference/{module}/{metric}``."""
        self._activation_differences.add(metric_name, metric_fn, metric_regex, metric_aggregation_fn)
        self._metric_added()

    def add_parameter_metric(
        self, metric_name: str, metric_fn: Callable[[Tensor], object], metric_regex: str = ".*"
    ) -> None:
        """A metric of parameters, logged as ``parameter/{parameter}/{metric}``."""
        self._parameters.add(metric_name, metric_fn, metric_regex)

    def add_parameter_difference_metric(
        self, metric_name: str, metric_fn: Callable[[Tensor, Tensor], object], metric_regex: str = ".*"
    ) -> None:
        """A metric of a parameter and the reference's, logged as ``parameter_difference/{parameter}/{metric}``."""
        self._parameter_differences.add(metric_name, metric_fn, metric_regex)

    def add_gradient_metric(
        self, metric_name: str, metric_fn: Callable[[Tensor], object], metric_regex: str = ".*"
    ) -> None:
        """A metric of gradients, logged as ``gradient/{parameter}/{metric}``."""
        self._gradients.add(metric_name, metric_fn, metric_regex)
