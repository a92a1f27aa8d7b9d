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

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, final

import torch
from torch import Tensor, nn

from torchtap.errors import MonitorError
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
from torchtap.monitors.module_monitor.reference import Copies
from torchtap.monitors.module_monitor.replay import Replay, is_function
from torchtap.names import paths_around
from torchtap.reduce import row_norms
from torchtap.taps.walk.arguments import Args, Kwargs
from torchtap.taps.walk.structure import map_leaves
from torchtap.taps.walk.walker import shown_call

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
        self._cutter = Cutter()
        self._mixing = mixing(monitor.module)
        self.logger = monitor.logger
        self.module = monitor.module
        self.reference_module = monitor.reference_module
        self.format_module_name_fn = monitor.format_module_name_fn
        self.cpu_offload = monitor.cpu_offload

        # What is kept of the calls in this micro-batch, by module name.
        self.module_inputs: dict[str, tuple[Any, ...]] = {}
        self.module_outputs: dict[str, Any] = {}
        self.reference_module_inputs: dict[str, tuple[Any, ...]] = {}
        self._keywords: dict[str, dict[str, Any]] = {}
        self._reference_keywords: dict[str, dict[str, Any]] = {}
        self._reference_outputs: dict[str, Any] = {}
        self._copies = Copies()
        self._measured: dict[str, list[Measured]] = {}

        # Whether calls are taken where they happen, whether the check was asked for in this step, and the modules
        # whose reference has run while they themselves have not yet.
        self._at_once = False
        self._was_asked = False
        self._awaited: set[str] = set()

        generators = [torch.default_generator]
        devices = {p.device.index or 0 for p in self.module.parameters() if p.is_cuda}
        generators += [torch.cuda.default_generators[device] for device in sorted(devices)]
        self._generators = tuple(generators)

        self.rcc_forward_hooks = HooksManager()
        self.rcc_reference_forward_hooks = HooksManager()
        modules = self._listed(self.module, self.rcc_forward_hooks, self._on_forward)
        references = self._listed(
            self.reference_module, self.rcc_reference_forward_hooks, self._on_reference_forward
        )
        self._replay = Replay(monitor._own_actions, self._aside)
        self._places = {
            name: _Pair(name, module, references[name], self._replay)
            for name, module in modules.items()
            if name in references
        }
        monitor._companions.append(self._arm)

    def _listed(self, model: nn.Module, hooks: HooksManager, take: Any) -> dict[str, nn.Module]:
        """The modules to check by name, with hooks on; a wrapper gives what the module inside it gives."""
        found: dict[str, nn.Module] = {}
        for raw_name, module, is_wrapper in named_modules(model):
            name = self.format_module_name_fn(raw_name)
            if is_wrapper or self.monitor._is_excluded(name):
                self.logger.debug("Module %s is excluded", name)
                continue
            found[name] = module
            self.monitor._put_on(hooks, module, shown_call(name, take), with_kwargs=True)
        return found

    def part(self, inputs: Any) -> Any:
        """The part of a batch that is checked: what to run the reference on. All of it without a ``share``."""
        return inputs if self._share == 1 else first_rows(inputs, self._share)

    def _arm(self, monitored: bool) -> None:
        """A step begins."""
        if monitored and self._share < 1:
            refuse_mixing(self._mixing)
        for hooks in (self.rcc_forward_hooks, self.rcc_reference_forward_hooks):
            hooks.resume() if monitored else hooks.pause()
        self._awaited.clear()
        self._replay.forget()
        if monitored:
            self._at_once = self._was_asked and not self.cpu_offload
            self._was_asked = False
        else:
            self._copies.release()

    # -- both forwards ------------------------------------------------------------------------------------

    def _on_forward(self, name: str, args: Args, kwargs: Kwargs, output: object) -> None:
        if not self.monitor.within_monitoring_window:
            return
        with torch.no_grad():
            if self._share < 1 and name in self._reference_outputs:
                args = self._cutter.arguments_like(args, self.reference_module_inputs[name])
                output = self._cutter.like(output, self._reference_outputs[name])
                if kwargs:
                    kwargs = self._cutter.like(kwargs, self._reference_keywords.get(name, {}))
            if self._at_once and name in self._awaited:
                self._awaited.discard(name)
                self.module_inputs.pop(name, None)
                if name != ROOT:
                    self._measured[name] = self._terms_of(self._places[name], args, kwargs, output)
                return
        self._measured.pop(name, None)
        self.module_inputs[name] = self._keep(args, self._copies)
        self.module_outputs[name] = self._keep(output, self._copies)
        self._keywords[name] = self._keep(kwargs, self._copies)

    def _on_reference_forward(self, name: str, args: Args, kwargs: Kwargs, output: object) -> None:
        monitor = self.monitor
        if not monitor.current_step_monitored or monitor.ignore_reference_module_activations:
            return
        copies = monitor._reference.copies
        self.reference_module_inputs[name] = self._keep(args, copies)
        self._reference_outputs[name] = self._keep(output, copies)
        if self._share < 1 and kwargs:
            self._reference_keywords[name] = self._keep(kwargs, copies)
        self._awaited.add(name)

    def _keep(self, value: object, copies: Copies) -> Any:
        """A value as it is now: tensors are copied, once however often they show up."""
        if not self.cpu_offload:  # most values are a tensor, or a call's only argument
            if type(value) is Tensor:
                return copies.of(value)
            if type(value) is tuple and len(value) == 1 and type(value[0]) is Tensor:
                return (copies.of(value[0]),)

        def kept(_: str, tensor: Tensor) -> Tensor:
            copied = copies.of(tensor)
            return copied.cpu() if self.cpu_offload else copied

        return map_leaves(value, kept)

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
        self._take_kept()
        self._log_measured()

    def _log_measured(self) -> None:
        found = [each for name in self._places for each in self._measured.get(name, ())]
        self._forget()
        ledger = self.monitor._ledger
        for (keys, wanted, _, rows, width), sums in zip(
            found, row_norms.read([norms for _, _, norms, _, _ in found]), strict=True
        ):
            if rows:
                chosen = wanted(sums)
                ledger.add(keys, chosen, rows)
                if self._rms_norms:
                    ledger.add(_rms_keys(keys), [each / width**0.5 for each in chosen], rows)

    def _take_kept(self) -> None:
        """The terms of the calls that were kept: from the inside out, as the hooks were called."""
        places = [self._place_of(name) for name in self.module_inputs if name != ROOT]
        for place in places:
            place.shares = self._shares_its_input(place)
        with torch.no_grad():
            for place in places:
                name = place.name
                self._measured[name] = self._terms_of(
                    place, self.module_inputs[name], self._keywords[name], self.module_outputs[name]
                )

    def _place_of(self, name: str) -> _Pair:
        place = self._places.get(name)
        if place is None or name not in self.reference_module_inputs:
            raise MonitorError(
                f"Step {self.monitor.current_step}: module {name} ran, but the reference's did not. Run the "
                "reference module on the same batch before calling refined_coordinate_check."
            )
        return place

    def _shares_its_input(self, place: _Pair) -> bool:
        """Whether a container of this place was given the same value: its copy is then the same, too."""
        inputs = self.module_inputs[place.name]
        if not inputs or not isinstance(inputs[0], Tensor):
            return False
        return any(
            inputs[0] is other[0] for name in place.containers if (other := self.module_inputs.get(name))
        )

    def _terms_of(self, place: _Pair, args: Args, kwargs: Kwargs, output: object) -> list[Measured]:
        if place.is_same_function():
            between = output
        else:
            between = self._replay.output_of(place.reference, args, kwargs, remember=place.shares)
        return place.terms.of(
            args,
            output,
            between,
            self.reference_module_inputs[place.name],
            self._reference_outputs[place.name],
        )

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
        for kept in (
            self.module_inputs,
            self.module_outputs,
            self.reference_module_inputs,
            self._keywords,
            self._reference_outputs,
        ):
            kept.update(map_leaves(kept, lambda _, tensor: tensor.to(device)))

    def _forget(self) -> None:
        self.module_inputs = {}
        self.module_outputs = {}
        self.reference_module_inputs = {}
        self._reference_outputs = {}
        self._keywords = {}
        self._reference_keywords = {}
        self._cutter.forget()
        self._measured = {}
        self._awaited.clear()
        self._replay.forget()
        self._copies.forget()


@final
class _Pair:
    """A module and its counterpart in the reference."""

    def __init__(self, name: str, module: nn.Module, reference: nn.Module, replay: Replay) -> None:
        self.name = name
        self.reference = reference
        self._module = module
        self._replay = replay
        self._is_function = is_function(module, reference)
        self.terms = Terms(name, module, reference)
        self.containers = [path for path in reversed(tuple(paths_around(name))) if path]
        self.shares = False  # whether a container is going to run it on the same value

    def is_same_function(self) -> bool:
        """Whether the reference would answer what the module has answered, whatever was learned."""
        return self._is_function and not (
            self._replay.has_other_hook(self._module) or self._replay.has_other_hook(self.reference)
        )
