"""Measure what an optimizer's step changes, without a second copy of the model.

A change needs the parameter before the step. There are three ways to get it:

- ``copied``: a copy is held during the step. Exact. Used as long as all copies fit into half of the allowance.
- ``rehearsed``: just before the step, the optimizer's own step runs on copies of the parameter, its gradient and its
  state, one block at a time. Exact: the same code computes the same change. Used for the optimizers of torch whose
  arithmetic is known to be elementwise, and for Adafactor, whose two reductions run over the blocks first.
- ``sampled``: a copy of at most ``SAMPLE`` elements is held, at fixed positions that are spread over the parameter.
  Statistics are estimates for the whole parameter. For changes with a normal distribution the standard error of
  ``rms``, ``l2`` and ``ratio`` is 0.3 %, that of ``mean`` 0.4 % of ``std``; extremes are those of the sample.

It guarantees:
- a change of exactly zero is zero in all three ways, in every dtype;
- a rehearsal changes neither the optimizer nor its state, gradients or parameters, and draws no random number;
- after the step, a few elements of each rehearsed parameter are compared with what was rehearsed.

Not here: which parameters are measured and when (`state`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, final

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer

from torchtap._torch import has_step_hooks, step_without_hooks
from torchtap._torch_distributed import local_part, spec_of
from torchtap.plan.budget import allowance
from torchtap.plan.sites import Place
from torchtap.receive import reasons
from torchtap.receive.receiver import PortState, Receiver
from torchtap.reduce.device_copy import Crossing

if TYPE_CHECKING:
    from torchtap.receive.state import Held

__all__ = [
    "SAMPLE",
    "Change",
    "Sampled",
    "Sizes",
    "UpdateReader",
    "blocks_of",
    "rehearsable",
    "rehearse",
    "sample",
]

SAMPLE = 1 << 16  # elements of a parameter
_LEAST_SAMPLE = 256
_BLOCK = 1 << 18  # elements: about ten arrays of a MiB, which fit into caches
_BLOCK_ON_DEVICE = 1 << 20  # a launch costs more there
_NOT_AS_REHEARSED = "the optimizer's step did something else than its class does; it is sampled from now on"
_AUDITED = 16  # elements of a parameter that are compared after the step
_ADAFACTOR = getattr(torch.optim, "Adafactor", None)
_ELEMENTWISE = frozenset(
    {
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.ASGD,
    }
)
Index: TypeAlias = tuple[slice, ...]


@final
class Change(NamedTuple):
    """A block of a parameter before the step, and its change. Both are valid until the next block is made."""

    before: Tensor
    change: Tensor


# -- the optimizer's own arithmetic -----------------------------------------------------------------------


def rehearsable(optimizer: Optimizer, parameter: Tensor) -> bool:
    """Return True if the step of this optimizer can be run ahead for this parameter, block by block.

    Only for classes of torch as they are: a subclass may do anything. An optimizer with step hooks of its own is left
    out, since these may change gradients or parameters.
    """
    if type(optimizer) not in _ELEMENTWISE and type(optimizer) is not _ADAFACTOR:
        return False
    if has_step_hooks(optimizer):
        return False
    gradient = parameter.grad
    if gradient is None:
        return True
    spec = spec_of(parameter)
    tensors = [local_part(parameter), local_part(gradient)]
    if gradient.layout is not torch.strided or tensors[0].shape != tensors[1].shape:
        return False
    if type(optimizer) is _ADAFACTOR:
        return spec is None
    state = [value for value in optimizer.state.get(parameter, {}).values() if isinstance(value, Tensor)]
    same = all(spec_of(each) == spec for each in (gradient, *state) if each.numel() > 1)
    return same and all(local_part(each).shape == tensors[0].shape or each.numel() == 1 for each in state)


@torch.no_grad()
def rehearse(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> Iterator[Change]:
    """Yield what the next step of an optimizer does to a parameter of this group, block by block."""
    local = local_part(parameter.detach())
    if parameter.grad is None:
        for index in blocks_of(local.shape, _block_size(local)):
            yield Change(local[index], torch.zeros_like(local[index]))
    elif type(optimizer) is _ADAFACTOR:
        yield from _rehearse_adafactor(optimizer, group, parameter)
    else:
        yield from _rehearse_elementwise(optimizer, group, parameter)


def _rehearse_elementwise(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> Iterator[Change]:
    local, gradient = local_part(parameter.detach()), parameter.grad
    assert gradient is not None
    gradient = local_part(gradient.detach())
    state = {
        name: local_part(value) if isinstance(value, Tensor) else value
        for name, value in optimizer.state.get(parameter, {}).items()
    }
    alike = [
        name for name, value in state.items() if isinstance(value, Tensor) and value.shape == local.shape
    ]
    local, gradient, *rows = _in_memory_order([local, gradient, *(state[name] for name in alike)])
    state |= zip(alike, rows, strict=True)
    double = object.__new__(type(optimizer))
    double.__dict__.update(optimizer.__dict__)
    double.defaults = {**optimizer.defaults, "differentiable": False}
    step = step_without_hooks(type(optimizer))
    for index in blocks_of(local.shape, _block_size(local)):
        block = local[index].clone(memory_format=torch.contiguous_format)
        block.grad = gradient[index].clone(memory_format=torch.contiguous_format)
        double.state = defaultdict(dict)
        if state:
            double.state[block] = {name: _part(value, index, local) for name, value in state.items()}
        double.param_groups = [{**group, "params": [block], "differentiable": False}]
        step(double)
        yield Change(local[index], block - local[index])


def _part(value: Any, index: Index, parameter: Tensor) -> Any:
    """Return a copy of what belongs to a block: of a number all of it."""
    if not isinstance(value, Tensor):
        return value
    if value.shape != parameter.shape:
        return value.clone()
    return value[index].clone(memory_format=torch.contiguous_format)


def _rehearse_adafactor(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> Iterator[Change]:
    """Adafactor divides by a variance of rows and columns, and limits the root mean square of the whole.

    It reads both from the device itself, so that reading them here makes nobody wait who would not have waited.
    """
    old, gradient = parameter.detach(), parameter.grad
    assert gradient is not None
    gradient = -gradient.detach() if group["maximize"] else gradient.detach()
    state = optimizer.state.get(parameter, {})
    rate, decay = float(group["lr"]), group["weight_decay"]
    least = torch.finfo(old.dtype).eps if group["eps"][0] is None else group["eps"][0]
    count = float(state["step"]) + 1 if state else 1.0
    weight = count ** group["beta2_decay"]
    root = max(old.numel(), 1) ** 0.5
    alpha = max(group["eps"][1], old.norm(2).item() / root) * min(rate, count**-0.5)
    variances: list[Tensor] = []
    if gradient.dim() > 1:
        for dim, name in ((-1, "row_var"), (-2, "col_var")):
            mean = torch.norm(gradient, dim=dim, keepdim=True).square_().div_(gradient.size(dim))
            variances.append(state.get(name, torch.zeros_like(mean)).lerp(mean, weight))
        variances.append(variances[0].mean(dim=-2, keepdim=True).clamp_(min=least))

    def direction(index: Index) -> Tensor:
        part = gradient[index]
        if variances:
            rows, columns, means = variances
            lead, every = index[:-2], slice(None)
            variance = rows[(*index[:-1], every)] @ columns[(*lead, every, index[-1])]
            variance.div_(means[(*lead, every, every)])
        else:
            square = part * part
            variance = state["variance"][index] if state else torch.zeros_like(square)
            variance = variance.lerp(square, weight)
        return variance.clamp_(min=least * least).rsqrt_().mul_(part)

    indices = list(blocks_of(old.shape, _block_size(old)))
    total = sum(direction(index).norm(2).item() ** 2 for index in indices)
    alpha /= max(1.0, total**0.5 / (root * group["d"]))
    for index in indices:
        block = old[index].clone(memory_format=torch.contiguous_format)
        if decay:
            block.mul_(1 - rate * decay)
        block.add_(direction(index), alpha=-alpha)
        yield Change(old[index], block.sub_(old[index]))


def _in_memory_order(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors as rows of elements in the order of their memory, if that is the same for all of them.

    Blocks of such rows begin where vectors of the processor begin: in bfloat16, torch rounds the last elements of a
    range otherwise than the others. Tensors of different layouts are returned unchanged.
    """
    strides = tensors[0].stride()
    order = sorted(range(len(strides)), key=lambda dim: (-strides[dim], dim))
    sorted_ = [tensor.permute(order) for tensor in tensors]
    return (
        [each.view(-1) for each in sorted_]
        if all(each.is_contiguous() for each in sorted_)
        else list(tensors)
    )


