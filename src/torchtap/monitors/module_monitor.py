"""``ModuleMonitor``: metrics of activations, parameters and gradients, step by step, by their names.

The calls, keys and numbers are those of the ``torch-module-monitor`` package. Guarantees:
- a step that is not monitored carries no hook; copies and pickles of the model never carry a live one;
- results are copied to the host once a step;
- calls that an activation checkpoint repeats are not counted again.

Not here: metrics and the watch that records module outputs (`metrics`), keeping and writing (`metric_storage`),
attention (`attention_heads`), the refined coordinate check (`coordinate_check`).
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from numbers import Number
from typing import Any, Self, final

import torch
from torch import Tensor, nn

from torchtap._torch import compiler_was_used
from torchtap.errors import MetricError, MonitorError
from torchtap.hooks.hooks import Handle, after
from torchtap.monitors.attention_heads import AttentionPatch
from torchtap.monitors.metric_storage import ROOT, StepWriter, StorageManager
from torchtap.monitors.metrics import Found, InHand, MetricRegistry, OutputWatch, leaf_name
from torchtap.plan.names import WRAPPED_ATTRIBUTES
from torchtap.spi import Call, Consumer, ModulePath, Stop, Visiting, leaves, unwrap

__all__ = [
    "HooksManager",
    "ModuleMonitor",
    "MonitorMixin",
    "default_format_module_name_fn",
    "extract_activation_tensor",
    "named_modules",
]

# Wrappers whose attribute stays in the raw name, because a user's format function may look for it.
_SPELLED_WRAPPERS = tuple(name for name in WRAPPED_ATTRIBUTES if name != "_checkpoint_wrapped_module")


# -- names -----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1 << 14)
def default_format_module_name_fn(name: str) -> str:
    """Return a module's or parameter's name without wrappers. The root module is ``[root module]``."""
    if name == "" or name in _SPELLED_WRAPPERS:
        return ROOT
    for wrapper in _SPELLED_WRAPPERS:
        name = name.replace(f"{wrapper}.", "")
    return name


def named_modules(model: nn.Module) -> list[tuple[str, nn.Module, bool]]:
    """Return ``(name, module, is_wrapper)`` of each module once.

    The name is that of ``model.named_modules()`` without the ``module.`` of DDP and similar wrappers.
    """
    found: dict[nn.Module, tuple[str, nn.Module, bool]] = {}

    def visit(module: nn.Module, name: str) -> None:
        if module in found:
            return
        is_wrapper = unwrap(module) is not module
        found[module] = (name, module, is_wrapper)
        for child_name, child in module._modules.items():
            if child is not None:
                unnamed = is_wrapper and child_name not in _SPELLED_WRAPPERS
                visit(child, name if unnamed else str(ModulePath(name) / child_name))

    visit(model, "")
    return list(found.values())


def _named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return ``(name, parameter)`` of each parameter once, in the order of ``model.named_parameters()``."""
    found: dict[nn.Parameter, str] = {}
    for name, module, _ in named_modules(model):
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(parameter, str(ModulePath(name) / leaf))
    return [(name, parameter) for parameter, name in found.items()]


def extract_activation_tensor(output: object) -> object:
    """Return the tensor of an output ``(tensor, cache, ...)``, and any other output unchanged."""
    if isinstance(output, (tuple, list)) and output and isinstance(output[0], Tensor):
        return output[0]
    return output


# -- hooks -----------------------------------------------------------------------------------------------------


