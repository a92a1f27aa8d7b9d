"""Parameters and their gradients: which there are, under which names, and what is wanted of them.

The list is made anew only when modules or parameters came or went, so that a step costs what the arithmetic costs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor, nn

from torchtap.monitors.module_monitor.ledger import BoundMetrics, Ledger
from torchtap.monitors.module_monitor.metrics import MetricTable
from torchtap.monitors.module_monitor.naming import default_format_module_name_fn, named_parameters

__all__ = ["ParameterList"]


@final
@dataclass(frozen=True, slots=True)
class _NamedParameter:
    """A parameter; ``spellings`` are what patterns are matched against."""

    name: str
    formatted: str
    spellings: tuple[str, ...]
    parameter: nn.Parameter
    owner: dict[str, Any]
    leaf: str


@final
class ParameterList:
    """The parameters of one model and the metrics bound to them."""

    def __init__(self, model: nn.Module, format_name: Callable[[str], str]) -> None:
        self._model = model
        self._format_name = format_name
        self._seen: list[tuple[dict[str, Any], list[Any], dict[str, Any], int]] = []
        self._entries: list[_NamedParameter] = []
        self._bound: dict[str, tuple[int, list[tuple[_NamedParameter, BoundMetrics]]]] = {}

    def take(
        self,
        ledger: Ledger,
        prefix: str,
        table: MetricTable,
        value_of: Callable[[nn.Parameter], Tensor | None],
        missing: Callable[[str], None] = lambda name: None,
    ) -> None:
        """Take a value of each parameter: itself or its gradient. ``missing`` is told where there is none."""
        bounds: list[BoundMetrics] = []
        values: list[Tensor] = []
        for entry, bound in self._bindings(prefix, table):
            value = value_of(entry.parameter)
            if value is None:
                missing(entry.name)
            elif bound.metrics:
                bounds.append(bound)
                values.append(value)
        ledger.take_all(bounds, values)

    def compare(
        self,
        ledger: Ledger,
        table: MetricTable,
        others: dict[str, nn.Parameter],
        missing: Callable[[str], None],
    ) -> None:
        """Compare each parameter with that of the same name in ``others``."""
        for entry, bound in self._bindings("parameter_difference", table):
            other = others.get(entry.formatted)
            if other is None:
                missing(entry.name)
            elif bound.metrics:
                ledger.take_pair(bound, entry.parameter, other)

    def by_formatted_name(self) -> dict[str, nn.Parameter]:
        """All parameters."""
        self._refresh()
        return {entry.formatted: entry.parameter for entry in self._entries}

    def _bindings(self, prefix: str, table: MetricTable) -> list[tuple[_NamedParameter, BoundMetrics]]:
        self._refresh()
        known = self._bound.get(prefix)
        if known is None or known[0] != table.edition:
            bound = [(entry, table.at(prefix, entry.formatted, *entry.spellings)) for entry in self._entries]
            known = self._bound[prefix] = (table.edition, bound)
        return known[1]

    def _refresh(self) -> None:
        if self._seen and self._is_unchanged():
            return
        modules = list(self._model.modules())
        self._seen = [
            (m._modules, list(m._modules.values()), m._parameters, len(m._parameters)) for m in modules
        ]
        places: dict[int, tuple[dict[str, Any], str]] = {}
        for module in modules:
            for leaf, parameter in module._parameters.items():
                places.setdefault(id(parameter), (module._parameters, leaf))
        self._entries = []
        for name, parameter in named_parameters(self._model):
            clean = default_format_module_name_fn(name)
            spellings = (name,) if clean == name else (name, clean)
            self._entries.append(
                _NamedParameter(name, self._format_name(name), spellings, parameter, *places[id(parameter)])
            )
        self._bound.clear()

    def _is_unchanged(self) -> bool:
        for modules, children, parameters, count in self._seen:
            # Modules are equal only to themselves.
            if len(parameters) != count or ((children or modules) and list(modules.values()) != children):
                return False
        return all(entry.owner.get(entry.leaf) is entry.parameter for entry in self._entries)
