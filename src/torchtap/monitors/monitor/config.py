"""A `Monitor`'s settings out of a training's configuration: a dict, or a file in JSON, YAML or TOML.

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
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from torchtap.errors import MissingExtraError, PlanError
from torchtap.sanitize import parse_json, parse_toml, read_file, shown

__all__ = ["MonitorConfig", "read_config"]

_TYPES: dict[str, tuple[type, ...]] = {
    "monitor_layers": (dict, list, tuple),
    "monitor_epochs": (list, tuple, range),
    "monitor_batch_indices": (list, tuple, range),
    "monitor_output_dir": (str, os.PathLike),
    "monitor_format": (str,),
    "monitor_memory_ceiling": (int,),
    "monitor_asynchronous": (bool,),
}
# What `Monitor` calls it, where that is another word.
_ARGUMENTS = {"monitor_layers": "layers_to_monitor", "monitor_epochs": "epochs_to_record"}


@final
@dataclass(frozen=True, slots=True)
class MonitorConfig:
    """What a configuration says about monitoring. Layers and numbers are checked when the monitor is made."""

    arguments: dict[str, Any]
    source: str

    @classmethod
    def of(cls, settings: object, source: str = "the configuration") -> MonitorConfig:
        """From a configuration's data."""
        if not isinstance(settings, Mapping):
            raise PlanError(
                f"{source} is a {type(settings).__name__}: it has to be a table of names to values"
            )
        found = {key: value for key, value in settings.items() if str(key).startswith("monitor_")}
        for key, value in found.items():
            _check(source, key, value)
        return cls({_argument(key): value for key, value in found.items()}, source)

    def completed(self, given: Mapping[str, object]) -> dict[str, Any]:
        """The arguments for a `Monitor`: those given, then those configured. An error names all that both lack."""
        arguments = {**self.arguments, **{key: value for key, value in given.items() if value is not None}}
        needed = ["monitor_layers", "monitor_epochs", "monitor_output_dir"]
        single = _single_layers(arguments.get("layers_to_monitor"))
        if single:
            needed.append("monitor_batch_indices")
        lacking = [key for key in needed if _argument(key) not in arguments]
        if lacking:
            because = f" (these layers are 'single': {single})" if "monitor_batch_indices" in lacking else ""
            raise PlanError(
                f"{self.source} has no {' and no '.join(map(repr, lacking))}{because}: add to it, or give "
                f"{', '.join(f'{_argument(key)}=' for key in lacking)} beside it"
            )
        return arguments


def _argument(key: str) -> str:
    return _ARGUMENTS.get(key, key.removeprefix("monitor_"))


def _check(source: str, key: str, value: object) -> None:
    if key not in _TYPES:
        near = difflib.get_close_matches(key, _TYPES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(_TYPES)}"
        raise PlanError(f"{source} has {key!r}{hint}")
    if not isinstance(value, _TYPES[key]) or (isinstance(value, bool) and bool not in _TYPES[key]):
        wanted = " or ".join(each.__name__ for each in _TYPES[key] if each in (dict, list, str, int, bool))
        raise PlanError(f"{source}: {key!r} is {value!r}; it has to be a {wanted}")


def _single_layers(layers: object) -> list[str]:
    """The layers of which given batches are recorded; what is wrong with them is told when the monitor is made."""
    if isinstance(layers, Mapping):
        return [
            str(name)
            for name, options in layers.items()
            if not isinstance(options, Mapping) or options.get("record_type", "single") == "single"
        ]
    return [str(name) for name in layers] if isinstance(layers, (list, tuple)) else []


def read_config(config: str | os.PathLike[str] | Mapping[str, object]) -> MonitorConfig:
    """The monitor's part of a configuration: of a file, or of a dict."""
    if isinstance(config, Mapping):
        return MonitorConfig.of(config)
    place = Path(config)
    try:
        text = read_file(place).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        said = getattr(error, "strerror", None) or error
        raise PlanError(f"the configuration {str(place)!r} cannot be read: {said}") from error
    try:
        settings = _parse(place, text)
    except (ValueError, RecursionError) as error:
        if isinstance(error, PlanError):
            raise
        said = shown(str(error))
        raise PlanError(f"the configuration {str(place)!r} is not what its suffix says: {said}") from error
    return MonitorConfig.of(settings, str(place))


def _parse(place: Path, text: str) -> object:
    match place.suffix.lower():
        case ".json":
            return parse_json(text)
        case ".toml":
            return parse_toml(text.encode("utf-8"))
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
