"""Numbers of the training's own, kept until the record of their step and phase is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast, final

from torch import Tensor

from torchtap.errors import SessionError
from torchtap.plan.names import site_name
from torchtap.receive.collect import PendingNumbers, numbers_on_host
from torchtap.store.record import ScalarBlock, TensorItem

__all__ = ["Logged"]

_STATISTICS = ("value",)


@final
class Logged:
    """What was logged since it was last taken, by phase."""

    def __init__(self) -> None:
        self._numbers: dict[str, dict[str, Any]] = {}
        self._tensors: dict[str, dict[str, Tensor]] = {}
        self._known: dict[tuple[str, ...], tuple[str, ...]] = {}  # sites: equal steps share their names

    @property
    def empty(self) -> bool:
        """Whether nothing was."""
        return not self._numbers and not self._tensors

    @property
    def phases(self) -> list[str]:
        """The phases that anything was logged in."""
        return list(dict.fromkeys((*self._numbers, *self._tensors)))

    def add(
        self,
        phase: str,
        name: str | Mapping[str, float | Tensor] | None,
        value: float | Tensor | None,
        numbers: dict[str, float | Tensor],
    ) -> None:
        """Keep numbers of one phase. A name with a colon is a full site name, others become ``:value.<name>``."""
        if name is not None:
            numbers = {**(name if isinstance(name, Mapping) else {name: cast("float", value)}), **numbers}
        for key, number in numbers.items():
            site = key if ":" in key else site_name("", "value", key)
            if isinstance(number, Tensor) and number.numel() != 1:
                self._tensors.setdefault(phase, {})[site] = number.detach().clone()
            elif isinstance(number, Tensor) and not number.is_complex():
                self._numbers.setdefault(phase, {})[site] = number.detach()
            else:
                try:
                    self._numbers.setdefault(phase, {})[site] = float(number)
                except (TypeError, ValueError, RuntimeError):
                    raise SessionError(f"log: {key!r} is {number!r}, which is no number") from None

    def take(
        self, phase: str, coming: list[PendingNumbers]
    ) -> tuple[tuple[ScalarBlock, ...], tuple[TensorItem, ...]]:
        """What was logged in a phase, as a record has it; afterwards nothing is."""
        whole = self._tensors.pop(phase, {})
        tensors = tuple(TensorItem(site, "value", "full", tensor.cpu()) for site, tensor in whole.items())
        logged = self._numbers.pop(phase, {})
        if not logged:
            return (), tensors
        rows: list[list[Any]] = [
            [number.reshape(()) if isinstance(number, Tensor) and not number.is_cpu else float(number)]
            for number in logged.values()
        ]
        values = numbers_on_host(rows, coming)
        sites = tuple(logged)
        return (ScalarBlock(self._known.setdefault(sites, sites), _STATISTICS, values),), tensors
