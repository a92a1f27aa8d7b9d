"""Numbers by step and key, aggregated at the end of each step, and their way to HDF5 and back.

``log_dict`` is ``{step: {key: value}}``. What is logged several times in a step is a list until `aggregate_step`
makes one value of it: by the key's own aggregation function, else the mean over everything that was logged. It
guarantees:
- aggregating reads each device once, however many keys there are;
- what came in as a tensor is a plain number afterwards.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchtap.errors import MonitorError
from torchtap.monitors.module_monitor import hdf5

__all__ = ["StorageManager"]

Step = int
LogDict = dict[Any, dict[str, Any]]


class StorageManager:
    """The metrics of all steps, in memory."""

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self.logger = logger
        self.aggregation_fns: dict[str, Callable[[object], object]] = {}
        self._log_dict: LogDict = {}
        # Set by a monitor: brings in what it has measured so far, before anybody looks.
        self._settle: Callable[[], None] | None = None

    @property
    def log_dict(self) -> LogDict:
        """``{step: {key: value}}``; values of a step that is not aggregated yet may be lists."""
        if self._settle is not None:
            self._settle()
        return self._log_dict

    @log_dict.setter
    def log_dict(self, log_dict: LogDict) -> None:
        self._log_dict = log_dict

    # -- steps --------------------------------------------------------------------------------------------

    def create_step_entry(self, step: Step) -> None:
        """Begin a step with nothing logged."""
        self._log_dict[step] = {}

    def has_step(self, step: Step) -> bool:
        """Whether anything was begun or logged at a step."""
        return step in self._log_dict

    def get_step_metrics(self, step: Step) -> dict[str, Any]:
        """What was logged at a step; empty for a step that was not."""
        return self.log_dict.get(step, {})

    def get_all_metrics(self) -> LogDict:
        """All steps."""
        return self.log_dict

    def load_metrics(self, log_dict: LogDict) -> None:
        """Take over metrics from elsewhere; only an empty storage does."""
        if self._log_dict:
            raise MonitorError(
                f"load_metrics: the log dict is not empty, it has {len(self._log_dict)} steps; clear() it first"
            )
        self._log_dict = log_dict

    def clear(self) -> None:
        """Forget all steps."""
        self._log_dict = {}

    def keep_only(self, step: Step) -> None:
        """Forget all steps but one."""
        self._log_dict = {step: self._log_dict[step]} if step in self._log_dict else {}

    # -- logging ------------------------------------------------------------------------------------------

    def log_scalar(
        self,
        step: Step,
        key: str,
        value: Number | Tensor | float,
        aggregation_fn: Callable[[object], object] | None = None,
    ) -> None:
        """Log a number. Further numbers of the same key and step are averaged at the end of the step."""
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
        self,
        step: Step,
        key: str,
        tensor: Tensor,
        aggregation_fn: Callable[[object], object] | None = None,
    ) -> None:
        """Log a tensor: at the end of the step one number is made of all its elements."""
        metrics = self._log_dict.setdefault(step, {})
        known = metrics.setdefault(key, [])
        if not isinstance(known, list):
            known = metrics[key] = [torch.as_tensor([known])]
        known.append(tensor.detach().flatten())
        if aggregation_fn is not None:
            self.aggregation_fns[key] = aggregation_fn

    # -- the end of a step --------------------------------------------------------------------------------

    def aggregate_step(self, step: Step) -> None:
        """Make one value of each list. An aggregation function may return a dict: its keys are appended."""
        metrics = self.log_dict.get(step)
        if metrics is None:
            return
        lists = {key: value for key, value in metrics.items() if type(value) is list}
        averaged = {key: values for key, values in lists.items() if self._is_averaged(key, values)}
        metrics.update(zip(averaged, means(list(averaged.values())), strict=True))
        for key, values in lists.items():
            if key in averaged:
                continue
            joined = torch.cat(values) if isinstance(values[0], Tensor) else values
            self._put(metrics, key, self.aggregation_fns.get(key, np.mean)(joined))
        if self.logger is not None:
            size = sys.getsizeof(self._log_dict) / 1024
            self.logger.info(
                f"Logged {len(metrics)} keys at step {step}. Total size of log data: {size:.2f} KB"
            )

    def _is_averaged(self, key: str, values: list[object]) -> bool:
        return isinstance(values[0], Tensor) and key not in self.aggregation_fns

    @staticmethod
    def _put(metrics: dict[str, object], key: str, value: object) -> None:
        if not isinstance(value, dict):
            metrics[key] = _plain(value)
            return
        for suffix, part in value.items():
            metrics[key + suffix] = _plain(part)
        if "" not in value:
            metrics.pop(key, None)

    def condensed_log_dict(self) -> dict[str, dict[Any, Any]]:
        """The same numbers the other way round: ``{key: {step: value}}``."""
        condensed: dict[str, dict[Any, Any]] = {}
        for step, metrics in self.log_dict.items():
            for key, value in metrics.items():
                condensed.setdefault(key, {})[step] = value
        return condensed

    # -- files --------------------------------------------------------------------------------------------

    def save_hdf5(
        self, filename: str | os.PathLike[str], condensed: bool = True, *, flat: bool = False
    ) -> None:
        """Write everything to an HDF5 file: for each key a group with the datasets ``keys`` and ``values``.

        ``condensed=False`` makes a group for each step instead. A ``/`` in a key makes groups in groups, as a
        path does; with ``flat`` it is replaced by a look-alike, so that every group is at the top.
        """
        entries: Mapping[Any, Mapping[Any, Any]] = self.condensed_log_dict() if condensed else self.log_dict
        hdf5.save(filename, entries, flat=flat, refused=self._warn_unsaved)

    def _warn_unsaved(self, entry: object, reason: Exception) -> None:
        if self.logger is not None:
            self.logger.warning("Could not save %s: %s", entry, reason)

    @staticmethod
    def read_hdf5_entry_keys(filename: str | os.PathLike[str]) -> list[str]:
        """The keys in a file, as they were logged."""
        return hdf5.keys(filename)

    @staticmethod
    def read_hdf5_entry(filename: str | os.PathLike[str], entry_key: object) -> tuple[object, object] | None:
        """``(steps, values)`` of one key as arrays, or None where there is no such key."""
        return hdf5.read(filename, str(entry_key))

    @staticmethod
    def load_hdf5(filename: str | os.PathLike[str]) -> dict[str, dict[object, object]]:
        """What `save_hdf5` wrote: ``{key: {step: value}}``."""
        return hdf5.load(filename)


def _section_sums(joined: Tensor, sizes: list[int]) -> list[float]:
    """Sums of consecutive sections of a tensor on the CPU, in double precision; 0 for an empty one."""
    ends = np.cumsum(sizes)
    filled = np.array(sizes) > 0
    found = np.zeros(len(sizes))
    if filled.any():
        starts = (ends - np.array(sizes))[filled]
        with np.errstate(invalid="ignore", over="ignore"):
            found[filled] = np.add.reduceat(joined.detach().numpy().astype(np.float64), starts)
    return found.tolist()


def means(groups: list[list[Tensor]]) -> list[float]:
    """The mean over all elements of each group, with one read for each device."""
    answers = [0.0] * len(groups)
    waiting: dict[torch.device, list[tuple[int, Tensor]]] = {}
    on_host: list[int] = []
    for index, group in enumerate(groups):
        if all(each.is_cpu for each in group):
            on_host.append(index)
            continue
        mean = _mean_on_device(group)
        waiting.setdefault(mean.device, []).append((index, mean))
    for pairs in waiting.values():
        for (index, _), number in zip(pairs, torch.stack([mean for _, mean in pairs]).tolist(), strict=True):
            answers[index] = number
    for index, number in zip(on_host, _host_means([groups[index] for index in on_host]), strict=True):
        answers[index] = number
    return answers


def _mean_on_device(group: list[Tensor]) -> Tensor:
    device = group[0].device
    joined = group[0] if len(group) == 1 else torch.cat([each.to(device).flatten() for each in group])
    return joined.to(torch.float32 if device.type == "mps" else torch.float64).mean()  # MPS has no float64


def _host_means(groups: list[list[Tensor]]) -> list[float]:
    """The same for tensors on the CPU: everything in one array, summed up section by section."""
    if not groups:
        return []
    pieces = [each.detach().flatten() for group in groups for each in group]
    if any(piece.dtype != torch.float32 for piece in pieces):
        pieces = [_wide(piece) for piece in pieces]
    sizes = [sum(each.numel() for each in group) for group in groups]
    totals = _section_sums(torch.cat(pieces), sizes)
    return [total / size if size else float("nan") for total, size in zip(totals, sizes, strict=True)]


def _wide(piece: Tensor) -> Tensor:
    return (piece.abs() if piece.is_complex() else piece).to(torch.float64)


def _plain(value: object) -> object:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
