"""The pulse of a training: a few numbers of every update, outside of every schedule and budget.

Each row is one update of one optimizer: its loss, every hyper-parameter that is a number, fingerprints of the input and
the target, the mode, the clip factor, and for one parameter of each group and one more in turn: the size of gradient,
weight, update and moments, the share of elements that changed, and what the optimizer's arithmetic predicts.

It guarantees:
- sizes are those of at most `SAMPLE` elements of a parameter; nothing larger is copied;
- no device is waited for: rows stay on their device until `ROWS` of them are copied together;
- no random number is drawn, no hook is on an inner module.

Rows leave through ``deliver`` as one table: column name to numbers, with ``step`` among them. ``0.loss`` is of the
first optimizer, ``0.1.lr`` of its second group, ``0.r.grad`` of the parameter in turn, whose number is ``0.r.which``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from torchtap._torch import saved_by
from torchtap._torch_distributed import local_part
from torchtap.forms.op.passes import PassHooks
from torchtap.plan.names import join_path, site_name
from torchtap.plan.sites import places, unwrap
from torchtap.receive import backward, training
from torchtap.receive.collect import Numbers, PendingNumbers, numbers_on_host
from torchtap.spi import StepListener

__all__ = ["PULSE", "ROWS", "SAMPLE", "Pulse", "Table", "pulse_of"]

PULSE = "pulse"  # the kind of the run's events
SAMPLE = 1024  # elements of a parameter
ROWS = 8  # updates between two deliveries
_GROUPS = 3  # of an optimizer that have a parameter of their own; all others take turns
_PRINT = 2048  # elements of an input or a target
_EARLY, _PREDICTED = 32, 4  # the arithmetic is predicted for the first updates, then for one in four
_NODES = 6  # of autograd's graph, from the loss on

Table = dict[str, list[float]]


def pulse_of(watch: Any, models: Mapping[str, nn.Module] | nn.Module) -> Pulse:
    """Record the pulse of a training as events of a watch's run. It is started; call ``stop`` at the end."""
    roots = {"": models} if isinstance(models, nn.Module) else dict(models)
    names = {
        id(parameter): site_name(join_path(root, place.path), "param", leaf)
        for root, model in roots.items()
        for place in places(unwrap(model))
        for leaf, parameter in place.module._parameters.items()
        if parameter is not None
    }
    watch.note(PULSE, parameters=list(names.values()))
    made = Pulse(
        list(roots.values()),
        names,
        lambda: max(0, watch.step_number),
        lambda rows: watch.note(PULSE, rows=rows),
    )
    made.start()
    return made


class _Sample(NamedTuple):
    """A parameter just before its update."""

    name: str  # of the columns
    parameter: Tensor
    weight: Tensor
    gradient: Tensor
    outside: Tensor | None  # its change since the last update, by anything but the optimizer
    predicted: Tensor | None  # the change that the optimizer's arithmetic gives


