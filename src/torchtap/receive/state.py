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
from typing import TYPE_CHECKING, Any, final

from torch import Tensor
from torch.optim.optimizer import Optimizer

from torchtap._torch_distributed import fsdp_sharded
from torchtap.receive import reasons, training
from torchtap.receive.entries import PortState
from torchtap.receive.held import Held
from torchtap.receive.receiver import Receiver
from torchtap.receive.training import parameters_of
from torchtap.receive.updates import UpdateReader

if TYPE_CHECKING:
    from torchtap.receive.local_gradients import LocalGradients

__all__ = ["StateReader"]

_GRADIENTS = ("param_grad", "param_grad_unclipped", "param_grad_accumulated", "param_grad_local")
_BEFORE_UPDATE = ("param", *_GRADIENTS)
_OF_PARAMETERS = (*_BEFORE_UPDATE, "update", "optim_state")


@final
class StateReader:
    """Reads the parameters, gradients, buffers and optimizer's values that live taps ask for."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._held = Held(receiver)
        self._armed: frozenset[int] = frozenset()
        self._parameters: dict[int, tuple[PortState, ...]] = {}  # id of a parameter -> its live ports
        self._gradients: dict[int, tuple[int, ...]] = {}  # the ids of those of them that read its gradient
        # Of an optimizer and kinds: the ids of its parameters, and all ports that are read then.
        self._asked_of: dict[tuple[int, tuple[str, ...]], tuple[list[int], list[PortState]]] = {}
        self._before_update = 0  # how many of all these ports are read before an update
        self._reads_state = False  # whether any port reads what an optimizer keeps
        self._buffers: tuple[PortState, ...] = ()
        self._rates: PortState | None = None
        self._groups: dict[int, int] = {}  # id of an optimizer -> the number of its first group
        self._next_group = 0
        self._known: set[int] = set()  # the ids of the model's parameters
        self._taken: set[int] = set()  # the ids of ports that were read in this step
        self._stepped: list[Optimizer] = []  # of which what was read may not be the last
        self._passed: set[int] = set()  # those of them that are read again if there is another update
        self._updates = UpdateReader(receiver, self._held)
        self._listens = False
        self._sharded: dict[tuple[int, str], Any] = {}  # what manages parameters that are gathered at times
        self._local: LocalGradients | None = None  # None: nobody averages them
        if receiver.placing is not None:
            from torchtap.receive.local_gradients import LocalGradients

            self._local = LocalGradients()

    def arm(self, live: frozenset[int]) -> None:
        """A step begins in which these taps are live."""
        self._taken.clear()
        self._passed.clear()
        self._stepped.clear()
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
        self._find_rates(ports)
        self._buffers = tuple(port for port in ports if port.kind == "buffer")
        if self._parameters or self._rates is not None:
            training.listen(self)
            self._listens = True

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

    def _find_rates(self, ports: list[PortState]) -> None:
        """Where learning rates go, if anybody asks for them; and whose they may be."""
        self._rates = next((port for port in ports if port.kind == "lr"), None)
        if self._rates is not None:
            places = self._receiver.plan.places
            self._known = {id(each) for place in places for each in place.module._parameters.values()}

    def finish_step(self) -> None:
        """Read what no optimizer step has brought yet."""
        self._passed.clear()
        self._stepped.clear()
        if self._parameters or self._buffers:
            self._receiver.turn_to_state()
        if len(self._taken) < self._before_update:
            self._read(_of_kinds(self._parameters.values(), _BEFORE_UPDATE))
        for port in self._buffers:
            buffer = _tensor_of(port)
            if buffer is not None:
                self._held.take(port, buffer)
        self._updates.begin_step()

    def disarm(self) -> None:
        """Nothing is read until `arm` is called again."""
        if self._listens:
            training.stop_listening(self)
            self._listens = False
        if self._local is not None:
            self._local.stop()
        self._armed = frozenset()
        self._parameters, self._buffers, self._rates = {}, (), None
        self._asked_of.clear()

    # -- what the training tells --------------------------------------------------------------------------

    def evaluating(self, optimizer: Optimizer) -> None:
        self._pass(optimizer)

    def _pass(self, optimizer: Optimizer) -> None:
        """What was read of this optimizer's gradients is not the last of this step if others come."""
        if self._receiver.hears_this_thread():
            self._stepped.append(optimizer)

    def _others_come(self) -> None:
        """There is more to read in this step, after optimizers have stepped."""
        while self._stepped:
            for parameter in parameters_of(self._stepped.pop()):
                self._passed.update(self._gradients.get(id(parameter), ()))

    def unscaling(self, optimizer: Optimizer) -> None:
        self._read_of(optimizer, ("param_grad_accumulated",))
        # Unscaling changes gradients in place without counting it: the same tensor is another value afterwards.
        self._receiver.folding.forget_values()

    def clipping(self, gradients: Sequence[Tensor]) -> None:
        if not self._receiver.hears_this_thread():
            return
        clipped = {id(gradient) for gradient in gradients}
        self._receiver.turn_to_state()
        asked = [ports for ports in self._parameters.values() if self._is_clipped(ports, clipped)]
        self._read(_of_kinds(asked, ("param_grad_unclipped", "param_grad_accumulated")))
        self._receiver.folding.forget_values()

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
        if self._rates is not None or self._updates.reads or self._reads_state:
            self._receiver.turn_to_state()
        if self._updates.reads or self._reads_state:
            self._take_after(optimizer)
        if self._rates is not None:
            self._take_rates(self._rates, optimizer)
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
        site = port.port.site
        managed = self._sharded.get((id(site.module), site.leaf)) if self._sharded else None
        if managed is None:
            return _tensor_of(port)
        shard: Tensor = managed.sharded_param
        return shard

    def _read_of(self, optimizer: Optimizer, kinds: tuple[str, ...]) -> None:
        if not self._receiver.hears_this_thread():
            return
        self._receiver.turn_to_state()
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
        if self._stepped:
            self._others_come()
        taken, passed = self._taken, self._passed
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
        if self._sharded or port.module is None:
            parameter = self._parameter_of(port)
        else:
            parameter = port.module._parameters.get(port.leaf)
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
            if (id(port.port.site.module), port.leaf) in self._sharded:
                port.note = reasons.NO_LOCAL_GRADIENT
        wanted = [self._parameter_of(port) for port in asked if port.note != reasons.NO_LOCAL_GRADIENT]
        return [parameter for parameter in wanted if parameter is not None]

    def _take_optimizer_state(self, port: PortState, state: dict[str, Any]) -> None:
        leaf = port.leaf
        for name, value in state.items():
            if isinstance(value, Tensor):
                self._held.take_part(port, f"{leaf}.{name}", value)
            elif isinstance(value, (int, float)):
                self._held.take_number(port, f"{leaf}.{name}", "value", value)
        if not state:
            port.note = reasons.NO_OPTIMIZER_STATE

    def _take_rates(self, port: PortState, optimizer: Optimizer) -> None:
        first = self._groups.get(id(optimizer))
        if first is None:
            if self._known.isdisjoint(map(id, parameters_of(optimizer))):
                return  # another model's
            first = self._groups[id(optimizer)] = self._next_group
            self._next_group += len(optimizer.param_groups)
        for number, group in enumerate(optimizer.param_groups):
            rate = group.get("lr")
            if rate is not None:
                self._held.take_number(port, str(first + number), "value", rate)


def _of_kinds(asked: Iterable[tuple[PortState, ...]], kinds: tuple[str, ...]) -> list[PortState]:
    return [port for ports in asked for port in ports if port.kind in kinds]


def _tensor_of(port: PortState) -> Tensor | None:
    if port.module is None:
        return None
    held = port.module._buffers if port.kind == "buffer" else port.module._parameters
    return held.get(port.leaf)
