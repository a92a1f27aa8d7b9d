"""The refined coordinate check: how much of a change comes from a layer's weights and how much from its input.

With W_0 and x_0 of the reference and W_t and x_t of the monitored module, ``W_t x_t - W_0 x_0`` is the sum of
``(W_t - W_0) x_t`` and ``W_0 (x_t - x_0)`` (arXiv 2505.22491). Each term is logged as the mean of its rows' norms.
It guarantees:
- the extra forward passes of the reference draw no random number that the training would have got;
- where several checks need the same part of the reference on the same input, it runs once.

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
        self._copies = _Copies()

        self.rcc_forward_hooks = HooksManager()
        self.rcc_reference_forward_hooks = HooksManager()
        self._modules = self._listed(self.module, self.rcc_forward_hooks, self._on_forward)
        self._references = self._listed(
            self.reference_module, self.rcc_reference_forward_hooks, self._on_reference_forward
        )
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
        self.module_inputs[name] = tuple(self._keep(each) for each in args)
        self.module_outputs[name] = self._keep(output)
        if kwargs:
            self._keywords[name] = {key: self._keep(value) for key, value in kwargs.items()}
        else:
            self._keywords.pop(name, None)

    def _on_reference_forward(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        monitor = self.monitor
        if not monitor.current_step_monitored or monitor.ignore_reference_module_activations:
            return
        self.reference_module_inputs[name] = tuple(self._keep(each) for each in args)
        self._reference_outputs[name] = self._keep(output)

    def _keep(self, value: Any) -> Any:
        """A value as it is now: tensors are copied, once however often they show up."""
        if isinstance(value, Tensor):
            kept = self._copies.of(value)
            return kept.cpu() if self.cpu_offload else kept
        if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
            return type(value)(self._keep(each) for each in value)
        if type(value) is dict:
            return {key: self._keep(each) for key, each in value.items()}
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
        device = next(self.module.parameters()).device
        with torch.no_grad(), self._undisturbed(), _Memo(self._references.values()) as memo:
            for name, module in self._modules.items():
                if name == ROOT or name not in self.module_inputs:
                    continue
                reference = self._references.get(name)
                if reference is None or name not in self.reference_module_inputs:
                    raise MonitorError(
                        f"Step {monitor.current_step}: module {name} ran, but the reference's did not. Run the "
                        "reference module on the same batch before calling refined_coordinate_check."
                    )
                inputs = _to(self.module_inputs[name], device)
                before = memo.run(reference, inputs, _to(self._keywords.get(name, {}), device))
                self._check_module(
                    name,
                    module,
                    reference,
                    _to(inputs, device),
                    _to(self.reference_module_inputs[name], device),
                    _to(self.module_outputs[name], device),
                    before,
                    _to(self._reference_outputs[name], device),
                )
        self.module_inputs = {}
        self.module_outputs = {}
        self.reference_module_inputs = {}
        self._reference_outputs = {}
        self._keywords = {}
        self._copies = _Copies()

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

    def _check_module(
        self,
        name: str,
        module: nn.Module,
        reference: nn.Module,
        inputs: tuple[Any, ...],
        reference_inputs: tuple[Any, ...],
        output: Any,
        between: Any,
        reference_output: Any,
    ) -> None:
        """``output`` is W_t x_t, ``between`` W_0 x_t and ``reference_output`` W_0 x_0."""
        outputs, betweens = dict(leaves(output)), dict(leaves(between))
        references = dict(leaves(reference_output))
        for leaf in outputs:
            if leaf in betweens and leaf in references and outputs[leaf].shape == references[leaf].shape:
                self._check_output(
                    leaf_name(name, leaf), module, outputs[leaf], betweens[leaf], references[leaf]
                )
        if isinstance(module, nn.Embedding):
            return  # its input is an index
        first, first_reference = (each[0] if each else None for each in (inputs, reference_inputs))
        if isinstance(first, Tensor):
            first, first_reference = self._check_input(name, first, first_reference)
        if isinstance(module, (nn.Linear, nn.LayerNorm)):
            self._check_weight(name, module, reference, output, between, reference_output)
        if isinstance(module, nn.LayerNorm) and isinstance(first_reference, Tensor):
            self._check_normalised(name, module, first, first_reference)
        if isinstance(module, nn.MultiheadAttention) and isinstance(reference, nn.MultiheadAttention):
            self._check_projections(name, module, reference, inputs, reference_inputs)

    def _check_output(
        self, name: str, module: nn.Module, output: Tensor, between: Tensor, reference: Tensor
    ) -> None:
        self._log(f"RCC (W_t-W_0)x_t/{name}/l2norm", output - between)
        if not isinstance(module, nn.Embedding):
            self._log(f"RCC W_0(x_t-x_0)/{name}/l2norm", between - reference)

    def _check_input(self, name: str, first: Tensor, reference: Any) -> tuple[Tensor, Any]:
        if first.is_floating_point():
            self._log(f"RCC x_t/{name}/l2norm", first)
            if isinstance(reference, Tensor) and reference.shape == first.shape:
                self._log(f"RCC (x_t-x_0)/{name}/l2norm", first - reference)
        return first, reference

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

    def _check_normalised(self, name: str, module: nn.LayerNorm, first: Any, reference: Tensor) -> None:
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
        self.monitor._log_own(key, l2_norm(value))


def _projection(module: nn.MultiheadAttention, part: str, index: int) -> Tensor:
    packed: Tensor | None = module._parameters["in_proj_weight"]
    if packed is None:
        own: Tensor = getattr(module, f"{part}_proj_weight")
        return own
    return packed[index * module.embed_dim : (index + 1) * module.embed_dim]


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value if value.device == device else value.to(device)
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return type(value)(_to(each, device) for each in value)
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


@final
class _Copies:
    """Copies of tensors as they were. What one module gives the next is given: one copy serves both."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, int, Tensor]] = {}

    def of(self, value: Tensor) -> Tensor:
        version = -1 if value.is_inference() else value._version
        known = self._known.get(id(value))
        if known is not None and known[0] is value and known[1] == version >= 0:
            return known[2]
        copy = value.detach().clone()
        self._known[id(value)] = (value, version, copy)  # the value is kept, so that its id stays its own
        return copy


@final
class _Memo:
    """Runs parts of the reference; a part that ran on the very same inputs before is not run again.

    A container's first child gets the container's own input, so its answer is there already, or will be.
    """

    def __init__(self, modules: Any) -> None:
        self._modules = list(modules)

    def __enter__(self) -> _Memo:
        return self

    def __exit__(self, *_: object) -> None:
        self._modules = []

    def run(self, module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        return module(*inputs, **keywords)
