"""The settings of a `Monitor`: layers by name, aliases, record types, epochs, batches; from arguments or a file.

Everything is checked before any hook is registered. Each mistake is a ``ValueError`` that names it.

Keys of a configuration that begin with ``monitor_`` are read; the others belong to the training:

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
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, final, get_args

from torch import nn

from torchtap.errors import MissingExtraError, PlanError
from torchtap.sanitize import parse_json, parse_toml, read_file, shown
from torchtap.spi import ModulePath, places

__all__ = [
    "LayerConfig",
    "MonitoredLayer",
    "RecordType",
    "check_numbers",
    "check_settings",
    "completed_config",
    "monitored_layers",
    "read_config",
]

RecordType = Literal["single", "epoch_full"]
LayerConfig: TypeAlias = "Sequence[str] | Mapping[str, Mapping[str, Any] | None]"

# Classes of torch that hold modules and have no forward.
_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@final
@dataclass(frozen=True, slots=True)
class MonitoredLayer:
    """A layer to record. ``path`` is its name among sites, which has no trace of wrappers."""

    name: str
    alias: str
    record_type: RecordType
    path: str


def monitored_layers(model: nn.Module, layers: LayerConfig) -> tuple[MonitoredLayer, ...]:
    """Return the layers of a list or a dict, checked against the model."""
    options = _options(layers)
    found = places(model)
    paths = {path: place.path for place in found for path in (place.path, *place.other_paths)}
    unknown = [name for name, _ in options if not isinstance(name, str) or _clean(name, paths) not in paths]
    if unknown:
        near = difflib.get_close_matches(str(unknown[0]), [path for path in paths if path], n=1, cutoff=0.4)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise PlanError(
            f"The following layers specified in 'layers_to_monitor' do not exist in the model: {unknown}.{hint} "
            f"Available layers: {[path for path in paths if path]}"
        )
    chosen = tuple(_layer(name, given, paths[_clean(name, paths)]) for name, given in options)
    aliases = [layer.alias for layer in chosen]
    for place, alias in enumerate(aliases):
        if alias in aliases[:place]:
            raise PlanError(f"Duplicate alias '{alias}' in layers_to_monitor.")
    modules = {place.path: place.module for place in found}
    for layer in chosen:
        _warn_of_containers(layer, modules[layer.path])
    return chosen


def _options(layers: LayerConfig) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the names with their options."""
    if isinstance(layers, str) or not isinstance(layers, (Mapping, Sequence)):
        raise PlanError(
            f"layers_to_monitor is {layers!r}: give a list of layer names, or a dict of name to "
            "{'alias': ..., 'record_type': 'single' or 'epoch_full'}"
        )
    if not layers:
        raise PlanError("layers_to_monitor is empty: name at least one layer")
    if isinstance(layers, Mapping):
        return [(name, given or {}) for name, given in layers.items()]
    return [(name, {}) for name in layers]


def _clean(name: str, paths: Mapping[str, str]) -> str:
    """Return a layer's name without the parts that wrappers add in ``named_modules()``."""
    return name if name in paths else ModulePath(name).without_wrappers()


def _layer(name: str, options: object, path: str) -> MonitoredLayer:
    if not isinstance(options, Mapping):
        raise PlanError(
            f"layers_to_monitor[{name!r}] is {options!r}: give a dict with 'alias' and 'record_type', or None"
        )
    strangers = set(options) - {"alias", "record_type"}
    if strangers:
        raise PlanError(
            f"layers_to_monitor[{name!r}] has {sorted(strangers)}: the known options are 'alias' and 'record_type'"
        )
    record_type = options.get("record_type", "single")
    if record_type not in get_args(RecordType):
        raise PlanError(
            f"record_type {record_type!r} of layer {name!r}: it is 'single' (given epochs and batches) or "
            "'epoch_full' (all batches of given epochs)"
        )
    alias = options.get("alias")
    if alias is not None and (not isinstance(alias, str) or not alias):
        raise PlanError(
            f"alias {alias!r} of layer {name!r}: an alias is a text, or None for the layer's name"
        )
    alias = alias or name
    if set(alias) & set('/\\\0:*?"<>|') or alias.startswith("."):
        raise PlanError(
            f"alias {alias!r} of layer {name!r} cannot name a folder: use letters, digits, '_', '.'"
        )
    return MonitoredLayer(name, alias, record_type, path)


