"""``ModuleMonitor``: metrics of activations, parameters and gradients, step by step, by their names.

The calls, keys and numbers are those of the ``torch-module-monitor`` package; the work is done by torchtap. It
guarantees:
- a step that is not monitored carries no hook; copies and pickles of the model never carry a live one;
- metrics that are plain expressions share one pass over each value; results come to the host once a step;
- what an activation checkpoint repeats is not counted again.

Not here: what metrics mean (`expressions`), measuring (`ledger`), keeping (`storage`, `records`), attention and the
refined coordinate check (their own files).
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Number
from typing import Any

import torch
from torch import Tensor, nn

from torchtap.errors import MetricError, MonitorError
from torchtap.hooks.leaves import leaves
from torchtap.hooks.walker import Walker, shown_output
from torchtap.hooks.ways import Action
from torchtap.monitors.module_monitor.attention import AttentionPatch
from torchtap.monitors.module_monitor.eager_stance import EagerStance
from torchtap.monitors.module_monitor.hooks import HooksManager
from torchtap.monitors.module_monitor.ledger import Ledger
from torchtap.monitors.module_monitor.metrics import MetricRegistry
from torchtap.monitors.module_monitor.mixin import MonitorMixin
from torchtap.monitors.module_monitor.naming import (
    check_same_structure,
    default_format_module_name_fn,
    leaf_name,
    named_modules,
)
from torchtap.monitors.module_monitor.output_hooks import Visited, take_output, take_reference_output
from torchtap.monitors.module_monitor.parameters import ParameterList
from torchtap.monitors.module_monitor.records import StepKeeper
from torchtap.monitors.module_monitor.reference import ReferenceActivations
from torchtap.monitors.module_monitor.storage import StorageManager
from torchtap.plan.sites import unwrap
from torchtap.store.record import Consumer

__all__ = ["ModuleMonitor"]


class ModuleMonitor(MetricRegistry):
    """Monitors the training of a module; see ``docs/module-monitor.md``.

    ``monitor_step_fn`` says which steps are monitored (None: all). ``excluded_modules_regex`` and
    ``included_modules_regex`` are matched against formatted names; exclusion wins. ``error_on_duplicates`` raises when
    a module gives a second activation in one micro-batch. ``attention`` monitors every attention inside the model, or
    inside modules whose name it matches. ``run`` is a folder that all numbers go to; memory then holds the newest step
    only. ``sinks`` are called with ``(step, metrics)`` or are consumers of records.
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
        self._given: set[str] | None = set() if error_on_duplicates else None  # modules, in this micro-batch
        self.logger = _quiet_logger() if logger is None else logger
        self.cpu_offload = cpu_offload

        self.module: nn.Module | None = None
        self.module_names: dict[nn.Module, str] = {}
        self.reference_module: nn.Module | None = None
        self.reference_module_names: dict[nn.Module, str] = {}
        self.ignore_reference_module_activations = False

        self.current_step: int | None = None
        self.current_step_monitored = False
        self.within_monitoring_window = False

        self.activation_hooks = HooksManager()
        self.reference_activation_hooks = HooksManager()
        self._own_actions: set[Callable[..., object]] = set()  # on modules, those of checks among them
        self.storage = StorageManager(self.logger)
        self.storage._settle = self._settle
        self._ledger = Ledger()
        self._reference = ReferenceActivations(offload=cpu_offload)
        self._calls: dict[str, int] = {}  # of the monitored module's parts, in the current pass
        self._walkers: list[Walker] = []  # that tell of passes, where there is a reference
        # Told whether the step that begins is monitored.
        self._companions: list[Callable[[bool], None]] = [self._reference.arm]
        # The check whose hooks on the reference serve the monitor, too, in the step that is open.
        self._relieved_by: object | None = None
        self._own_parameters: ParameterList | None = None
        self._silenced = 0
        self._stance = EagerStance()
        self._attention = AttentionPatch(self, attention) if attention else None
        self._keeper = StepKeeper(run, sinks) if run is not None or sinks else None

    # -- the module and its reference ---------------------------------------------------------------------

    def set_module(self, module: nn.Module) -> None:
        """The module to monitor. A monitor has one for its whole life."""
        if module is None:
            raise MonitorError("Module cannot be None. Give the module to monitor.")
        if self.module is not None:
            raise MonitorError("Module has already been set! Make another ModuleMonitor for another module.")
        self.module = module
        self._own_parameters = ParameterList(module, self.format_module_name_fn)
        for name, part, is_wrapper in named_modules(module):
            formatted = self.module_names[part] = self.format_module_name_fn(name)
            if self._is_excluded(formatted):
                self.logger.debug("Module %s is excluded", name)
                continue
            if not is_wrapper:  # a wrapper gives what the module inside it gave
                self._put_on(self.activation_hooks, part, shown_output(Visited(self, formatted), take_output))
                self.logger.debug("Registered forward hook for module %s", name)
            if isinstance(part, MonitorMixin):
                part.set_module_monitor(self, False)

    def set_reference_module(self, module: nn.Module | None) -> None:
        """The module to compare with, of the same structure; None for none. Replaces the one before."""
        if self.module is None:
            raise MonitorError("Please set the monitored module before setting the reference module.")
        self.remove_reference_module()
        if module is None:
            return
        parts = [
            (self.format_module_name_fn(name), part, is_wrapper)
            for name, part, is_wrapper in named_modules(module)
        ]
        check_same_structure(set(self.module_names.values()), {name for name, _, _ in parts})
        self.reference_module = module
        for name, part, is_wrapper in parts:
            self.reference_module_names[part] = name
            if self._is_excluded(name):
                self.logger.debug("Excluding reference module %s from monitoring.", name)
                continue
            if not is_wrapper:
                self._put_on(
                    self.reference_activation_hooks,
                    part,
                    shown_output(Visited(self, name), take_reference_output),
                )
                self.logger.debug("Registered forward hook for reference module %s", name)
            if isinstance(part, MonitorMixin):
                part.set_module_monitor(self, True)
        of_reference, of_module = Walker(unwrap(module)), Walker(unwrap(self.module))
        of_reference.passes(self._reference.begin_pass, self._reference.end_pass)
        of_module.passes(self._calls.clear)
        self._walkers = [of_reference, of_module]

    def _put_on(self, hooks: HooksManager, part: nn.Module, action: Action) -> None:
        self._own_actions.add(action)
        hooks.put_on(part, action)

    def has_reference_module(self) -> bool:
        """Whether there is a reference."""
        return self.reference_module is not None

    def remove_reference_module(self) -> None:
        """Forget the reference and take everything off it."""
        if self.reference_module is None:
            return
        for part in self.reference_module.modules():
            if isinstance(part, MonitorMixin):
                part.set_module_monitor(None, False)
        self.reference_module = None
        self.reference_activation_hooks.remove_all_hooks()
        self._relieved_by = None
        self.reference_activation_hooks.rest(not self.current_step_monitored)
        for walker in self._walkers:
            walker.leave()
        self._walkers = []
        self.reference_module_names = {}
        self._reference.forget()

    @property
    def reference_module_activations(self) -> dict[str, Tensor]:
        """Module name to what the reference gave in this micro-batch."""
        return self._reference.first

    @reference_module_activations.setter
    def reference_module_activations(self, activations: dict[str, Tensor]) -> None:
        self._reference.forget()
        self._reference.first = activations

    # -- steps --------------------------------------------------------------------------------------------

    def is_step_monitored(self, step: int) -> bool:
        """Whether a step is one of those to monitor."""
        return True if self.monitor_step_fn is None else self.monitor_step_fn(step)

    def is_monitoring(self) -> bool:
        """Whether values are taken at this moment."""
        return self.within_monitoring_window

    def begin_step(self, step: int) -> bool:
        """A step begins; says whether it is monitored. Call it before the forward pass."""
        if self.current_step is not None and step < self.current_step:
            raise MonitorError(
                f"Step {step} cannot be smaller than the current step {self.current_step}. Steps only grow."
            )
        self._settle()  # a step before that was never ended
        self._reference.forget()
        self._forget_calls()
        monitored = bool(self.is_step_monitored(step))
        if monitored and self.module is None:
            raise MonitorError("No module to monitor. Please set the module first.")
        self.current_step = step
        self.current_step_monitored = monitored
        self.within_monitoring_window = monitored and not self._silenced
        self._arm(monitored)
        if monitored:
            self.storage.create_step_entry(step)
        return monitored

    def _arm(self, monitored: bool) -> None:
        """Hooks are on the model in monitored steps only, and only if somebody wants what they hear."""
        self._relieved_by = None
        for tell in self._companions:
            tell(monitored)
        self.activation_hooks.rest(not (monitored and self._wants_outputs()))
        self.reference_activation_hooks.rest(not monitored or self._relieved_by is not None)
        self._stance.set(monitored)
        if self._attention is not None:
            self._attention.set(monitored)

    def _wants_outputs(self) -> bool:
        return bool(self._activations.listed or self._activation_differences.listed)

    def _metric_added(self) -> None:
        if self.current_step_monitored:
            self.activation_hooks.rest(False)

    @contextmanager
    def no_monitor(self) -> Iterator[None]:
        """Inside this block nothing is monitored; a pass of the reference is still kept for comparison."""
        self._silenced += 1
        self.within_monitoring_window = False
        try:
            yield
        finally:
            self._silenced -= 1
            self.within_monitoring_window = self.current_step_monitored and not self._silenced

    def after_micro_batch(self) -> None:
        """A micro-batch is over: what the reference gave for it is not needed any more."""
        self._reference.forget()
        self._forget_calls()

    def _forget_calls(self) -> None:
        self._calls.clear()
        if self._given is not None:
            self._given.clear()

    def end_step(self) -> None:
        """The step is over: one number is made of all that was taken for a key, over calls and micro-batches."""
        self._reference.forget()
        step = self.current_step
        if self.within_monitoring_window and step is not None:
            metrics = self.storage._log_dict.setdefault(step, {})
            self._ledger.finish(self.storage, step, metrics)
            self.storage.aggregate_step(step)
            if self._keeper is not None:
                self._keeper.keep(step, metrics, training=getattr(self.module, "training", True))
                if self._keeper.has_run:
                    self.storage.keep_only(step)
        self.current_step_monitored = False
        self.within_monitoring_window = False
        self._stance.set(False)
        if self._attention is not None:
            self._attention.set(False)

    def get_step_metrics(self) -> dict[str, Any]:
        """The numbers of the current step, by key."""
        return self.storage.get_step_metrics(self.current_step)  # type: ignore[arg-type]

    def get_all_metrics(self) -> dict[object, dict[str, object]]:
        """The numbers of all steps, ``{step: {key: value}}``; from the run folder where there is one."""
        if self._keeper is not None and self._keeper.has_run:
            return {**self._keeper.read_back(), **self.storage.get_all_metrics()}
        return self.storage.get_all_metrics()

    def close(self) -> None:
        """Take every hook off, and close the run and the sinks."""
        self._settle()
        self.remove_reference_module()
        self._arm(False)
        self.activation_hooks.remove_all_hooks()
        for part in self.module_names:
            if isinstance(part, MonitorMixin):
                part.set_module_monitor(None, False)
        self.current_step_monitored = self.within_monitoring_window = False
        if self._keeper is not None:
            self._keeper.close()

    def _settle(self) -> None:
        """Put what was measured so far into the storage, as if it had been logged value by value."""
        if self.current_step is not None and not self._ledger.is_empty():
            self._ledger.drain(self.storage, self.current_step)

    # -- numbers of the user's own ------------------------------------------------------------------------

    def log_scalar(
        self,
        key: str,
        value: Number | Tensor | float,
        aggregation_fn: Callable[[object], object] | None = None,
        force: bool = False,
    ) -> None:
        """Log a number; ``force`` does so at steps that are not monitored, too."""
        if self.within_monitoring_window or force:
            self.storage.log_scalar(self.current_step, key, value, aggregation_fn)  # type: ignore[arg-type]

    def log_scalars(self, monitor_dict: Mapping[str, Any], force: bool = False) -> None:
        """Log several numbers."""
        for key, value in monitor_dict.items():
            self.log_scalar(key, value, force=force)

    def log_tensor(
        self, key: str, tensor: Tensor, aggregation_fn: Callable[[object], object] | None = None
    ) -> None:
        """Log the mean over a tensor, or what ``aggregation_fn`` makes of it. Its value at this moment counts."""
        if self.within_monitoring_window:
            kept = torch.as_tensor(tensor).detach().clone()
            self.storage.log_tensor(self.current_step, key, kept, aggregation_fn)  # type: ignore[arg-type]

    def _log_own(self, key: str, tensor: Tensor) -> None:
        """The same for a tensor that nobody else has, so that no copy is needed."""
        if self.within_monitoring_window:
            self.storage.log_tensor(self.current_step, key, tensor)  # type: ignore[arg-type]

    # -- activations --------------------------------------------------------------------------------------

    def monitor_activations(
        self, module: str | nn.Module, activations: object, is_reference: bool = False
    ) -> None:
        """Take a value as a module's output. Hooks do it for every module; this is for values of one's own."""
        if not self.current_step_monitored:
            return
        if not self.within_monitoring_window and not (is_reference and self._silenced):
            return
        name = self._get_module_name(module, is_reference)
        if self._is_excluded(name):
            return
        if is_reference:
            self._take_reference_output(name, activations)
        else:
            self._take_output(name, activations)

    def _take_once(self, name: str) -> None:
        """Refuse a module's second activation in a micro-batch."""
        assert self._given is not None
        if name in self._given:
            raise MonitorError(
                f"Step {self.current_step}: Activations of module {name} have already been stored in this micro-batch. "
                "Call after_micro_batch() between two batches, or run further passes under no_monitor()."
            )
        self._given.add(name)

    def _take_output(self, name: str, output: object) -> None:
        if self._given is not None:
            self._take_once(name)
        if isinstance(output, Tensor):
            self._take(name, name, output)
            return
        for leaf, value in leaves(output):
            self._take(leaf_name(name, leaf), name, value)

    def _take(self, place: str, name: str, value: Tensor) -> None:
        bound = self._activations.at("activation", place, name, place)
        if bound.metrics:
            self._ledger.take(bound, value)
        if self.reference_module is not None and self._activation_differences.listed:
            self._compare(place, name, value)

    def _compare(self, place: str, name: str, value: Tensor) -> None:
        bound = self._activation_differences.at("activation_difference", place, name, place)
        if not bound.metrics:
            return
        call = self._calls.get(place, 0)
        self._calls[place] = call + 1
        reference = self._reference.get(place, call)
        if reference is None:
            reference = self._reference.get(place)
        if reference is None:
            self.logger.warning(
                "Step %s: No reference module activations found for module %s", self.current_step, place
            )
            return
        self._ledger.take_pair(bound, value.cpu() if self.cpu_offload else value, reference)

    def _take_reference_output(self, name: str, output: object) -> None:
        if self.ignore_reference_module_activations:
            return
        if self.reference_module is None:
            self.logger.warning(
                "Step %s: Attempted to store activations of the reference module, but no reference module is set "
                "(for module %s).",
                self.current_step,
                name,
            )
            return
        for leaf, value in leaves(output):
            copied = self._reference.copies.of(value)
            self._keep_reference_output(
                name, leaf_name(name, leaf), copied.cpu() if self.cpu_offload else copied
            )

    def _keep_reference_output(self, name: str, place: str, copied: Any) -> None:
        """Keep a copy of a value of a module, opened or not."""
        try:
            self._reference.keep(place, copied, quiet=self._silenced > 0, step=self.current_step)
        except MonitorError as error:
            raise MetricError(f"Failed to monitor activations of module {name}. {error}") from error

    # -- gradients and parameters -------------------------------------------------------------------------

    def monitor_gradients(self, before_clip: bool = False) -> None:
        """Take the gradients of all parameters. Call it after backward, before the optimizer's step."""
        if not self.within_monitoring_window or self._own_parameters is None:
            return
        prefix = "gradient_before_clip" if before_clip else "gradient"
        self._own_parameters.take(
            self._ledger, prefix, self._gradients, lambda parameter: parameter.grad, self._warn_no_gradient
        )

    def _warn_no_gradient(self, name: str) -> None:
        self.logger.warning(
            "Step %s: Found a parameter where the gradient is None: %s", self.current_step, name
        )

    def monitor_parameters(self) -> None:
        """Take all parameters, and compare them with the reference's."""
        own = self._own_parameters
        if not self.within_monitoring_window or own is None:
            return
        own.take(self._ledger, "parameter", self._parameters, lambda parameter: parameter)
        if self.reference_module is not None and self.parameter_difference_metrics:
            others = ParameterList(self.reference_module, self.format_module_name_fn).by_formatted_name()
            own.compare(self._ledger, self._parameter_differences, others, self._warn_no_counterpart)

    def _warn_no_counterpart(self, name: str) -> None:
        self.logger.warning(
            "Step %s: Parameter %s not found in the reference module.", self.current_step, name
        )

    # -- names --------------------------------------------------------------------------------------------

    def _get_module_name(self, module: str | nn.Module, is_reference: bool) -> str:
        if isinstance(module, str):
            return module
        names = self.reference_module_names if is_reference else self.module_names
        if module not in names:
            which = "reference module names" if is_reference else "module names"
            raise MonitorError(
                f"Module {module} not found in {which}. It is no part of the "
                f"{'reference' if is_reference else 'monitored'} module."
            )
        return names[module]

    def _is_excluded(self, module: str | nn.Module, is_reference: bool = False) -> bool:
        name = self._get_module_name(module, is_reference)
        if self.excluded_modules_compiled_re.match(name) is not None:
            return True
        return self.included_modules_compiled_re.match(name) is None


def _quiet_logger() -> logging.Logger:
    logger = logging.getLogger("ModuleMonitor")
    if not any(isinstance(handler, logging.NullHandler) for handler in logger.handlers):
        logger.addHandler(logging.NullHandler())
    return logger
