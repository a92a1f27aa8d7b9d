"""`Monitor`: record the outputs of named layers at given epochs and batches, without changing model or training code.

A monitor is a watch whose steps are marked by ``set_epoch`` and ``set_batch_idx``; its taps keep whole tensors.
Guarantees:
- nothing of the model is held: outputs are detached copies on the CPU;
- a validation between two batches does not change a batch's outputs: passes in the other mode are left out;
- ``epoch_full`` needs no more memory than its ceiling, and its statistics are exact all the same;
- `Monitor.remove_hooks` restores the model.

Passes over the model within one batch are joined along the first dimension. If a layer is called several times in a
pass, the last call counts.

Not here: settings (`monitor_settings`), the outputs and their files (`monitor_outputs`), functions (`trainer`).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, final

from torch import nn

from torchtap import Epochs, Full, Selector, Site, Tap, watch
from torchtap.errors import PlanError, RecordingLostError, SessionError
from torchtap.forms.attach import form_of, tree_of
from torchtap.hooks.hooks import after, before
from torchtap.hooks.leaves import fill, from_names
from torchtap.monitors.monitor_outputs import (
    Outputs,
    Saver,
    check_format,
    read_item,
    writable_folder,
    write_item,
)
from torchtap.monitors.monitor_settings import (
    LayerConfig,
    MonitoredLayer,
    check_numbers,
    check_settings,
    completed_config,
    monitored_layers,
)
from torchtap.sanitize import shown
from torchtap.spi import Name, StepRecord, map_leaves, places

__all__ = ["Monitor"]


@final
@dataclass(frozen=True, slots=True)
class _Options:
    """Options that do not change after a monitor was made."""

    ceiling: int
    asynchronous: bool
    condition: Callable[[object], bool] | None
    strict: bool


@final
@dataclass(slots=True)
class _State:
    """The state of a monitor beside its outputs."""

    taken_step: int = -1
    unwritten: list[str] = field(default_factory=list)
    warned: set[str] = field(default_factory=set)
    removed: bool = False
    handles: list[Any] = field(default_factory=list)  # of a subclass's own hooks


class Monitor:
    """Record the outputs of layers.

        with Monitor(model, ["encoder.layers.0"], [1, 5], "outputs", batch_indices=[0]) as monitor:
            for epoch in range(1, 6):
                monitor.set_epoch(epoch)
                for index, batch in enumerate(loader):
                    monitor.set_batch_idx(index)
                    ...
                monitor.save_single_outputs()

    layers_to_monitor: layer names, or a dict of name to ``{"alias": ..., "record_type": ...}``. ``"single"`` (the
        default) keeps the outputs of given epochs and batches; ``"epoch_full"`` those of all batches of given epochs,
        with the statistics of their concatenation.
    epochs_to_record: the epochs.
    output_dir: folder for all files; created if it is missing.
    batch_indices: the batches to record; needed with any ``"single"`` layer.
    format: "pt", "npz" or "safetensors".
    memory_ceiling: bytes that ``epoch_full`` may keep in memory; further outputs go to disk.
    asynchronous: save in the background; `flush` waits.
    condition: called with each output; outputs for which it returns False are dropped.
    strict: raise if an output cannot be kept or written. By default the monitor warns and the training continues.
    way: how taps are attached: "hook", "wrap" or "forward".

    Raises ``ValueError`` for each mistake in the settings, before any hook is registered.
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
        way: Literal["hook", "wrap", "forward"] = "hook",
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
        ceiling = check_numbers([memory_ceiling], "memory_ceiling")[0]
        self._options = _Options(ceiling, asynchronous, condition, strict)
        self._state = _State()
        self._saver = Saver(self._note_loss)
        self._outputs = {
            sort: Outputs(
                [layer for layer in self._layers if layer.record_type == sort],
                self.output_dir,
                self.format,
                self._saver,
            )
            for sort in ("single", "epoch_full")
        }
        own_hooks = self._hook_fn.__func__ is not Monitor._hook_fn  # type: ignore[attr-defined]
        taps = [self._tap(layer, never=own_hooks) for layer in self._layers]
        self._watch = watch(model, None, taps, sinks=[_Arrivals(self)], strict=strict, way=way)
        if own_hooks:
            self._state.handles = _registered(model, self._layers, self._hook_fn)
        self._unclocked = _UnclockedPasses(model, self._warn_once)
        self._unclocked.wait_for("set_epoch was not called")

    @classmethod
    def from_config(
        cls,
        model: nn.Module,
        config: str | os.PathLike[str] | Mapping[str, Any],
        output_dir: str | os.PathLike[str] | None = None,
        batch_indices: Iterable[int] | None = None,
        **options: Any,
    ) -> Self:
        """Make a monitor from a JSON, YAML or TOML file, or a dict, with ``monitor_layers`` and ``monitor_epochs``.

        Arguments, also those of `Monitor` itself, win over the configuration and complete it.
        """
        given = {"output_dir": output_dir, "batch_indices": batch_indices, **options}
        return cls(model, **completed_config(config, given))

    def _tap(self, layer: MonitoredLayer, *, never: bool) -> Tap:
        def picks(site: Site) -> bool:
            return site.path == layer.path and site.kind == "output"

        title = str(Name(layer.path, "output"))
        selector = Selector(title, picks, lambda _: True, kinds=frozenset({"output"}))
        batches = self.batch_indices if layer.record_type == "single" else None
        return Tap((selector,), Full(), Epochs(() if never else self.epochs_to_record, batches))

    # -- the clock ---------------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch. The data of the one before is dropped, so save or use it first."""
        self._check_open()
        _check_number(epoch, "set_epoch", "an epoch")
        if self.current_epoch is None:
            self._unclocked.stop()
        self._settle()
        self._warn_of_silence()
        self._clear("single", "epoch_full")
        self._watch.set_epoch(epoch)
        self.current_epoch, self.current_batch_idx = epoch, None
        if epoch in self.epochs_to_record:
            self._unclocked.wait_for(f"set_batch_idx was not called in epoch {epoch}")
        else:
            self._unclocked.stop()

    def set_batch_idx(self, batch_idx: int) -> None:
        """Begin a batch. Passes over the model from now on belong to it."""
        self._check_open()
        _check_number(batch_idx, "set_batch_idx", "a batch index")
        if self.current_epoch is None:
            raise SessionError(
                f"set_batch_idx({batch_idx}) before set_epoch: first set the epoch of the batch with "
                "monitor.set_epoch(epoch)"
            )
        self._unclocked.stop()
        self._watch.set_batch(batch_idx)
        self.current_batch_idx = batch_idx

    def create_epoch_callback(self) -> Callable[[int], None]:
        """Return a function for a training loop to call with each epoch's number."""
        return self.set_epoch

    def create_batch_callback(self) -> Callable[[int], None]:
        """Return a function for a training loop to call with each batch's index."""
        return self.set_batch_idx

    # -- data --------------------------------------------------------------------------------------------------

    @property
    def single_data(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the ``single`` outputs themselves, read-only, in the form of `get_single_data`."""
        self._settle()
        return self._outputs["single"].view()

    @property
    def epoch_data(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the ``epoch_full`` outputs themselves, read-only, in the form of `get_epoch_data`."""
        self._settle()
        return self._outputs["epoch_full"].view()

    def get_single_data(self, layers: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
        """Return copies of the ``single`` outputs, by alias.

        layers: names or aliases; all by default.

        Returns ``{alias: {"layer": str, "alias": str, "output_shape": list, "data": {(epoch, batch_idx): output}}}``.
        Layers without an output are left out. This call ends the open batch.
        """
        self._settle()
        return self._outputs["single"].copy(self._aliases(layers, "single"))

    def get_epoch_data(self, layers: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
        """Return copies of the ``epoch_full`` outputs, by alias. Those on disk are mapped."""
        self._settle()
        return self._outputs["epoch_full"].copy(self._aliases(layers, "epoch_full"))

    def get_epoch_statistics(self, layers: Sequence[str] | None = None) -> dict[str, dict[int, Any]]:
        """Return ``{alias: {epoch: statistics of the concatenation of its outputs}}``."""
        self._settle()
        return self._outputs["epoch_full"].statistics(self._aliases(layers, "epoch_full"))

    def get_single_outputs(self, layers: Sequence[str] | None = None) -> dict[str, list[Any]]:
        """Return copies of the ``single`` outputs as lists, by layer name."""
        return _lists(self.get_single_data(layers))

    def get_epoch_buffers(self, layers: Sequence[str] | None = None) -> dict[str, list[Any]]:
        """Return copies of the ``epoch_full`` outputs as lists, by layer name."""
        return _lists(self.get_epoch_data(layers))

    # -- files -------------------------------------------------------------------------------------------------

    def save_single_outputs(self, layers: Sequence[str] | None = None) -> list[Path]:
        """Write the ``single`` outputs that are not written yet: ``<alias>/epoch_0001/batch_000000.pt``.

        Each file has ``epoch, batch_idx, layer, alias, output_shape, output``. Returns the paths.
        """
        return self._save("single", layers)

    def save_epoch_outputs(self, layers: Sequence[str] | None = None) -> list[Path]:
        """Write the ``epoch_full`` outputs likewise, with a file ``statistics`` beside each epoch's batches."""
        return self._save("epoch_full", layers)

    def save_custom_output(self, output: object, filename: str) -> Path:
        """Write a result of your own into the output folder. The suffix selects the format."""
        place = self.output_dir / filename
        if not place.resolve().is_relative_to(self.output_dir.resolve()):
            raise PlanError(f"{filename!r} leads out of {self.output_dir}: give a name inside it")
        if place.suffix not in (".pt", ".npz", ".safetensors"):
            place = place.with_name(f"{place.name}.{self.format}")
        write_item(place, output)
        return place

    @staticmethod
    def load_outputs(path: str | os.PathLike[str]) -> Any:
        """Read a file that a monitor saved, in any format."""
        return read_item(path)

    def flush(self) -> None:
        """Wait until all files are written."""
        self._saver.flush()

    # -- releasing ---------------------------------------------------------------------------------------------

    def clear_current_epoch_data(self) -> None:
        """Drop the epoch's outputs of both record types."""
        self._settle()
        self._clear("single", "epoch_full")

    def clear_epoch_data(self) -> None:
        """Drop the ``epoch_full`` outputs only."""
        self._settle()
        self._clear("epoch_full")

    def remove_hooks(self) -> None:
        """Restore the model and wait for the files. Data can be read until it is cleared."""
        if self._state.removed:
            return
        self._state.removed = True
        self._unclocked.report()
        self._unclocked.stop()
        for handle in self._state.handles:
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

    # -- receiving outputs -------------------------------------------------------------------------------------

    def _custom_condition(self, output: object) -> bool:
        """Return True if an output is kept. A subclass may override it."""
        condition = self._options.condition
        return condition is None or bool(condition(output))

    def _hook_fn(self, layer_name: str) -> Callable[[nn.Module, object, object], object]:
        """Return a forward hook that keeps a layer's output.

        If a subclass overrides it, its hooks are registered and nothing else is recorded. They may call
        ``super()._hook_fn(layer_name)(module, input, output)`` to keep an output.
        """
        layer = next(each for each in self._layers if each.name == layer_name)

        def hook(module: nn.Module, input: object, output: object) -> None:
            epoch, batch = self.current_epoch, self.current_batch_idx
            if epoch is not None and batch is not None and self._is_live(layer, epoch, batch):
                kept = map_leaves(output, lambda _, tensor: tensor.detach().to("cpu", copy=True))
                self._keep(layer, epoch, batch, kept)

        return hook

    def _take(self, record: StepRecord) -> None:
        # Of a batch's phases the first counts: a validation in between has a record of its own.
        if record.epoch is None or record.batch is None or record.step == self._state.taken_step:
            return
        self._state.taken_step = record.step
        by_path: dict[str, dict[int, dict[str, object]]] = {}
        for item in record.tensors:
            name = Name.parse(item.site)
            by_path.setdefault(name.path, {}).setdefault(name.call, {})[name.leaf] = item.value
        for layer in self._layers:
            calls = by_path.get(layer.path)
            if calls is None or not self._is_live(layer, record.epoch, record.batch):
                continue
            if len(calls) > 1:
                self._warn_once(
                    f"layer {layer.name!r} is called {len(calls)} times in a pass; the last call's output is kept"
                )
            self._keep(layer, record.epoch, record.batch, self._rebuilt(layer, calls[max(calls)]))

    def _is_live(self, layer: MonitoredLayer, epoch: int, batch: int) -> bool:
        """Return True if this layer is recorded now. Two layers may be names of one module."""
        everything = layer.record_type == "epoch_full" or self.batch_indices is None
        return epoch in self.epochs_to_record and (everything or batch in (self.batch_indices or ()))

    def _rebuilt(self, layer: MonitoredLayer, by_leaf: dict[str, object]) -> object:
        if set(by_leaf) == {""}:
            return by_leaf[""]
        bones = self._watch.structure(layer.path)
        return from_names(by_leaf) if bones is None else fill(bones, by_leaf)

    def _keep(self, layer: MonitoredLayer, epoch: int, batch: int, output: object) -> None:
        full = layer.record_type == "epoch_full"
        outputs = self._outputs[layer.record_type]
        if outputs.has(layer.alias, epoch, batch):
            self._warn_once(
                f"batch {batch} of epoch {epoch} was set more than once; the outputs of the first time are kept"
            )
        elif self._custom_condition(output):
            ceiling = self._options.ceiling if full else None
            outputs.add(layer.alias, epoch, batch, output, ceiling=ceiling, measured=full)

    # -- inside ------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        if not self._state.removed:
            self._unclocked.report()
            self._watch.end_step()

    def _clear(self, *sorts: str) -> None:
        for sort in sorts:
            self._outputs[sort].clear()

    def _save(self, sort: str, layers: Sequence[str] | None) -> list[Path]:
        self._settle()
        self._warn_of_silence()
        paths = self._outputs[sort].save(self._aliases(layers, sort))
        if not self._options.asynchronous:
            self._saver.flush()
        return paths

    def _aliases(self, layers: Sequence[str] | None, sort: str) -> list[str]:
        """Return the aliases of one record type's layers, or of those with the given names or aliases."""
        own = self._outputs[sort].layers
        if layers is None:
            return list(own)
        chosen = [layers] if isinstance(layers, str) else list(layers)
        known = {name: layer.alias for layer in self._layers for name in (layer.name, layer.alias)}
        unknown = [name for name in chosen if name not in known]
        if unknown:
            raise PlanError(f"layers {unknown} are not monitored; these are: {sorted(known)}")
        return [known[name] for name in chosen if known[name] in own]

    def _warn_of_silence(self) -> None:
        """Warn of layers that were live at some time and have no output, with the reason."""
        if not self._watch.passes:
            return
        names = {str(Name(layer.path, "output")): layer.name for layer in self._layers}
        for missing in self._watch.coverage():
            if missing.site in names and not missing.reason.startswith("off schedule"):
                self._warn_once(f"nothing was recorded for layer {names[missing.site]!r}: {missing.reason}")

    def _warn_once(self, message: str) -> None:
        if message not in self._state.warned:
            self._state.warned.add(message)
            warnings.warn(shown(message, 5000, lines=True), RuntimeWarning, stacklevel=4)

    @property
    def lost(self) -> list[str]:
        """Return a sentence for each output that could not be kept or written."""
        return [*self._watch.lost, *self._state.unwritten]

    @property
    def hooks_removed(self) -> bool:
        """Return True after `remove_hooks`."""
        return self._state.removed

    def _note_loss(self, message: str) -> None:
        self._state.unwritten.append(message)
        if self._options.strict:
            raise RecordingLostError(message)
        self._warn_once(f"torchtap could not save an output and goes on: {message}")

    def _check_open(self) -> None:
        if self._state.removed:
            raise SessionError("this monitor's hooks were removed; make a new Monitor to go on")


@final
class _Arrivals:
    """The sink through which a monitor receives the records of its watch."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor

    def write(self, record: StepRecord) -> None:
        self._monitor._take(record)

    def close(self) -> None:
        pass


@final
class _UnclockedPasses:
    """Warn of passes over the model before `set_epoch` or `set_batch_idx` was called.

    A pass in training mode is reported at once. One in evaluation mode may be a look at the model before the training,
    so it is reported only if data is read and the call is still missing. The model carries a hook only in between.
    """

    def __init__(self, model: Any, warn: Callable[[str], None]) -> None:
        self._model, self._warn = model, warn
        self._hookable = form_of(model) == "eager"  # a hook on a compiled model would become part of it
        self._handle: Any = None
        self._missing = ""
        self._passes = 0

    def wait_for(self, missing: str) -> None:
        """Begin to count passes. ``missing`` names the call that is due."""
        self._missing, self._passes = missing, 0
        if self._hookable and self._handle is None:
            self._handle = before(self._model, self._on_pass)

    def stop(self) -> None:
        """Stop counting: the call was made, or the monitor ends."""
        self._missing = ""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def report(self) -> None:
        """Warn if there were passes and the call is missing."""
        if self._missing and self._passes:
            self._warn(
                f"the model ran and nothing was recorded: {self._missing}. Call monitor.set_epoch(epoch) at the start "
                "of each epoch and monitor.set_batch_idx(index) at the start of each batch"
            )

    def _on_pass(self, *_: object) -> None:
        self._passes += 1
        if self._model.training:
            self.report()


def _registered(
    model: nn.Module, layers: Iterable[MonitoredLayer], hook_for: Callable[[str], object]
) -> list[Any]:
    """Register a subclass's own hook on each layer."""
    form = form_of(model)
    if form != "eager":
        raise PlanError(
            f"this Monitor has a _hook_fn of its own, and the model is {form}: such a model runs no hooks. Monitor "
            "the eager model, or override _custom_condition in place of _hook_fn"
        )
    modules = {place.path: place.module for place in places(model)}
    handles: list[Any] = []
    for layer in layers:
        hook = hook_for(layer.name)
        if not callable(hook):
            for handle in handles:
                handle.remove()
            raise PlanError(
                f"_hook_fn({layer.name!r}) returned {hook!r}: it has to return hook(module, input, output)"
            )
        handles.append(after(modules[layer.path], hook))
    return handles


def _lists(data: dict[str, dict[str, Any]]) -> dict[str, list[Any]]:
    return {each["layer"]: list(each["data"].values()) for each in data.values()}


def _check_number(number: object, call: str, what: str) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise PlanError(f"{call}({number!r}): {what} is a whole number from 0 on")
