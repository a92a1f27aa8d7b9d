"""The refined coordinate check: split the change of a layer's output into the share of its weights and of its input.

With W_0 and x_0 of the reference and W_t and x_t of the monitored module, ``W_t x_t - W_0 x_0`` is the sum of
``(W_t - W_0) x_t`` and ``W_0 (x_t - x_0)`` (arXiv 2505.22491). Each term is logged as the mean of its rows' norms.

Hooks on both models keep copies of each module's last call. `RefinedCoordinateCheck.refined_coordinate_check` runs
each part of the reference on the model's own input and compares. Guarantees:
- the extra calls of the reference use up no random number, and change no value of the model;
- with ``share``, the numbers are exactly those of the part of the batch that is checked.

Not here: the plot over widths (`widths`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchtap._torch import RunningNorm, graph_task, version_of
from torchtap.errors import MonitorError
from torchtap.monitors.metric_storage import ROOT
from torchtap.monitors.metrics import Found, leaf_name
from torchtap.monitors.module_monitor import HooksManager, ModuleMonitor, named_modules
from torchtap.spi import leaves, map_leaves

__all__ = ["RefinedCoordinateCheck", "l2_norm"]

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]

_OWN, _INHERITED = "RCC (W_t-W_0)x_t/{}/l2norm", "RCC W_0(x_t-x_0)/{}/l2norm"
_STEPS = (0, 1)  # the two steps of `_of_steps`; both numbers of `_of_change`
# The places of a weight's terms among the sums of `_of_steps`, with and without biases.
_OF_WEIGHT, _WITHOUT_BIAS = (0, 1, 2, 3, 4, 1), (0, 1, 2, 3, 0, 1)


def l2_norm(tensor: Tensor) -> Tensor:
    """Return the L2 norm of each row, over the last dimension."""
    norms: Tensor = torch.linalg.vector_norm(tensor, ord=2, dim=-1)
    return norms


class _Call(NamedTuple):
    """A module's call: copies of its arguments and of its output."""

    args: Args
    kwargs: Kwargs
    output: Any


class _Term(NamedTuple):
    """Sums of row norms, and the keys of some of them. ``picks`` has the place of each key's sum."""

    keys: tuple[str, ...]
    picks: tuple[int, ...]
    norms: Tensor
    rows: int
    width: int


