"""The outputs that a `Monitor` holds between two epochs: in memory up to a ceiling, then on disk; and its files.

Guarantees:
- an output is never changed once it is here; readers get copies;
- all outputs in memory, those waiting to be written included, stay below the ceiling plus one batch;
- an output on disk is in its final format: saving moves the file;
- statistics equal those of the concatenation of all batches, and need no batch in memory;
- a file is complete or does not exist: it is written under another name and moved;
- every file is read without pickle, and `read_item` returns the same entries for each format.

An item has ``epoch, batch_idx, layer, alias, output_shape, output``. Tuples stay tuples; dataclasses and other classes
of the model become dicts.
"""

from __future__ import annotations

import atexit
import json
import os
import queue
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, final, get_args

import numpy as np
import torch
from torch import Tensor

from torchtap import Stats
from torchtap.errors import OutputError, PlanError, RunCorruptError, TorchtapError
from torchtap.hooks.leaves import fill, from_names, plain, skeleton
from torchtap.monitors.monitor_settings import MonitoredLayer
from torchtap.sanitize import parse_json, shown
from torchtap.spi import ModulePath, leaves, map_leaves

__all__ = ["EpochStatistics", "FileFormat", "Outputs", "Saver", "check_format", "read_item", "write_item"]

FileFormat = Literal["pt", "npz", "safetensors"]
_FACTS = "facts"  # the entry of array formats that holds everything but arrays, as JSON
_PIECE = 1 << 20  # elements that are widened at once


# -- saving in the background ----------------------------------------------------------------------------------


@final
class Saver:
    """Run jobs one after another in a thread. A job that fails is noted, and the next one runs."""

    def __init__(self, on_failure: Callable[[str], None]) -> None:
        self._on_failure = on_failure
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], int] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._waiting = 0
        self._failures: list[str] = []
        self._thread: threading.Thread | None = None
        self.pending_bytes = 0  # memory that the waiting jobs hold

    def submit(self, job: Callable[[], None], nbytes: int = 0) -> None:
        """Run a job after all jobs that were submitted before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="torchtap-monitor-saver", daemon=True)
            self._thread.start()
            atexit.register(self.close)  # a script that ends without waiting still gets its files
        with self._changed:
            self._waiting += 1
            self.pending_bytes += nbytes
        self._jobs.put((job, nbytes))

    def wait_below(self, nbytes: int) -> None:
        """Wait until the pending jobs hold at most this much memory."""
        with self._changed:
            self._changed.wait_for(lambda: self.pending_bytes <= nbytes)

    def flush(self) -> None:
        """Wait until every job is done, then report failures."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting == 0)
            failures, self._failures = self._failures, []
        for failure in failures:
            self._on_failure(failure)

    def close(self) -> None:
        """Finish and end the thread. A later job starts another."""
        try:
            self.flush()
        finally:
            atexit.unregister(self.close)
            if self._thread is not None:
                self._jobs.put(None)
                self._thread.join()
                self._thread = None

    def _work(self) -> None:
        while (submitted := self._jobs.get()) is not None:
            job, nbytes = submitted
            failure = None
            try:
                job()
            except Exception as error:
                failure = f"{type(error).__name__}: {error}"
            del submitted, job  # releases the job's memory before the waiting threads continue
            with self._changed:
                if failure is not None:
                    self._failures.append(failure)
                self._waiting -= 1
                self.pending_bytes -= nbytes
                self._changed.notify_all()


# -- statistics ------------------------------------------------------------------------------------------------


