"""What held in good runs, as plain data, and its file: JSON that people can read and change.

The file may come from anybody: it is bounded in size, and each part is checked before it is used. Whatever is wrong
with it is a `DiagnosisError`. No torch.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from torchtap.errors import DiagnosisError, OutputError
from torchtap.sanitize import open_file, parse_json

__all__ = ["Bound", "Invariants", "SiteHabits", "read_invariants"]

VERSION = 1
_LARGEST = 256 * 2**20
_NAME = "torchtap_invariants"


@final
@dataclass(frozen=True, slots=True)
class Bound:
    """A range from one step to another, both included; the margin is in it. None is no limit."""

    first: int
    last: int
    low: float | None
    high: float | None


@final
@dataclass(slots=True)
class SiteHabits:
    """What held at one site in one phase."""

    always: bool = False  # it came whenever others of its kind did
    moves: bool | None = None  # a parameter that changed from record to record, or never; None: sometimes
    ranges: dict[str, list[Bound]] = field(default_factory=dict)
    constant: dict[str, float] = field(default_factory=dict)


@final
@dataclass(slots=True)
class Invariants:
    """What held in all of some good runs."""

    runs: list[str]
    phases: dict[str, dict[str, SiteHabits]]
    equal: list[list[str]]  # sites of training that always had the same numbers
    falls: list[str]  # logged numbers that ended lower than they began
    last_step: int

    def write(self, path: str | os.PathLike[str]) -> None:
        """Keep them in a file."""
        text = json.dumps(self.to_dict(), indent=1, allow_nan=False)
        try:
            Path(path).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise OutputError(f"the invariants cannot be written to {os.fspath(path)}: {error}") from error

    def to_dict(self) -> dict[str, object]:
        """As plain data, for JSON."""
        phases = {
            phase: {site: _plain(habits) for site, habits in sites.items()}
            for phase, sites in self.phases.items()
        }
        return {
            _NAME: VERSION,
            "runs": self.runs,
            "last_step": self.last_step,
            "equal": self.equal,
            "falls": self.falls,
            "phases": phases,
        }


def _plain(habits: SiteHabits) -> dict[str, object]:
    ranges = {
        statistic: [[each.first, each.last, each.low, each.high] for each in bounds]
        for statistic, bounds in habits.ranges.items()
    }
    return {
        "always": habits.always,
        "moves": habits.moves,
        "constant": habits.constant,
        "ranges": ranges,
    }


def read_invariants(path: str | os.PathLike[str]) -> Invariants:
    """The invariants of a file that `torchtap learn` wrote."""
    place = os.fspath(path)
    try:
        with open_file(place) as opened:
            raw = opened.read(_LARGEST + 1)
    except (OSError, ValueError) as error:
        raise DiagnosisError(f"the invariants at {place} cannot be read: {error}") from error
    if len(raw) > _LARGEST:
        raise DiagnosisError(
            f"{place} has more than {_LARGEST} bytes: it is no file that `torchtap learn` wrote"
        )
    try:
        return _invariants(parse_json(raw, strict=True))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise DiagnosisError(
            f"{place} is not a file of invariants, or damaged ({type(error).__name__}: {error}); "
            "`torchtap learn GOOD_RUN... -o FILE` writes one"
        ) from error


def _invariants(read: Any) -> Invariants:
    version = _mapping(read).get(_NAME)
    if version != VERSION:
        raise ValueError(f"its {_NAME!r} is {version!r}, and this torchtap reads {VERSION}")
    return Invariants(
        _texts(read["runs"]),
        {
            phase: {site: _habits(_mapping(each)) for site, each in _mapping(sites).items()}
            for phase, sites in _mapping(read["phases"]).items()
        },
        [_texts(group) for group in _list(read["equal"])],
        _texts(read["falls"]),
        _whole(read["last_step"]),
    )


def _habits(read: Mapping[str, object]) -> SiteHabits:
    moves = read["moves"]
    if not isinstance(read["always"], bool) or not (moves is None or isinstance(moves, bool)):
        raise ValueError("'always' and 'moves' are true or false")
    ranges = {
        statistic: [_bound(each) for each in _list(bounds)]
        for statistic, bounds in _mapping(read["ranges"]).items()
    }
    constant = {statistic: _number(value) for statistic, value in _mapping(read["constant"]).items()}
    return SiteHabits(read["always"], moves, ranges, constant)


def _bound(read: object) -> Bound:
    first, last, low, high = _list(read)
    return Bound(_whole(first), _whole(last), _or_none(_number, low), _or_none(_number, high))


def _or_none(check: Callable[[object], float], value: object) -> float | None:
    return None if value is None else check(value)


def _mapping(value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"a table was expected, not {type(value).__name__}")
    return value


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"a list was expected, not {type(value).__name__}")
    return value


def _texts(value: Any) -> list[str]:
    if not all(isinstance(each, str) for each in _list(value)):
        raise ValueError("a list of names was expected")
    return list(value)


def _whole(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= 2**63:
        raise ValueError("a step is a whole number")
    return value


def _number(value: object) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError("a limit is a finite number")
    return float(value)
