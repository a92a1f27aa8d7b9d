"""What the reference module gave, kept until the monitored module has given the same.

Values are kept by module name, call by call, as copies: tensors, or the bytes of small ones, of which tensors are made
when somebody looks. It guarantees:
- a pass under ``no_monitor`` is kept too, since that is how a reference is meant to be run, but never replaces what
  a monitored pass left;
- a second monitored pass before `forget` is an error, not a silent mixture of batches.
"""

from __future__ import annotations

from typing import Any, TypeAlias, final

from torch import Tensor

from torchtap._torch import version_of
from torchtap.errors import MonitorError
from torchtap.hooks.arguments import Args, Kwargs
from torchtap.hooks.structure import map_leaves
from torchtap.reduce.kernel import SMALL, make_keeper
from torchtap.store.write.pool import HostPool

__all__ = ["Call", "Copies", "ReferenceActivations", "opened", "pooled_copy"]


# What a module was given, by position and by name, and what it returned: copies, opened or not.
Call: TypeAlias = tuple[Args, Kwargs, Any]

_MOST_POOLED = 2 << 30  # past this, copies are made in fresh memory, which takes about twice as long


@final
class Copies:
    """Copies of tensors as they were. What one module gives the next is given: one copy serves both.

    On the CPU they are made in memory that was used before, which is kept from one monitored step to the next.
    ``offload`` brings the copies of calls to the CPU.
    """

    def __init__(self, *, offload: bool = False) -> None:
        self._known: dict[int, tuple[Tensor, int, Tensor]] = {}
        self._pool = HostPool(_MOST_POOLED)
        self._offload = offload
        self._keeper = None if offload or make_keeper is None else make_keeper(_lend_nothing, _lend_nothing)

    def of_call(self, args: Args, kwargs: Kwargs, output: object) -> Call:
        """A call as it is now. Most are of one small tensor: of these, native code keeps the bytes (`opened`)."""
        small: Call | None = None if self._keeper is None else self._keeper.copies(args, kwargs, output)
        if small is not None:
            return small
        return self.of_all(args), self.of_all(kwargs), self.of_all(output)

    def of_all(self, value: object) -> Any:
        """A value as it is now: the tensors in it are copied."""
        if not self._offload:  # most values are a tensor, or a call's only argument
            if type(value) is Tensor:
                return self.of(value)
            if type(value) is tuple and len(value) == 1 and type(value[0]) is Tensor:
                return (self.of(value[0]),)

        def copied(_: str, tensor: Tensor) -> Tensor:
            return self.of(tensor).cpu() if self._offload else self.of(tensor)

        return map_leaves(value, copied)

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
        if self._keeper is not None:
            self._keeper.forget()

    def release(self) -> None:
        """Let go of the memory, too."""
        self.forget()
        if self._pool.nbytes:
            self._pool = HostPool(_MOST_POOLED)


def _lend_nothing(_: object) -> None:
    """Large values are copied by `pooled_copy`."""


def opened(value: Any) -> Any:
    """Return the value."""
    return value


def pooled_copy(pool: HostPool, value: Tensor) -> Tensor:
    """A copy with the same strides, in the pool's memory where that pays."""
    if type(value) is Tensor and value.is_cpu and value.nbytes >= SMALL and value.is_contiguous():
        return pool.copy(value)
    # Detaching costs a third of a small copy.
    return value.detach().clone() if value.requires_grad else value.clone()


@final
class ReferenceActivations:
    """Activations of the reference in the current micro-batch; ``first`` has those of each module's first call."""

    def __init__(self, *, offload: bool = False) -> None:
        self._first: dict[str, Any] = {}  # to be opened
        self.copies = Copies(offload=offload)
        self._further: dict[tuple[str, int], Tensor] = {}
        self._calls: dict[str, int] = {}  # of those that were called more than once
        # The pass over the whole reference in which a module was last called.
        self._pass_of: dict[str, int] = {}
        self._quiet: set[str] = set()  # kept under no_monitor
        self._pass = 0
        self._inside = False

    @property
    def first(self) -> dict[str, Tensor]:
        """By module's name."""
        for name, value in self._first.items():
            self._first[name] = opened(value)
        return self._first

    @first.setter
    def first(self, values: dict[str, Tensor]) -> None:
        self._first = values

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
        self._first = {}
        self.copies.forget()
        self._further.clear()
        self._calls.clear()
        self._pass_of.clear()
        self._quiet.clear()

    def keep(self, name: str, value: Any, *, quiet: bool, step: int | None) -> bool:
        """Keep a copy of a value, opened or not; says whether it was kept."""
        known = name in self._first
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
        if further_call:
            call = self._calls.get(name, 1)
            self._further[name, call] = opened(value)
            self._calls[name] = call + 1
        else:
            self._first[name] = value
        self._pass_of[name] = self._pass
        if quiet:
            self._quiet.add(name)
        return True

    def get(self, name: str, call: int = 0) -> Tensor | None:
        """What the reference gave at a module's n-th call."""
        if call:
            return self._further.get((name, call))
        value: Tensor | None = opened(self._first.get(name))
        return value

    def _drop(self, name: str) -> None:
        for call in range(1, self._calls.pop(name, 0)):
            self._further.pop((name, call), None)
        del self._first[name]
        self._quiet.discard(name)
