"""Read what a model holds rather than passes on. The same for every form.

Parameters are read when ``optimizer.step`` is entered. Gradients are read just before the optimizer uses them: after
its closure, after unscaling and clipping. A gradient has further sites for its earlier stages: as it was accumulated
(``param_grad_accumulated``, before unscaling), before it was clipped (``param_grad_unclipped``), and, among several
ranks, before these averaged it (``param_grad_local``). Where nothing scales, clips or averages, all four are the same
value. What an optimizer did (``update``), what it keeps (``optim_state``) and its learning rates (``lr``) are read when
it has stepped. What no optimizer brought is read at the end of the step, and so are buffers.

A step may hold several closure calls (LBFGS) and several updates (those inside one ``with watch.step():``). Then
``param`` is what the first update found, ``param_grad`` and its stages are what the last one used, ``optim_state`` is
what it left, and ``update`` is what all of them did together. None of these is a mixture.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, final

from torch import Tensor
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from torchtap._torch_distributed import fsdp_sharded
from torchtap.receive import reasons, training
from torchtap.receive.receiver import PortState, Receiver
from torchtap.receive.training import parameters_of
from torchtap.receive.updates import UpdateReader

__all__ = ["Held", "StateReader"]

_GRADIENTS = ("param_grad", "param_grad_unclipped", "param_grad_accumulated", "param_grad_local")
_BEFORE_UPDATE = ("param", *_GRADIENTS)
_OF_PARAMETERS = (*_BEFORE_UPDATE, "update", "optim_state")


@final
class StateReader(training.StepListener):
    """Reads the parameters, gradients, buffers and optimizer's values that live taps ask for."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._held = Held(receiver)
        self._armed: frozenset[int] = frozenset()
        self._parameters: dict[int, tuple[PortState, ...]] = {}  # id of a parameter -> its live ports
        self._gradients: dict[int, tuple[int, ...]] = {}  # the ids of those of them that read its gradient
        # Of an optimizer and kinds: the ids of its parameters, and all ports that are read then.
        self._asked_of: dict[tuple[int, tuple[str, ...]], tuple[list[int], list[PortState]]] = {}
        self._before_update = 0  # the number of these ports that are read before an update
        self._reads_state = False  # True if any port reads what an optimizer keeps
        self._buffers: tuple[PortState, ...] = ()
        self._rates = _Rates(receiver, self._held)
        self._step = _StepReads()
        self._updates = UpdateReader(receiver, self._held)
        self._sharded: dict[tuple[int, str], Any] = {}  # what manages parameters that are gathered at times
        self._local: LocalGradients | None = None  # None: nobody averages them
        if receiver.placing is not None:
            self._local = LocalGradients()

    def arm(self, live: frozenset[int]) -> None:
        """A step begins in which these taps are live."""
        self._step = _StepReads()
        self._updates.begin_step()
        if self._local is not None:
            self._local.clear()
        if live == self._armed:
            return
        self.disarm()
        self._armed = live
        if self._receiver.placing is not None:
            self._sharded = fsdp_sharded(self._receiver.plan.places[0].module)
        ports = [port for port in self._receiver.ports.values() if not live.isdisjoint(port.port.taps)]
        self._sort_by_parameter(ports)
        if self._local is not None:
            self._local.watch(self._averaged(ports))
        self._rates.arm(ports)
        self._buffers = tuple(port for port in ports if port.kind == "buffer")
        if self._parameters or self._rates.port is not None:
            training.listen(self)

    def _sort_by_parameter(self, ports: list[PortState]) -> None:
        """Which live ports each parameter has, and what of them is read before and after an update."""
        of_parameters = [port for port in ports if port.kind in _OF_PARAMETERS]
        for port in of_parameters:
            key = id(self._parameter_of(port))
            self._parameters[key] = (*self._parameters.get(key, ()), port)
        self._gradients = {
            key: tuple(id(port) for port in ports_of_one if port.kind in _GRADIENTS)
            for key, ports_of_one in self._parameters.items()
        }
        kinds = [port.kind for port in of_parameters]
        self._before_update = sum(kind in _BEFORE_UPDATE for kind in kinds)
        self._reads_state = "optim_state" in kinds
        named = (
            (self._parameter_of(ports_of_one[0]), ports_of_one) for ports_of_one in self._parameters.values()
        )
        self._updates.arm((parameter, ports) for parameter, ports in named if parameter is not None)

    def finish_step(self) -> None:
        """Read what no optimizer step has brought yet."""
        self._step.passed.clear()
        self._step.stepped.clear()
        if self._parameters or self._buffers:
            self._receiver.switch_to_state()
        if len(self._step.taken) < self._before_update:
            self._read(_of_kinds(self._parameters.values(), _BEFORE_UPDATE))
        for port in self._buffers:
            buffer = _tensor_of(port)
            if buffer is not None:
                self._held.take(port, buffer)
        self._updates.begin_step()

    def disarm(self) -> None:
        """Nothing is read until `arm` is called again."""
        if self._parameters or self._rates.port is not None:
            training.stop_listening(self)
        if self._local is not None:
            self._local.stop()
        self._armed = frozenset()
        self._parameters, self._buffers, self._rates.port = {}, (), None
        self._asked_of.clear()

    # -- what the training tells --------------------------------------------------------------------------

    def evaluating(self, optimizer: Optimizer) -> None:
        self._pass(optimizer)

    def _pass(self, optimizer: Optimizer) -> None:
        """What was read of this optimizer's gradients is not the last of this step if others come."""
        if self._receiver.hears_this_thread():
            self._step.stepped.append(optimizer)

    def _others_come(self) -> None:
        """There is more to read in this step, after optimizers have stepped."""
        while self._step.stepped:
            for parameter in parameters_of(self._step.stepped.pop()):
                self._step.passed.update(self._gradients.get(id(parameter), ()))

    def unscaling(self, optimizer: Optimizer) -> None:
        self._read_of(optimizer, ("param_grad_accumulated",))
        # Unscaling changes gradients in place without counting it: the same tensor is another value afterwards.
        self._receiver.accumulator.forget_values()

    def clipping(self, gradients: Sequence[Tensor]) -> None:
        if not self._receiver.hears_this_thread():
            return
        clipped = {id(gradient) for gradient in gradients}
        self._receiver.switch_to_state()
        asked = [ports for ports in self._parameters.values() if self._is_clipped(ports, clipped)]
        self._read(_of_kinds(asked, ("param_grad_unclipped", "param_grad_accumulated")))
        self._receiver.accumulator.forget_values()

    def _is_clipped(self, ports: tuple[PortState, ...], clipped: set[int]) -> bool:
        parameter = self._parameter_of(ports[0])
        return parameter is not None and id(parameter.grad) in clipped

    def entered(self, optimizer: Optimizer) -> None:
        """Read parameters before anything moves them: some optimizers do so before they call their closure."""
        self._read_of(optimizer, ("param",))
        if self._updates.reads and self._receiver.hears_this_thread():
            self._updates.entered(optimizer)

    def ready(self, optimizer: Optimizer) -> None:
        self._read_of(optimizer, _BEFORE_UPDATE)
        if self._updates.reads and self._receiver.hears_this_thread():
            self._updates.ready(optimizer)

    def updated(self, optimizer: Optimizer) -> None:
        if not self._receiver.hears_this_thread():
            return
        if self._rates.port is not None or self._updates.reads or self._reads_state:
            self._receiver.switch_to_state()
        if self._updates.reads or self._reads_state:
            self._take_after(optimizer)
        self._rates.take(optimizer)
        self._pass(optimizer)

    def _take_after(self, optimizer: Optimizer) -> None:
        """What the optimizer did to each parameter, and what it keeps for it."""
        for parameter in parameters_of(optimizer):
            self._updates.updated(parameter)
            for port in self._parameters.get(id(parameter), ()):
                if port.kind == "optim_state":
                    self._take_optimizer_state(port, optimizer.state.get(parameter, {}))

    def skipped(self, optimizer: Optimizer) -> None:
        pass  # its gradients are read when the step ends

    # -- reading ------------------------------------------------------------------------------------------

    def _parameter_of(self, port: PortState) -> Tensor | None:
        """A port's parameter, as the optimizer has it: of one that is gathered for a forward, this rank's shard."""
        site = port.site
        managed = self._sharded.get((id(site.module), site.leaf)) if self._sharded else None
        if managed is None:
            return _tensor_of(port)
        shard: Tensor = managed.sharded_param
        return shard

    def _read_of(self, optimizer: Optimizer, kinds: tuple[str, ...]) -> None:
        if not self._receiver.hears_this_thread():
            return
        self._receiver.switch_to_state()
        # A fused optimizer divides by the scale itself.
        scale = getattr(optimizer, "grad_scale", None)
        self._read(self._ports_of(optimizer, kinds), scale)

    def _ports_of(self, optimizer: Optimizer, kinds: tuple[str, ...]) -> list[PortState]:
        """The live ports of these kinds, of all parameters of an optimizer: in most steps those of the step before."""
        held = [id(parameter) for parameter in parameters_of(optimizer)]
        known, ports = self._asked_of.get((id(optimizer), kinds), ((), []))
        if known != held:
            ports = _of_kinds([self._parameters.get(key, ()) for key in held], kinds)
            self._asked_of[id(optimizer), kinds] = held, ports
        return ports

    def _read(self, asked: list[PortState], scale: Tensor | None = None) -> None:
        """Take what these ports show, those that were not read yet: all together, since they are many."""
        if self._step.stepped:
            self._others_come()
        taken, passed = self._step.taken, self._step.passed
        if taken:
            asked = [port for port in asked if id(port) not in taken or id(port) in passed]
        found: list[PortState] = []
        values: list[Tensor] = []
        for port in asked:
            value = self._value_of(port)
            if value is None:
                continue
            if scale is not None and port.kind in ("param_grad", "param_grad_unclipped"):
                value = value / scale
            found.append(port)
            values.append(value)
        read = [id(port) for port in found]
        taken.update(read)
        passed.difference_update(read)
        self._held.take_each(found, values)

    def _value_of(self, port: PortState) -> Tensor | None:
        """What a port shows now; where it is nothing, the port says why."""
        if self._sharded or port.site.module is None:
            parameter = self._parameter_of(port)
        else:
            parameter = port.site.module._parameters.get(port.site.leaf)
        if parameter is None or port.kind == "param":
            return parameter
        if self._local is not None and port.kind == "param_grad_local":
            gradient = self._local.of(parameter)
            if gradient is None and port.note == reasons.NO_LOCAL_GRADIENT:
                return None
        else:
            gradient = parameter.grad
        if gradient is None:
            port.note = reasons.NO_PARAMETER_GRADIENT if parameter.numel() else reasons.NO_ELEMENT
        return gradient

    def _averaged(self, ports: Sequence[PortState]) -> list[Tensor]:
        """The parameters whose local gradients are asked for and can be had."""
        asked = [port for port in ports if port.kind == "param_grad_local"]
        for port in asked:
            if (id(port.site.module), port.site.leaf) in self._sharded:
                port.note = reasons.NO_LOCAL_GRADIENT
        wanted = [self._parameter_of(port) for port in asked if port.note != reasons.NO_LOCAL_GRADIENT]
        return [parameter for parameter in wanted if parameter is not None]

    def _take_optimizer_state(self, port: PortState, state: dict[str, Any]) -> None:
        leaf = port.site.leaf
        for name, value in state.items():
            if isinstance(value, Tensor):
                self._held.take_part(port, f"{leaf}.{name}", value)
            elif isinstance(value, (int, float)):
                self._held.take_number(port, f"{leaf}.{name}", "value", value)
        if not state:
            port.note = reasons.NO_OPTIMIZER_STATE