@final
class Pulse(StepListener):
    """Listens to a training. ``names`` are the parameters' sites by their id; ``step`` returns the open step."""

    def __init__(
        self,
        models: Sequence[Any],
        names: Mapping[int, str],
        step: Callable[[], int],
        deliver: Callable[[Table], None],
    ) -> None:
        self._names, self._step, self._deliver = names, step, deliver
        self._order = list(names.values())
        self._hooks = [
            PassHooks(each, self, None, self._called) for each in models if isinstance(each, nn.Module)
        ]
        self._known: dict[int, _Followed] = {}
        self._rows: list[dict[str, float | Tensor]] = []
        self._row: dict[str, float | Tensor] = {}  # of the update that comes next
        self._sent: list[tuple[list[str], Numbers, list[PendingNumbers]]] = []
        self._samples: list[_Sample] = []
        self._weights: dict[torch.device, Tensor] = {}  # of fingerprints
        self._process = os.getpid()

    def start(self) -> None:
        """Listen from now on."""
        backward.listen(self)
        training.listen(self)
        for each in self._hooks:
            each.switch_on()

    def stop(self) -> None:
        """Deliver the last rows and leave everything as it was."""
        backward.stop_listening(self)
        training.stop_listening(self)
        for each in self._hooks:
            each.switch_off()
        self.flush()
        self._deliver_sent(wait=True)

    # -- passes and losses --------------------------------------------------------------------------------

    def begin_pass(self, training: bool | None = None) -> None:
        if torch.is_grad_enabled() and training is not None:
            self._row["training"] = float(training)

    def end_pass(self) -> None:
        pass

    def _called(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if not torch.is_grad_enabled() or "input" in self._row:
            return
        for each in (*args, *kwargs.values()):
            if isinstance(each, Tensor) and each.numel() > 1:
                self._row["input"] = self._print(each)
                return

    def backward_begins(self, loss: Tensor | None, root: Tensor | None) -> None:
        if loss is not None:
            known = self._row.get("loss", 0.0)
            self._row["loss"] = known + loss.detach().float()
        if root is not None and "target" not in self._row:
            try:
                target = _target(root)
                if target is not None:
                    self._row["target"] = self._print(target)
            except RuntimeError:
                pass  # what a node has saved was freed or changed

    def backward_ends(self) -> None:
        pass

    def _print(self, value: Tensor) -> Tensor:
        """Return a number that two different tensors do not share: a projection of elements spread over it."""
        value = local_part(value.detach())
        if value.device not in self._weights:
            made = torch.sin(torch.arange(1, _PRINT + 1, dtype=torch.float64) * 12.9898) * 43758.5453
            self._weights[value.device] = (made - made.floor()).float().to(value.device, non_blocking=True)
        flat = value.reshape(-1)
        flat = flat[:: max(1, flat.numel() // _PRINT)][:_PRINT].float()
        return torch.dot(flat, self._weights[value.device][: flat.numel()])

    # -- updates ------------------------------------------------------------------------------------------

    def clipping(self, gradients: Sequence[Tensor]) -> None:
        if len(gradients) and "unclipped" not in self._row:
            self._row["unclipped"] = _part(gradients[-1]).norm()

    def ready(self, optimizer: Optimizer) -> None:
        if self._samples or os.getpid() != self._process:
            return  # a closure is called again, or a forked worker steps
        followed = self._followed(optimizer)
        if followed is None:
            return
        with torch.no_grad():
            self._note_clip(followed)
            for name, group, parameter in followed.due(self._row):
                if parameter.grad is not None and not parameter.grad.is_sparse:
                    self._samples.append(followed.sample(name, group, parameter))

    def _note_clip(self, followed: _Followed) -> None:
        """Set ``clip``: the size of the last gradient over its size before it was clipped."""
        before = self._row.pop("unclipped", None)
        last = followed.optimizer.param_groups[-1]["params"][-1].grad
        if isinstance(before, Tensor) and last is not None:
            self._row["clip"] = _part(last).norm() / before

    def updated(self, optimizer: Optimizer) -> None:
        followed = self._known.get(id(optimizer))
        if followed is None or os.getpid() != self._process:
            return
        with torch.no_grad():
            for sample in self._samples:
                self._measure(followed, sample)
        self._end_row(followed)

    def skipped(self, optimizer: Optimizer) -> None:
        followed = self._known.get(id(optimizer))
        if followed is not None:
            self._row["skipped"] = 1.0
            self._end_row(followed)

    def _measure(self, followed: _Followed, sample: _Sample) -> None:
        """Note the sizes of a sample after its update."""
        after = _part(sample.parameter)
        change = after - sample.weight
        if not sample.name.endswith("r"):
            followed.last[sample.name] = (sample.parameter, after.clone())
        columns = {"weight": sample.weight, "grad": sample.gradient, "update": change}
        columns |= followed.moments(sample.parameter)
        if sample.outside is not None:
            columns["outside"] = sample.outside
        if sample.predicted is not None:
            columns |= {"predicted": sample.predicted, "unexplained": change - sample.predicted}
        sizes = torch.stack(list(columns.values())).square().mean(1).sqrt()
        for name, size in zip(columns, sizes.tolist() if sizes.is_cpu else sizes.unbind(), strict=True):
            self._row[f"{sample.name}.{name}"] = size
        self._row[f"{sample.name}.age"] = followed.age(sample.parameter)
        self._row[f"{sample.name}.moved"] = torch.count_nonzero(change) / change.numel()

    def _end_row(self, followed: _Followed) -> None:
        row, number = self._row, followed.number
        followed.updates += 1
        shared = ("loss", "skipped", "clip")
        self._rows.append(
            {
                "step": float(self._step()),
                **{f"{number}.{key}" if key in shared else key: value for key, value in row.items()},
            }
        )
        self._row, self._samples = {}, []
        if len(self._rows) >= ROWS:
            self.flush()
        elif self._sent:
            self._deliver_sent()

    def _followed(self, optimizer: Optimizer) -> _Followed | None:
        """Return what is known of an optimizer; None if it holds nothing of the models."""
        found = self._known.get(id(optimizer))
        if found is None or found.optimizer is not optimizer:
            held = {id(each) for each in training.parameters_of(optimizer)}
            if held.isdisjoint(self._names):
                return None
            # A new optimizer of the same parameters goes on with the columns of the old one.
            same = [each for each in self._known.values() if each.held == held]
            number = (
                same[-1].number
                if same
                else 1 + max((each.number for each in self._known.values()), default=-1)
            )
            found = self._known[id(optimizer)] = _Followed(optimizer, number, held, self._names, self._order)
        return found

    def flush(self) -> None:
        """Deliver the rows so far."""
        rows, self._rows = self._rows, []
        if not rows or os.getpid() != self._process:
            return
        names = list(dict.fromkeys(name for row in rows for name in row))
        cells = [row.get(name, math.nan) for row in rows for name in names]
        coming: list[PendingNumbers] = []
        self._sent.append((names, numbers_on_host([cells], coming)[0], coming))
        self._deliver_sent()

    def _deliver_sent(self, *, wait: bool = False) -> None:
        """Deliver rows in order, up to the first whose numbers are still on their way from a device."""
        while self._sent and (wait or all(each.done() for each in self._sent[0][2])):
            names, numbers, coming = self._sent.pop(0)
            for each in coming:
                each.fill()
            self._deliver({name: numbers[place :: len(names)].tolist() for place, name in enumerate(names)})


@final
class _Followed:
    """One optimizer: whose turn it is, and what its arithmetic gives."""

    def __init__(
        self,
        optimizer: Optimizer,
        number: int,
        held: set[int],
        names: Mapping[int, str],
        order: Sequence[str],
    ) -> None:
        self.optimizer, self.number, self.held, self.updates = optimizer, number, held, 0
        self._names = names
        self._place = {name: index for index, name in enumerate(order)}
        self._hyper: dict[str, float] = {}
        self._turn = 0
        self.last: dict[
            str, tuple[Tensor, Tensor]
        ] = {}  # the sample of each group's parameter after its update

    def due(self, row: dict[str, float | Tensor]) -> list[tuple[str, dict[str, Any], Tensor]]:
        """Return the parameters to look at; note hyper-parameters that are new or changed, and each learning rate."""
        found: list[tuple[str, dict[str, Any], Tensor]] = []
        groups = self.optimizer.param_groups
        for index, group in enumerate(groups):
            name = f"{self.number}.{index}"
            self._note_hyper(name, group, row)
            learning = [each for each in group["params"] if each.requires_grad]
            if learning and index < _GROUPS:
                found.append((name, group, max(reversed(learning[-4:]), key=lambda each: each.dim())))
                self._note_which(name, found[-1][2], row)
        every = [(group, each) for group in groups for each in group["params"] if each.requires_grad]
        if len(every) > len(found):
            group, parameter = every[self._turn % len(every)]
            self._turn += 1
            if not any(parameter is each for _, _, each in found):
                name = f"{self.number}.r"
                self._note_which(name, parameter, row)
                found.append((name, group, parameter))
        return found

    def _note_which(self, name: str, parameter: Tensor, row: dict[str, float | Tensor]) -> None:
        """Note the number of a parameter among the models'; -1 for one that is not theirs."""
        row[f"{name}.which"] = float(self._place.get(self._names.get(id(parameter), ""), -1))

    def _note_hyper(self, name: str, group: dict[str, Any], row: dict[str, float | Tensor]) -> None:
        for key, value in group.items():
            if key == "params":
                continue
            parts = value if isinstance(value, tuple) else (value,)
            for place, part in enumerate(parts):
                column = f"{name}.{key}{place or ''}"
                if isinstance(part, Tensor):
                    row[column] = part.detach().clone()  # a scheduler changes it in place
                elif isinstance(part, (int, float)) and (key == "lr" or self._hyper.get(column) != part):
                    row[column] = self._hyper[column] = float(part)

    def sample(self, name: str, group: dict[str, Any], parameter: Tensor) -> _Sample:
        """Return a parameter's sample just before its update."""
        weight = _part(parameter).clone()
        assert parameter.grad is not None
        gradient = _part(parameter.grad).clone()
        due = self.updates < _EARLY or self.updates % _PREDICTED == 0
        predicted = self._predict(group, parameter, weight, gradient) if due else None
        known, after = self.last.get(name, (None, weight))
        outside = weight - after if known is parameter else None
        return _Sample(name, parameter, weight, gradient, outside, predicted)

    def _predict(
        self, group: dict[str, Any], parameter: Tensor, weight: Tensor, gradient: Tensor
    ) -> Tensor | None:
        """Return the change by the arithmetic of SGD, Adam and AdamW; None for other optimizers."""
        if parameter.dtype != torch.float32 or getattr(self.optimizer, "grad_scale", None) is not None:
            return None  # rounded in another format, or unscaled inside of the step
        kind, state = type(self.optimizer), self.optimizer.state.get(parameter, {})
        rate, decay = group["lr"], group.get("weight_decay", 0)
        if group.get("maximize"):
            gradient = -gradient
        if kind is torch.optim.SGD:
            gradient = gradient + decay * weight
            buffer = state.get("momentum_buffer")
            if group["momentum"]:
                moved = (
                    gradient
                    if buffer is None
                    else group["momentum"] * _part(buffer) + (1 - group["dampening"]) * gradient
                )
                gradient = gradient + group["momentum"] * moved if group["nesterov"] else moved
            return torch.mul(gradient, -rate)
        if kind not in (torch.optim.Adam, torch.optim.AdamW) or group.get("amsgrad"):
            return None
        apart = kind is torch.optim.AdamW or group.get("decoupled_weight_decay")
        if not apart:
            gradient = gradient + decay * weight
        first, second = group["betas"]
        steps = (
            float(state["step"]) + 1
            if "step" in state and not _on_device(state["step"])
            else self.updates + 1
        )
        zero = torch.zeros_like(gradient)
        one = torch.lerp(_part(state["exp_avg"]) if "exp_avg" in state else zero, gradient, 1 - first)
        two = (
            second * (_part(state["exp_avg_sq"]) if "exp_avg_sq" in state else zero)
            + (1 - second) * gradient.square()
        )
        size = (two / (1 - second**steps)).sqrt() + group["eps"]
        change = -rate / (1 - first**steps) * one / size
        return torch.sub(change, rate * decay * weight) if apart else torch.as_tensor(change)

    def age(self, parameter: Tensor) -> float | Tensor:
        """Return how many updates the state of a parameter counts; NaN if it counts none."""
        found = self.optimizer.state.get(parameter, {}).get("step", math.nan)
        return found.detach().clone() if _on_device(found) else float(found)

    def moments(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the samples of a parameter's moments after its update."""
        state = self.optimizer.state.get(parameter, {})
        found = {
            "moment": state.get("exp_avg", state.get("momentum_buffer")),
            "second": state.get("exp_avg_sq"),
        }
        return {name: _part(value) for name, value in found.items() if isinstance(value, Tensor)}


def _part(value: Tensor) -> Tensor:
    """Return at most `SAMPLE` elements from the middle of a tensor, in float32."""
    value = local_part(value.detach())
    while not value.is_contiguous() and value.dim():
        value = value[len(value) // 2]
    flat = value.reshape(-1)
    size = min(SAMPLE, flat.numel())
    return flat.narrow(0, (flat.numel() - size) // 2, size).float()


def _target(root: Tensor) -> Tensor | None:
    """Return the target of the loss function next to the root of a graph, if one is saved there."""
    node = root.grad_fn
    for _ in range(_NODES):
        if node is None:
            return None
        target = saved_by(node, "target")
        if isinstance(target, Tensor) and target.numel() > 1:
            return target
        node = next((each for each, _ in node.next_functions if each is not None), None)
    return None


def _on_device(value: object) -> bool:
    return isinstance(value, Tensor) and not value.is_cpu
