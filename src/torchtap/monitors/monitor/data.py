"""What a `Monitor` holds between two epochs: outputs by layer and batch, in memory up to a ceiling, then on disk.

It guarantees:
- an output is never changed once it is here; readers get copies;
- all outputs in memory, those waiting to be written among them, stay below the ceiling plus one batch;
- an output that went to disk is in its final format already: saving moves the file.

Not here: hooks and the clock (`monitor`), formats (`files`).
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

from torchtap.hooks.leaves import leaves
from torchtap.hooks.structure import fill, from_names, map_leaves, skeleton
from torchtap.monitors.monitor.chosen import MonitoredLayer
from torchtap.monitors.monitor.files import FileFormat, read_item, shape_of, write_item
from torchtap.monitors.monitor.saver import Saver
from torchtap.monitors.monitor.statistics import EpochStatistics

__all__ = ["LayerData", "Outputs"]


@final
@dataclass(slots=True, eq=False)
class _Output:
    """One output. ``value`` is None once it is on disk, where ``file`` says."""

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
class LayerData:
    """The outputs of one layer."""

    layer: MonitoredLayer
    outputs: dict[tuple[int, int], _Output] = field(default_factory=dict)
    statistics: dict[int, dict[str, EpochStatistics]] = field(
        default_factory=dict
    )  # epoch -> leaf -> numbers


@final
class Outputs:
    """Outputs of all layers of one record type."""

    def __init__(
        self, layers: tuple[MonitoredLayer, ...], folder: Path, suffix: FileFormat, saver: Saver
    ) -> None:
        self.layers = {layer.alias: LayerData(layer) for layer in layers}
        self._folder, self._suffix, self._saver = folder, suffix, saver
        self._in_memory = 0
        self._spill: Path | None = None

    # -- in -------------------------------------------------------------------------------------------------

    def add(
        self, alias: str, epoch: int, batch: int, value: object, *, ceiling: int | None, measured: bool
    ) -> None:
        """Keep an output of one batch, on disk if memory is used up."""
        data = self.layers[alias]
        nbytes = sum(tensor.nbytes for _, tensor in leaves(value))
        output = _Output(epoch, batch, value, shape_of(value), skeleton(value), nbytes)
        data.outputs[epoch, batch] = output
        if measured:
            statistics = data.statistics.setdefault(epoch, {})
            for leaf, tensor in leaves(value):
                statistics.setdefault(leaf, EpochStatistics()).add(tensor)
        if ceiling is not None and self._is_full(ceiling, nbytes):
            self._to_disk(data.layer, output)
            self._saver.wait_below(max(0, ceiling - self._in_memory))
        else:
            self._in_memory += nbytes

    def _is_full(self, ceiling: int, more: int) -> bool:
        # A quarter is left for outputs on their way to disk, so that the training need not wait for each.
        held = self._in_memory + more
        return held > ceiling * 3 // 4 or held + self._saver.pending_bytes > ceiling

    def _to_disk(self, layer: MonitoredLayer, output: _Output) -> None:
        if self._spill is None:
            self._spill = Path(tempfile.mkdtemp(prefix=".spilled-", dir=self._folder))
        file = self._place(self._spill, layer, output)
        item, output.value, output.file = self._item(layer, output, output.value), None, file
        self._saver.submit(lambda: write_item(file, item), output.nbytes)

    # -- out ------------------------------------------------------------------------------------------------

    def copy(self, aliases: list[str]) -> dict[str, dict[str, Any]]:
        """Deep copies, in the form that `Monitor` documents, of the layers that have outputs."""
        return self._told(aliases, _copied)

    def view(self) -> Mapping[str, Mapping[str, Any]]:
        """The same without copies. It cannot be written to: an output that was put in would be lost."""
        shown = self._told(list(self.layers), lambda value: value)
        for each in shown.values():
            each["data"] = MappingProxyType(each["data"])
        return MappingProxyType({alias: MappingProxyType(each) for alias, each in shown.items()})

    def _told(self, aliases: list[str], value: Callable[[object], object]) -> dict[str, dict[str, Any]]:
        self._settle()
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
        found = dict(leaves(read_item(output.file)["output"]))
        return fill(output.bones, found)

    def statistics(self, aliases: list[str]) -> dict[str, dict[int, Any]]:
        """For each layer and epoch, the statistics of its outputs; a dict for each leaf where there are several."""
        return {
            alias: {
                epoch: from_names({leaf: each.result() for leaf, each in by_leaf.items()})
                for epoch, by_leaf in self.layers[alias].statistics.items()
            }
            for alias in aliases
        }

    # -- files ----------------------------------------------------------------------------------------------

    def save(self, aliases: list[str]) -> list[Path]:
        """Have all outputs written that were not yet; the paths are those that will be there when the saver is done."""
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
            item = self._item(layer, output, output.value)
            self._saver.submit(lambda: write_item(place, item), output.nbytes)
        else:
            spilled, output.file = output.file, place
            self._saver.submit(lambda: _move(spilled, place))
        return place

    def _save_statistics(self, data: LayerData, epoch: int) -> Path:
        by_leaf = data.statistics[epoch]
        item = {
            "epoch": epoch,
            "layer": data.layer.name,
            "alias": data.layer.alias,
            "batches": [batch for (of, batch) in data.outputs if of == epoch],
            "output_shape": from_names({leaf: each.shape for leaf, each in by_leaf.items()}),
            "statistics": from_names({leaf: each.result() for leaf, each in by_leaf.items()}),
        }
        place = self._epoch_folder(self._folder, data.layer, epoch) / f"statistics.{self._suffix}"
        self._saver.submit(lambda: write_item(place, item))
        return place

    def _item(self, layer: MonitoredLayer, output: _Output, value: object) -> dict[str, object]:
        return {
            "epoch": output.epoch,
            "batch_idx": output.batch,
            "layer": layer.name,
            "alias": layer.alias,
            "output_shape": output.shape,
            "output": value,
        }

    def _place(self, folder: Path, layer: MonitoredLayer, output: _Output) -> Path:
        return self._epoch_folder(folder, layer, output.epoch) / f"batch_{output.batch:06}.{self._suffix}"

    def _epoch_folder(self, folder: Path, layer: MonitoredLayer, epoch: int) -> Path:
        return folder / layer.alias / f"epoch_{epoch:04}"

    # -- letting go -----------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget everything. Files that were saved stay; what was on disk for want of memory goes."""
        for data in self.layers.values():
            data.outputs.clear()
            data.statistics.clear()
        self._in_memory = 0
        spill, self._spill = self._spill, None
        if spill is not None:
            self._saver.submit(lambda: shutil.rmtree(spill, ignore_errors=True))

    def _settle(self) -> None:
        if self._spill is not None:
            self._saver.flush()

    def __iter__(self) -> Iterator[LayerData]:
        return iter(self.layers.values())


def _copied(value: object) -> object:
    return map_leaves(value, lambda _, tensor: tensor.clone())


def _move(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(source, target)