@final
class _StepReads:
    """What was read in the open step."""

    def __init__(self) -> None:
        self.taken: set[int] = set()  # the ids of ports
        self.stepped: list[Optimizer] = []  # whose gradients may not be the last of this step
        self.passed: set[int] = set()  # the ids of ports that are read again at another update


@final
class _Rates:
    """Read the learning rates of a model's optimizers, with one number for each parameter group."""

    def __init__(self, receiver: Receiver, held: Held) -> None:
        self._plan, self._held = receiver.plan, held
        self.port: PortState | None = None  # None while no active tap selects rates
        self._known: set[int] = set()  # the ids of the model's parameters
        self._groups: dict[int, int] = {}  # id of an optimizer -> the number of its first group
        self._next_group = 0

    def arm(self, ports: Iterable[PortState]) -> None:
        """Begin a step in which these ports are active."""
        self.port = next((port for port in ports if port.kind == "lr"), None)
        if self.port is not None:
            modules = (place.module for place in self._plan.places)
            self._known = {id(each) for module in modules for each in module._parameters.values()}

    def take(self, optimizer: Optimizer) -> None:
        """Read the rates of an optimizer that has stepped, unless it is another model's."""
        port = self.port
        if port is None:
            return
        first = self._groups.get(id(optimizer))
        if first is None:
            if self._known.isdisjoint(map(id, parameters_of(optimizer))):
                return
            first = self._groups[id(optimizer)] = self._next_group
            self._next_group += len(optimizer.param_groups)
        for number, group in enumerate(optimizer.param_groups):
            rate = group.get("lr")
            if rate is not None:
                self._held.take_number(port, str(first + number), "value", rate)


