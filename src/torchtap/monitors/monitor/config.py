"""A `Monitor`'s settings out of a training's configuration file: JSON, YAML or TOML, told by the suffix.

Only keys that begin with ``monitor_`` are looked at; the rest belongs to the training. The schema:

    monitor_layers          list of names, or {name: {alias: text or null, record_type: single | epoch_full}}
    monitor_epochs          list of whole numbers
    monitor_batch_indices   list of whole numbers, needed with any `single` layer
    monitor_output_dir      text
    monitor_format          pt | npz | safetensors
    monitor_memory_ceiling  bytes
    monitor_asynchronous    true | false
"""

from __future__ import annotations

import difflib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from torchtap.errors import MissingExtraError, PlanError

__all__ = ["MonitorConfig", "read_config"]

_TYPES: dict[str, tuple[type, ...]] = {
    "monitor_layers": (dict, list),
    "monitor_epochs": (list,),
    "monitor_batch_indices": (list,),
    "monitor_output_dir": (str,),
    "monitor_format": (str,),
    "monitor_memory_ceiling": (int,),
    "monitor_asynchronous": (bool,),
}
_OPTIONS = ("format", "memory_ceiling", "asynchronous")


@final
@dataclass(frozen=True, slots=True)
class MonitorConfig:
    """What a configuration says about monitoring. Layers and numbers are checked when the monitor is made."""

    layers: dict[str, Any] | list[str]
    epochs: list[int]
    batch_indices: list[int] | None = None
    output_dir: str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, settings: Any, source: str = "the configuration") -> MonitorConfig:
        """From a configuration's data."""
        if not isinstance(settings, dict):
            raise PlanError(
                f"{source} is a {type(settings).__name__}: it has to be a table of names to values"
            )
        found = {key: value for key, value in settings.items() if str(key).startswith("monitor_")}
        for key, value in found.items():
            if key not in _TYPES:
                near = difflib.get_close_matches(key, _TYPES, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(_TYPES)}"
                raise PlanError(f"{source} has {key!r}{hint}")
            if not isinstance(value, _TYPES[key]) or (isinstance(value, bool) and bool not in _TYPES[key]):
                wanted = " or ".join(each.__name__ for each in _TYPES[key])
                raise PlanError(f"{source}: {key!r} is {value!r}; it has to be a {wanted}")
        for needed in ("monitor_layers", "monitor_epochs"):
            if needed not in found:
                raise PlanError(f"{source} has no {needed!r}")
        return cls(
            layers=found["monitor_layers"],
            epochs=found["monitor_epochs"],
            batch_indices=found.get("monitor_batch_indices"),
            output_dir=found.get("monitor_output_dir"),
            options={key: found[f"monitor_{key}"] for key in _OPTIONS if f"monitor_{key}" in found},
        )


def read_config(path: str | os.PathLike[str]) -> MonitorConfig:
    """The monitor's part of a configuration file."""
    place = Path(path)
    try:
        text = place.read_text(encoding="utf-8")
    except OSError as error:
        raise PlanError(
            f"the configuration {str(place)!r} cannot be read: {error.strerror or error}"
        ) from error
    try:
        settings = _parse(place, text)
    except ValueError as error:
        if isinstance(error, PlanError):
            raise
        raise PlanError(f"the configuration {str(place)!r} is not what its suffix says: {error}") from error
    return MonitorConfig.of(settings, str(place))


def _parse(place: Path, text: str) -> Any:
    match place.suffix.lower():
        case ".json":
            return json.loads(text)
        case ".toml":
            import tomllib

            return tomllib.loads(text)
        case ".yaml" | ".yml":
            try:
                import yaml
            except ImportError:
                raise MissingExtraError(
                    f"reading {place.name} needs PyYAML: pip install 'torchtap[yaml]', or write the "
                    "configuration as JSON or TOML",
                    extra="yaml",
                ) from None
            try:
                return yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise ValueError(str(error)) from error
    raise PlanError(
        f"the configuration {str(place)!r} ends in {place.suffix!r}; known are .json, .yaml, .toml"
    )
