"""`Receiver`: every value arrives here, in every form of a model, and is passed to the reductions of active taps.

    hook → `Receiver.take(port, value)` → row of the phase's block, or `Accumulator.fold`

It guarantees:
- a pass belongs to one phase, which the clock names; passes of one phase fold into one result for each site;
- a gradient goes to the phase of the pass that requested it, or nowhere after that phase was collected;
- a call in another thread changes nothing, and is counted.

Not here: hooks (`eager` and the other forms), reductions (`accumulator`), requesting gradients (`gradients`), values of
graphs (`by_name`), parameters and buffers (`state`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from threading import get_ident
from typing import TYPE_CHECKING, Any, Protocol, final

import torch
from torch import Tensor, nn

from torchtap._torch import graph_task, script_tracer
from torchtap.hooks.leaves import input_leaves, leaves
from torchtap.plan.names import Kind, paths_around
from torchtap.plan.plan import Plan, Port
from torchtap.plan.sites import input_names
from torchtap.receive import reasons
from torchtap.receive.accumulator import Accumulator, PhaseState, SiteState
from torchtap.receive.gradients import release_leaves

if TYPE_CHECKING:
    from torchtap.hooks.leaves import Args
    from torchtap.receive.lanes import Lanes
    from torchtap.receive.placing import Placing

__all__ = ["FormFacts", "PassClock", "PortState", "Receiver"]

_NO_THREAD = -1
is_compiling: Callable[[], bool] = torch.compiler.is_compiling


class PassClock(Protocol):
    """Decide where the values of a pass are folded. A key names a phase; which step it belongs to is known later."""

    def begin_pass(self, training: bool, grad: bool) -> tuple[int, frozenset[int]] | None:
        """Return the key and the active taps of a pass that begins now; None for one that is not recorded.

        ``training`` is the module's mode; ``grad`` is True if autograd records.
        """

    def state_key(self) -> tuple[int, frozenset[int]]:
        """Return the same for parameters, gradients and buffers that are read now."""


@final
@dataclass(slots=True)
class FormFacts:
    """Facts about a model's form that decide how its values are named and what is missing."""

    # Given the number of passes so far, a path and a leaf: the leaf's name, if the form is not certain of it.
    rename: Callable[[int, str, str], str] | None = None
    knows_positions: bool = True  # False if the form cannot tell where in a structure a tensor is
    missing: dict[str, str] = field(default_factory=dict)  # sites that it does not have, with the reason
    unnamed_reason: str = ""  # why it may have sites that it cannot name; empty if it names all


@final
@dataclass(slots=True)
class Totals:
    """Counts of a whole session. They continue when the model's modules are replaced."""

    passes: int = 0  # calls of the model in open steps
    late: int = 0  # gradients that were computed after their phase was collected
    other_thread_calls: int = 0
    arrived_before: frozenset[str] = frozenset()  # bare names of sites that had values before the replacement