def _warn_of_containers(layer: MonitoredLayer, module: nn.Module) -> None:
    if isinstance(module, _NEVER_CALLED):
        children = [f"{layer.name}.{child}" for child in module._modules]
        instead = f"; monitor {', '.join(map(repr, children[:3]))} … instead" if children else ""
        warnings.warn(
            shown(
                f"layer {layer.name!r} is a {type(module).__name__}: a container that is never called, so nothing "
                f"will be recorded for it{instead}",
                5000,
                lines=True,
            ),
            RuntimeWarning,
            stacklevel=5,
        )


def check_settings(
    layers: Iterable[MonitoredLayer], epochs_to_record: object, batch_indices: object
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Return the epochs and batches, checked against the record types."""
    epochs = check_numbers(epochs_to_record, "epochs_to_record")
    if not epochs:
        raise PlanError("epochs_to_record must not be empty: list the epochs to record, e.g. [1, 5, 10]")
    batches = None if batch_indices is None else check_numbers(batch_indices, "batch_indices")
    single = [layer.name for layer in layers if layer.record_type == "single"]
    if single and not batches:
        raise PlanError(
            "batch_indices must be specified and non-empty when any layer has record_type 'single'; "
            f"these do: {single}"
        )
    return epochs, batches


def check_numbers(numbers: object, name: str) -> tuple[int, ...]:
    """Return whole numbers of 0 or more, in the given order."""
    if isinstance(numbers, (str, bytes)) or not isinstance(numbers, Iterable):
        raise PlanError(f"{name} is {numbers!r}: give a list of whole numbers")
    checked = tuple(numbers)
    for number in checked:
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise PlanError(f"{name} has {number!r}: it lists whole numbers from 0 on")
    return checked


# -- configurations --------------------------------------------------------------------------------------------

_TYPES: dict[str, tuple[type, ...]] = {
    "monitor_layers": (dict, list, tuple),
    "monitor_epochs": (list, tuple, range),
    "monitor_batch_indices": (list, tuple, range),
    "monitor_output_dir": (str, os.PathLike),
    "monitor_format": (str,),
    "monitor_memory_ceiling": (int,),
    "monitor_asynchronous": (bool,),
}
# The names of `Monitor`'s arguments that differ from the key.
_ARGUMENTS = {"monitor_layers": "layers_to_monitor", "monitor_epochs": "epochs_to_record"}


def completed_config(
    config: str | os.PathLike[str] | Mapping[str, Any], given: Mapping[str, object]
) -> dict[str, Any]:
    """Return the arguments for a `Monitor`: those given, then those configured. Raise for all that both lack."""
    source, configured = read_config(config)
    arguments = {**configured, **{key: value for key, value in given.items() if value is not None}}
    needed = ["monitor_layers", "monitor_epochs", "monitor_output_dir"]
    single = _single_layers(arguments.get("layers_to_monitor"))
    if single:
        needed.append("monitor_batch_indices")
    lacking = [key for key in needed if _argument(key) not in arguments]
    if lacking:
        because = f" (these layers are 'single': {single})" if "monitor_batch_indices" in lacking else ""
        raise PlanError(
            f"{source} has no {' and no '.join(map(repr, lacking))}{because}: add to it, or give "
            f"{', '.join(f'{_argument(key)}=' for key in lacking)} beside it"
        )
    return arguments


def read_config(config: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the source of a configuration and the monitor's arguments in it. ``config`` is a file or a dict."""
    source = "the configuration" if isinstance(config, Mapping) else str(Path(config))
    settings = config if isinstance(config, Mapping) else _parsed(Path(config))
    if not isinstance(settings, Mapping):
        raise PlanError(f"{source} is a {type(settings).__name__}: it has to be a table of names to values")
    found = {key: value for key, value in settings.items() if str(key).startswith("monitor_")}
    for key, value in found.items():
        _check(source, key, value)
    return source, {_argument(key): value for key, value in found.items()}


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
    """Return the layers of which given batches are recorded. Mistakes in them are found later."""
    if isinstance(layers, Mapping):
        return [
            str(name)
            for name, options in layers.items()
            if not isinstance(options, Mapping) or options.get("record_type", "single") == "single"
        ]
    return [str(name) for name in layers] if isinstance(layers, (list, tuple)) else []


def _parsed(place: Path) -> object:
    try:
        text = read_file(place).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PlanError(f"the configuration {str(place)!r} cannot be read: {reason}") from error
    try:
        return _parse(place, text)
    except PlanError:
        raise
    except (ValueError, RecursionError) as error:
        reason = shown(str(error))
        raise PlanError(f"the configuration {str(place)!r} does not fit its suffix: {reason}") from error


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
