"""What a `Run` shows: the recording of one rank, or of all ranks of a training as one.

The seam between the front (`reader`), which knows names, errors and pictures, and what finds the numbers: `strand` for
one rank, `world` for all. Names are spelled out when they come here. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from torchtap.placement import Placement
from torchtap.store.read.results import Matrix, Series, Table, TensorRef

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FoundTensor", "Status", "View"]

Status = Literal["closed", "recording", "interrupted"]


class FoundTensor(Protocol):
    """A tensor that was found and not read yet."""

    def ref(self) -> TensorRef:
        """What it is."""

    def array(self) -> np.ndarray:
        """It as numpy."""

    def tensor(self) -> Tensor:
        """It as torch has it."""

    def pieces(self, size: int) -> Iterator[memoryview] | None:
        """Its bytes in order; None where they cannot be had without holding all of it."""


class View(Protocol):
    """A recording. Sites, statistics and phases that it does not have give empty answers."""

    @property
    def status(self) -> Status: ...

    @property
    def statuses(self) -> dict[int, Status]: ...

    @property
    def manifest(self) -> dict[str, Any]: ...

    @property
    def attempts(self) -> list[int]: ...

    @property
    def phases(self) -> list[str]: ...

    @property
    def problems(self) -> list[str]: ...

    def refresh(self) -> None: ...

    def follow(self, poll: float) -> Iterator[int]: ...

    def events(self) -> list[dict[str, object]]: ...

    def phase_of(self, site: str) -> str: ...

    def site_names(self) -> dict[str, None]: ...

    def site_facts(self) -> dict[str, dict[str, object]]: ...

    def placement(self, site: str, step: int | None, phase: str) -> Placement | None: ...

    def statistics(self, site: str | None) -> list[str]: ...

    def steps(self, site: str | None) -> npt.NDArray[np.int64]: ...

    def clock(self) -> np.recarray: ...

    def series(self, site: str, statistic: str, phase: str, *, partial: bool) -> Series: ...

    def matrix(
        self,
        statistic: str,
        sites: Sequence[str],
        steps: npt.NDArray[np.int64] | None,
        phase_of: Callable[[str], str],
        *,
        partial: bool,
    ) -> Matrix: ...

    def table(self, sites: list[str], statistics: list[str], *, partial: bool) -> Table: ...

    def tensors(self, site: str | None) -> list[TensorRef]: ...

    def find(
        self, site: str, step: int | None, field: str, reduction: str | None, phase: str
    ) -> FoundTensor | None: ...