class RefinedCoordinateCheck:
    """Check every module that was called. Call `refined_coordinate_check` after both forward passes.

        check = RefinedCoordinateCheck(monitor)
        monitor.begin_step(step)
        with monitor.no_monitor():
            reference(inputs)
        model(inputs)
        check.refined_coordinate_check()
        monitor.end_step()

    rms_norms: log each ``…/l2norm`` also as ``…/rmsnorm``, divided by the root of the row's width, so that models of
        several widths compare.
    share: check only this part of each batch, its first rows. Run the reference on `part` of the inputs.

    Raises `MonitorError` if the monitor has no module or no reference.
    """

    def __init__(self, monitor: ModuleMonitor, *, rms_norms: bool = False, share: float = 1.0) -> None:
        if not 0 < share <= 1:
            raise MonitorError(f"share={share!r}: give the part of a batch to check, e.g. share=1/8")
        if monitor.module is None:
            raise MonitorError("Set the module to monitor before setting up the refined coordinate check.")
        if monitor.reference_module is None:
            raise MonitorError("Set the reference module before setting up the refined coordinate check.")
        self.monitor = monitor
        self._rms_norms = rms_norms
        self._share = share
        self._parts = _listed(monitor, monitor.module)
        self._reference_parts = _listed(monitor, monitor.reference_module)
        lonely = self._parts.keys() ^ self._reference_parts.keys()
        if lonely:
            raise MonitorError(
                f"Module {min(lonely)} has no counterpart in the other of model and reference."
            )
        # Calls of the current micro-batch by module name, the last one of each module.
        self._calls: dict[str, _Call] = {}
        self._reference_calls: dict[str, _Call] = {}
        self._copies = _Copies(offload=monitor.cpu_offload)
        self.rcc_forward_hooks = _hooks(self._parts, self._on_forward)
        self.rcc_reference_forward_hooks = _hooks(self._reference_parts, self._on_reference_forward)
        monitor._companions.append(self._arm)

    def part(self, inputs: Any) -> Any:
        """Return the part of a batch that is checked, to run the reference on. All of it without a ``share``."""

        def first_rows(_: str, value: Tensor) -> Tensor:
            return value[: max(1, math.ceil(len(value) * self._share))] if value.dim() else value

        return inputs if self._share == 1 else map_leaves(inputs, first_rows)

    @property
    def module_inputs(self) -> dict[str, Args]:
        """Return the inputs of the model's modules in this micro-batch, by name."""
        return {name: call.args for name, call in self._calls.items()}

    @property
    def module_outputs(self) -> dict[str, Any]:
        """Return the outputs of the model's modules in this micro-batch, by name."""
        return {name: call.output for name, call in self._calls.items()}

    @property
    def reference_module_inputs(self) -> dict[str, Args]:
        """Return the inputs of the reference's modules in this micro-batch, by name."""
        return {name: call.args for name, call in self._reference_calls.items()}

    # -- both forward passes -----------------------------------------------------------------------------------

    def _arm(self, monitored: bool) -> None:
        if monitored and self._share < 1:
            assert self.monitor.module is not None
            _refuse_mixing(self.monitor.module)
        for hooks in (self.rcc_forward_hooks, self.rcc_reference_forward_hooks):
            hooks.suspend(not monitored)
        self._forget()

    def _on_forward(self, name: str, args: Args, kwargs: Kwargs, output: object) -> None:
        if self.monitor.within_monitoring_window:
            call, start = _Call(args, kwargs, output), self._reference_calls.get(name)
            self._calls[name] = self._copies.of(call if start is None else self._cut(call, start))

    def _on_reference_forward(self, name: str, args: Args, kwargs: Kwargs, output: object) -> None:
        monitor = self.monitor
        if monitor.current_step_monitored and not monitor.ignore_reference_module_activations:
            self._reference_calls[name] = self._copies.of(_Call(args, kwargs, output))

    def _cut(self, call: _Call, like: _Call) -> _Call:
        """Cut the values of a call to the shapes that the reference's have."""
        return call if self._share == 1 else _Call(*map(_cut_like, call, like))

    def _forget(self) -> None:
        self._calls, self._reference_calls = {}, {}
        self._copies.forget()

    # -- the check ---------------------------------------------------------------------------------------------

    def refined_coordinate_check(self) -> None:
        """Log the terms of every module. The reference and the module must have run on the same batch.

        Raises `MonitorError` if one of them has not run.
        """
        monitor = self.monitor
        if not monitor.is_monitoring():
            return
        if not self._calls:
            raise MonitorError(
                "No inputs found for the monitored module. Perform a forward pass before calling "
                "refined_coordinate_check."
            )
        with torch.no_grad(), self._aside():
            terms = [
                term for name, call in self._calls.items() if name != ROOT for term in self._terms(name, call)
            ]
        terms = [term for term in terms if term.rows]
        for term, sums in zip(terms, _on_host([term.norms for term in terms]), strict=True):
            for key, pick in zip(term.keys, term.picks, strict=True):
                mean = sums[pick] / term.rows
                monitor._in_hand.add(Found(key, mean, term.rows))
                if self._rms_norms:
                    key = f"{key.removesuffix('/l2norm')}/rmsnorm"
                    monitor._in_hand.add(Found(key, mean / math.sqrt(term.width), term.rows))
        self._forget()

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Keep calls of the reference out of the monitor, and restore the random number generators."""
        devices = {p.device.index or 0 for p in self.monitor.module.parameters() if p.is_cuda}  # type: ignore[union-attr]
        self.monitor.ignore_reference_module_activations = True
        try:
            with torch.random.fork_rng(devices=sorted(devices)):
                yield
        finally:
            self.monitor.ignore_reference_module_activations = False

    def _terms(self, name: str, call: _Call) -> list[_Term]:
        start = self._reference_calls.get(name)
        if start is None:
            raise MonitorError(
                f"Step {self.monitor.current_step}: module {name} ran, but the reference's did not. Run the reference "
                "module on the same batch before calling refined_coordinate_check."
            )
        module, part = self._parts[name], self._reference_parts[name]
        call = self._cut(call, start)
        if self.monitor.cpu_offload:
            device = next(self.monitor.module.parameters()).device  # type: ignore[union-attr]
            call, start = map_leaves((call, start), lambda _, tensor: tensor.to(device))
        args, kwargs = call.args, call.kwargs
        if not _leaves_input_alone(part):
            args, kwargs = map_leaves((args, kwargs), lambda _, tensor: tensor.clone())
        between = part(*args, **kwargs)
        terms = _of_output(name, module, part, call.output, between, start.output)
        if not isinstance(module, nn.Embedding):  # whose input is an index
            terms += _of_input(name, module, call.args, start.args)
        if isinstance(module, nn.MultiheadAttention) and isinstance(part, nn.MultiheadAttention):
            terms += _of_projections(name, module, part, call.args, start.args)
        return terms


def _listed(monitor: ModuleMonitor, model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules to check, by name. A wrapper returns the output of the module inside it."""
    named = [(monitor.format_module_name_fn(name), part, wraps) for name, part, wraps in named_modules(model)]
    return {name: part for name, part, wraps in named if not wraps and not monitor._is_excluded(name)}