def _of_kinds(asked: Iterable[tuple[PortState, ...]], kinds: tuple[str, ...]) -> list[PortState]:
    return [port for ports in asked for port in ports if port.kind in kinds]


def _tensor_of(port: PortState) -> Tensor | None:
    if port.site.module is None:
        return None
    held = port.site.module._buffers if port.kind == "buffer" else port.site.module._parameters
    return held.get(port.site.leaf)


@final
class Held:
    """Takes parameters, their gradients, buffers, and what an optimizer keeps."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._accumulator = receiver.accumulator

    def take(self, port: PortState, tensor: Tensor) -> None:
        """The value of a port that stands for one tensor."""
        port.called = True
        self._take_anew(port, port.site.leaf, tensor)

    def take_each(self, ports: list[PortState], tensors: list[Tensor]) -> None:
        """`take` for each of several ports, by one call into native code where that can be."""
        for position in self._fold_together(ports, tensors):
            self.take(ports[position], tensors[position])

    def take_blocks(
        self, ports: Sequence[PortState], whole: Tensor, blocks: Iterable[Tensor], *, scale: float, how: str
    ) -> None:
        """Fold a value that arrives in blocks of elements, for each of several ports.

        ``whole`` has the shape and placement of the value. Each element of a block stands for ``scale`` elements.
        Reductions that need the value in one piece do not get it; that is reported.
        """
        sites = []
        for port in ports:
            port.called = True
            self.drop(port, port.site.leaf)
            site = self._accumulator.site(port, port.site.leaf, 0)
            if site is not None:
                site.shape, site.dtype, site.how = tuple(whole.shape), whole.dtype, how
                sites.append(site)
                if self._receiver.placing is not None:
                    self._receiver.placing.note(site, whole, self._accumulator.phase.key)
        for block in blocks:
            for site in sites:
                self._accumulator.fold_block(site, block, scale)

    def take_part(self, port: PortState, leaf: str, tensor: Tensor) -> None:
        """A tensor that belongs to a port's own, such as what an optimizer keeps for it."""
        port.called = True
        self._take_anew(port, leaf, tensor)

    def take_number(self, port: PortState, leaf: str, statistic: str, number: float | Tensor) -> None:
        """A number that is a result already; it is kept whatever the reduction."""
        port.called = True
        site = self._accumulator.site(port, leaf, 0)
        if site is not None:
            site.shape = site.shape or ()
            self._accumulator.phase.numbers.setdefault(statistic, {})[site.name] = number

    def _take_anew(self, port: PortState, leaf: str, tensor: Tensor) -> None:
        """Take a value in place of what the phase holds: a later value of the same step replaces it."""
        self.drop(port, leaf)
        self._receiver.take_leaf(port, leaf, 0, tensor)

    def drop(self, port: PortState, leaf: str) -> None:
        """Drop what the phase holds of a leaf's first call."""
        with self._accumulator.lock:
            site, phase = port.sites.get((leaf, 0, 0)), self._accumulator.phase
            while site is not None:
                if 0 <= site.row < len(phase.arrived) and phase.arrived[site.row]:
                    phase.block.reset(slice(site.row, site.row + 1))
                    phase.arrived[site.row] = 0
                for fold in site.folds.get(phase.key, {}).values():
                    fold.state = None
                site = site.merged

    def _fold_together(self, ports: list[PortState], tensors: list[Tensor]) -> Sequence[int]:
        """Fold statistics of many tensors by one native call. Return the positions of those that are left."""
        phase, generation = self._accumulator.phase, self._accumulator.phase.generation
        left, quick, rows = list[int](), list[int](), list[int]()
        for position, port in enumerate(ports):
            site = port.first
            if site is not None and site.stats_only and site.generation == generation:
                quick.append(position)
                rows.append(site.row)
            else:
                left.append(position)
        missed = set(phase.block.put_each(rows, [tensors[position] for position in quick]))
        for number, position in enumerate(quick):
            if number in missed:
                left.append(position)
                continue
            port, placing = ports[position], self._receiver.placing
            port.called = True
            phase.arrived[rows[number]] = 1
            if placing is not None and port.first is not None:
                placing.note(port.first, tensors[position], phase.key)
        return left


@final
class LocalGradients:
    """The newest gradient of each parameter as this rank computed it, before a wrapper averages it over ranks.

    A hook copies each gradient when autograd has accumulated it, which is before DDP reduces it. With several passes in
    a step the newest copy is that of all of them.
    """

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._kept: dict[int, Tensor] = {}

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Keep the gradients of these from now on."""
        for parameter in parameters:
            if parameter.requires_grad and parameter.is_leaf:
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._keep))

    def _keep(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._kept[id(parameter)] = parameter.grad.detach().clone()

    def of(self, parameter: Tensor) -> Tensor | None:
        """What was kept for a parameter in this step."""
        return self._kept.get(id(parameter))

    def clear(self) -> None:
        """A new step begins."""
        self._kept.clear()

    def stop(self) -> None:
        """Leave the parameters as they were."""
        while self._handles:
            self._handles.pop().remove()
        self._kept.clear()