@final
class EpochStatistics:
    """Statistics of one tensor per batch: over all elements, and for each position over the first dimension."""

    def __init__(self) -> None:
        self._state: Tensor | None = None
        self._over_first: _OverFirst | None = None
        self._one_shape = True
        self.shape: list[int] = [0]  # of the concatenation

    def add(self, value: Tensor) -> None:
        """Add one batch."""
        for piece in value.detach().reshape(-1).split(_PIECE):
            # In float64, so that the result equals that of the concatenation up to rounding.
            self._state = Stats().update(self._state, piece if piece.is_complex() else piece.double())
        if value.dim() == 0 or value.is_complex():
            self._one_shape = False
        elif self._one_shape:
            if self._over_first is None:
                self._over_first = _OverFirst(value.shape[1:])
            elif self._over_first.shape != value.shape[1:]:
                self._one_shape, self._over_first = False, None
            if self._over_first is not None:
                self._over_first.add(value)
        self.shape = [self.shape[0] + (value.shape[0] if value.dim() else 1), *value.shape[1:]]

    def result(self) -> dict[str, Any]:
        """Return the statistics, and ``over_first_dimension`` if all batches have one shape, else None."""
        if self._state is None:
            return {}
        each = None if self._over_first is None else self._over_first.result()
        return {**Stats().result(self._state), "over_first_dimension": each}