def _hooks(parts: dict[str, nn.Module], visit: Callable[..., None]) -> HooksManager:
    """Register a hook on each part. It ignores calls that a checkpoint repeats."""

    def hook(name: str, module: nn.Module, args: Args, kwargs: Kwargs, output: object) -> None:
        if not torch.compiler.is_compiling() and graph_task() == -1:
            visit(name, args, kwargs, output)

    hooks = HooksManager()
    for name, part in parts.items():
        hooks.register_forward_hook(part, partial(hook, name), with_kwargs=True)
    return hooks


@final
class _Copies:
    """Copy tensors. A module's output that is the next one's input is copied once."""

    def __init__(self, *, offload: bool) -> None:
        self._offload = offload
        self._known: dict[int, tuple[Tensor, int, Tensor]] = {}

    def of(self, call: _Call) -> _Call:
        """Return a copy of a call."""
        return _Call(*(map_leaves(each, self._copy) for each in call))

    def _copy(self, _: str, value: Tensor) -> Tensor:
        known = self._known.get(id(value))
        if known is not None and known[0] is value and known[1] == version_of(value) >= 0:
            return known[2]
        copy = value.detach().clone()
        copy = copy.cpu() if self._offload else copy
        self._known[id(value)] = (
            value,
            version_of(value),
            copy,
        )  # the value is kept so that its id stays unique
        return copy

    def forget(self) -> None:
        """Release all values."""
        self._known.clear()


def _leaves_input_alone(part: nn.Module) -> bool:
    """Return True for torch's own layers that do not write into their input."""
    own = type(part).__module__.startswith("torch.nn.modules.") and "forward" not in part.__dict__
    return own and not part._modules and not getattr(part, "inplace", False)


# -- a part of a batch -----------------------------------------------------------------------------------------


def _cut_like(value: Any, like: Any) -> Any:
    """Cut the tensors of a structure to the shapes of another: the first rows of a batch come first everywhere."""
    shapes = {name: tensor.shape for name, tensor in leaves(like)}
    return map_leaves(value, lambda name, each: _cut(each, shapes[name]) if name in shapes else each)


def _cut(value: Tensor, shape: torch.Size) -> Tensor:
    if value.shape == shape or value.dim() != len(shape):
        return value
    at, *others = (at for at in range(len(shape)) if value.shape[at] != shape[at])
    if others or value.shape[at] < shape[at]:
        raise MonitorError(
            f"a value of shape {tuple(value.shape)} has no part of shape {tuple(shape)}: run the reference on "
            "check.part(inputs), and the model on all of them"
        )
    return value.narrow(at, 0, shape[at])


def _refuse_mixing(model: nn.Module) -> None:
    """Raise `MonitorError` if samples of a batch influence each other."""
    for name, module in model.named_modules():
        if isinstance(module, RunningNorm) and module.training:
            raise MonitorError(
                f"{name} ({type(module).__name__}) trains on the statistics of its batch, so a part of a batch has "
                "other values: check whole batches, or freeze it with eval()"
            )


# -- row norms -------------------------------------------------------------------------------------------------


def _row_count(value: Tensor) -> int:
    """Return the number of rows. A tensor without dimensions is one row."""
    return math.prod(value.shape[:-1])


def _of_change(value: Tensor, other: Tensor) -> Tensor:
    """Return the sums over rows of ``|value|`` and ``|value - other|``."""
    value, other = _wide(value), _wide(other)
    return _sums(value, value - other)


