"""The half of a receiver that takes what a model or its optimizer holds. Of several in one step the last counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final

from torch import Tensor

from torchtap.receive.entries import PortState
from torchtap.receive.receiver import Receiver

__all__ = ["Held"]


@final
class Held:
    """Takes parameters, their gradients, buffers, and what an optimizer keeps."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._folding = receiver.folding

    def take(self, port: PortState, tensor: Tensor) -> None:
        """The value of a port that stands for one tensor."""
        port.next_call(self._receiver.pass_number)
        self._take_anew(port, port.leaf, tensor)

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
        entries = []
        for port in ports:
            port.next_call(self._receiver.pass_number)
            self.drop(port, port.leaf)
            entry = self._folding.entry(port, port.leaf, 0)
            if entry is not None:
                entry.shape, entry.dtype, entry.how = tuple(whole.shape), whole.dtype, how
                entries.append(entry)
                if self._receiver.placing is not None:
                    self._receiver.placing.note(entry, whole, self._folding.tally.phase)
        for block in blocks:
            for entry in entries:
                self._folding.fold_block(entry, block, scale)

    def take_part(self, port: PortState, leaf: str, tensor: Tensor) -> None:
        """A tensor that belongs to a port's own, such as what an optimizer keeps for it."""
        port.next_leaf_call(self._receiver.pass_number, leaf)
        self._take_anew(port, leaf, tensor)

    def take_number(self, port: PortState, leaf: str, statistic: str, number: float | Tensor) -> None:
        """A number that is a result already; it is kept whatever the reduction."""
        port.next_leaf_call(self._receiver.pass_number, leaf)
        entry = self._folding.entry(port, leaf, 0)
        if entry is not None:
            entry.shape = entry.shape or ()
            self._folding.tally.numbers.setdefault(statistic, {})[entry.name] = number

    def _take_anew(self, port: PortState, leaf: str, tensor: Tensor) -> None:
        """Take a value in place of what the tally holds: a later value of the same step replaces it."""
        self.drop(port, leaf)
        self._receiver.take_leaf(port, leaf, 0, tensor)

    def drop(self, port: PortState, leaf: str) -> None:
        """Drop what the tally holds of a leaf's first call."""
        with self._folding.lock:
            entry, tally = port.entries.get((leaf, 0)), self._folding.tally
            while entry is not None:
                if 0 <= entry.row < len(tally.arrived) and tally.arrived[entry.row]:
                    tally.block.reset(slice(entry.row, entry.row + 1))
                    tally.arrived[entry.row] = 0
                for fold in entry.folds.get(tally.phase, {}).values():
                    fold.state = None
                entry = entry.also

    def _fold_together(self, ports: list[PortState], tensors: list[Tensor]) -> Sequence[int]:
        """Fold statistics of many tensors by one native call. Return the positions of those that are left."""
        tally, generation = self._folding.tally, self._folding.generation
        left, quick, rows = list[int](), list[int](), list[int]()
        for position, port in enumerate(ports):
            entry = port.first
            if entry is not None and entry.quick and entry.generation == generation:
                quick.append(position)
                rows.append(entry.row)
            else:
                left.append(position)
        missed = set(tally.block.put_each(rows, [tensors[position] for position in quick]))
        for number, position in enumerate(quick):
            if number in missed:
                left.append(position)
                continue
            port, placing = ports[position], self._receiver.placing
            port.next_call(self._receiver.pass_number)
            tally.arrived[rows[number]] = 1
            if placing is not None and port.first is not None:
                placing.note(port.first, tensors[position], tally.phase)
        return left
