"""What is noted of a training beside numbers: facts, each told once, and the structure that it was set up with.

Both are plain data that goes into a run's events and comes back from there, so that a finished run says the same as a
live one. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, final

from torchtap.sanitize import shown

__all__ = ["FACT", "STRUCTURE", "Fact", "Structure", "read_fact", "read_structure"]

FACT, STRUCTURE = "fact", "structure"  # the kinds of events


@final
@dataclass(frozen=True, slots=True)
class Fact:
    """Something that was seen at a site in a step: exact, and told once for each name and site."""

    name: str
    site: str
    step: int
    value: float = 0.0
    text: str = ""

    def to_dict(self) -> dict[str, object]:
        """As plain data."""
        return asdict(self)


@final
@dataclass(frozen=True, slots=True)
class Structure:
    """How a training was set up, as its first update showed it."""

    trainable: frozenset[str] = frozenset()  # sites (kind param) that require a gradient
    frozen: frozenset[str] = frozenset()
    optimized: frozenset[str] = frozenset()  # sites (kind param) that an optimizer holds
    optimizers: tuple[str, ...] = ()  # their classes, with the module they come from
    fresh: bool = False  # whether the weights are as they were initialised
    sizes: Mapping[str, int] = field(default_factory=dict)  # elements of each parameter

    def to_dict(self) -> dict[str, object]:
        """As plain data."""
        return {
            "trainable": sorted(self.trainable),
            "frozen": sorted(self.frozen),
            "optimized": sorted(self.optimized),
            "optimizers": list(self.optimizers),
            "fresh": self.fresh,
            "sizes": dict(self.sizes),
        }


def read_fact(event: Mapping[str, Any]) -> Fact | None:
    """The fact of an event that anybody may have written; None where it is none."""
    try:
        return Fact(
            str(event["name"]),
            str(event["site"]),
            int(event["step"]),
            float(event.get("value", 0.0)),
            shown(str(event.get("text", ""))),
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def read_structure(event: Mapping[str, Any]) -> Structure | None:
    """The structure of an event; None where it is none."""
    try:
        sizes = event.get("sizes", {})
        return Structure(
            frozenset(map(str, event["trainable"])),
            frozenset(map(str, event["frozen"])),
            frozenset(map(str, event["optimized"])),
            tuple(map(str, event.get("optimizers", ()))),
            bool(event.get("fresh", False)),
            {str(name): int(size) for name, size in sizes.items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None
