"""What a tap may cost, and what it keeps instead once that is spent.

A rule only, frozen and pure. `plan` binds the lesser taps beside the one that was asked for; `spending` does the
accounts while the model runs and decides which of them is live.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torchtap.errors import PlanError
from torchtap.reduce.reduction import AnyReduction

__all__ = ["Budget", "allowance", "lesser"]

_LEAST = 64 << 20
_SHARE_OF_PARAMETERS = 50


@final
@dataclass(frozen=True, slots=True)
class Budget:
    """A limit for one tap. Over it, whole tensors become samples and samples become statistics, for good.

    bytes: of tensors in the whole run, as they are in memory; never exceeded. share: of the time of the steps in
    which the tap is live, for what it takes from the thread that trains. memory: bytes that may be held on the model's
    device, if that is more than the `allowance`, such as for whole updates of a large model.
    """

    bytes: int | None = None
    share: float | None = None
    memory: int | None = None

    def __post_init__(self) -> None:
        if self.bytes is None and self.share is None and self.memory is None:
            raise PlanError("Budget() limits nothing: give bytes=, share= or both")
        if self.memory is not None and (not isinstance(self.memory, int) or self.memory < 0):
            raise PlanError(f"Budget(memory={self.memory!r}): give a whole number of bytes, e.g. 4 << 30")
        if self.bytes is not None and (not isinstance(self.bytes, int) or self.bytes < 0):
            raise PlanError(f"Budget(bytes={self.bytes!r}): give a whole number of bytes, e.g. 10 << 30")
        if self.share is not None and not 0 < self.share < 1:
            raise PlanError(
                f"Budget(share={self.share!r}): a share of a step's time lies between 0 and 1, e.g. 0.05"
            )

    @property
    def limits(self) -> bool:
        """Return True if the tap has to keep less when it has cost so much."""
        return self.bytes is not None or self.share is not None

    def spec(self) -> dict[str, object]:
        """The budget as JSON."""
        spec: dict[str, object] = {"bytes": self.bytes, "share": self.share}
        return spec if self.memory is None else {**spec, "memory": self.memory}


def allowance(nbytes: int) -> int:
    """Return how many bytes torchtap may hold on a device with so many bytes of parameters."""
    return max(_LEAST, nbytes // _SHARE_OF_PARAMETERS)


def lesser(keep: AnyReduction) -> tuple[AnyReduction, ...]:
    """What takes the place of a reduction that has become too dear, one after the other."""
    if keep.in_rows:
        raise PlanError(
            "statistics are the least that a tap keeps: a budget needs another keep=, e.g. Full()"
        )
    from torchtap.reduce.elements import Sample
    from torchtap.reduce.stats import Stats

    return (Sample(), Stats()) if keep.whole else (Stats(),)