@final
class PortState:
    """A port of the plan at run time: the number of calls in a pass, and the sites of its leaves.

    apart: taps that keep each pass by itself. For them calls are counted from pass to pass.
    """

    __slots__ = (
        "apart",
        "calls",
        "earlier",
        "first",
        "input_names",
        "kind",
        "leaf_calls",
        "note",
        "pass_number",
        "port",
        "recalls",
        "site",
        "sites",
        "structure",
    )

    def __init__(self, port: Port, apart: frozenset[int] = frozenset()) -> None:
        self.port = port
        self.kind: Kind = port.site.kind
        self.site = site = port.site
        self.apart = apart.intersection(port.taps)
        self.pass_number = -1
        self.calls = self.recalls = 0
        self.leaf_calls: dict[str, int] = {}
        self.earlier: tuple[int, dict[str, int]] = (0, {})  # calls, and calls of each leaf, in earlier passes
        self.sites: dict[tuple[str, int], SiteState | None] = {}  # by leaf and call
        self.first: SiteState | None = None  # of the first call and the port's own leaf: most values
        self.structure: Any = None  # of an output that is not one tensor, from the first call
        self.note = ""  # why a call had no value
        takes_arguments = self.kind in ("input", "grad_input") and site.module is not None
        self.input_names = input_names(site.module) if takes_arguments and site.module is not None else None

    def next_call(self, pass_number: int) -> int:
        """Return the number of this call in the pass."""
        if self.pass_number != pass_number:
            self.start_pass(pass_number)
        call = self.calls
        self.calls = call + 1
        return call

    def next_recall(self) -> int:
        """Return the number of the call that activation checkpointing repeats now."""
        call = self.recalls
        self.recalls = call + 1
        return call

    def advance(self, pass_number: int, calls: int, *, replayed: bool = False) -> int:
        """Count this many calls, 0 for a further value of the newest one. Return the number of the newest."""
        if replayed:
            self.recalls += calls
            return max(self.recalls - 1, 0)
        if self.pass_number != pass_number:
            self.start_pass(pass_number)
        self.calls += calls
        return max(self.calls - 1, 0)

    def call_at(self, pass_number: int, number: int, total: int) -> int:
        """Return the number of the call that is the ``number``-th of ``total`` calls in this pass."""
        if self.pass_number != pass_number:
            self.start_pass(pass_number)
        earlier = self.earlier[0]
        self.calls = max(self.calls, earlier + total)
        return earlier + number

    def next_leaf_call(self, pass_number: int, leaf: str) -> int:
        """Count the values of one leaf, not the calls: for values that are made inside a module's code."""
        if self.pass_number != pass_number:
            self.start_pass(pass_number)
        call = self.leaf_calls.get(leaf, 0)
        self.leaf_calls[leaf] = call + 1
        return call

    def start_pass(self, pass_number: int) -> None:
        """Count from 0, unless a tap keeps passes apart."""
        self.pass_number = pass_number
        if self.apart:
            self.earlier = self.calls, dict(self.leaf_calls)
            return
        self.calls = self.recalls = 0
        if self.leaf_calls:
            self.leaf_calls.clear()

    @property
    def called(self) -> bool:
        """Return True if it was called in any pass."""
        return self.pass_number >= 0

    @property
    def arrived(self) -> bool:
        """Return True if there was any value."""
        return any(site is not None and site.shape is not None for site in self.sites.values())

    def call_in_pass(self, leaf: str, call: int) -> int:
        """Return the number that a call has in its own pass."""
        calls, of_leaves = self.earlier
        return call - of_leaves.get(leaf, 0) - calls


