"""The refined coordinate check: how much of a change comes from a layer's weights and how much from its input.

With W_0 and x_0 of the reference and W_t and x_t of the monitored module, ``W_t x_t - W_0 x_0`` is the sum of
``(W_t - W_0) x_t`` and ``W_0 (x_t - x_0)`` (arXiv 2505.22491). Each term is logged as the mean of its rows' norms.
It guarantees:
- the extra forward passes of the reference draw no random number that the training would have got;
- a part of the reference that several checks need on the same input runs once (`replay`).

Not here: the plot over widths (`torchtap rcc`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchtap.errors import MonitorError
from torchtap.monitors.module_monitor.hooks import HooksManager, LiveHook
from torchtap.monitors.module_monitor.monitor import ModuleMonitor
from torchtap.monitors.module_monitor.naming import ROOT, leaf_name, named_modules
from torchtap.monitors.module_monitor.reference import Copies
from torchtap.monitors.module_monitor.replay import Replay
from torchtap.taps.leaves import leaves

__all__ = ["RefinedCoordinateCheck", "l2_norm"]

_graph_task = torch._C._current_graph_task_id


def l2_norm(tensor: Tensor) -> Tensor:
    """The L2 norm of each row: over the last dimension."""
    norms: Tensor = torch.linalg.vector_norm(tensor, ord=2, dim=-1)
    return norms


class RefinedCoordinateCheck:
    """Checks every module that was called. Make it once, call `refined_coordinate_check` after both forwards."""

    def __init__(self, monitor: ModuleMonitor) -> None:
        if monitor.module is None:
            raise MonitorError("Set the module to monitor before setting up the refined coordinate check.")
        if monitor.reference_module is None:
            raise MonitorError("Set the reference module before setting up the refined coordinate check.")
        self.monitor = monitor
        self.logger = monitor.logger
        self.module = monitor.module
        self.reference_module = monitor.reference_module
        self.format_module_name_fn = monitor.format_module_name_fn
        self.cpu_offload = monitor.cpu_offload

        self.module_inputs: dict[str, tuple[Any, ...]] = {}
        self.module_outputs: dict[str, Any] = {}
        self.reference_module_inputs: dict[str, tuple[Any, ...]] = {}
        self._keywords: dict[str, dict[str, Any]] = {}
        self._reference_outputs: dict[str, Any] = {}
        self._copies = Copies()

        self.rcc_forward_hooks = HooksManager()
        self.rcc_reference_forward_hooks = HooksManager()
        self._modules = self._listed(self.module, self.rcc_forward_hooks, self._on_forward)
        self._references = self._listed(
            self.reference_module, self.rcc_reference_forward_hooks, self._on_reference_forward
        )
        self._in_place = {
            module
            for module in self._references.values()
            if any(getattr(part, "inplace", False) for part in module.modules())
        }
        self._norms: list[tuple[str, Tensor]] = []
        self._input_norms: dict[tuple[int, int], tuple[Tensor, Tensor | None]] = {}
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
            hooks.register_forward_hook(module, _CallHook(take, name), with_kwargs=True)
        return found

    def _arm(self, monitored: bool) -> None:
        for hooks in (self.rcc_forward_hooks, self.rcc_reference_forward_hooks):
            hooks.resume() if monitored else hooks.pause()

    # -- both forwards ------------------------------------------------------------------------------------

    def _on_forward(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not self.monitor.within_monitoring_window:
            return
        copies = self._copies
        self.module_inputs[name] = self._keep(args, copies)
        self.module_outputs[name] = self._keep(output, copies)
        if kwargs:
            self._keywords[name] = self._keep(kwargs, copies)
        else:
            self._keywords.pop(name, None)

    def _on_reference_forward(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        monitor = self.monitor
        if not monitor.current_step_monitored or monitor.ignore_reference_module_activations:
            return
        copies = monitor._reference.copies
        self.reference_module_inputs[name] = self._keep(args, copies)
        self._reference_outputs[name] = self._keep(output, copies)

    def _keep(self, value: Any, copies: Copies) -> Any:
        """A value as it is now: tensors are copied, once however often they show up."""
        if isinstance(value, Tensor):
            kept = copies.of(value)
            return kept.cpu() if self.cpu_offload else kept
        if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
            return type(value)([self._keep(each, copies) for each in value])
        if type(value) is dict:
            return {key: self._keep(each, copies) for key, each in value.items()}
        return value

    # -- the check ----------------------------------------------------------------------------------------

    def refined_coordinate_check(self) -> None:
        """Log the terms of every module. Both the reference and the module must have run on the same batch."""
        monitor = self.monitor
        if not monitor.is_monitoring():
            return
        if not self.module_inputs:
            raise MonitorError(
                "No inputs found for the monitored module. Perform a forward pass before calling "
                "refined_coordinate_check."
            )
        if self.cpu_offload:
            self._bring_back(next(self.module.parameters()).device)
        calls = {
            self._reference_of(name): (inputs, self._keywords.get(name, {}))
            for name, inputs in self.module_inputs.items()
            if name != ROOT
        }
        with torch.no_grad(), self._undisturbed(), Replay(calls, self._in_place) as replay:
            for name, module in self._modules.items():
                if name != ROOT and name in self.module_inputs:
                    reference = self._references[name]
                    self._check_module(name, module, reference, replay.output_of(reference))
        self._input_norms = {}
        self._forget()
        norms, self._norms = self._norms, []
        monitor._ledger.add([key for key, _ in norms], [norm for _, norm in norms])

    def _reference_of(self, name: str) -> nn.Module:
        reference = self._references.get(name)
        if reference is None or name not in self.reference_module_inputs:
            raise MonitorError(
                f"Step {self.monitor.current_step}: module {name} ran, but the reference's did not. Run the "
                "reference module on the same batch before calling refined_coordinate_check."
            )
        return reference

    def _bring_back(self, device: torch.device) -> None:
        for kept in (self.module_inputs, self.module_outputs, self.reference_module_inputs, self._keywords):
            kept.update({name: _to(value, device) for name, value in kept.items()})
        self._reference_outputs = _to(self._reference_outputs, device)

    def _forget(self) -> None:
        self.module_inputs = {}
        self.module_outputs = {}
        self.reference_module_inputs = {}
        self._reference_outputs = {}
        self._keywords = {}
        self._copies.forget()

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """The reference runs once more without being taken for its own pass, and without using up randomness."""
        self.monitor.ignore_reference_module_activations = True
        devices = sorted({p.device.index or 0 for p in self.module.parameters() if p.is_cuda})
        try:
            with torch.random.fork_rng(devices=devices):
                yield
        finally:
            self.monitor.ignore_reference_module_activations = False

    def _check_module(self, name: str, module: nn.Module, reference: nn.Module, between: Any) -> None:
        """``output`` is W_t x_t, ``between`` W_0 x_t and ``start`` W_0 x_0."""
        output, start = self.module_outputs[name], self._reference_outputs[name]
        if isinstance(output, Tensor):
            self._check_output(name, module, output, between, start)
        else:
            betweens, starts = dict(leaves(between)), dict(leaves(start))
            for leaf, value in leaves(output):
                if leaf in betweens and leaf in starts and value.shape == starts[leaf].shape:
                    self._check_output(leaf_name(name, leaf), module, value, betweens[leaf], starts[leaf])
        if isinstance(module, nn.Embedding):
            return  # its input is an index
        inputs, reference_inputs = self.module_inputs[name], self.reference_module_inputs[name]
        first = inputs[0] if inputs else None
        first_reference = reference_inputs[0] if reference_inputs else None
        if isinstance(first, Tensor) and first.is_floating_point():
            self._check_input(name, first, first_reference)
        if isinstance(module, (nn.Linear, nn.LayerNorm)):
            self._check_weight(name, module, reference, output, between, start)
            if isinstance(module, nn.LayerNorm):
                self._check_normalised(name, module, first, first_reference)
        elif isinstance(module, nn.MultiheadAttention) and isinstance(reference, nn.MultiheadAttention):
            self._check_projections(name, module, reference, inputs, reference_inputs)

    def _check_input(self, name: str, first: Tensor, reference: Any) -> None:
        # A container's input is its first child's, too: the copies are kept until the check is over.
        key = (id(first), id(reference))
        known = self._input_norms.get(key)
        if known is None:
            moved = isinstance(reference, Tensor) and reference.shape == first.shape
            known = self._input_norms[key] = (l2_norm(first), l2_norm(first - reference) if moved else None)
        self._norms.append((f"RCC x_t/{name}/l2norm", known[0]))
        if known[1] is not None:
            self._norms.append((f"RCC (x_t-x_0)/{name}/l2norm", known[1]))

    def _check_output(
        self, name: str, module: nn.Module, output: Tensor, between: Tensor, start: Tensor
    ) -> None:
        self._log(f"RCC (W_t-W_0)x_t/{name}/l2norm", output - between)
        if not isinstance(module, nn.Embedding):
            self._log(f"RCC W_0(x_t-x_0)/{name}/l2norm", between - start)

    def _check_weight(
        self, name: str, module: Any, reference: Any, output: Tensor, between: Tensor, start: Tensor
    ) -> None:
        """The same terms without the bias: those of the weight alone."""
        if module.bias is not None:
            output = output - module.bias
            between = between - reference.bias
            start = start - reference.bias
        self._log(f"RCC (W_t-W_0)x_t/{name}.weight/l2norm", output - between)
        self._log(f"RCC W_0(x_t-x_0)/{name}.weight/l2norm", between - start)
        self._log(f"RCC (W_t-W_0)x_t/{name}.weight/W_t x_t/l2norm", output)
        self._log(f"RCC W_0(x_t-x_0)/{name}.weight/W_0 x_0/l2norm", start)

    def _check_normalised(self, name: str, module: nn.LayerNorm, first: Any, reference: Any) -> None:
        """What a layer norm's weight is multiplied with: its normalised input."""
        shape, epsilon = module.normalized_shape, module.eps
        now = functional.layer_norm(first, shape, None, None, epsilon)
        then = functional.layer_norm(reference, shape, None, None, epsilon)
        self._log(f"RCC (W_t-W_0)x_t/{name}.weight/x_t/l2norm", now)
        self._log(f"RCC W_0(x_t-x_0)/{name}.weight/x_t-x_0/l2norm", now - then)

    def _check_projections(
        self,
        name: str,
        module: nn.MultiheadAttention,
        reference: nn.MultiheadAttention,
        inputs: tuple[Any, ...],
        reference_inputs: tuple[Any, ...],
    ) -> None:
        """The projections of query, key and value, which are no modules of their own."""
        for index, part in enumerate(("q", "k", "v")):
            if index >= len(inputs) or not isinstance(inputs[index], Tensor):
                continue
            now, before = _projection(module, part, index), _projection(reference, part, index)
            value, start = inputs[index], reference_inputs[index]
            between = functional.linear(value, before)
            place = f"{name}.{part}_proj.weight"
            self._log(f"RCC (W_t-W_0)x_t/{place}/l2norm", functional.linear(value, now) - between)
            self._log(f"RCC W_0(x_t-x_0)/{place}/l2norm", between - functional.linear(start, before))

    def _log(self, key: str, value: Tensor) -> None:
        self._norms.append((key, l2_norm(value)))


def _projection(module: nn.MultiheadAttention, part: str, index: int) -> Tensor:
    packed: Tensor | None = module._parameters["in_proj_weight"]
    if packed is None:
        own: Tensor = getattr(module, f"{part}_proj_weight")
        return own
    return packed[index * module.embed_dim : (index + 1) * module.embed_dim]


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return type(value)([_to(each, device) for each in value])
    if type(value) is dict:
        return {key: _to(each, device) for key, each in value.items()}
    return value


@final
class _CallHook(LiveHook):
    """Hands a module's call to the check."""

    def __init__(self, take: Any, name: str) -> None:
        self._take = take
        self._name = name

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if _graph_task() == -1:
            self._take(self._name, args, kwargs, output)