@final
class _OverFirst:
    """Mean, std, min and max over the first dimension: Chan's merge, in float64, a few columns at a time."""

    def __init__(self, shape: torch.Size) -> None:
        self.shape = shape
        self._count = 0
        self._mean = torch.zeros(max(1, shape.numel()), dtype=torch.float64)
        self._squares = torch.zeros_like(self._mean)
        self._least: Tensor | None = None
        self._most: Tensor | None = None

    def add(self, value: Tensor) -> None:
        rows = value.detach().reshape(value.shape[0], -1)
        if rows.numel() == 0:
            return
        least, most = rows.amin(0), rows.amax(0)
        self._least = least if self._least is None else torch.minimum(self._least, least)
        self._most = most if self._most is None else torch.maximum(self._most, most)
        count, more = self._count, len(rows)
        step = max(1, _PIECE // more)
        for start in range(0, rows.shape[1], step):
            piece = rows[:, start : start + step].double()
            mean = piece.mean(0)
            squares = (piece - mean).square_().sum(0)
            known = slice(start, start + step)
            distance = mean - self._mean[known]
            self._mean[known] += distance * (more / (count + more))
            self._squares[known] += squares + distance.square() * (count * more / (count + more))
        self._count = count + more

    def result(self) -> dict[str, Any]:
        if self._least is None or self._most is None:
            return {}
        spread = self._squares / (self._count - 1) if self._count > 1 else self._squares * torch.nan
        whole = {"mean": self._mean, "std": spread.sqrt(), "min": self._least, "max": self._most}
        return {name: values.reshape(self.shape) for name, values in whole.items()}


# -- outputs ---------------------------------------------------------------------------------------------------


@final
@dataclass(slots=True, eq=False)
class _Output:
    """One output. ``value`` is None once it is on disk, in ``file``."""

    epoch: int
    batch: int
    value: Any
    shape: list[Any]
    bones: Any
    nbytes: int
    file: Path | None = None
    saved: bool = False


@final
@dataclass(slots=True, eq=False)
class _LayerData:
    """The outputs of one layer."""

    layer: MonitoredLayer
    outputs: dict[tuple[int, int], _Output] = field(default_factory=dict)
    statistics: dict[int, dict[str, EpochStatistics]] = field(default_factory=dict)  # by epoch and leaf


@final
class Outputs:
    """Outputs of all layers of one record type."""

    def __init__(
        self, layers: Iterable[MonitoredLayer], folder: Path, suffix: FileFormat, saver: Saver
    ) -> None:
        self.layers = {layer.alias: _LayerData(layer) for layer in layers}
        self._folder, self._suffix, self._saver = folder, suffix, saver
        self._in_memory = 0
        self._spill: Path | None = None

    def has(self, alias: str, epoch: int, batch: int) -> bool:
        """Return True if this batch's output is here."""
        return (epoch, batch) in self.layers[alias].outputs

    def add(
        self, alias: str, epoch: int, batch: int, value: object, *, ceiling: int | None, measured: bool
    ) -> None:
        """Keep an output of one batch: in memory, or on disk if the ceiling is reached."""
        data = self.layers[alias]
        found = dict(leaves(value))
        nbytes = sum(tensor.nbytes for tensor in found.values())
        output = _Output(epoch, batch, value, _shape_of(value), skeleton(value), nbytes)
        data.outputs[epoch, batch] = output
        if measured:
            statistics = data.statistics.setdefault(epoch, {})
            for leaf, tensor in found.items():
                statistics.setdefault(leaf, EpochStatistics()).add(tensor)
        if ceiling is not None and self._is_full(ceiling, nbytes):
            self._to_disk(data.layer, output)
            self._saver.wait_below(max(0, ceiling - self._in_memory))
        else:
            self._in_memory += nbytes

    def _is_full(self, ceiling: int, more: int) -> bool:
        # A quarter is left for outputs that are being written, so that the training need not wait for each.
        held = self._in_memory + more
        return held > ceiling * 3 // 4 or held + self._saver.pending_bytes > ceiling

    def _to_disk(self, layer: MonitoredLayer, output: _Output) -> None:
        if self._spill is None:
            self._spill = Path(tempfile.mkdtemp(prefix=".spilled-", dir=self._folder))
        file = self._place(self._spill, layer, output)
        item, output.value, output.file = _item(layer, output), None, file
        self._saver.submit(lambda: write_item(file, item), output.nbytes)

    # -- reading -----------------------------------------------------------------------------------------------

    def copy(self, aliases: list[str]) -> dict[str, dict[str, Any]]:
        """Return deep copies, in the form that `Monitor` documents, of the layers that have outputs."""
        return self._shown(aliases, lambda value: map_leaves(value, lambda _, tensor: tensor.clone()))

    def view(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the outputs without copies, read-only: an output that was put in would be lost."""
        shown_data = self._shown(list(self.layers), lambda value: value)
        for each in shown_data.values():
            each["data"] = MappingProxyType(each["data"])
        return MappingProxyType({alias: MappingProxyType(each) for alias, each in shown_data.items()})

    def _shown(self, aliases: list[str], value: Callable[[Any], Any]) -> dict[str, dict[str, Any]]:
        if self._spill is not None:
            self._saver.flush()
        return {
            alias: {
                "layer": data.layer.name,
                "alias": alias,
                "output_shape": next(iter(data.outputs.values())).shape,
                "data": {key: self._value(output, value) for key, output in data.outputs.items()},
            }
            for alias, data in ((alias, self.layers[alias]) for alias in aliases)
            if data.outputs
        }

    def _value(self, output: _Output, value: Callable[[Any], Any]) -> Any:
        if output.value is not None:
            return value(output.value)
        assert output.file is not None
        return fill(output.bones, dict(leaves(read_item(output.file)["output"])))

    def statistics(self, aliases: list[str]) -> dict[str, dict[int, Any]]:
        """Return the statistics by alias and epoch; a dict of leaves if an output has several."""
        return {
            alias: {epoch: _by_name(by_leaf) for epoch, by_leaf in self.layers[alias].statistics.items()}
            for alias in aliases
        }

    # -- files -------------------------------------------------------------------------------------------------

    def save(self, aliases: list[str]) -> list[Path]:
        """Write all outputs that are not written yet. The files exist when the saver is done."""
        paths: list[Path] = []
        for alias in aliases:
            data = self.layers[alias]
            new = [output for output in data.outputs.values() if not output.saved]
            paths += [self._save(data.layer, output) for output in new]
            if new:
                paths += [self._save_statistics(data, epoch) for epoch in data.statistics]
        return paths

    def _save(self, layer: MonitoredLayer, output: _Output) -> Path:
        place = self._place(self._folder, layer, output)
        output.saved = True
        if output.file is None:
            item = _item(layer, output)
            self._saver.submit(lambda: write_item(place, item), output.nbytes)
        else:
            spilled, output.file = output.file, place
            self._saver.submit(lambda: _move(spilled, place))
        return place

    def _save_statistics(self, data: _LayerData, epoch: int) -> Path:
        by_leaf = data.statistics[epoch]
        item = {
            "epoch": epoch,
            "layer": data.layer.name,
            "alias": data.layer.alias,
            "batches": [batch for (of, batch) in data.outputs if of == epoch],
            "output_shape": from_names({leaf: each.shape for leaf, each in by_leaf.items()}),
            "statistics": _by_name(by_leaf),
        }
        place = self._epoch_folder(self._folder, data.layer, epoch) / f"statistics.{self._suffix}"
        self._saver.submit(lambda: write_item(place, item))
        return place

    def _place(self, folder: Path, layer: MonitoredLayer, output: _Output) -> Path:
        return self._epoch_folder(folder, layer, output.epoch) / f"batch_{output.batch:06}.{self._suffix}"

    def _epoch_folder(self, folder: Path, layer: MonitoredLayer, epoch: int) -> Path:
        return folder / layer.alias / f"epoch_{epoch:04}"

    def clear(self) -> None:
        """Drop everything. Saved files stay; files that only relieved the memory are deleted."""
        for data in self.layers.values():
            data.outputs.clear()
            data.statistics.clear()
        self._in_memory = 0
        spill, self._spill = self._spill, None
        if spill is not None:
            self._saver.submit(lambda: shutil.rmtree(spill, ignore_errors=True))


def _by_name(statistics: Mapping[str, EpochStatistics]) -> Any:
    return from_names({leaf: each.result() for leaf, each in statistics.items()})


def _item(layer: MonitoredLayer, output: _Output) -> dict[str, Any]:
    return {
        "epoch": output.epoch,
        "batch_idx": output.batch,
        "layer": layer.name,
        "alias": layer.alias,
        "output_shape": output.shape,
        "output": output.value,
    }


def _shape_of(output: object) -> list[Any]:
    """Return ``[2, 5, 16]`` for a tensor, a list of such lists for anything with several tensors."""
    if isinstance(output, Tensor):
        return list(output.shape)
    return [list(tensor.shape) for _, tensor in leaves(output)]


def _move(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(source, target)


# -- formats ---------------------------------------------------------------------------------------------------


def check_format(name: str) -> FileFormat:
    """Return the format of this name."""
    for known in get_args(FileFormat):
        if name == known:
            return known  # type: ignore[no-any-return]
    raise PlanError(f"format {name!r}: outputs are saved as {', '.join(map(repr, get_args(FileFormat)))}")


def writable_folder(folder: str | os.PathLike[str]) -> Path:
    """Return the folder, created if it is missing, after a file could be written into it."""
    place = Path(folder)
    probe = place / f".torchtap-{os.getpid()}"
    try:
        place.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise OutputError(
            f"output_dir {str(folder)!r} cannot be written to ({error.strerror or error}): choose a folder with "
            "write permission"
        ) from error
    return place


def write_item(path: Path, item: object) -> None:
    """Write tensors, numbers and text in any structure, in the format of the path's suffix."""
    beside = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _WRITERS[path.suffix](beside, plain(item))
        os.replace(beside, path)
    except OSError as error:
        with suppress(OSError):
            beside.unlink()
        raise OutputError(f"{path} cannot be written: {error}") from error


def read_item(path: str | os.PathLike[str]) -> Any:
    """Read a file of `write_item`. A ``.pt`` file is mapped: its tensors need memory when they are used."""
    place = Path(path)
    reader = _READERS.get(place.suffix)
    if reader is None:
        raise PlanError(f"{place}: a monitor's files end in {', '.join(_READERS)}")
    try:
        return reader(place)
    except (FileNotFoundError, TorchtapError):
        raise
    except Exception as error:  # a damaged file fails anywhere in torch, numpy, safetensors or JSON
        reason = shown(f"{type(error).__name__}: {error}")
        raise RunCorruptError(f"{place} cannot be read: {reason}") from error


def _write_pt(path: Path, item: object) -> None:
    torch.save(_without_foreign(item), path)


def _without_foreign(tree: object) -> object:
    """Return the tree, or raise if loading it would need a class that only the writer knows."""
    if isinstance(tree, dict):
        return {key: _without_foreign(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)([_without_foreign(value) for value in tree])
    if isinstance(tree, np.ndarray):
        return torch.from_numpy(tree)
    if isinstance(tree, np.generic):
        return tree.item()
    if isinstance(tree, Tensor):
        tensor = tree.detach()
        # A view would bring the whole of its storage into the file.
        return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor
    if tree is None or isinstance(tree, (str, bytes, int, float, complex, torch.dtype, torch.Size)):
        return tree
    raise PlanError(
        f"a {type(tree).__name__} cannot be saved: give tensors, arrays, numbers, text, and lists, tuples or "
        "dicts of them, so that the file loads without pickle"
    )


def _read_pt(path: Path) -> object:
    return torch.load(path, weights_only=True, mmap=True, map_location="cpu")


def _take_apart(item: object, prefix: str = "") -> tuple[dict[str, Tensor], object]:
    """Return the tensors by dotted name, and the structure as JSON data with ``{"tensor": name}`` in their places."""
    if isinstance(item, np.ndarray):
        item = torch.from_numpy(item)
    if isinstance(item, Tensor):
        name = prefix or "output"
        return {name: item.detach()}, {"tensor": name}
    if isinstance(item, dict):
        tensors, facts = _take_parts(item.items(), prefix)
        return tensors, {"dict": facts}
    if isinstance(item, (list, tuple)):
        tensors, facts = _take_parts(enumerate(item), prefix)
        return tensors, {"tuple" if isinstance(item, tuple) else "list": list(facts.values())}
    return {}, _without_foreign(item)


def _take_parts(
    parts: Iterable[tuple[object, object]], prefix: str
) -> tuple[dict[str, Tensor], dict[str, object]]:
    tensors: dict[str, Tensor] = {}
    facts: dict[str, Any] = {}
    for key, value in parts:
        inner, facts[str(key)] = _take_apart(value, str(ModulePath(prefix) / str(key)))
        tensors |= inner
    return tensors, facts


def _put_together(facts: object, tensors: Mapping[str, object]) -> object:
    if not isinstance(facts, dict):
        return facts
    ((kind, inner),) = facts.items()
    if kind == "tensor":
        return tensors[inner]
    if kind == "dict":
        return {key: _put_together(value, tensors) for key, value in inner.items()}
    made = [_put_together(value, tensors) for value in inner]
    return tuple(made) if kind == "tuple" else made


def _write_safetensors(path: Path, item: object) -> None:
    from safetensors.torch import save_file

    tensors, facts = _take_apart(item)
    # Tensors that share memory are refused, so each is copied.
    save_file(
        {name: t.clone().contiguous() for name, t in tensors.items()}, path, {_FACTS: json.dumps(facts)}
    )


def _read_safetensors(path: Path) -> object:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        facts = (file.metadata() or {}).get(_FACTS)
    return from_names(tensors) if facts is None else _put_together(parse_json(facts), tensors)


def _write_npz(path: Path, item: object) -> None:
    tensors, facts = _take_apart(item)
    arrays: dict[str, Any] = {name: _array(tensor) for name, tensor in tensors.items()}
    arrays[_FACTS] = np.array(json.dumps(facts))
    with path.open("wb") as file:
        np.savez(file, **arrays)


def _array(tensor: Tensor) -> np.ndarray:
    try:
        return tensor.numpy()
    except TypeError:  # numpy has no bfloat16; float32 holds all its values
        return tensor.float().numpy()


def _read_npz(path: Path) -> object:
    # Opened here: numpy leaves a file open that is not an archive.
    with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
        facts = parse_json(str(file[_FACTS]))
        tensors = {name: torch.from_numpy(file[name]) for name in file.files if name != _FACTS}
    return _put_together(facts, tensors)


_WRITERS = {".pt": _write_pt, ".safetensors": _write_safetensors, ".npz": _write_npz}
_READERS = {".pt": _read_pt, ".safetensors": _read_safetensors, ".npz": _read_npz}
