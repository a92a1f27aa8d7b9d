"""What the reference module gave, kept until the monitored module has given the same.

Values are kept by module name, call by call, as copies. It guarantees:
- a pass under ``no_monitor`` is kept too, since that is how a reference is meant to be run, but never replaces what
  a monitored pass left;
- a second monitored pass before `forget` is an error, not a silent mixture of batches.
"""

from __future__ import annotations

from typing import final

from torch import Tensor

from torchtap._torch import version_of
from torchtap.errors import MonitorError
from torchtap.store.write.pool import HostPool

__all__ = ["Copies", "ReferenceActivations", "pooled_copy"]


_SMALL = 64 << 10  # bytes below which torch's own way of copying is the faster one
_MOST_POOLED = 2 << 30  # past this, copies are made in fresh memory, which takes about twice as long


@final
class Copies:
    """Copies of tensors as they were. What one module gives the next is given: one copy serves both.

    On the CPU they are made in memory that was used before, which is kept from one monitored step to the next.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, int, Tensor]] = {}
        self._pool = HostPool(_MOST_POOLED)

    def of(self, value: Tensor) -> Tensor:
        """A copy of this value that nobody changes."""
        known = self._known.get(id(value))
        if known is not None and known[0] is value and known[1] == version_of(value) >= 0:
            return known[2]
        copy = pooled_copy(self._pool, value)
        # The value is kept, so that its id stays its own.
        self._known[id(value)] = (value, version_of(value), copy)
        return copy

    def forget(self) -> None:
        """Let go of all of them."""
        self._known.clear()

    def release(self) -> None:
        """Let go of the memory, too."""
        self.forget()
        if self._pool.nbytes:
            self._pool = HostPool(_MOST_POOLED)


def pooled_copy(pool: HostPool, value: Tensor) -> Tensor:
    """A copy with the same strides, in the pool's memory where that pays."""
    if type(value) is Tensor and value.is_cpu and value.nbytes >= _SMALL and value.is_contiguous():
        return pool.copy(value)
    # Detaching costs a third of a small copy.
    return value.detach().clone() if value.requires_grad else value.clone()


@final
class ReferenceActivations:
    """Activations of the reference in the current micro-batch; ``first`` has those of each module's first call."""

    def __init__(self) -> None:
        self.first: dict[str, Tensor] = {}
        self.copies = Copies()
        self._further: dict[tuple[str, int], Tensor] = {}
        self._calls: dict[str, int] = {}
        self._pass_of: dict[
            str, int
        ] = {}  # the pass over the whole reference in which a module was last called
        self._quiet: set[str] = set()  # kept under no_monitor
        self._pass = 0
        self._inside = False

    def arm(self, monitored: bool) -> None:
        """A step begins. Memory is kept as long as the steps are monitored."""
        if not monitored:
            self.copies.release()

    def begin_pass(self) -> None:
        """The whole reference is called."""
        self._pass += 1
        self._inside = True

    def end_pass(self) -> None:
        """The call of the whole reference is over."""
        self._inside = False

    def forget(self) -> None:
        """A new micro-batch begins. What was handed out stays as it is."""
        self.first = {}
        self.copies.forget()
        self._further.clear()
        self._calls.clear()
        self._pass_of.clear()
        self._quiet.clear()

    def keep(self, name: str, value: Tensor, *, quiet: bool, step: int | None) -> bool:
        """Keep a copy of a value; says whether it was kept."""
        known = name in self.first
        further_call = known and self._inside and self._pass_of.get(name) == self._pass
        if known and not further_call:
            if name in self._quiet:
                self._drop(name)
            elif quiet:
                return False
            else:
                raise MonitorError(
                    f"Step {step}: Activations of the reference module for module {name} are already stored: the "
                    "reference was called twice; call after_micro_batch() between two batches, or make further "
                    "calls under no_monitor()"
                )
        call = self._calls.get(name, 0)
        if call == 0:
            self.first[name] = value
        else:
            self._further[name, call] = value
        self._calls[name] = call + 1
        self._pass_of[name] = self._pass
        if quiet:
            self._quiet.add(name)
        return True

    def get(self, name: str, call: int = 0) -> Tensor | None:
        """What the reference gave at a module's n-th call."""
        return self.first.get(name) if call == 0 else self._further.get((name, call))

    def _drop(self, name: str) -> None:
        for call in range(1, self._calls.pop(name, 0)):
            self._further.pop((name, call), None)
        del self.first[name]
        self._quiet.discard(name)