def _of_steps(
    value: Tensor, between: Tensor, start: Tensor, biases: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Return the sums over rows of ``|value - between|``, ``|between - start|``, ``|value|`` and ``|start|``.

    ``biases`` are contained in every row of ``value``, and of ``between`` and ``start``. With them the last two sums
    are without the bias, and a fifth is that of ``value - between`` without it. The other step does not contain it.
    """
    value, between, start = _wide(value), _wide(between), _wide(start)
    steps = (value - between, between - start)
    if biases is None:
        return _sums(*steps, value, start)
    bias, start_bias = map(_wide, biases)
    value, between, start = value - bias, between - start_bias, start - start_bias
    return _sums(*steps, value, start, value - between)


def _wide(value: Tensor) -> Tensor:
    """Return 16-bit values in 32 bits: no norm overflows or is rounded to 16 bits."""
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


def _sums(*values: Tensor) -> Tensor:
    wide = torch.float32 if values[0].device.type == "mps" else torch.float64  # MPS has no float64
    return torch.stack([torch.linalg.vector_norm(each, dim=-1).sum(dtype=wide) for each in values])


def _on_host(sums: list[Tensor]) -> list[list[float]]:
    """Return all sums as numbers, with one read for each device."""
    found: list[list[float]] = [[]] * len(sums)
    for device in {each.device for each in sums}:
        places = [place for place, each in enumerate(sums) if each.device == device]
        numbers = torch.cat([sums[place] for place in places]).tolist()
        for place in places:
            found[place], numbers = numbers[: len(sums[place])], numbers[len(sums[place]) :]
    return found


# -- terms -----------------------------------------------------------------------------------------------------


def _of_output(name: str, module: Any, part: Any, output: Any, between: Any, start: Any) -> list[_Term]:
    if isinstance(output, Tensor) and isinstance(module, (nn.Linear, nn.LayerNorm)):
        # The same terms once more without the bias: those of the weight alone.
        biases = None if module.bias is None else (module.bias, part.bias)
        weight = f"{name}.weight"
        keys = (
            _OWN.format(name),
            _INHERITED.format(name),
            f"RCC (W_t-W_0)x_t/{weight}/W_t x_t/l2norm",
            f"RCC W_0(x_t-x_0)/{weight}/W_0 x_0/l2norm",
            _OWN.format(weight),
            _INHERITED.format(weight),
        )
        picks = _WITHOUT_BIAS if biases is None else _OF_WEIGHT
        return [
            _Term(
                keys, picks, _of_steps(output, between, start, biases), _row_count(output), output.shape[-1]
            )
        ]
    terms = []
    betweens, starts = dict(leaves(between)), dict(leaves(start))
    for leaf, value in leaves(output):
        if leaf not in betweens or leaf not in starts or value.shape != starts[leaf].shape:
            continue
        place, width = leaf_name(name, leaf), value.shape[-1] if value.dim() else 1
        if isinstance(module, nn.Embedding):
            norms = _of_change(value, betweens[leaf])
            terms.append(_Term((_OWN.format(place),), (1,), norms, _row_count(value), width))
        else:
            norms = _of_steps(value, betweens[leaf], starts[leaf])
            both = (_OWN.format(place), _INHERITED.format(place))
            terms.append(_Term(both, _STEPS, norms, _row_count(value), width))
    return terms


def _of_input(name: str, module: Any, args: Args, start_args: Args) -> list[_Term]:
    """Return the terms of a module's first input and its change."""
    first = args[0] if args else None
    if not isinstance(first, Tensor) or not first.is_floating_point() or not first.dim():
        return []
    other = start_args[0] if start_args else None
    rows, width = _row_count(first), first.shape[-1]
    keys = (f"RCC x_t/{name}/l2norm", f"RCC (x_t-x_0)/{name}/l2norm")
    if not isinstance(other, Tensor) or other.shape != first.shape:
        return [_Term(keys[:1], (0,), _of_change(first, first), rows, width)]
    terms = [_Term(keys, _STEPS, _of_change(first, other), rows, width)]
    if isinstance(module, nn.LayerNorm):  # whose weight is multiplied with the normalised input
        normalised = (
            f"RCC (W_t-W_0)x_t/{name}.weight/x_t/l2norm",
            f"RCC W_0(x_t-x_0)/{name}.weight/x_t-x_0/l2norm",
        )
        now, before = (
            functional.layer_norm(each, module.normalized_shape, None, None, module.eps)
            for each in (first, other)
        )
        terms.append(_Term(normalised, _STEPS, _of_change(now, before), rows, width))
    return terms


def _of_projections(
    name: str, module: nn.MultiheadAttention, part: nn.MultiheadAttention, args: Args, start_args: Args
) -> list[_Term]:
    """Return the terms of the projections of query, key and value, which are no modules."""
    terms = []
    for index, letter in enumerate(("q", "k", "v")):
        if index < len(args) and isinstance(args[index], Tensor):
            now, before = _projection(module, letter, index), _projection(part, letter, index)
            value, between = functional.linear(args[index], now), functional.linear(args[index], before)
            norms = _of_steps(value, between, functional.linear(start_args[index], before))
            place = f"{name}.{letter}_proj.weight"
            keys = (_OWN.format(place), _INHERITED.format(place))
            terms.append(_Term(keys, _STEPS, norms, _row_count(value), value.shape[-1]))
    return terms


def _projection(module: nn.MultiheadAttention, letter: str, index: int) -> Tensor:
    packed: Tensor | None = module._parameters["in_proj_weight"]
    if packed is None:
        own: Tensor = getattr(module, f"{letter}_proj_weight")
        return own
    return packed[index * module.embed_dim : (index + 1) * module.embed_dim]
