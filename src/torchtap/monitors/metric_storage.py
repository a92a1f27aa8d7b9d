"""Numbers of a `ModuleMonitor` by step and key: in memory, in HDF5 files, in run folders and sinks.

``log_dict`` is ``{step: {key: value}}``. Values that are logged more than once in a step are a list until
`StorageManager.aggregate_step` combines them: with the key's own aggregation function, else as the mean over all
elements. Guarantees:
- aggregating reads each device once, however many keys there are;
- every key is restored from a run and from an HDF5 file exactly;
- a sink that fails costs its own numbers, not the training.
"""

from __future__ import annotations

import datetime
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from numbers import Number
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from torchtap.errors import MonitorError, needing
from torchtap.rank_identity import identity
from torchtap.session.consumers import Consumers
from torchtap.spi import Consumer, ModulePath, Name, RunWriter, ScalarBlock, StepRecord, environment

__all__ = ["ROOT", "StepWriter", "StorageManager", "key_of", "site_of"]

ROOT = "[root module]"
LogDict = dict[Any, dict[str, Any]]
Aggregate = Callable[[Any], Any]


class StorageManager:
    """The metrics of all steps, in memory."""

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self.logger = logger
        self.aggregation_fns: dict[str, Aggregate] = {}
        self._log_dict: LogDict = {}
        # A monitor sets it: logs the results of the open step before they are read.
        self._settle: Callable[[], None] = lambda: None

    @property
    def log_dict(self) -> LogDict:
        """Return ``{step: {key: value}}``. Values of a step that is not aggregated yet may be lists."""
        self._settle()
        return self._log_dict

    @log_dict.setter
    def log_dict(self, log_dict: LogDict) -> None:
        self._log_dict = log_dict

    # -- steps -------------------------------------------------------------------------------------------------

    def create_step_entry(self, step: int) -> None:
        """Begin a step with nothing logged."""
        self._log_dict[step] = {}

    def has_step(self, step: int) -> bool:
        """Return True if a step was begun or anything was logged at it."""
        return step in self._log_dict

    def get_step_metrics(self, step: int | None) -> dict[str, Any]:
        """Return the metrics of a step; an empty dict if nothing was logged."""
        return self.log_dict.get(step, {})

    def get_all_metrics(self) -> LogDict:
        """Return all steps."""
        return self.log_dict

    def load_metrics(self, log_dict: LogDict) -> None:
        """Take over metrics. Raises `MonitorError` unless the storage is empty."""
        if self._log_dict:
            raise MonitorError(
                f"load_metrics: the log dict is not empty, it has {len(self._log_dict)} steps; clear() it first"
            )
        self._log_dict = log_dict

    def clear(self) -> None:
        """Remove all steps."""
        self._log_dict = {}

    def keep_only(self, step: int) -> None:
        """Remove all steps but one."""
        self._log_dict = {step: self._log_dict[step]} if step in self._log_dict else {}

    # -- logging -----------------------------------------------------------------------------------------------

    def log_scalar(
        self,
        step: int,
        key: str,
        value: Number | Tensor | float,
        aggregation_fn: Aggregate | None = None,
    ) -> None:
        """Log a number. Several numbers of one key and step are averaged when the step ends."""
        if isinstance(value, Tensor):
            value = value.item()
        if not isinstance(value, (Number, np.bool_)):
            raise MonitorError(
                f"log_scalar: The provided value is not a scalar. Key: {key}, Value: {value!r}; give a number or a "
                "tensor with one element"
            )
        metrics = self._log_dict.setdefault(step, {})
        if key not in metrics:
            metrics[key] = value
        elif isinstance(metrics[key], list):
            metrics[key].append(value)
        else:
            metrics[key] = [metrics[key], value]
        if aggregation_fn is not None:
            self.aggregation_fns[key] = aggregation_fn

    def log_tensor(
        self, step: int, key: str, tensor: Tensor, aggregation_fn: Aggregate | None = None
    ) -> None:
        """Log a tensor. When the step ends, one number is computed from all elements of the key."""
        metrics = self._log_dict.setdefault(step, {})
        known = metrics.setdefault(key, [])
        if not isinstance(known, list):
            known = metrics[key] = [torch.as_tensor([known])]
        known.append(tensor.detach().flatten())
        if aggregation_fn is not None:
            self.aggregation_fns[key] = aggregation_fn

    # -- the end of a step -------------------------------------------------------------------------------------

    def aggregate_step(self, step: int) -> None:
        """Reduce each list to one value. If an aggregation function returns a dict, its keys are appended."""
        metrics = self.log_dict.get(step)
        if metrics is None:
            return
        lists = {key: value for key, value in metrics.items() if type(value) is list}
        averaged = {
            key: values
            for key, values in lists.items()
            if isinstance(values[0], Tensor) and key not in self.aggregation_fns
        }
        metrics.update(zip(averaged, _means(list(averaged.values())), strict=True))
        for key in lists.keys() - averaged.keys():
            values = lists[key]
            joined = torch.cat(values) if isinstance(values[0], Tensor) else values
            _put(metrics, key, self.aggregation_fns.get(key, np.mean)(joined))
        if self.logger is not None:
            size = sys.getsizeof(self._log_dict) / 1024
            self.logger.info(
                f"Logged {len(metrics)} keys at step {step}. Total size of log data: {size:.2f} KB"
            )

    def condensed_log_dict(self) -> dict[str, dict[Any, Any]]:
        """Return the numbers by key: ``{key: {step: value}}``."""
        condensed: dict[str, dict[Any, Any]] = {}
        for step, metrics in self.log_dict.items():
            for key, value in metrics.items():
                condensed.setdefault(key, {})[step] = value
        return condensed

    # -- files -------------------------------------------------------------------------------------------------

    def save_hdf5(
        self, filename: str | os.PathLike[str], condensed: bool = True, *, flat: bool = False
    ) -> None:
        """Write everything to an HDF5 file: for each key a group with the datasets ``keys`` and ``values``.

        condensed: if False, write a group for each step instead.
        flat: keep every group at the top level, with a look-alike in place of ``/`` in keys. By default a ``/`` nests
            groups, so that ``file["activation/fc1/mean"]["values"]`` reads one series.
        """
        entries: Mapping[Any, Mapping[Any, Any]] = self.condensed_log_dict() if condensed else self.log_dict
        names = {str(entry) for entry in entries}
        with _h5py().File(filename, "w") as file:
            for entry, series in entries.items():
                try:
                    _write_group(file, str(entry), series, flat=flat or _in_the_way(str(entry), names))
                except (TypeError, ValueError) as reason:
                    if self.logger is not None:
                        self.logger.warning("Could not save %s: %s", entry, reason)

    @staticmethod
    def read_hdf5_entry_keys(filename: str | os.PathLike[str]) -> list[str]:
        """Return the keys in a file, in their logged spelling."""
        with _h5py().File(filename, "r") as file:
            return [key for key, _ in _groups(file)]

    @staticmethod
    def read_hdf5_entry(filename: str | os.PathLike[str], entry_key: object) -> tuple[Any, Any] | None:
        """Return ``(steps, values)`` of one key as arrays, or None if there is no such key."""
        with _h5py().File(filename, "r") as file:
            for known, group in _groups(file):
                if known == str(entry_key):
                    return _steps(group), group["values"][()]
        return None

    @staticmethod
    def load_hdf5(filename: str | os.PathLike[str]) -> dict[str, dict[Any, Any]]:
        """Return the contents of a file that `save_hdf5` wrote: ``{key: {step: value}}``."""
        with _h5py().File(filename, "r") as file:
            return {
                key: dict(zip(_whole(_steps(group)).tolist(), group["values"][()].tolist(), strict=True))
                for key, group in _groups(file)
            }