class HooksManager:
    """Forward hooks by module, at most one for each. Leaving the block, or deleting it, removes them.

    Copies and pickles of a model carry none of these hooks.
    """

    def __init__(self) -> None:
        self.hooks: dict[nn.Module, Handle] = {}
        self._functions: dict[nn.Module, tuple[Callable[..., object], bool]] = {}
        self._suspended = False

    def register_forward_hook(
        self, module: nn.Module, hook_fn: Callable[..., object], *, with_kwargs: bool = False
    ) -> None:
        """Register a hook on a module, in place of the one that this manager registered before."""
        self.remove_hook(module)
        self._functions[module] = (hook_fn, with_kwargs)
        self.hooks[module] = after(module, hook_fn, with_kwargs=with_kwargs)
        if self._suspended:
            self.hooks[module].remove()

    def remove_hook(self, module: nn.Module) -> None:
        """Remove a module's hook, if there is one."""
        if module in self.hooks:
            self.hooks.pop(module).remove()
            self._functions.pop(module, None)

    def remove_all_hooks(self) -> None:
        """Remove every hook."""
        for module in list(self.hooks):
            self.remove_hook(module)

    def suspend(self, suspended: bool) -> None:
        """Take the hooks off the model, or register them again. Suspended hooks stay listed."""
        if suspended == self._suspended:
            return
        self._suspended = suspended
        for module, (function, with_kwargs) in self._functions.items():
            if suspended:
                self.hooks[module].remove()
            else:
                self.hooks[module] = after(module, function, with_kwargs=with_kwargs)

    def __len__(self) -> int:
        return len(self.hooks)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove_all_hooks()

    def __del__(self) -> None:
        self.remove_all_hooks()


@final
class _Listed:
    """The place of a module in a monitor. Removing it stops monitoring the module."""

    def __init__(self, remove: Callable[[], None]) -> None:
        self.remove = remove


@final
class _Link:
    """A module's monitor. It is empty in a copy or a pickle of the module."""

    __slots__ = ("is_reference", "monitor")

    def __init__(self, monitor: object = None, is_reference: bool = False) -> None:
        self.monitor = monitor
        self.is_reference = is_reference

    def __deepcopy__(self, memo: object) -> _Link:
        return _Link()

    __copy__ = __deepcopy__

    def __reduce__(self) -> tuple[object, ...]:
        return _Link, ()


_NO_LINK = _Link()


class MonitorMixin:
    """Let a module's own code log values: ``if self.is_monitoring: self.get_module_monitor().log_tensor(...)``."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        # Before nn.Module among the bases, this initialiser runs first. After it, it may run on a complete module.
        if not isinstance(self, nn.Module) or "_parameters" not in self.__dict__:
            super().__init__(*args, **kwargs)

    def set_module_monitor(
        self, monitor: ModuleMonitor | None = None, is_reference_module: bool = False
    ) -> None:
        """Set the monitor. A `ModuleMonitor` calls this for every module that has the method."""
        self.__dict__["_monitor_link"] = _Link(monitor, is_reference_module)

    def get_module_monitor(self) -> ModuleMonitor | None:
        """Return the monitor of this module, if any."""
        return self.module_monitor

    @property
    def module_monitor(self) -> ModuleMonitor | None:
        """Return the monitor of this module, if any."""
        return self.__dict__.get("_monitor_link", _NO_LINK).monitor  # type: ignore[no-any-return]

    @module_monitor.setter
    def module_monitor(self, monitor: ModuleMonitor | None) -> None:
        self.set_module_monitor(monitor, self.is_reference_module)

    @property
    def is_reference_module(self) -> bool:
        """Return True if this module belongs to the monitor's reference."""
        return self.__dict__.get("_monitor_link", _NO_LINK).is_reference  # type: ignore[no-any-return]

    @is_reference_module.setter
    def is_reference_module(self, is_reference: bool) -> None:
        self.set_module_monitor(self.module_monitor, is_reference)

    @property
    def is_monitoring(self) -> bool:
        """Return True if values that are logged now are kept."""
        monitor = self.module_monitor
        return monitor is not None and monitor.is_monitoring()


# -- what a monitor consists of --------------------------------------------------------------------------------


@final
@dataclass(slots=True)
class _Window:
    """The open step: its number, if it is monitored, and the number of open `no_monitor` blocks."""

    step: int | None = None
    monitored: bool = False
    silenced: int = 0
    seen: set[str] | None = None  # modules of this micro-batch, if a second activation is refused

    @property
    def is_open(self) -> bool:
        return self.monitored and not self.silenced


