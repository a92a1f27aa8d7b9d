"""What a `Monitor` is told to look at: layers by name, their aliases and record types, epochs and batches.

Everything is checked here, before anything is put on the model, and each mistake is a ``ValueError`` that names
it. Not here: taps (`monitor`), files.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, final, get_args

from torch import nn

from torchtap.errors import PlanError
from torchtap.plan.names import nearest_names, without_wrappers
from torchtap.plan.sites import places

__all__ = [
    "LayerConfig",
    "MonitoredLayer",
    "RecordType",
    "check_numbers",
    "check_settings",
    "monitored_layers",
]

RecordType = Literal["single", "epoch_full"]
LayerConfig: TypeAlias = "Sequence[str] | Mapping[str, Mapping[str, Any] | None]"

# Classes of torch that hold modules and have no forward of their own.
_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@final
@dataclass(frozen=True, slots=True)
class MonitoredLayer:
    """A layer under watch. ``path`` is its name among sites, where wrappers leave no trace."""

    name: str
    alias: str
    record_type: RecordType
    path: str


def monitored_layers(model: nn.Module, asked: LayerConfig) -> tuple[MonitoredLayer, ...]:
    """The layers that a list or a dict asks for, checked against the model."""
    options = _options(asked)
    found = places(model)
    paths = {path: place.path for place in found for path in (place.path, *place.other_paths)}
    _check_known([name for name, _ in options], paths)
    layers = tuple(_layer(name, given, paths[_clean(name, paths)]) for name, given in options)
    _check_apart([layer.alias for layer in layers])
    modules = {place.path: place.module for place in found}
    for layer in layers:
        _warn_of_containers(layer, modules[layer.path])
    return layers


def _options(asked: LayerConfig) -> list[tuple[str, Mapping[str, Any]]]:
    """The names that are asked for, each with what is said of it."""
    if isinstance(asked, str) or not isinstance(asked, (Mapping, Sequence)):
        raise PlanError(
            f"layers_to_monitor is {asked!r}: give a list of layer names, or a dict of name to "
            "{'alias': ..., 'record_type': 'single' or 'epoch_full'}"
        )
    if not asked:
        raise PlanError("layers_to_monitor is empty: name at least one layer")
    if isinstance(asked, Mapping):
        return [(name, given or {}) for name, given in asked.items()]
    return [(name, {}) for name in asked]


def _check_known(names: list[object], paths: dict[str, str]) -> None:
    unknown = [name for name in names if not isinstance(name, str) or _clean(name, paths) not in paths]
    if unknown:
        near = nearest_names(str(unknown[0]), [path for path in paths if path], 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise PlanError(
            f"The following layers specified in 'layers_to_monitor' do not exist in the model: {unknown}.{hint} "
            f"Available layers: {[path for path in paths if path]}"
        )


def _check_apart(aliases: list[str]) -> None:
    for place, alias in enumerate(aliases):
        if alias in aliases[:place]:
            raise PlanError(f"Duplicate alias '{alias}' in layers_to_monitor.")


def _clean(name: str, paths: Mapping[str, str]) -> str:
    """A layer's name without what wrappers put into ``named_modules()``."""
    if name in paths:
        return name
    return without_wrappers(name)


def _layer(name: str, options: object, path: str) -> MonitoredLayer:
    if not isinstance(options, Mapping):
        raise PlanError(
            f"layers_to_monitor[{name!r}] is {options!r}: give a dict with 'alias' and 'record_type', or None"
        )
    strangers = set(options) - {"alias", "record_type"}
    if strangers:
        raise PlanError(
            f"layers_to_monitor[{name!r}] has {sorted(strangers)}: what is known is 'alias' and 'record_type'"
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
            f"layer {layer.name!r} is a {type(module).__name__}: a container that is never called, so nothing "
            f"will be recorded for it{instead}",
            RuntimeWarning,
            stacklevel=5,
        )


def check_settings(
    layers: Iterable[MonitoredLayer], epochs_to_record: object, batch_indices: object
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Epochs and batches, checked against the record types."""
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
    """Whole numbers from 0 on, in the order given."""
    if isinstance(numbers, (str, bytes)) or not isinstance(numbers, Iterable):
        raise PlanError(f"{name} is {numbers!r}: give a list of whole numbers")
    checked = tuple(numbers)
    for number in checked:
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise PlanError(f"{name} has {number!r}: it lists whole numbers from 0 on")
    return checked
