"""The half of a receiver that asks for gradients: of what modules are given and give, call by call.

What is asked for comes back to `Receiver.take_gradient`, once autograd has it (`gradients`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

from torch import Tensor

from torchtap.hooks.leaves import leaves
from torchtap.receive import reasons
from torchtap.receive.entries import PortState
from torchtap.receive.gradients import Ask, ask_for_gradient
from torchtap.receive.receiver import Receiver

__all__ = ["Asking"]


@final
class Asking:
    """Has a receiver await gradients.

    A checkpoint's repetition (``recomputed``) asks only where the call that it repeats could not: the values that came
    into the checkpoint were there both times.
    """

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def of_each(
        self,
        port: PortState,
        found: Iterable[tuple[str, Tensor]],
        recomputed: bool = False,
        ask: Ask = ask_for_gradient,
    ) -> None:
        """Ask autograd for the gradients of these values, which a module was given or gave."""
        receiver = self._receiver
        if receiver.between_passes and not recomputed and not receiver.begin_part(port):
            return
        call = port.next_recall() if recomputed else port.next_call(receiver.pass_number)
        try:
            for leaf, tensor in found:
                self._await(port, leaf, call, tensor, recomputed, ask)
        except Exception as error:
            receiver.folding.lose(port.port.site.name, error)

    def of_output(self, port: PortState, tree: object, recomputed: bool) -> None:
        """The same for what a module returned. Most often that is one tensor."""
        if not isinstance(tree, Tensor):
            self.of_each(port, leaves(tree), recomputed)
            return
        receiver = self._receiver
        if receiver.between_passes and not recomputed and not receiver.begin_part(port):
            return
        if recomputed:
            call = port.next_recall()
        else:  # `next_call`, spelled out
            if port.pass_number != receiver.pass_number:
                port.start_pass(receiver.pass_number)
            call = port.calls
            port.calls = call + 1
        try:
            self._await(port, "", call, tree, recomputed, ask_for_gradient)
        except Exception as error:
            receiver.folding.lose(port.port.site.name, error)

    def _await(
        self, port: PortState, leaf: str, call: int, tensor: Tensor, recomputed: bool, ask: Ask
    ) -> None:
        if not tensor.requires_grad:
            _note_no_gradient(port, leaf, call)
            return
        receiver = self._receiver
        folding = receiver.folding
        entry = None if call or leaf else port.first
        if entry is None or not entry.quick or entry.generation != folding.generation:
            entry = folding.entry(port, leaf, call)
        if entry is not None and not (recomputed and entry.asked):
            entry.asked = not recomputed
            tally = folding.tally
            ask(tensor, receiver.take_gradient, entry, tally, tally.serial)


def _note_no_gradient(port: PortState, leaf: str, call: int) -> None:
    port.note = reasons.NO_GRADIENT
    known = port.entries.get((leaf, call))
    if known is not None:
        known.asked = False