@final
@dataclass(slots=True)
class _Subject:
    """A model under watch: its modules by formatted name."""

    module: nn.Module | None = None
    names: dict[nn.Module, str] = field(default_factory=dict)
    hooks: HooksManager = field(default_factory=HooksManager)  # lists the monitored modules
    visiting: Visiting | None = None

    def visit(self, visitor: Any | None) -> None:
        """Show the outputs of all monitored modules to a visitor, or to none."""
        if self.visiting is not None:
            self.visiting.end()
            self.visiting = None
        if visitor is not None and self.module is not None:
            stops = [Stop(self.names[part], part, inputs=False) for part in self.hooks.hooks]
            self.visiting = Visiting(self.module, visitor, stops)
            self.visiting.begin()


@final
class _ReferenceOutputs:
    """Outputs of the reference in the current micro-batch, call by call, as copies.

    A pass under ``no_monitor`` is kept too, but never replaces a monitored one. A second monitored pass is an error.
    """

    def __init__(self, window: _Window, offload: bool) -> None:
        self._window = window
        self._offload = offload
        self.ignored = False  # while a check runs parts of the reference
        self.first: dict[str, Tensor] = {}
        self._further: dict[tuple[str, int], Tensor] = {}
        self._silenced: set[str] = set()  # places that were kept under no_monitor

    def before(self, call: Call, args: object, kwargs: object) -> None:
        """See nothing: only outputs are kept."""

    def after(self, call: Call, output: object) -> None:
        """Keep the output of a module of the reference."""
        if self._window.monitored and not self.ignored and not call.repeated:
            self.keep(call.path, output, call.number)

    def keep(self, name: str, output: object, call: int = 0) -> None:
        """Keep copies of all tensors of an output."""
        for leaf, value in leaves(output):
            place, silenced = leaf_name(name, leaf), self._window.silenced > 0
            if place in self.first and place not in self._silenced:
                if silenced:
                    continue
                if not call:
                    raise MetricError(
                        f"Failed to monitor activations of module {name}. Step {self._window.step}: Activations of "
                        f"the reference module for module {place} are already stored: the reference was called twice; "
                        "call after_micro_batch() between two batches, or make further calls under no_monitor()"
                    )
            copy = value.detach().clone()
            copy = copy.cpu() if self._offload else copy
            if call:
                self._further[place, call] = copy
                continue
            self._further = {key: kept for key, kept in self._further.items() if key[0] != place}
            self.first[place] = copy
            if silenced:
                self._silenced.add(place)
            else:
                self._silenced.discard(place)

    def get(self, place: str, call: int) -> Tensor | None:
        """Return the reference's output at a module's n-th call; the first one's if there were fewer."""
        return self._further.get((place, call), self.first.get(place))

    def forget(self) -> None:
        """Drop everything: a new micro-batch begins. Tensors that were handed out stay valid."""
        self.first = {}
        self._further.clear()
        self._silenced.clear()


@final
class _Comparison:
    """Compare the model's outputs with the reference's. Refuse a module's second activation if the user wants that."""

    def __init__(self, monitor: ModuleMonitor) -> None:
        self._monitor = monitor

    def before(self, call: Call, args: object, kwargs: object) -> None:
        """See nothing: only outputs are compared."""

    def after(self, call: Call, output: object) -> None:
        """Compare the output of a module."""
        if self._monitor.is_monitoring() and not call.repeated:
            self.see(call.path, output, call.number)

    def see(self, name: str, output: object, call: int = 0) -> None:
        """Compare each tensor of an output."""
        monitor, seen = self._monitor, self._monitor._window.seen
        if seen is not None:
            if name in seen:
                raise MonitorError(
                    f"Step {monitor.current_step}: Activations of module {name} have already been stored in this "
                    "micro-batch. Call after_micro_batch() between two batches, or run further passes under "
                    "no_monitor()."
                )
            seen.add(name)
        if not monitor._compares:
            return
        for leaf, value in leaves(output):
            place = leaf_name(name, leaf)
            reference = monitor._reference_outputs.get(place, call)
            if reference is None:
                monitor.logger.warning(
                    "Step %s: No reference module activations found for module %s",
                    monitor.current_step,
                    place,
                )
                continue
            own = value.cpu() if monitor.cpu_offload else value
            monitor._take(
                "activation_difference", "activation_difference", place, (name, place), own, reference
            )