def blocks_of(shape: Sequence[int], most: int) -> Iterator[Index]:
    """Yield slices that cut a shape into blocks of at most ``most`` elements; one for each dimension."""
    if prod(shape) <= most:
        if 0 not in shape:
            yield tuple(slice(0, size) for size in shape)
        return
    inner = prod(shape[1:])
    rows = most // inner
    if rows:
        for first in range(0, shape[0], rows):
            yield (slice(first, min(first + rows, shape[0])), *(slice(0, size) for size in shape[1:]))
    else:
        for first in range(shape[0]):
            for rest in blocks_of(shape[1:], most):
                yield (slice(first, first + 1), *rest)


def _block_size(tensor: Tensor) -> int:
    return _BLOCK if tensor.device.type == "cpu" else _BLOCK_ON_DEVICE


# -- samples ----------------------------------------------------------------------------------------------


def sample(tensor: Tensor, most: int = SAMPLE) -> Tensor:
    """Return a copy of at most ``most`` elements, at positions that depend on the number of elements alone.

    Positions are multiples of a step near the golden section of the size, so that rows and columns are met evenly.
    """
    count = tensor.numel()
    if count <= most:
        return tensor.detach().reshape(-1).clone()
    step = int(count * 0.6180339887498949) | 1
    while _common_divisor(step, count) != 1:
        step += 2
    positions = torch.arange(most, device=tensor.device).mul_(step).remainder_(count)
    return torch.take(tensor.detach(), positions)


