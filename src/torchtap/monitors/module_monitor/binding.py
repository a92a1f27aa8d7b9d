"""The metrics that were added, and which of them apply where. Matching is done once for each place."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, final

from torchtap.errors import MonitorError
from torchtap.monitors.module_monitor.expressions import Reading, recognise
from torchtap.monitors.module_monitor.ledger import BoundMetrics, PlacedMetric

__all__ = ["MetricTable"]

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