@final
class _EagerStance:
    """Let compiled code run eagerly in monitored steps: a compiled graph does not see hooks that are added later.

    Nothing is recompiled, and nothing happens in a process that has never used torch.compile.
    """

    def __init__(self) -> None:
        self._held: Any = None

    def set(self, eager: bool) -> None:
        if eager and self._held is None and compiler_was_used():
            self._held = torch.compiler.set_stance("force_eager")
        elif not eager and self._held is not None:
            held, self._held = self._held, None
            held.__exit__(None, None, None)


# -- the monitor -----------------------------------------------------------------------------------------------


class ModuleMonitor(MetricRegistry):
    """Monitor the training of a module.

        monitor = ModuleMonitor(monitor_step_fn=lambda step: step % 10 == 0)
        monitor.set_module(model)
        monitor.add_activation_metric("l2", "l2")
        for step, batch in enumerate(batches):
            monitor.begin_step(step)
            ...
            monitor.end_step()

    monitor_step_fn: returns True for the steps to monitor; every 20th by default, None for all.
    format_module_name_fn: turns names of ``named_modules()`` and ``named_parameters()`` into those in keys.
    excluded_modules_regex, included_modules_regex: matched against formatted names; exclusion wins.
    logger: receives warnings and the size of each step; a silent one by default.
    cpu_offload: keep the reference's activations on the CPU.
    error_on_duplicates: raise `MonitorError` if a module has a second activation in one micro-batch.
    attention: monitor every attention inside the model, or inside modules whose name this pattern matches.
    run: a run folder for all numbers; memory then holds only the last step.
    sinks: functions of ``(step, metrics)``, or consumers of records.
    """

    def __init__(
        self,
        monitor_step_fn: Callable[[int], bool] | None = lambda step: step % 20 == 0,
        format_module_name_fn: Callable[[str], str] = default_format_module_name_fn,
        excluded_modules_regex: str = r"$.^",
        logger: logging.Logger | None = None,
        cpu_offload: bool = False,
        *,
        included_modules_regex: str | None = None,
        error_on_duplicates: bool = False,
        attention: bool | str = False,
        run: str | os.PathLike[str] | None = None,
        sinks: Sequence[Consumer | Callable[[int, dict[str, object]], None]] = (),
    ) -> None:
        super().__init__()
        self.monitor_step_fn = monitor_step_fn
        self.format_module_name_fn = format_module_name_fn
        self.excluded_modules_compiled_re = re.compile(excluded_modules_regex)
        self.included_modules_compiled_re = re.compile(included_modules_regex or "")
        self.logger = _quiet_logger() if logger is None else logger
        self.storage = StorageManager(self.logger)
        self.storage._settle = self._settle
        self._window = _Window(seen=set() if error_on_duplicates else None)
        self._own, self._reference = _Subject(), _Subject()
        self._reference_outputs = _ReferenceOutputs(self._window, cpu_offload)
        self._outputs: OutputWatch | None = (
            None  # until the first monitored step, and after a metric was added
        )
        self._in_hand = InHand()
        self._writer = StepWriter(run, sinks) if run is not None or sinks else None
        # Called with True when a monitored step begins, with False when one ends or is not monitored.
        self._companions: list[Callable[[bool], None]] = [_EagerStance().set]
        if attention:
            self._companions.append(AttentionPatch(self, attention).set)

    # -- the module and its reference --------------------------------------------------------------------------

    def set_module(self, module: nn.Module) -> None:
        """Set the module to monitor. Raises `MonitorError` if there is one already."""
        if module is None:
            raise MonitorError("Module cannot be None. Give the module to monitor.")
        if self._own.module is not None:
            raise MonitorError("Module has already been set! Make another ModuleMonitor for another module.")
        self._set(self._own, module, self._formatted(module), is_reference=False)

    def set_reference_module(self, module: nn.Module | None) -> None:
        """Set the module to compare with, which must have the same structure. None removes it."""
        if self._own.module is None:
            raise MonitorError("Please set the monitored module before setting the reference module.")
        self.remove_reference_module()
        if module is not None:
            parts = self._formatted(module)
            _check_same_structure(set(self.module_names.values()), {name for name, _, _ in parts})
            self._set(self._reference, module, parts, is_reference=True)
            self._arm(self._window.monitored)

    def _formatted(self, module: nn.Module) -> list[tuple[str, nn.Module, bool]]:
        return [
            (self.format_module_name_fn(name), part, wraps) for name, part, wraps in named_modules(module)
        ]

    def _set(
        self,
        subject: _Subject,
        module: nn.Module,
        parts: list[tuple[str, nn.Module, bool]],
        *,
        is_reference: bool,
    ) -> None:
        subject.module = module
        for name, part, is_wrapper in parts:
            subject.names[part] = name
            if self._is_excluded(name):
                self.logger.debug("Module %s is excluded", name)
                continue
            if not is_wrapper:  # a wrapper returns the output of the module inside it
                subject.hooks.hooks[part] = _Listed(self._listing_changed)
            if isinstance(part, MonitorMixin):
                part.set_module_monitor(self, is_reference)

    def _listing_changed(self) -> None:
        """React to a module that was removed from a listing."""
        self._drop_outputs()
        self._own.visit(None)
        self._reference.visit(None)

    def has_reference_module(self) -> bool:
        """Return True if there is a reference."""
        return self._reference.module is not None

    def remove_reference_module(self) -> None:
        """Remove the reference and everything that was registered on it."""
        reference, self._reference = self._reference, _Subject()
        reference.visit(None)
        for part in reference.names:
            if isinstance(part, MonitorMixin):
                part.set_module_monitor(None, False)
        self._own.visit(None)
        self._reference_outputs.forget()

    @property
    def module(self) -> nn.Module | None:
        """Return the monitored module."""
        return self._own.module

    @property
    def module_names(self) -> dict[nn.Module, str]:
        """Return the formatted name of each part of the monitored module."""
        return self._own.names

    @property
    def activation_hooks(self) -> HooksManager:
        """Return the monitored parts of the module. Removing one stops monitoring it."""
        return self._own.hooks

    @property
    def reference_module(self) -> nn.Module | None:
        """Return the reference, if there is one."""
        return self._reference.module

    @property
    def reference_module_names(self) -> dict[nn.Module, str]:
        """Return the formatted name of each part of the reference."""
        return self._reference.names

    @property
    def reference_activation_hooks(self) -> HooksManager:
        """Return the parts of the reference whose outputs are kept."""
        return self._reference.hooks

    @property
    def reference_module_activations(self) -> dict[str, Tensor]:
        """Return the reference's outputs in this micro-batch, by module name."""
        return self._reference_outputs.first

    @reference_module_activations.setter
    def reference_module_activations(self, activations: dict[str, Tensor]) -> None:
        self._reference_outputs.forget()
        self._reference_outputs.first = activations

    @property
    def ignore_reference_module_activations(self) -> bool:
        """Return True while calls of the reference are not kept."""
        return self._reference_outputs.ignored

    @ignore_reference_module_activations.setter
    def ignore_reference_module_activations(self, ignored: bool) -> None:
        self._reference_outputs.ignored = ignored

    @property
    def cpu_offload(self) -> bool:
        """Return True if the reference's activations are kept on the CPU."""
        return self._reference_outputs._offload

    # -- steps -------------------------------------------------------------------------------------------------

    @property
    def current_step(self) -> int | None:
        """Return the step that was begun last."""
        return self._window.step

    @property
    def current_step_monitored(self) -> bool:
        """Return True inside a monitored step."""
        return self._window.monitored

    @property
    def within_monitoring_window(self) -> bool:
        """Return True inside a monitored step and outside of `no_monitor`."""
        return self._window.is_open

    def is_step_monitored(self, step: int) -> bool:
        """Return True if a step is one of those to monitor."""
        return True if self.monitor_step_fn is None else self.monitor_step_fn(step)

    def is_monitoring(self) -> bool:
        """Return True if values are recorded at this moment."""
        return self._window.is_open

    def begin_step(self, step: int) -> bool:
        """Begin a step, before its forward pass. Return True if it is monitored."""
        window = self._window
        if window.step is not None and step < window.step:
            raise MonitorError(
                f"Step {step} cannot be smaller than the current step {window.step}. Steps only grow."
            )
        self._settle()  # an earlier step may not have been ended
        self.after_micro_batch()
        monitored = bool(self.is_step_monitored(step))
        if monitored and self._own.module is None:
            raise MonitorError("No module to monitor. Please set the module first.")
        window.step, window.monitored = step, monitored
        self._arm(monitored)
        if monitored:
            self.storage.create_step_entry(step)
        return monitored

    def _arm(self, monitored: bool) -> None:
        """Register hooks for a monitored step, and only those that some metric needs; remove them for any other."""
        if monitored and self._outputs is None:
            assert self._own.module is not None
            names = {part: self._own.names[part] for part in self._own.hooks.hooks}
            self._outputs = OutputWatch(unwrap(self._own.module), names, self._tables["activation"])
        if self._outputs is not None:
            self._outputs.begin(monitored, self._window.silenced > 0)
        visits = monitored and (self._compares or self._window.seen is not None)
        if visits != (self._own.visiting is not None):
            self._own.visit(_Comparison(self) if visits else None)
        refers = monitored and self.has_reference_module()
        if refers != (self._reference.visiting is not None):
            self._reference.visit(self._reference_outputs if refers else None)
        for notify in self._companions:
            notify(monitored)

    @property
    def _compares(self) -> bool:
        return self.has_reference_module() and bool(self.activation_difference_metrics)

    def _metric_added(self) -> None:
        self._drop_outputs()
        if self._window.monitored:
            self._arm(True)

    def _drop_outputs(self) -> None:
        """Close the watch of module outputs; the next monitored step makes another."""
        self._settle()
        outputs, self._outputs = self._outputs, None
        if outputs is not None:
            outputs.close()

    @contextmanager
    def no_monitor(self) -> Iterator[None]:
        """Monitor nothing inside this block. A pass of the reference is still kept for comparison."""
        self._silence(1)
        try:
            yield
        finally:
            self._silence(-1)

    def _silence(self, blocks: int) -> None:
        self._window.silenced += blocks
        if self._outputs is not None and self._window.monitored:
            self._outputs.set_recording(self._window.is_open)

    def after_micro_batch(self) -> None:
        """End a micro-batch: drop what the reference returned for it."""
        self._reference_outputs.forget()
        if self._window.seen is not None:
            self._window.seen.clear()

    def end_step(self) -> None:
        """End the step: reduce the values of each key, over calls and micro-batches, to one number."""
        self.after_micro_batch()
        window, step = self._window, self._window.step
        was_open, window.monitored = window.is_open, False
        results = self._results(go_on=False)
        if was_open and step is not None:
            self._log(results, step, final=True)
            self.storage.aggregate_step(step)
            if self._writer is not None:
                metrics = self.storage.get_step_metrics(step)
                self._writer.write(step, metrics, training=getattr(self.module, "training", True))
                if self._writer.has_run:
                    self.storage.keep_only(step)
        for notify in self._companions:
            notify(False)

    def _settle(self) -> None:
        """Log the results of the open step so far, as if each value had been logged when it was recorded."""
        window = self._window
        if window.monitored and window.step is not None:
            self._log(self._results(go_on=True), window.step, final=False)

    def _results(self, *, go_on: bool) -> list[Found]:
        outputs = [] if self._outputs is None else self._outputs.drain(go_on=go_on)
        return [*outputs, *self._in_hand.drain()]

    def _log(self, results: Iterable[Found], step: int, *, final: bool) -> None:
        metrics = self.storage._log_dict.setdefault(step, {})
        sums: dict[str, tuple[float, float]] = {}
        for key, value, weight, aggregate in results:
            if isinstance(value, Tensor):
                self.storage.log_tensor(step, key, value, aggregate)
            else:
                total, weights = sums.get(key, (0.0, 0.0))
                sums[key] = (total + value * weight, weights + weight)
        for key, (total, weight) in sums.items():
            mean = total / weight if weight else float("nan")
            if final and key not in metrics:
                metrics[key] = mean
            else:
                self.storage.log_tensor(step, key, torch.full((int(weight),), mean, dtype=torch.float64))

    def get_step_metrics(self) -> dict[str, Any]:
        """Return the numbers of the current step, by key. Inside a step, values may be lists."""
        return self.storage.get_step_metrics(self._window.step)

    def get_all_metrics(self) -> dict[Any, dict[str, Any]]:
        """Return the numbers of all steps, ``{step: {key: value}}``, read from the run folder if there is one."""
        if self._writer is not None and self._writer.has_run:
            return {**self._writer.read_back(), **self.storage.get_all_metrics()}
        return self.storage.get_all_metrics()

    def close(self) -> None:
        """Remove every hook, and close the run and the sinks."""
        self._settle()
        self.remove_reference_module()
        self._window.monitored = False
        self._arm(False)
        self._drop_outputs()
        for part in self.module_names:
            if isinstance(part, MonitorMixin):
                part.set_module_monitor(None, False)
        if self._writer is not None:
            self._writer.close()

    # -- the user's own numbers --------------------------------------------------------------------------------

    def log_scalar(
        self,
        key: str,
        value: Number | Tensor | float,
        aggregation_fn: Callable[[Any], Any] | None = None,
        force: bool = False,
    ) -> None:
        """Log a number. ``force`` logs it also at steps that are not monitored."""
        if self._window.is_open or force:
            self.storage.log_scalar(self._window.step, key, value, aggregation_fn)  # type: ignore[arg-type]

    def log_scalars(self, monitor_dict: Mapping[str, Any], force: bool = False) -> None:
        """Log several numbers."""
        for key, value in monitor_dict.items():
            self.log_scalar(key, value, force=force)

    def log_tensor(
        self, key: str, tensor: Tensor, aggregation_fn: Callable[[Any], Any] | None = None
    ) -> None:
        """Log the mean over a tensor's present elements, or what ``aggregation_fn`` computes from them."""
        if self._window.is_open:
            kept = torch.as_tensor(tensor).detach().clone()
            self.storage.log_tensor(self._window.step, key, kept, aggregation_fn)  # type: ignore[arg-type]

    # -- values in hand ----------------------------------------------------------------------------------------

    def monitor_activations(
        self, module: str | nn.Module, activations: object, is_reference: bool = False
    ) -> None:
        """Record a value as a module's output. Module outputs are recorded without it."""
        window = self._window
        if not (window.is_open or (window.monitored and is_reference)):
            return
        name = self._get_module_name(module, is_reference)
        if self._is_excluded(name) or (is_reference and self.ignore_reference_module_activations):
            return
        if not is_reference:
            for leaf, value in leaves(activations):
                place = leaf_name(name, leaf)
                self._take("activation", "activation", place, (name, place), value)
            _Comparison(self).see(name, activations)
        elif self.has_reference_module():
            self._reference_outputs.keep(name, activations)
        else:
            self.logger.warning(
                "Step %s: Attempted to store activations of the reference module, but no reference module is set "
                "(for module %s).",
                window.step,
                name,
            )

    def monitor_gradients(self, before_clip: bool = False) -> None:
        """Record the gradients of all parameters. Call it after backward, before the optimizer's step."""
        if not self._window.is_open or self.module is None:
            return
        prefix = "gradient_before_clip" if before_clip else "gradient"
        for name, parameter in _named_parameters(self.module):
            if parameter.grad is None:
                self.logger.warning(
                    "Step %s: Found a parameter where the gradient is None: %s", self.current_step, name
                )
            else:
                self._take_parameter("gradient", prefix, name, parameter.grad)

    def monitor_parameters(self) -> None:
        """Record all parameters, and compare them with the reference's."""
        if not self._window.is_open or self.module is None:
            return
        others: dict[str, nn.Parameter] | None = None
        if self._reference.module is not None and self.parameter_difference_metrics:
            named = _named_parameters(self._reference.module)
            others = {self.format_module_name_fn(name): parameter for name, parameter in named}
        for name, parameter in _named_parameters(self.module):
            self._take_parameter("parameter", "parameter", name, parameter)
            if others is None:
                continue
            other = others.get(self.format_module_name_fn(name))
            if other is None:
                self.logger.warning(
                    "Step %s: Parameter %s not found in the reference module.", self.current_step, name
                )
            else:
                self._take_parameter("parameter_difference", "parameter_difference", name, parameter, other)

    def _take_parameter(self, sort: str, prefix: str, name: str, *values: Tensor) -> None:
        names = (name, default_format_module_name_fn(name))
        self._take(sort, prefix, self.format_module_name_fn(name), names, *values, one_number=True)

    def _take(
        self,
        sort: str,
        prefix: str,
        place: str,
        names: tuple[str, ...],
        *values: Tensor,
        one_number: bool = False,
    ) -> None:
        """Compute the metrics of one sort for a value, or for a value and the reference's."""
        statistics: dict[str, str] = {}
        values = tuple(value.detach() for value in values)
        for metric in self._tables[sort].at(*names):
            key = f"{prefix}/{place}/{metric.name}"
            if metric.is_statistic:
                statistics[key] = metric.function
                continue
            try:
                answer = torch.as_tensor(metric.answer(*values))
                if one_number and answer.numel() != 1:
                    problem = f"returned a tensor of shape {tuple(answer.shape)}, not one number"
                    raise metric.failure(problem, values[0])
            except MetricError as error:
                raise MetricError(f"{prefix}/{place}: {error}") from error.__cause__
            self.storage.log_tensor(self._window.step, key, answer, metric.aggregate)  # type: ignore[arg-type]
        if statistics:
            value, *other = values
            self._in_hand.measure(value - other[0] if other else value, statistics)

    # -- names -------------------------------------------------------------------------------------------------

    def _get_module_name(self, module: str | nn.Module, is_reference: bool) -> str:
        if isinstance(module, str):
            return module
        names = self.reference_module_names if is_reference else self.module_names
        if module not in names:
            which = "reference module names" if is_reference else "module names"
            raise MonitorError(
                f"Module {module} not found in {which}. It does not belong to the "
                f"{'reference' if is_reference else 'monitored'} module."
            )
        return names[module]

    def _is_excluded(self, name: str) -> bool:
        if self.excluded_modules_compiled_re.match(name) is not None:
            return True
        return self.included_modules_compiled_re.match(name) is None


def _check_same_structure(own: set[str], reference: set[str]) -> None:
    """Raise `MonitorError` unless the reference has modules of the same names."""
    differing = sorted(reference ^ own)
    if differing:
        shown = ", ".join(
            f"{name!r} (only in the {'reference' if name in reference else 'module'})"
            for name in differing[:5]
        )
        raise MonitorError(
            "The reference module must have the same structure as the monitored module (there are modules with "
            f"different names): {shown}{' …' if len(differing) > 5 else ''}"
        )


def _quiet_logger() -> logging.Logger:
    logger = logging.getLogger("ModuleMonitor")
    if not any(isinstance(handler, logging.NullHandler) for handler in logger.handlers):
        logger.addHandler(logging.NullHandler())
    return logger