def _put(metrics: dict[str, object], key: str, value: object) -> None:
    if not isinstance(value, dict):
        metrics[key] = _plain(value)
        return
    for suffix, part in value.items():
        metrics[key + suffix] = _plain(part)
    if "" not in value:
        metrics.pop(key, None)


def _plain(value: object) -> object:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _means(groups: list[list[Tensor]]) -> list[float]:
    """Return the mean over all elements of each group, with one read for each device."""
    waiting: dict[torch.device, list[tuple[int, Tensor]]] = {}
    for index, group in enumerate(groups):
        device = group[0].device
        joined = group[0] if len(group) == 1 else torch.cat([each.to(device) for each in group])
        joined = joined.abs() if joined.is_complex() else joined
        wide = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
        waiting.setdefault(device, []).append((index, joined.to(wide).mean()))
    answers = [0.0] * len(groups)
    for pairs in waiting.values():
        for (index, _), number in zip(pairs, torch.stack([mean for _, mean in pairs]).tolist(), strict=True):
            answers[index] = number
    return answers


# -- HDF5 ------------------------------------------------------------------------------------------------------

_SLASH = "∕"  # U+2215: looks like a slash and is an ordinary character to HDF5
_DATASETS = {"keys", "values"}


def _write_group(file: Any, name: str, series: Mapping[Any, Any], *, flat: bool) -> None:
    labels = list(series)
    is_text = bool(labels) and all(isinstance(label, str) for label in labels)
    steps = np.array(labels, dtype=object if is_text else np.float64)
    values = np.array(list(series.values()), dtype=np.float64)
    group = file.create_group(name.replace("/", _SLASH) if flat else name)
    if group.name != f"/{name}":
        group.attrs["key"] = name
    group.create_dataset("keys", data=steps)
    group.create_dataset("values", data=values)


