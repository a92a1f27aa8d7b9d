"""The refined coordinate check: how much of a change comes from a layer's weights and how much from its input.

With W_0 and x_0 of the reference and W_t and x_t of the monitored module, ``W_t x_t - W_0 x_0`` is the sum of
``(W_t - W_0) x_t`` and ``W_0 (x_t - x_0)`` (arXiv 2505.22491). Each term is logged as the mean of its rows' norms.

A module's call is either kept, as copies, until `refined_coordinate_check` takes it, or taken where it happens, which
needs no copies and finds the values in the cache. The latter is done where the reference has run before, and once
the check has been asked for in the monitored step before this one: nothing is computed for a check that never comes.
It guarantees:
- the extra passes of the reference draw no random number that the training would have got, and change no value of
  the model's;
- a part of the reference that several terms need on the same input runs once (`replay`).

Not here: the terms and their keys (`coordinate_terms`), the plot over widths (`torchtap rcc`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import pairwise
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from torchtap._torch import has_global_hooks, set_grad_enabled
from torchtap.errors import MonitorError
from torchtap.hooks.arguments import Args, Kwargs
from torchtap.hooks.structure import map_leaves
from torchtap.hooks.untraced import Hook
from torchtap.hooks.walker import shown_call
from torchtap.monitors.module_monitor.coordinate_cells import Cells, Numbers, Sums
from torchtap.monitors.module_monitor.coordinate_terms import Measured, Terms
from torchtap.monitors.module_monitor.hooks import HooksManager
from torchtap.monitors.module_monitor.monitor import ModuleMonitor
from torchtap.monitors.module_monitor.naming import ROOT, named_modules
from torchtap.monitors.module_monitor.part_of_rows import (
    Cutter,
    check_share,
    first_rows,
    mixing,
    refuse_mixing,
)
from torchtap.monitors.module_monitor.reference import Call, Copies, opened
from torchtap.monitors.module_monitor.replay import Replay, fetch_weight, is_function
from torchtap.plan.names import paths_around
from torchtap.reduce import row_norms

__all__ = ["RefinedCoordinateCheck", "l2_norm"]


def l2_norm(tensor: Tensor) -> Tensor:
    """The L2 norm of each row: over the last dimension."""
    norms: Tensor = torch.linalg.vector_norm(tensor, ord=2, dim=-1)
    return norms


@lru_cache(maxsize=1 << 14)
def _rms_keys(keys: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{key.removesuffix('/l2norm')}/rmsnorm" for key in keys)


class RefinedCoordinateCheck:
    """Checks every module that was called. Make it once, call `refined_coordinate_check` after both forwards.

    ``rms_norms`` logs each ``…/l2norm`` once more as ``…/rmsnorm``: divided by the root of the row's width, so that
    models of several widths compare. ``share`` checks that part of each batch, its first rows, exactly: run the
    reference on `part` of the inputs.
    """

    def __init__(self, monitor: ModuleMonitor, *, rms_norms: bool = False, share: float = 1.0) -> None:
        check_share(share)
        if monitor.module is None:
            raise MonitorError("Set the module to monitor before setting up the refined coordinate check.")
        if monitor.reference_module is None:
            raise MonitorError("Set the reference module before setting up the refined coordinate check.")
        self.monitor = monitor
        self._rms_norms = rms_norms
        self._share = share
        self._cutter = Cutter() if share < 1 else None
        self._mixing = mixing(monitor.module)
        self.logger = monitor.logger
        self.module = monitor.module
        self.reference_module = monitor.reference_module
        self.format_module_name_fn = monitor.format_module_name_fn
        self.cpu_offload = monitor.cpu_offload

        # What is kept of the calls in this micro-batch, by module name.
        self.module_inputs: dict[str, tuple[Any, ...]] = {}
        self.module_outputs: dict[str, Any] = {}
        self._keywords: dict[str, dict[str, Any]] = {}
        self._copies = Copies(offload=monitor.cpu_offload)
        self._measured: dict[str, _Pair] = {}  # those whose terms were taken

        # Whether calls are taken where they happen, and whether the check was asked for in this step.
        self._at_once = False
        self._was_asked = False

        generators = [torch.default_generator]
        devices = {p.device.index or 0 for p in self.module.parameters() if p.is_cuda}
        generators += [torch.cuda.default_generators[device] for device in sorted(devices)]
        self._generators = tuple(generators)

        self.rcc_forward_hooks = HooksManager()
        self.rcc_reference_forward_hooks = HooksManager()
        self._replay = Replay(monitor._own_actions, self._aside)
        self._pairs = self._paired()
        on_forward, on_reference = shown_call(self._on_forward), shown_call(self._on_reference_forward)
        monitor._own_actions |= {on_forward, on_reference}
        for pair in self._pairs:
            self.rcc_forward_hooks.put_on(pair.module, Hook(on_forward, pair), with_kwargs=True)
            self.rcc_reference_forward_hooks.put_on(
                pair.reference, Hook(on_reference, pair), with_kwargs=True
            )
        monitor._companions.append(self._arm)

    def _paired(self) -> list[_Pair]:
        """The modules to check, each with its counterpart."""
        modules, references = self._listed(self.module), self._listed(self.reference_module)
        lonely = modules.keys() ^ references.keys()
        if lonely:
            raise MonitorError(
                f"Module {min(lonely)} has no counterpart in the other of model and reference."
            )
        self._cells = Cells(len(modules))
        pairs = [
            _Pair(name, module, references[name], self._replay, self._cells)
            for name, module in modules.items()
        ]
        linears = [pair for pair in pairs if type(pair.reference) is nn.Linear]
        for pair, following in pairwise(linears):
            pair.following = following.reference
        return pairs

    def _listed(self, model: nn.Module) -> dict[str, nn.Module]:
        """The modules to check by name; a wrapper gives what the module inside it gives."""
        found: dict[str, nn.Module] = {}
        for raw_name, module, is_wrapper in named_modules(model):
            name = self.format_module_name_fn(raw_name)
            if is_wrapper or self.monitor._is_excluded(name):
                self.logger.debug("Module %s is excluded", name)
                continue
            found[name] = module
        return found

    def part(self, inputs: Any) -> Any:
        """The part of a batch that is checked: what to run the reference on. All of it without a ``share``."""
        return inputs if self._share == 1 else first_rows(inputs, self._share)

    def _arm(self, monitored: bool) -> None:
        """A step begins."""
        if monitored and self._share < 1:
            refuse_mixing(self._mixing)
        for hooks in (self.rcc_forward_hooks, self.rcc_reference_forward_hooks):
            hooks.rest(not monitored)
        if monitored and self._hears_reference() and self.monitor._relieved_by is None:
            self.monitor._relieved_by = self  # one hook on a module is enough
        for pair in self._pairs:
            pair.is_awaited = False
        self._replay.forget()
        if monitored:
            self._at_once = self._was_asked and not self.cpu_offload
            self._was_asked = False
        else:
            self._copies.release()

    def _hears_reference(self) -> bool:
        """Whether every module of the monitor's reference has a hook of this check."""
        theirs, own = self.monitor.reference_activation_hooks.hooks, self.rcc_reference_forward_hooks.hooks
        return self.monitor.reference_module is self.reference_module and theirs.keys() <= own.keys()

    # -- both forwards ------------------------------------------------------------------------------------

    def _on_forward(self, pair: _Pair, args: Args, kwargs: Kwargs, output: object) -> None:
        if not self.monitor.within_monitoring_window:
            return
        name = pair.name
        if pair.is_awaited and self._at_once:
            pair.is_awaited = False
            if self.module_inputs:
                self.module_inputs.pop(name, None)
            if name != ROOT:
                self._take(pair, args, kwargs, output)
            return
        self._measured.pop(name, None)
        if pair.start is not None and self._cutter is not None:
            args, kwargs = self._cutter.call_like(args, kwargs, pair.start)
            output = self._cutter.like(output, pair.start[2])
        copied = self._copies.of_all
        self.module_inputs[name] = copied(args)
        self.module_outputs[name] = copied(output)
        self._keywords[name] = copied(kwargs)

    def _on_reference_forward(self, pair: _Pair, args: Args, kwargs: Kwargs, output: object) -> None:
        monitor = self.monitor
        if not monitor.current_step_monitored or monitor.ignore_reference_module_activations:
            return
        call = monitor._reference.copies.of_call(args, kwargs, output)
        if monitor._relieved_by is self:
            if type(output) is Tensor:
                monitor._keep_reference_output(pair.name, pair.name, call[2])
            else:
                monitor._take_reference_output(pair.name, output)
        pair.start = call
        pair.is_awaited = True
        if pair.following is not None:
            fetch_weight(pair.following)

    @property
    def reference_module_inputs(self) -> dict[str, tuple[Any, ...]]:
        """What the reference's modules were given in this micro-batch, by name."""
        return {pair.name: opened(pair.start[0]) for pair in self._pairs if pair.start is not None}

    # -- the check ----------------------------------------------------------------------------------------

    def refined_coordinate_check(self) -> None:
        """Log the terms of every module. Both the reference and the module must have run on the same batch."""
        monitor = self.monitor
        if not monitor.is_monitoring():
            return
        if not self.module_inputs and not self._measured:
            raise MonitorError(
                "No inputs found for the monitored module. Perform a forward pass before calling "
                "refined_coordinate_check."
            )
        self._was_asked = True
        if self.cpu_offload:
            self._bring_back(next(self.module.parameters()).device)
        if self.module_inputs:
            self._take_kept()
        terms = [pair.terms for pair in self._pairs if pair.name in self._measured]
        self._log(self._cells.sums([filled for each in terms for filled in each.filled]))
        listed = [one for each in terms if each.listed for one in each.listed]
        if listed:
            self._log(_joined(listed))
        self._forget()

    def _log(self, sums: Sums) -> None:
        keys, totals, rows, widths = sums
        ledger = self.monitor._ledger
        if keys:
            ledger.add(keys, totals, rows)
            if self._rms_norms:
                ledger.add(_rms_keys(keys), totals / np.sqrt(widths), rows)

    def _take_kept(self) -> None:
        """The terms of the calls that were kept: from the inside out, as the hooks were called."""
        pairs = {pair.name: pair for pair in self._pairs}
        kept = [pairs[name] for name in self.module_inputs if name != ROOT]
        for pair in kept:
            if pair.start is None:
                raise MonitorError(
                    f"Step {self.monitor.current_step}: module {pair.name} ran, but the reference's did not. Run the "
                    "reference module on the same batch before calling refined_coordinate_check."
                )
            pair.shares = self._shares_its_input(pair)
        for pair in kept:
            name = pair.name
            self._take(pair, self.module_inputs[name], self._keywords[name], self.module_outputs[name])

    def _shares_its_input(self, pair: _Pair) -> bool:
        """Whether a container of this module was given the same value: its copy is then the same, too."""
        inputs = self.module_inputs[pair.name]
        if not inputs or not isinstance(inputs[0], Tensor):
            return False
        return any(
            inputs[0] is other[0] for name in pair.containers if (other := self.module_inputs.get(name))
        )

    def _take(self, pair: _Pair, args: Args, kwargs: Kwargs, output: object) -> None:
        """The terms of one call."""
        start = pair.start
        assert start is not None
        if pair.is_same_function():
            between = output
        else:
            had_grad = torch.is_grad_enabled()
            set_grad_enabled(False)
            try:
                if self._cutter is not None:
                    args, kwargs = self._cutter.call_like(args, kwargs, start)
                between = self._replay.output_of(pair.reference, args, kwargs, remember=pair.shares)
            finally:
                set_grad_enabled(had_grad)
        pair.terms.take(args, output, between, start, self._cutter)
        self._measured[pair.name] = pair

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """What runs meanwhile is not taken for a pass of the reference's own, and uses up no randomness."""
        states = [generator.get_state() for generator in self._generators]
        self.monitor.ignore_reference_module_activations = True
        try:
            yield
        finally:
            self.monitor.ignore_reference_module_activations = False
            for generator, state in zip(self._generators, states, strict=True):
                generator.set_state(state)

    def _bring_back(self, device: torch.device) -> None:
        def back(_: str, tensor: Tensor) -> Tensor:
            return tensor.to(device)

        for kept in (self.module_inputs, self.module_outputs, self._keywords):
            kept.update(map_leaves(kept, back))
        for pair in self._pairs:
            pair.start = map_leaves(pair.start, back)

    def _forget(self) -> None:
        self.module_inputs = {}
        self.module_outputs = {}
        self._keywords = {}
        if self._cutter is not None:
            self._cutter.forget()
        self._measured = {}
        for pair in self._pairs:
            pair.start = None
            pair.is_awaited = False
        self._replay.forget()
        self._copies.forget()


