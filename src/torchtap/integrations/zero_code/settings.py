"""Settings of the recording of a script, from the ``TORCHTAP`` variable: a TOML file, JSON text, or ``1``.

A plan file::

    out = "runs/exp1"          # the run folder
    every = 10                 # steps between two records of the default plan
    share = 0.02               # of the training's time at most; the interval grows where this is not enough
    model = "net"              # a variable of the script, or "package.module:name"; found by itself otherwise
    sinks = ["tensorboard:logs"]
    doctor = true              # a doctor's plan in place of the default one, and findings while it trains

    [[tap]]                    # in place of the default plan; keys as in `torchtap.tap`
    select = "*:output"
    keep = "stats"             # or { reduction = "histogram", bins = 64 }
    every = 10

    [labels]
    note = "first try"
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, final

from torchtap.errors import PlanError
from torchtap.sanitize import parse_json, parse_toml, read_file, shown

__all__ = ["DEFAULT_SITES", "Settings", "read_plan_file"]

DEFAULT_SITES = ("*:output", "*:grad_output", "*:param", "*:param_grad", "*:update", ":lr")


@final
@dataclass(frozen=True, slots=True)
class Settings:
    """The selected values, the run folder, and the share of time."""

    out: str | None = None
    every: int = 10
    share: float | None = 0.02
    model: str | None = None
    tap: tuple[Mapping[str, Any], ...] = ()
    sinks: tuple[str, ...] = ()
    doctor: bool = False
    labels: Mapping[str, Any] = field(default_factory=dict)
    dry_run: bool = False  # state the cost after the first pass, and end the script

    @classmethod
    def of(cls, values: Mapping[str, Any], where: str) -> Settings:
        """Settings from plain data; ``where`` names their origin in errors."""
        known = cls.__dataclass_fields__
        for name in values:
            if name not in known:
                raise PlanError(f"{where}: there is no setting {name!r}; known are {', '.join(known)}")
        given: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in values.items()}
        made = cls(**given)
        made._check(where)
        return made

    def _check(self, where: str) -> None:
        if type(self.every) is not int or self.every < 1:
            raise PlanError(f"{where}: every={self.every!r}: give a whole number of steps from 1 on")
        if self.share is not None and not (isinstance(self.share, (int, float)) and 0 < self.share < 1):
            raise PlanError(f"{where}: share={self.share!r}: a share of the time lies between 0 and 1")
        if not isinstance(self.doctor, bool):
            raise PlanError(f"{where}: doctor={self.doctor!r}: it is true or false")
        if self.doctor and self.tap:
            raise PlanError(f"{where}: a doctor brings its own plan; leave out either doctor or the taps")
        for each in self.tap:
            _check_tap(each, where)

    @classmethod
    def from_environment(cls, words: str) -> Settings:
        """Return the settings in the ``TORCHTAP`` variable."""
        if words.lstrip().startswith("{"):
            try:
                values = parse_json(words)
            except ValueError as error:
                raise PlanError(f"TORCHTAP is no JSON: {shown(str(error))}") from None
            return cls.of(values, "TORCHTAP")
        if words.lower() in ("1", "true", "yes", "on"):
            return cls()
        return read_plan_file(words)

    def as_dict(self) -> dict[str, Any]:
        """The settings as plain data."""
        return asdict(self)

    def to_environment(self) -> str:
        """The words for the ``TORCHTAP`` variable of another process."""
        return json.dumps(self.as_dict())

    def folder(self) -> str:
        """Return the run folder: the given one, or one that all processes of a launch agree on."""
        if self.out is not None:
            return self.out
        script = Path(getattr(sys.modules.get("__main__"), "__file__", None) or sys.argv[0] or "script").stem
        launched = "RANK" in os.environ or "LOCAL_RANK" in os.environ
        mark = f"launch-{os.getppid()}" if launched else time.strftime("%Y%m%d-%H%M%S")
        return str(Path("runs") / f"{script}-{mark}")


def read_plan_file(path: str) -> Settings:
    """The settings of a TOML file."""
    try:
        values = parse_toml(read_file(path))
    except OSError as error:
        raise PlanError(f"the plan {path!r} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise PlanError(f"the plan {path!r} is no TOML: {shown(str(error))}") from None
    return Settings.of(values, f"plan {path!r}")


def _check_tap(tap: object, where: str) -> None:
    if not isinstance(tap, Mapping) or "select" not in tap:
        raise PlanError(f"{where}: {tap!r} is no tap: it has to say what to select")
