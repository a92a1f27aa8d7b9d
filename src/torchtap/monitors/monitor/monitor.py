"""`Monitor`: the outputs of named layers, at given epochs and batches, without touching model or training code.

A plan, a clock and a store over the core: taps that keep whole tensors, a `Watch` whose clock is ``set_epoch``
and ``set_batch_idx``, and the outputs that arrived (`data`). It guarantees:
- nothing of the model is held: outputs are detached copies on the CPU;
- a validation between two batches does not get into a batch's outputs: passes of the other mode are left out;
- ``epoch_full`` needs no more memory than its ceiling, and its statistics are exact all the same;
- `remove_hooks` leaves the model as it was found.

Within one batch, passes over the model are joined along the first dimension; of a layer that is called several
times in a pass, the last call counts.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import nn

from torchtap.errors import PlanError, RecordingLostError, SessionError
from torchtap.forms.attach import tree_of
from torchtap.hooks.structure import fill, from_names, map_leaves
from torchtap.hooks.ways import WayName
from torchtap.monitors.monitor.chosen import (
    LayerConfig,
    MonitoredLayer,
    check_numbers,
    check_settings,
    monitored_layers,
)
from torchtap.monitors.monitor.config import read_config
from torchtap.monitors.monitor.data import Outputs
from torchtap.monitors.monitor.files import check_format, read_item, writable_folder, write_item
from torchtap.monitors.monitor.forgotten import ForgottenClock
from torchtap.monitors.monitor.own_hooks import put_on_own_hooks
from torchtap.monitors.monitor.saver import Saver
from torchtap.plan.names import site_name
from torchtap.plan.sites import Selector, Site
from torchtap.plan.tap import Tap
from torchtap.reduce import Full
from torchtap.schedule import Epochs
from torchtap.session.front import watch
from torchtap.store.record import StepRecord

__all__ = ["Monitor"]


class Monitor:
    """Records what layers put out.

    layers_to_monitor: layer names, or a dict of name to ``{"alias": ..., "record_type": ...}``. ``"single"``
    keeps the outputs of given epochs and batches, ``"epoch_full"`` those of all batches of given epochs, with
    the statistics of their concatenation. memory_ceiling: bytes that ``epoch_full`` may keep in memory;
    beyond it outputs go to disk. asynchronous: saving does not wait for the disk (`flush` does). condition:
    called with each output; what it says False of is not kept. format: "pt", "npz" or "safetensors".
    """

    MEMORY_CEILING: ClassVar[int] = 512 * 2**20

    def __init__(
        self,
        model: nn.Module,
        layers_to_monitor: LayerConfig,
        epochs_to_record: Iterable[int],
        output_dir: str | os.PathLike[str],
        batch_indices: Iterable[int] | None = None,
        *,
        format: str = "pt",
        memory_ceiling: int = MEMORY_CEILING,
        asynchronous: bool = False,
        condition: Callable[[object], bool] | None = None,
        strict: bool = False,
        way: WayName = "hook",
    ) -> None:
        self._layers = monitored_layers(tree_of(model), layers_to_monitor)
        self.epochs_to_record, self.batch_indices = check_settings(
            self._layers, epochs_to_record, batch_indices
        )
        self.format = check_format(format)
        self.model = model
        self.output_dir = writable_folder(output_dir)
        self.current_epoch: int | None = None
        self.current_batch_idx: int | None = None
        self._taken_step = -1
        self._unwritten: list[str] = []
        self._ceiling = check_numbers([memory_ceiling], "memory_ceiling")[0]
        self._asynchronous = asynchronous
        self._condition = condition
        self._strict = strict
        self._warned: set[str] = set()
        self._removed = False
        self._saver = Saver(self._note_loss)
        single = tuple(layer for layer in self._layers if layer.record_type == "single")
        full = tuple(layer for layer in self._layers if layer.record_type == "epoch_full")
        self._single = Outputs(single, self.output_dir, self.format, self._saver)
        self._epoch = Outputs(full, self.output_dir, self.format, self._saver)
        self._own_hooks = self._hook_fn.__func__ is not Monitor._hook_fn  # type: ignore[attr-defined]
        self._watch = watch(
            model, None, [self._tap(layer) for layer in self._layers], sinks=[_Arrivals(self)],
            strict=strict, way=way,
        )  # fmt: skip
        self._handles = put_on_own_hooks(model, self._layers, self._hook_fn) if self._own_hooks else []
        self._forgotten = ForgottenClock(model, self._warn_once)
        self._forgotten.wait_for("set_epoch was not called")

    @classmethod
    def from_config(
        cls,
        model: nn.Module,
        config: str | os.PathLike[str] | Mapping[str, Any],
        output_dir: str | os.PathLike[str] | None = None,
        batch_indices: Iterable[int] | None = None,
        **options: Any,
    ) -> Self:
        """From a JSON, YAML or TOML file, or a dict, with ``monitor_layers`` and ``monitor_epochs``.

        Arguments, those of `Monitor` itself among them, win over the configuration and stand in for what it lacks.
        """
        given = {"output_dir": output_dir, "batch_indices": batch_indices, **options}
        return cls(model, **read_config(config).completed(given))

    def _tap(self, layer: MonitoredLayer) -> Tap:
        def picks(site: Site) -> bool:
            return site.path == layer.path and site.kind == "output"

        selector = Selector(
            site_name(layer.path, "output"), picks, lambda _: True, kinds=frozenset({"output"})
        )
        batches = self.batch_indices if layer.record_type == "single" else None
        epochs = () if self._own_hooks else self.epochs_to_record
        return Tap((selector,), Full(), Epochs(epochs, batches))

    # -- the clock ------------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """A new epoch begins. Data of the one before is let go of, so save or use it first."""
        self._check_open()
        _check_number(epoch, "set_epoch", "an epoch")
        if self.current_epoch is None:
            self._forgotten.arrived()
        self._settle()
        self._warn_of_silence()
        self._single.clear()
        self._epoch.clear()
        self._watch.set_epoch(epoch)
        self.current_epoch, self.current_batch_idx = epoch, None
        if epoch in self.epochs_to_record:
            self._forgotten.wait_for(f"set_batch_idx was not called in epoch {epoch}")
        else:
            self._forgotten.arrived()

    def set_batch_idx(self, batch_idx: int) -> None:
        """A batch begins; passes over the model from now on are its."""
        self._check_open()
        _check_number(batch_idx, "set_batch_idx", "a batch index")
        if self.current_epoch is None:
            raise SessionError(
                f"set_batch_idx({batch_idx}) before set_epoch: say which epoch the batch belongs to first, "
                "with monitor.set_epoch(epoch)"
            )
        self._forgotten.arrived()
        self._watch.set_batch(batch_idx)
        self.current_batch_idx = batch_idx

    def create_epoch_callback(self) -> Callable[[int], None]:
        """A function for a training loop to call with each epoch's number."""
        return self.set_epoch

    def create_batch_callback(self) -> Callable[[int], None]:
        """A function for a training loop to call with each batch's index."""
        return self.set_batch_idx

    # -- data -----------------------------------------------------------------------------------------------

    @property
    def single_data(self) -> Mapping[str, Mapping[str, object]]:
        """The ``single`` outputs themselves, to look at: the form of `get_single_data`, without the copies."""
        self._settle()
        return self._single.view()

    @property
    def epoch_data(self) -> Mapping[str, Mapping[str, object]]:
        """The same for the ``epoch_full`` outputs."""
        self._settle()
        return self._epoch.view()

    def get_single_data(self, layers: Sequence[str] | None = None) -> dict[str, dict[str, object]]:
        """Copies of the ``single`` outputs, by alias.

        ``{alias: {"layer": str, "alias": str, "output_shape": list, "data": {(epoch, batch_idx): output}}}``;
        ``layers`` are names or aliases, all by default. A layer of which nothing was recorded is left out. The
        batch that is open ends with this call.
        """
        self._settle()
        return self._single.copy(self._aliases(layers, self._single))

    def get_epoch_data(self, layers: Sequence[str] | None = None) -> dict[str, dict[str, object]]:
        """The same for the ``epoch_full`` outputs. Those that went to disk come back mapped from there."""
        self._settle()
        return self._epoch.copy(self._aliases(layers, self._epoch))

    def get_epoch_statistics(self, layers: Sequence[str] | None = None) -> dict[str, dict[int, object]]:
        """``{alias: {epoch: statistics of the concatenation of its outputs}}``."""
        self._settle()
        return self._epoch.statistics(self._aliases(layers, self._epoch))

    def get_single_outputs(self, layers: Sequence[str] | None = None) -> dict[str, list[object]]:
        """Copies of the ``single`` outputs as lists, by layer name."""
        return _lists(self.get_single_data(layers))

    def get_epoch_buffers(self, layers: Sequence[str] | None = None) -> dict[str, list[object]]:
        """Copies of the ``epoch_full`` outputs as lists, by layer name."""
        return _lists(self.get_epoch_data(layers))

    # -- files ----------------------------------------------------------------------------------------------

    def save_single_outputs(self, layers: Sequence[str] | None = None) -> list[Path]:
        """Write the ``single`` outputs that were not written yet: ``<alias>/epoch_0001/batch_000000.pt``.

        Each file has ``epoch, batch_idx, layer, alias, output_shape, output``. Returns the paths.
        """
        return self._save(self._single, layers)

    def save_epoch_outputs(self, layers: Sequence[str] | None = None) -> list[Path]:
        """The same for ``epoch_full``, with a file ``statistics`` beside each epoch's batches."""
        return self._save(self._epoch, layers)

    def save_custom_output(self, output: object, filename: str) -> Path:
        """Write a result of your own into the output folder; the suffix says the format (``.pt`` by default)."""
        place = self.output_dir / filename
        if not place.resolve().is_relative_to(self.output_dir.resolve()):
            raise PlanError(f"{filename!r} leads out of {self.output_dir}: give a name inside it")
        if place.suffix not in (".pt", ".npz", ".safetensors"):
            place = place.with_name(f"{place.name}.{self.format}")
        write_item(place, output)
        return place

    @staticmethod
    def load_outputs(path: str | os.PathLike[str]) -> object:
        """A file that a monitor saved, whatever its format."""
        return read_item(path)

    def flush(self) -> None:
        """Wait until everything that was to be saved is on disk."""
        self._saver.flush()

    # -- letting go -----------------------------------------------------------------------------------------

    def clear_current_epoch_data(self) -> None:
        """Forget the epoch's outputs, of both record types."""
        self._settle()
        self._single.clear()
        self._epoch.clear()

    def clear_epoch_data(self) -> None:
        """Forget the ``epoch_full`` outputs only."""
        self._settle()
        self._epoch.clear()

    def remove_hooks(self) -> None:
        """Leave the model as it was found, and wait for the files. Data stays readable until it is cleared."""
        if self._removed:
            return
        self._removed = True
        self._forgotten.tell()
        self._forgotten.arrived()
        for handle in self._handles:
            handle.remove()
        try:
            self._watch.close()
        finally:
            self._warn_of_silence()
            self._saver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove_hooks()

    # -- what arrives ---------------------------------------------------------------------------------------

    def _custom_condition(self, output: object) -> bool:
        """Whether an output is kept. A subclass may decide by itself."""
        return self._condition is None or bool(self._condition(output))

    def _hook_fn(self, layer_name: str) -> Callable[[nn.Module, object, object], object]:
        """A forward hook that keeps a layer's output.

        A subclass that overrides it has its own hooks on the layers, and nothing else is recorded. Its hook may
        call ``super()._hook_fn(layer_name)(module, input, output)`` where an output is to be kept.
        """
        layer = next(each for each in self._layers if each.name == layer_name)

        def hook(module: nn.Module, input: object, output: object) -> None:
            epoch, batch = self.current_epoch, self.current_batch_idx
            if epoch is not None and batch is not None and self._live(layer, epoch, batch):
                kept = map_leaves(output, lambda _, tensor: tensor.detach().to("cpu", copy=True))
                self._keep(layer, epoch, batch, kept)

        return hook

    def _take(self, record: StepRecord) -> None:
        # Of a batch's phases the first counts: a validation in between has a record of its own.
        if record.epoch is None or record.batch is None or record.step == self._taken_step:
            return
        self._taken_step = record.step
        by_path: dict[str, dict[int, dict[str, object]]] = {}
        for item in record.tensors:
            site = Site.parse(item.site)
            by_path.setdefault(site.path, {}).setdefault(site.call, {})[site.leaf] = item.value
        for layer in self._layers:
            calls = by_path.get(layer.path)
            if calls is None or not self._live(layer, record.epoch, record.batch):
                continue
            if len(calls) > 1:
                self._warn_once(
                    f"layer {layer.name!r} is called {len(calls)} times in a pass; the last call's output is kept"
                )
            self._keep(layer, record.epoch, record.batch, self._rebuilt(layer, calls[max(calls)]))

    def _live(self, layer: MonitoredLayer, epoch: int, batch: int) -> bool:
        """Whether this layer's own tap asked; two layers may be names of one module."""
        everything = layer.record_type == "epoch_full" or self.batch_indices is None
        return epoch in self.epochs_to_record and (everything or batch in (self.batch_indices or ()))

    def _rebuilt(self, layer: MonitoredLayer, by_leaf: dict[str, object]) -> object:
        if set(by_leaf) == {""}:
            return by_leaf[""]
        bones = self._watch.structure(layer.path)
        return from_names(by_leaf) if bones is None else fill(bones, by_leaf)

    def _keep(self, layer: MonitoredLayer, epoch: int, batch: int, output: object) -> None:
        full = layer.record_type == "epoch_full"
        outputs = self._epoch if full else self._single
        if (epoch, batch) in outputs.layers[layer.alias].outputs:
            self._warn_once(
                f"batch {batch} of epoch {epoch} was set more than once; the outputs of the first time are kept"
            )
        elif self._custom_condition(output):
            ceiling = self._ceiling if full else None
            outputs.add(layer.alias, epoch, batch, output, ceiling=ceiling, measured=full)

    # -- inside ---------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        if not self._removed:
            self._forgotten.tell()
            self._watch.end_step()

    def _save(self, outputs: Outputs, layers: Sequence[str] | None) -> list[Path]:
        self._settle()
        self._warn_of_silence()
        paths = outputs.save(self._aliases(layers, outputs))
        if not self._asynchronous:
            self._saver.flush()
        return paths

    def _aliases(self, layers: Sequence[str] | None, outputs: Outputs) -> list[str]:
        """The aliases among a type's layers that a choice of names or aliases stands for."""
        if layers is None:
            return list(outputs.layers)
        chosen = [layers] if isinstance(layers, str) else list(layers)
        known = {name: layer.alias for layer in self._layers for name in (layer.name, layer.alias)}
        unknown = [name for name in chosen if name not in known]
        if unknown:
            raise PlanError(f"layers {unknown} are not monitored; these are: {sorted(known)}")
        return [known[name] for name in chosen if known[name] in outputs.layers]

    def _warn_of_silence(self) -> None:
        """Say which layers were live at some time and brought nothing, and why."""
        if not self._watch.passes:
            return
        names = {site_name(layer.path, "output"): layer.name for layer in self._layers}
        for missing in self._watch.coverage():
            if missing.site in names and not missing.reason.startswith("off schedule"):
                self._warn_once(f"nothing was recorded for layer {names[missing.site]!r}: {missing.reason}")

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, RuntimeWarning, stacklevel=4)

    @property
    def lost(self) -> list[str]:
        """What could not be kept or written, a sentence each."""
        return [*self._watch.lost, *self._unwritten]

    @property
    def hooks_removed(self) -> bool:
        """Whether `remove_hooks` was called."""
        return self._removed

    def _note_loss(self, message: str) -> None:
        self._unwritten.append(message)
        if self._strict:
            raise RecordingLostError(message)
        self._warn_once(f"torchtap could not save an output and goes on: {message}")

    def _check_open(self) -> None:
        if self._removed:
            raise SessionError("this monitor's hooks were removed; make a new Monitor to go on")


class _Arrivals:
    """The sink through which a step's outputs reach their monitor."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor

    def write(self, record: StepRecord) -> None:
        self._monitor._take(record)

    def close(self) -> None:
        pass


def _lists(data: dict[str, dict[str, Any]]) -> dict[str, list[Any]]:
    return {each["layer"]: list(each["data"].values()) for each in data.values()}


def _check_number(number: object, call: str, what: str) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise PlanError(f"{call}({number!r}): {what} is a whole number from 0 on")