@final
class _Pair:
    """A module and its counterpart in the reference."""

    __slots__ = (
        "_is_function",
        "_replay",
        "containers",
        "following",
        "is_awaited",
        "module",
        "name",
        "reference",
        "shares",
        "start",
        "terms",
    )

    def __init__(
        self, name: str, module: nn.Module, reference: nn.Module, replay: Replay, cells: Cells
    ) -> None:
        self.name = name
        self.module = module
        self.reference = reference
        self._replay = replay
        self._is_function = is_function(module, reference)
        self.terms = Terms(name, module, reference, cells)
        self.containers = [path for path in reversed(tuple(paths_around(name))) if path]
        self.shares = False  # whether a container is going to run it on the same value
        self.start: Call | None = None  # the reference's last call in this micro-batch
        self.is_awaited = False  # the reference has run, the module has not yet
        self.following: nn.Module | None = None  # behind a linear, the one that most likely comes next

    def is_same_function(self) -> bool:
        """Whether the reference would answer what the module has answered, whatever was learned."""
        has_other_hook = self._replay.has_other_hook
        return self._is_function and not (
            has_global_hooks() or has_other_hook(self.module) or has_other_hook(self.reference)
        )


def _joined(listed: list[Measured]) -> Sums:
    """Terms that are in no cells, with one read for each device."""
    listed = [each for each in listed if each[3]]
    read = row_norms.read([norms for _, _, norms, _, _ in listed])
    return Sums(
        tuple(key for keys, *_ in listed for key in keys),
        _numbers(each for (_, wanted, *_), sums in zip(listed, read, strict=True) for each in wanted(sums)),
        _numbers(rows for keys, _, _, rows, _ in listed for _ in keys),
        _numbers(width for keys, _, _, _, width in listed for _ in keys),
    )


def _numbers(given: Iterable[float]) -> Numbers:
    return np.fromiter(given, dtype=np.float64)