def _common_divisor(one: int, other: int) -> int:
    while other:
        one, other = other, one % other
    return one


@final
class Sampled(NamedTuple):
    """A sample of a parameter before the step."""

    before: Tensor
    most: int
    elements: int  # of the parameter

    @classmethod
    def of(cls, parameter: Tensor, most: int) -> Sampled:
        local = local_part(parameter.detach())
        return cls(sample(local, most), most, local.numel())

    def change(self, parameter: Tensor) -> Change:
        """Return the sample and its change."""
        now = sample(local_part(parameter.detach()), self.most)
        return Change(self.before, now.sub_(self.before))

    @property
    def scale(self) -> float:
        """How many elements of the parameter one of the sample stands for."""
        return self.elements / max(self.before.numel(), 1)


@final
class Sizes:
    """Sum the squares of blocks before the step and of their changes, on their device."""

    def __init__(self) -> None:
        self._before: Tensor | float = 0.0
        self._change: Tensor | float = 0.0

    def add(self, block: Change) -> Tensor:
        """Add a block, and return its change."""
        self._before = self._before + _square(block.before)
        self._change = self._change + _square(block.change)
        return block.change

    @property
    def before(self) -> Tensor | float:
        """Return the norm of the parameter before the step."""
        return self._before**0.5

    @property
    def ratio(self) -> Tensor | float:
        """Return the norm of the change as a share of the norm before the step."""
        nothing = not isinstance(self._change, Tensor)
        return float("nan") if nothing else (self._change / self._before) ** 0.5


