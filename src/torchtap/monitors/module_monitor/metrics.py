"""The five sorts of metrics that a monitor has, and the calls that add them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from torchtap.monitors.module_monitor.binding import Listed, MetricTable

__all__ = ["MetricRegistry"]


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

    def add_activation_metric(
        self,
        metric_name: str,
        metric_fn: Callable[[Tensor], object],
        metric_regex: str = ".*",
        metric_aggregation_fn: Callable[[Tensor], object] | None = None,
    ) -> None:
        """A metric of module outputs, logged as ``activation/{module}/{metric}``."""
        self._activations.add(metric_name, metric_fn, metric_regex, metric_aggregation_fn)

    def add_activation_difference_metric(
        self,
        metric_name: str,
        metric_fn: Callable[[Tensor, Tensor], object],
        metric_regex: str = ".*",
        metric_aggregation_fn: Callable[[Tensor], object] | None = None,
    ) -> None:
        """A metric of an output and the reference's, logged as ``activation_difference/{module}/{metric}``."""
        self._activation_differences.add(metric_name, metric_fn, metric_regex, metric_aggregation_fn)

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
