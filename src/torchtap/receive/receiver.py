"""Where every value arrives, whatever form the model has and whatever carried it out: the listening half.

A receiver knows whom it hears (which thread, pass, phase and step) and hands what it hears to `folding`. It
guarantees:
- a pass is of one phase: the one the user named, else training or evaluation by the model's flag and by whether
  gradients are on;
- between two collections, passes of one phase fold into one result for each site, and into no other phase's;
- a gradient goes to the phase of the pass that asked for it, or nowhere once that step is over;
- a pass of a thread that is not heard changes nothing, and is counted.

Not here: hooks (`eager` and the other forms), the clock (`watching`), folding and entries (`folding`). Nor what only
some plans need: to request gradients (`gradients`), to take values by name (`by_name`) or what a model holds (`held`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from torchtap._torch import script_tracer
from torchtap.hooks.leaves import input_leaves, leaves
from torchtap.plan.names import paths_around
from torchtap.plan.plan import Plan
from torchtap.receive import reasons
from torchtap.receive.entries import Entry, PortState, Tally
from torchtap.receive.folding import Folding
from torchtap.receive.gradients import release_leaves

if TYPE_CHECKING:
    from torchtap.hooks.leaves import Args
    from torchtap.receive.pass_clock import PassClock
    from torchtap.receive.placing import Placing

__all__ = ["Receiver"]

_NO_THREAD = -1


@final
class Receiver:
    """Takes values from a model, keeps what live taps ask for."""

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
        self.folding = Folding(plan, strict=strict, copy=copy, on_lost=on_lost, placing=placing)
        self.ports: dict[tuple[str, str, str], PortState] = {
            (port.site.path, port.site.kind, port.site.leaf): PortState(port, apart) for port in plan.ports
        }
        # Bound once: they are called for every value.
        self._entry = self.folding.entry
        self._fold = self.folding.fold if placing is None else self.folding.fold_placed
        self.thread: int | None = _NO_THREAD  # None: values of every thread are received
        self.open = False  # True while a step is
        self._clock = clock  # None: all passes are of one phase
        self.takes_all = clock is None and placing is None  # whatever kind of pass it is
        self._passed_over: tuple[int | None] | None = (
            None  # whom to hear again after a pass that is not taken
        )
        self._enclosing: dict[tuple[str, str], tuple[PortState, ...]] = {}
        # Given the number of passes so far, a path and a leaf: what the leaf is called, where a form is not certain.
        self.rename: Callable[[int, str, str], str] | None = None
        self.pass_number = 0
        self.between_passes = True
        self.passes = 0  # calls of the model in open steps
        self.late = 0  # gradients that came after their step was over
        self.overheard = 0  # calls of the model by threads that are not heard, in open steps
        self.arrived_before: frozenset[str] = frozenset()  # bare names of what came to those that it follows
        self.knows_positions = True  # whether the form tells where in a structure a tensor stands
        self.missing: dict[str, str] = {}  # sites that a form is known not to have, with the reason
        self.forgets = ""  # what a form cannot name any more; empty where it knows all that there was

    @cached_property
    def _paths(self) -> dict[int, str]:
        return {id(place.module): place.path for place in self.plan.places}

    @property
    def entries(self) -> list[Entry]:
        """The sites that were seen, in the order of execution."""
        return self.folding.entries

    def silent_taps(self) -> list[int]:
        """The taps that were asked for and have brought nothing at all."""
        silent = set(range(len(self.plan.asked)))
        for entry in self.entries:
            if entry.shape is not None:
                silent.difference_update(entry.taps, entry.also.taps if entry.also is not None else ())
        return sorted(silent)

    # -- what a carrier asks ------------------------------------------------------------------------------

    def hears_this_thread(self) -> bool:
        """Whether values of the running thread are meant for this receiver."""
        return self.thread is None or self.thread == threading.get_ident()

    def listens_to(self, kind: str) -> bool:
        """Whether any tap of the plan asks for this kind."""
        return kind in self.plan.kinds

    def path_of(self, module: nn.Module) -> str | None:
        """The path of a module of this model, or None for a stranger."""
        return self._paths.get(id(module))

    # -- the clock ----------------------------------------------------------------------------------------

    def follow(self, before: Receiver) -> None:
        """Go on where the receiver of the same training has stopped: the model has other modules now."""
        self.passes, self.late = before.passes, before.late
        self.overheard = before.overheard
        came = (port.port.site.name for port in before.ports.values() if port.arrived)
        self.arrived_before = before.arrived_before.union(came)

    def begin_step(self, thread: int | None) -> None:
        """From now on values of this thread (of every thread: None) are heard."""
        release_leaves(self)
        self.thread, self.open = thread, True
        self._passed_over = None
        self.pass_number += 1
        self.between_passes = True

    def end_step(self) -> None:
        """Until the next step begins nothing is heard."""
        release_leaves(self)
        self.thread, self.open = _NO_THREAD, False
        self._passed_over = None

    def turn_to(self, phase: str, live: frozenset[int]) -> None:
        """What comes from now on belongs to this phase, with these taps live."""
        self.folding.turn_to(self.folding.tally_of(phase, live))

    def turn_to_state(self) -> None:
        """What comes now is read from the model, not from a pass: it belongs to the phase that trains."""
        if self._clock is not None:
            self.turn_to(*self._clock.state_key())

    @contextmanager
    def not_listening(self) -> Iterator[None]:
        """A block in which nothing is heard; the open step goes on after it."""
        thread, self.thread = self.thread, _NO_THREAD
        is_open, self.open = self.open, False
        try:
            yield
        finally:
            self.thread, self.open = thread, is_open

    def begin_pass(self, training: bool | None = None, learning: bool | None = None) -> None:
        """The model was called: calls of its modules are counted anew, but for taps that keep passes apart.

        ``training`` is the model's flag, None where it has none; ``learning`` says whether gradients are on.
        """
        if not self._is_own_pass():
            self.overheard += self.open
            return
        if self._passed_over is None:
            if script_tracer() is None and (self.takes_all or self._is_taken(training, learning)):
                self.passes += 1
            else:
                self._passed_over = (self.thread,)
                self.thread = _NO_THREAD
        self.pass_number += 1
        self.between_passes = False

    def _is_own_pass(self) -> bool:
        """Whether a call of the model that begins or ends now is of the thread that is heard, in an open step."""
        heard = self.thread if self._passed_over is None else self._passed_over[0]
        return self.open and (heard is None or heard == threading.get_ident())

    def begin_part(self, port: PortState) -> bool:
        """A module was called without the model around it: what comes until the next call of the model is one pass."""
        module = port.port.site.module
        if not self.open or not self._is_taken(getattr(module, "training", None), None):
            return False
        self.passes += 1
        self.pass_number += 1
        self.between_passes = False
        return True

    def _is_taken(self, training: bool | None, learning: bool | None) -> bool:
        """Whether a pass is to be heard; it is then of its phase. TorchScript's tracer must not find us in its own."""
        if self.placing is not None and self.placing.infers_shapes():
            return False
        if self._clock is not None:
            learning = torch.is_grad_enabled() if learning is None else learning
            begun = self._clock.begin_pass(training is not False, learning)
            if begun is None:
                return False
            folding = self.folding
            folding.turn_to(folding.tally_of(*begun))
            folding.tally.passes += 1
        return True

    @property
    def no_pass_is_open(self) -> bool:
        """Whether no pass is open, nor one that is not taken."""
        return self.between_passes and self._passed_over is None

    def end_pass(self) -> None:
        """Let go of the values that were held to recognise repeats."""
        if not self._is_own_pass():
            return
        if self._passed_over is not None:
            (self.thread,), self._passed_over = self._passed_over, None
        self.between_passes = True
        self.folding.forget_values()

    # -- values -------------------------------------------------------------------------------------------

    def take(self, port: PortState, tree: object) -> None:
        """A module's output, or any other structure of tensors, of the port's next call."""
        if self.between_passes and not self.begin_part(port):
            return
        # `next_call`, spelled out: this is where most values come.
        if port.pass_number != self.pass_number:
            port.start_pass(self.pass_number)
        call = port.calls
        port.calls = call + 1
        if isinstance(tree, Tensor):
            entry = None if call else port.first
            if entry is None or not entry.quick or entry.generation != self.folding.generation:
                entry = self._entry(port, "", call)
            if entry is not None:
                self._fold(entry, tree)
            return
        if port.structure is None:
            from torchtap.hooks.leaves import skeleton  # here: most modules return one tensor

            port.structure = skeleton(tree)
        if not self._take_leaves(port, call, leaves(tree)):
            port.note = reasons.NO_TENSOR.format(kind=port.kind, name=type(tree).__name__)

    def take_inputs(self, port: PortState, args: Args, kwargs: Mapping[str, Any]) -> None:
        """A module's arguments."""
        if self.between_passes and not self.begin_part(port):
            return
        call = port.next_call(self.pass_number)
        if not self._take_leaves(port, call, input_leaves(port.input_names, args, kwargs)):
            port.note = reasons.NO_ARGUMENT

    def take_gradient(self, entry: Entry, tally: Tally, serial: int, gradient: Tensor | None) -> None:
        """A gradient that was requested (`gradients`) while a tally had this serial."""
        if gradient is None:
            return
        # A backward that comes after its step has ended has nowhere to put its values.
        if not self.open or tally.serial != serial:
            self.late += 1
            return
        folding = self.folding
        if tally is not folding.tally:  # another pass came between the forward and its backward
            folding.turn_to(tally)
        if entry.generation != folding.generation:
            folding.refresh(entry)
        self._fold(entry, gradient)

    def take_from_inside(self, kind: str, owner: str | None, leaf: str, tensor: Tensor) -> None:
        """A value made in a module's code: it goes to the innermost enclosing module that each tap asks about."""
        for port in self.enclosing(kind, owner or ""):
            self.take_leaf(port, leaf, port.next_leaf_call(self.pass_number, leaf), tensor)

    def enclosing(self, kind: str, owner: str) -> tuple[PortState, ...]:
        """For each tap that asks for this kind, the port of the innermost module around ``owner``."""
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
        """The tensors of a structure; says whether it has any. Types of the user's may fail to be looked through."""
        came = False
        try:
            for leaf, tensor in found:
                came = True
                self.take_leaf(port, leaf, call, tensor)
        except Exception as error:
            self.folding.lose(port.port.site.name, error)
        return came

    def take_leaf(self, port: PortState, leaf: str, call: int, tensor: Tensor) -> None:
        """One tensor of a port's call."""
        entry = self._entry(port, leaf, call)
        if entry is not None:
            self._fold(entry, tensor)