def _square(block: Tensor) -> Tensor:
    narrow = block.dtype in (torch.bfloat16, torch.float16)
    norm = torch.linalg.vector_norm(block, dtype=torch.float32 if narrow else None)
    wide = torch.float32 if block.device.type == "mps" else torch.float64
    square: Tensor = norm.to(wide).square()
    return square


# -- during a step ----------------------------------------------------------------------------------------


@final
class _Rehearsed:
    """A few elements of a parameter, with the values that they should have after the step."""

    def __init__(self) -> None:
        self._elements: list[Tensor] = []  # views of the parameter: they show its values as they change
        self._before: list[Tensor] = []
        self._changes: list[Tensor] = []

    def add(self, block: Change) -> None:
        """Remember the first element of a block."""
        if len(self._elements) < _AUDITED and block.before.numel():
            first = (0,) * block.before.dim()
            self._elements.append(block.before[first])
            self._before.append(block.before[first].clone())
            self._changes.append(block.change[first].clone())  # a view would hold the block

    @torch.no_grad()
    def is_wrong(self) -> Crossing | None:
        """Return whether the step did something else, on its way to the host; None if there is no element."""
        if not self._elements:
            return None
        now, before, change = map(torch.stack, (self._elements, self._before, self._changes))
        expected = before + change
        near = (0.05 * change.abs() + 4 * torch.finfo(now.dtype).eps * before.abs()).real
        off = (now - expected).abs() > near
        both = now.isfinite() & expected.isfinite()
        return Crossing([(off & both).any() | (now.isfinite() != expected.isfinite()).any()])


class _Asked(NamedTuple):
    """A parameter whose updates live taps ask for."""

    parameter: Tensor
    ports: tuple[PortState, ...]