@final
class Receiver:
    """Collect values from hooks and feed them to the reductions of the active taps."""

    def __init__(
        self,
        plan: Plan,
        *,
        apart: frozenset[int] = frozenset(),
        strict: bool = False,
        copy: Callable[[Tensor], Tensor] = torch.clone,
        on_lost: Callable[[str], None] = lambda _: None,
        clock: PassClock | None = None,
        placing: Placing | None = None,
    ) -> None:
        self.plan = plan
        self.placing = placing  # None if this process is alone
        self.accumulator = Accumulator(plan, strict=strict, copy=copy, on_lost=on_lost, placing=placing)
        self.ports: dict[tuple[str, str, str], PortState] = {
            (port.site.path, port.site.kind, port.site.leaf): PortState(port, apart) for port in plan.ports
        }
        self.form = FormFacts()
        self.totals = Totals()
        self.thread: int | None = _NO_THREAD  # whose values are received; None for every thread
        self.open = False  # True inside a step
        self.lanes: Lanes | None = None  # of a capture: keep concurrent calls of the model apart
        self.pass_number = 0
        self.between_passes = True
        self._clock = clock  # None if all passes belong to one phase
        self._skipped: tuple[int | None] | None = None  # in a pass that is not recorded: `thread` before it
        self._enclosing: dict[tuple[str, str], tuple[PortState, ...]] = {}

    @cached_property
    def _paths(self) -> dict[int, str]:
        return {id(place.module): place.path for place in self.plan.places}

    @property
    def sites(self) -> list[SiteState]:
        """Return the sites that had a value, in the order of execution."""
        return self.accumulator.sites

    @property
    def single_phase(self) -> bool:
        """Return True if every pass is recorded, whatever the model's mode."""
        return self._clock is None and self.placing is None

    def silent_taps(self) -> list[int]:
        """Return the taps of the user that had no value at all."""
        silent = set(range(len(self.plan.asked)))
        for site in self.sites:
            if site.shape is not None:
                silent.difference_update(site.taps, site.merged.taps if site.merged is not None else ())
        return sorted(silent)

    def hears_this_thread(self) -> bool:
        """Return True if values of the running thread are received."""
        if self.lanes is not None:
            return self.lanes.hears()
        return self.thread is None or self.thread == get_ident()

    def lane(self) -> Receiver | None:
        """Return the receiver of the running caller's values; None if they are not received."""
        if self.lanes is not None:
            return self.lanes.current()
        return self if self.hears_this_thread() else None

    def listens_to(self, kind: str) -> bool:
        """Return True if any tap of the plan selects this kind."""
        return kind in self.plan.kinds

    def path_of(self, module: nn.Module) -> str | None:
        """Return the path of a module; None if it is not part of this model."""
        return self._paths.get(id(module))

    # -- steps and passes ---------------------------------------------------------------------------------

    def follow(self, before: Receiver) -> None:
        """Continue the totals of the receiver before: the model has other modules now."""
        came = (port.site.name for port in before.ports.values() if port.arrived)
        self.totals = before.totals
        self.totals.arrived_before = self.totals.arrived_before.union(came)

    def begin_step(self, thread: int | None) -> None:
        """Receive values of this thread, or of every thread (None)."""
        release_leaves(self)
        self.thread, self.open = thread, True
        self._skipped = None
        self.pass_number += 1
        self.between_passes = True

    def end_step(self) -> None:
        """Receive nothing until the next step begins."""
        release_leaves(self)
        self.thread, self.open = _NO_THREAD, False
        self._skipped = None

    def switch(self, phase: str, live: frozenset[int]) -> None:
        """Fold into this phase from now on, with these taps active."""
        self.accumulator.switch(phase, live)

    def switch_to_state(self) -> None:
        """Switch to the phase of values that are read from the model, not from a pass."""
        if self._clock is not None:
            self.accumulator.switch(*self._clock.state_key())

    @contextmanager
    def not_listening(self) -> Iterator[None]:
        """Receive nothing inside this block; the open step continues after it."""
        thread, self.thread = self.thread, _NO_THREAD
        is_open, self.open = self.open, False
        try:
            yield
        finally:
            self.thread, self.open = thread, is_open

    def begin_pass(self, training: bool | None = None, learning: bool | None = None) -> None:
        """Begin a call of the model: number the calls of its modules from 0.

        training: the model's mode, None if it has none.
        learning: True if autograd records; by default torch is asked.
        """
        lane = self if self.lanes is None else self.lanes.begin()
        if lane is not None and lane is not self:
            lane.begin_pass(training, learning)
            return
        thread = self.thread if self._skipped is None else self._skipped[0]
        if lane is None or not self.open or not (thread is None or thread == get_ident()):
            # A call in the context of another capture is that one's.
            self.totals.other_thread_calls += self.open and not (self.lanes and self.lanes.is_others())
            return
        if self._skipped is None:
            if script_tracer() is None and self._is_recorded(training, learning):
                self.totals.passes += 1
            else:
                self._skipped = (self.thread,)
                self.thread = _NO_THREAD
        self.pass_number += 1
        self.between_passes = False

    def begin_part(self, port: PortState) -> bool:
        """Begin a pass with a module that was called outside of the model; it lasts until the model is called."""
        module = port.site.module
        if not self.open or not self._is_recorded(getattr(module, "training", None), None):
            return False
        self.totals.passes += 1
        self.pass_number += 1
        self.between_passes = False
        return True

    def _is_recorded(self, training: bool | None, learning: bool | None) -> bool:
        """Return True if a pass is recorded, after switching to its phase."""
        if self.placing is not None and self.placing.infers_shapes():
            return False
        if self._clock is not None:
            learning = torch.is_grad_enabled() if learning is None else learning
            begun = self._clock.begin_pass(training is not False, learning)
            if begun is None:
                return False
            self.accumulator.switch(*begun).passes += 1
        return True

    @property
    def no_pass_is_open(self) -> bool:
        """Return True if no pass is open, recorded or not."""
        return self.between_passes and self._skipped is None

    def end_pass(self) -> None:
        """End a call of the model."""
        lane = None if self.lanes is None else self.lanes.end()
        if lane is not None and lane is not self:
            lane.end_pass()
            return
        thread = self.thread if self._skipped is None else self._skipped[0]
        if not self.open or not (thread is None or thread == get_ident()):
            return
        if self._skipped is not None:
            (self.thread,), self._skipped = self._skipped, None
        self.between_passes = True
        self.accumulator.forget_values()

    # -- values -------------------------------------------------------------------------------------------

    def output_hook(self, port: PortState, traced: Callable[[object], None]) -> Callable[..., None]:
        """Return a forward hook that receives a module's output. ``traced`` is called while a compiler traces it."""

        def hook(module: nn.Module, args: object, output: object) -> None:
            if is_compiling():
                traced(output)
            elif (self.thread is None or self.thread == get_ident()) and graph_task() == -1:
                self.take(port, output)

        return hook

    def take(self, port: PortState, tree: object) -> None:
        """Receive an output, or any other structure of tensors, of the port's next call."""
        if self.between_passes and not self.begin_part(port):
            return
        # `next_call`, written out: most values are received here.
        if port.pass_number != self.pass_number:
            port.start_pass(self.pass_number)
        call = port.calls
        port.calls = call + 1
        if isinstance(tree, Tensor):
            site, phase = port.first, self.accumulator.phase
            if call or site is None or not site.stats_only or site.generation != phase.generation:
                self.take_leaf(port, "", call, tree)
            elif self.placing is None and phase.take(site.row, tree):  # atomic, so it needs no lock
                phase.arrived[site.row] = 1
            else:
                self.accumulator.fold(site, tree)
            return
        if port.structure is None:
            from torchtap.hooks.leaves import skeleton  # most modules return one tensor

            port.structure = skeleton(tree)
        if not self._take_leaves(port, call, leaves(tree)):
            port.note = reasons.NO_TENSOR.format(kind=port.kind, name=type(tree).__name__)

    def take_inputs(self, port: PortState, args: Args, kwargs: Mapping[str, Any]) -> None:
        """Receive a module's arguments."""
        if self.between_passes and not self.begin_part(port):
            return
        call = port.next_call(self.pass_number)
        if not self._take_leaves(port, call, input_leaves(port.input_names, args, kwargs)):
            port.note = reasons.NO_ARGUMENT

    def take_gradient(self, site: SiteState, phase: PhaseState, serial: int, gradient: Tensor | None) -> None:
        """Receive a gradient that was requested (`gradients`) when the phase had this serial."""
        if gradient is None:
            return
        # A backward after its phase was collected has nowhere to put its values.
        if not self.open or phase.serial != serial:
            self.totals.late += 1
            return
        accumulator = self.accumulator
        if phase is not accumulator.phase:  # another pass came between the forward and its backward
            accumulator.resume(phase)
        if site.generation != phase.generation:
            accumulator.refresh(site)
        accumulator.fold(site, gradient)

    def take_from_inside(self, kind: str, owner: str | None, leaf: str, tensor: Tensor) -> None:
        """Receive a value of a module's code, for the innermost enclosing module that each tap selects."""
        for port in self.enclosing(kind, owner or ""):
            self.take_leaf(port, leaf, port.next_leaf_call(self.pass_number, leaf), tensor)

    def enclosing(self, kind: str, owner: str) -> tuple[PortState, ...]:
        """Return, for each tap of this kind, the port of the innermost module around ``owner``."""
        known = self._enclosing.get((kind, owner))
        if known is None:
            found: dict[int, PortState] = {}
            for index in range(len(self.plan.taps)):
                for path in (owner, *paths_around(owner)):
                    port = self.ports.get((path, kind, ""))
                    if port is not None and index in port.port.taps:
                        found[id(port)] = port
                        break
            known = self._enclosing[kind, owner] = tuple(found.values())
        return known

    def _take_leaves(self, port: PortState, call: int, found: Iterable[tuple[str, Tensor]]) -> bool:
        """Receive the tensors of a structure. Return True if it has any. Classes of the user may fail to be walked."""
        came = False
        try:
            for leaf, tensor in found:
                came = True
                self.take_leaf(port, leaf, call, tensor)
        except Exception as error:
            self.accumulator.lose(port.site.name, error)
        return came

    def take_leaf(self, port: PortState, leaf: str, call: int, tensor: Tensor) -> None:
        """Receive one tensor of a port's call."""
        site = self.accumulator.site(port, leaf, call)
        if site is not None:
            self.accumulator.fold(site, tensor)
