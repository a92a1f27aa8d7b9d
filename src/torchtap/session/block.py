"""The block of one step, `with watch.step():`. In a lull it counts the step by itself: a call more would show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar, final

from torchtap.session.lull import Lull

__all__ = ["Block"]

Owner = TypeVar("Owner")


@final
class Block(Generic[Owner]):
    """Gives its owner to those inside. It may be entered again and again, one time after the other."""

    __slots__ = ("_batch", "_enter", "_epoch", "_leave", "_lull", "_owner", "_step")

    def __init__(
        self,
        owner: Owner,
        lull: Lull,
        enter: Callable[[int | None, int | None, int | None], None],
        leave: Callable[[], None],
        step: int | None = None,
        epoch: int | None = None,
        batch: int | None = None,
    ) -> None:
        self._owner, self._lull = owner, lull
        self._enter, self._leave = enter, leave
        self._step, self._epoch, self._batch = step, epoch, batch

    def __enter__(self) -> Owner:
        lull, step = self._lull, self._step
        if self._epoch is self._batch is None and (step is None or type(step) is int):
            number = lull.last + 1 if step is None else step
            if lull.open < 0 <= lull.last < number < lull.until:
                lull.open, lull.in_block = number, True
                return self._owner
        self._enter(step, self._epoch, self._batch)
        return self._owner

    def __exit__(self, *_: object) -> None:
        lull = self._lull
        if lull.open >= 0:
            lull.last, lull.open, lull.in_block = lull.open, -1, False
        else:
            self._leave()