@final
class UpdateReader:
    """Measure the updates that live taps ask for, each in the best way that the allowance leaves.

    Between two calls of `begin_step` the updates of a parameter are one change, from the first to the last.
    """

    def __init__(self, receiver: Receiver, held: Held) -> None:
        self._receiver = receiver
        self._held = held
        self._asked: dict[int, _Asked] = {}
        self._room: dict[torch.device, int] = {}  # bytes that may be held
        self._copies: dict[torch.device, bool] = {}  # whether copies of all parameters fit
        self._sample: dict[torch.device, int] = {}  # elements of each parameter
        self._kept: dict[int, Tensor | Sampled | _Rehearsed | None] = {}
        self._spent: dict[torch.device, int] = {}  # bytes of copies that whole updates need
        self._unrehearsed: set[int] = set()  # parameters whose step does not do what was rehearsed
        self._audits: list[tuple[Crossing, int]] = []  # with the parameter

    @property
    def reads(self) -> bool:
        """Return True if any update is asked for."""
        return bool(self._asked)

    def arm(self, asked: Iterable[tuple[Tensor, tuple[PortState, ...]]]) -> None:
        """Measure the updates of these parameters from now on."""
        self._asked = {}
        for parameter, ports in asked:
            updates = tuple(port for port in ports if port.kind == "update")
            if updates:
                self._asked[id(parameter)] = _Asked(parameter, updates)
        plan = self._receiver.plan
        granted = max((tap.budget.memory or 0 for tap in plan.taps if tap.budget is not None), default=0)
        self._room = {
            device: max(allowance(nbytes), granted)
            for device, nbytes in _bytes_by_device(plan.places).items()
        }
        count: dict[torch.device, list[int]] = {}
        for parameter, _ in self._asked.values():
            count.setdefault(parameter.device, []).append(_nbytes(parameter))
        for device, sizes in count.items():
            half = self._room.setdefault(device, allowance(0)) // 2
            self._copies[device] = sum(sizes) <= half
            self._sample[device] = min(SAMPLE, max(_LEAST_SAMPLE, half // (8 * len(sizes))))

    def begin_step(self) -> None:
        """Forget what was held for the step before."""
        self._kept.clear()
        self._spent.clear()

    def entered(self, optimizer: Optimizer) -> None:
        """Hold what is needed of parameters that may move before the optimizer has its gradients."""
        self._begin_all(optimizer, rehearse=False)

    def ready(self, optimizer: Optimizer) -> None:
        """Measure or hold what is needed of each parameter of an optimizer that is about to step."""
        self._begin_all(optimizer, rehearse=True)

    def _begin_all(self, optimizer: Optimizer, *, rehearse: bool) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                asked = self._asked.get(id(parameter))
                if asked is not None:
                    try:
                        self._begin(optimizer, group, asked, rehearse)
                    except Exception as error:
                        self._lose(asked, error)

    def _begin(self, optimizer: Optimizer, group: dict[str, Any], asked: _Asked, rehearse: bool) -> None:
        parameter, key = asked.parameter, id(asked.parameter)
        if key in self._kept:
            if isinstance(self._kept[key], _Rehearsed):
                self._second_update(asked)
            return
        if self._copies[parameter.device] or local_part(parameter).numel() <= self._sample[parameter.device]:
            self._kept[key] = parameter.detach().clone()
        elif key not in self._unrehearsed and rehearsable(optimizer, parameter):
            if not rehearse:
                return
            self._kept[key] = None  # unless all of it works
            self._kept[key] = self._take_rehearsed(optimizer, group, asked)
        elif self._needs_whole(asked) and self._may_copy(parameter):
            self._kept[key] = parameter.detach().clone()
        else:
            self._kept[key] = Sampled.of(parameter, self._sample[parameter.device])

    def _second_update(self, asked: _Asked) -> None:
        """What was rehearsed is not all that this step does. From the next live step on, the parameter is sampled."""
        self._kept[id(asked.parameter)] = None
        self._unrehearsed.add(id(asked.parameter))
        for port in asked.ports:
            self._held.drop(port, port.site.leaf)
            port.note = reasons.SEVERAL_UPDATES

    def _may_assemble(self, parameter: Tensor) -> bool:
        """Return True if a change has the layout of its parameter, and a copy or two of it fit."""
        dense = torch.empty_like(parameter, device="meta").stride() == parameter.stride()
        return dense and spec_of(parameter) is None and 4 * _nbytes(parameter) <= self._room[parameter.device]

    def _may_copy(self, parameter: Tensor) -> bool:
        device, nbytes = parameter.device, _nbytes(parameter)
        if self._spent.get(device, 0) + nbytes > self._room[device] // 2:
            return False
        self._spent[device] = self._spent.get(device, 0) + nbytes
        return True

    def _needs_whole(self, asked: _Asked) -> bool:
        """Return True if a reduction cannot fold an update in blocks."""
        taps = self._receiver.plan.taps
        return any(not taps[index].keep.elementwise for port in asked.ports for index in port.port.taps)

    # -- taking -------------------------------------------------------------------------------------------

    def updated(self, parameter: Tensor) -> None:
        """An optimizer has stepped: measure the change of one of its parameters."""
        asked, kept = self._asked.get(id(parameter)), self._kept.get(id(parameter))
        if asked is None or kept is None:
            return
        try:
            if isinstance(kept, Sampled):
                self._take_blocks(asked, iter([kept.change(parameter)]), sampled=kept)
            elif isinstance(kept, _Rehearsed):
                wrong = kept.is_wrong()
                if wrong is not None:
                    self._audits.append((wrong, id(parameter)))
            else:
                self._take_whole(asked, kept, parameter.detach() - kept)
            self._look_at_audits(wait=parameter.device.type == "cpu")
        except Exception as error:
            self._lose(asked, error)

    @torch.no_grad()
    def _take_whole(self, asked: _Asked, before: Tensor, change: Tensor) -> None:
        sizes = Sizes()
        sizes.add(Change(local_part(before), local_part(change)))
        for port in asked.ports:
            self._held.take(port, change)
            self._take_sizes(port, asked.parameter, sizes, 1.0)

    def _take_rehearsed(self, optimizer: Optimizer, group: dict[str, Any], asked: _Asked) -> _Rehearsed:
        parameter, audit = asked.parameter, _Rehearsed()

        def blocks() -> Iterator[Change]:
            for block in rehearse(optimizer, group, parameter):
                audit.add(block)
                yield block

        if self._needs_whole(asked) and self._may_assemble(parameter):
            self._take_assembled(asked, blocks())
        else:
            self._take_blocks(asked, blocks())
        return audit

    @torch.no_grad()
    def _take_assembled(self, asked: _Asked, blocks: Iterator[Change]) -> None:
        """Put the change together, for reductions that need it whole. One parameter at a time is held."""
        change, sizes = torch.empty_like(asked.parameter, requires_grad=False), Sizes()
        for block in blocks:
            offset = block.before.storage_offset() - asked.parameter.storage_offset()
            change.as_strided(block.before.shape, block.before.stride(), offset).copy_(sizes.add(block))
        for port in asked.ports:
            self._held.take(port, change)
            self._take_sizes(port, asked.parameter, sizes, 1.0)

    def _take_blocks(self, asked: _Asked, blocks: Iterator[Change], sampled: Sampled | None = None) -> None:
        scale = 1.0 if sampled is None else sampled.scale
        how = "computed from the optimizer's step, block by block"
        if sampled is not None and scale > 1:
            how = f"estimated from {sampled.before.numel():,} of {sampled.elements:,} elements"
        sizes = Sizes()
        changes = (sizes.add(block) for block in blocks)
        self._held.take_blocks(asked.ports, asked.parameter, changes, scale=scale, how=how)
        for port in asked.ports:
            self._take_sizes(port, asked.parameter, sizes, scale)

    def _take_sizes(self, port: PortState, parameter: Tensor, sizes: Sizes, scale: float) -> None:
        self._held.take_number(port, port.site.leaf, "ratio", sizes.ratio)
        if spec_of(parameter) is not None:  # ranks' ratios are folded with it
            self._held.take_number(port, port.site.leaf, "weight_l2", sizes.before * scale**0.5)

    # -- what goes wrong ----------------------------------------------------------------------------------

    def _look_at_audits(self, *, wait: bool) -> None:
        """Stop rehearsing a parameter whose step did something else, and drop what was rehearsed."""
        for audit in [each for each in self._audits if wait or each[0].done()]:
            self._audits.remove(audit)
            crossing, key = audit
            if not crossing.wait()[0].item():
                continue
            self._unrehearsed.add(key)
            asked = self._asked.get(key)
            for port in () if asked is None else asked.ports:
                if key in self._kept:
                    self._held.drop(port, port.site.leaf)
                self._receiver.accumulator.lose(port.site.name, RuntimeError(_NOT_AS_REHEARSED))

    def _lose(self, asked: _Asked, error: Exception) -> None:
        self._kept[id(asked.parameter)] = None
        for port in asked.ports:
            self._held.drop(port, port.site.leaf)
            self._receiver.accumulator.lose(port.site.name, error)


def _bytes_by_device(places: Iterable[Place]) -> dict[torch.device, int]:
    """Return the bytes of a model's parameters on each device, each parameter counted once."""
    held = {
        id(each): each for place in places for each in place.module._parameters.values() if each is not None
    }
    found: dict[torch.device, int] = {}
    for parameter in held.values():
        found[parameter.device] = found.get(parameter.device, 0) + _nbytes(parameter)
    return found


def _nbytes(parameter: Tensor) -> int:
    if is_lazy(parameter):  # it has no shape before the first pass
        return 0
    local = local_part(parameter)
    return local.numel() * local.element_size()