def _groups(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each group that holds a series, with its key, in file order."""
    h5py = _h5py()
    if isinstance(group, h5py.Group) and set(group) >= _DATASETS and isinstance(group["keys"], h5py.Dataset):
        yield group.attrs.get("key", prefix), group
    for name in group:
        child = group[name]
        if isinstance(child, h5py.Group):
            yield from _groups(child, f"{prefix}/{name}" if prefix else name)


def _in_the_way(name: str, names: set[str]) -> bool:
    """Return True if HDF5 would change this path (``a//b``), or place it inside another key's group."""
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return True
    return parts[-1] in _DATASETS or any(
        "/".join(parts[:length]) in names and parts[length] in _DATASETS for length in range(1, len(parts))
    )


def _steps(group: Any) -> Any:
    stored = group["keys"]
    return stored.asstr()[()] if stored.dtype.kind == "O" else stored[()]


def _whole(steps: Any) -> Any:
    """Return the steps as integers if they are whole numbers."""
    if steps.dtype.kind == "O":
        return steps
    whole = steps.astype(np.int64)
    return whole if np.array_equal(whole, steps) else steps


def _h5py() -> Any:
    with needing("h5py", "hdf5", who="an HDF5 file"):
        import h5py
    return h5py


# -- runs and sinks --------------------------------------------------------------------------------------------

_KINDS = {"activation": "output", "parameter": "param", "gradient": "param_grad"}
_PREFIXES = {kind: prefix for prefix, kind in _KINDS.items()}


@lru_cache(maxsize=1 << 16)
def site_of(key: str) -> tuple[str, str]:
    """Return ``(site, statistic)`` of a monitor's key: ``activation/fc1/mean`` is ``mean`` of ``fc1:output``.

    A key that has no site is a value of the root, ``:value.<key>``. `key_of` is the inverse.
    """
    prefix, _, rest = key.partition("/")
    place, _, statistic = rest.rpartition("/")
    kind = _KINDS.get(prefix)
    if kind and place and statistic and not set(":#") & set(place):
        if kind == "output":
            module, _, leaf = place.removeprefix(ROOT).partition("[")
            site = str(Name(module, "output", leaf.removesuffix("]")))
        else:
            site = str(Name(ModulePath(place).parent, kind, ModulePath(place).name))
        if key_of(site, statistic) == key:
            return site, statistic
    return f":value.{key}", "value"


@lru_cache(maxsize=16)
def _grids(keys: tuple[str, ...]) -> list[tuple[tuple[str, ...], tuple[str], list[int]]]:
    """Return the sites of each statistic and the places of their numbers among the keys.

    Equal steps share the tuples, by which a run's writer recognises a grid.
    """
    by_statistic: dict[str, tuple[list[str], list[int]]] = {}
    for place, key in enumerate(keys):
        site, statistic = site_of(key)
        sites, places = by_statistic.setdefault(statistic, ([], []))
        sites.append(site)
        places.append(place)
    return [(tuple(sites), (statistic,), places) for statistic, (sites, places) in by_statistic.items()]


def key_of(site: str, statistic: str) -> str:
    """Return the monitor's key of a site and statistic of a run."""
    path, kind, leaf, _ = Name.read(site)
    if kind == "value":
        return leaf
    if kind == "output":
        return f"activation/{path or ROOT}{f'[{leaf}]' if leaf else ''}/{statistic}"
    return f"{_PREFIXES.get(kind, kind)}/{f'{path}.' if path else ''}{leaf}/{statistic}"


def _label(site: str, statistic: str, phase: str) -> str:
    """Return the name of a number in TensorBoard and similar sinks: the monitor's key."""
    key = key_of(site, statistic)
    return key if phase == "train" else f"{phase}.{key}"


@final
class _FunctionSink:
    """A function of ``(step, metrics)`` as a consumer of records."""

    def __init__(self, function: Callable[[int, dict[str, Any]], None]) -> None:
        self._function = function
        self.name = getattr(function, "__name__", type(function).__name__)
        self.metrics: dict[str, Any] = {}  # of the last step; a record holds only the numbers among them

    def write(self, record: StepRecord) -> None:
        self._function(record.step, dict(self.metrics))

    def close(self) -> None:
        pass


@final
class StepWriter:
    """Write each finished step to a run folder and to sinks."""

    def __init__(
        self,
        run: str | os.PathLike[str] | None,
        sinks: Sequence[Consumer | Callable[[int, dict[str, Any]], None]],
    ) -> None:
        self._run = None if run is None else _run_writer(run)
        self._functions = [_FunctionSink(sink) for sink in sinks if not isinstance(sink, Consumer)]
        consumers = [sink for sink in sinks if isinstance(sink, Consumer)]
        for sink in consumers:
            if hasattr(sink, "name_by"):
                sink.name_by(_label)
        writers = [] if self._run is None else [self._run]
        self._consumers = Consumers([*writers, *consumers, *self._functions], strict=False)

    @property
    def has_run(self) -> bool:
        """Return True if there is a run folder."""
        return self._run is not None

    def write(self, step: int, metrics: dict[str, Any], *, training: bool) -> None:
        """Write one step's numbers."""
        for each in self._functions:
            each.metrics = metrics
        numbers = {key: value for key, value in metrics.items() if isinstance(value, (int, float, np.number))}
        values = np.fromiter(numbers.values(), dtype=np.float64, count=len(numbers))
        blocks = tuple(
            ScalarBlock(sites, statistics, values[places].reshape(-1, 1))
            for sites, statistics, places in _grids(tuple(numbers))
        )
        phase = "train" if training else "eval"
        self._consumers.write(StepRecord(step, None, None, phase, time.time(), blocks, ()))

    def read_back(self) -> dict[int, dict[str, float]]:
        """Return every step in the run, ``{step: {key: value}}``."""
        from torchtap.store.read.reader import open_run

        assert self._run is not None
        self._run.flush()
        run = open_run(self._run.folder, attempt=self._run.attempt)
        found: dict[int, dict[str, float]] = {}
        for site in run.sites():
            for statistic in run.statistics(site):
                series = run.series(site, statistic)
                for step, value in zip(series.steps.tolist(), series.values.tolist(), strict=True):
                    found.setdefault(step, {})[key_of(site, statistic)] = value
        return dict(sorted(found.items()))

    def close(self) -> None:
        """Close the run and every sink."""
        self._consumers.close()


def _run_writer(run: str | os.PathLike[str]) -> RunWriter:
    manifest = {
        "created": datetime.datetime.now(datetime.UTC).isoformat(),
        "sites": [],
        "plan": {"monitor": "ModuleMonitor"},
        "environment": environment(),
    }
    here = identity()
    return RunWriter(run, manifest=manifest, rank=here.rank, world=here.world)
