"""The results of reading a run: plain columns and small named tuples, numpy only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, final

import numpy as np
import numpy.typing as npt

from torchtap.display import drawn
from torchtap.errors import MissingExtraError, needing
from torchtap.sanitize import storable
from torchtap.store.format.dtypes import BY_NAME

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow
    from torch import Tensor

__all__ = ["FoundTensor", "HistogramResult", "Matrix", "Series", "Status", "Table", "TensorRef"]

Status = Literal["closed", "recording", "interrupted"]


class Series(NamedTuple):
    """One statistic of one site over the steps at which it was recorded."""

    steps: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]

    def _repr_html_(self) -> str:
        return str(drawn("series", self.values, width=640, height=120))


class Matrix(NamedTuple):
    """One statistic of many sites; ``values[site, step]`` is NaN where nothing was recorded."""

    sites: list[str]
    steps: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]


class HistogramResult(NamedTuple):
    """A stored histogram: ``counts[i]`` values lay between ``edges[i]`` and ``edges[i + 1]``."""

    counts: np.ndarray
    edges: np.ndarray


class TensorRef(NamedTuple):
    """A stored tensor that was not read yet."""

    site: str
    field: str
    reduction: str
    step: int
    shape: tuple[int, ...]
    dtype: str  # torch's spelling, without "torch."
    nbytes: int  # on disk
    phase: str = "train"

    @property
    def unpacked(self) -> int:
        """How many bytes `Run.array` would take: the shape's, whatever is on disk."""
        known = BY_NAME.get(self.dtype)
        size = 8 if known is None else np.dtype(known.numpy).itemsize if known.numpy else 8
        return prod(self.shape) * size


class FoundTensor(Protocol):
    """A tensor that was found and not read yet."""

    def ref(self) -> TensorRef:
        """Describe it."""

    def array(self) -> np.ndarray:
        """Read it as numpy."""

    def tensor(self) -> Tensor:
        """Read it as torch."""

    def pieces(self, size: int) -> Iterator[memoryview] | None:
        """Read its bytes in order; None if that needs all of it in memory."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Every number of a run, one a row, as columns: step, epoch, batch, phase, site, statistic, value.

    Phases, sites and statistics are kept as codes into their names; asking for the column spells them out. An epoch
    or a batch that was not set is -1.
    """

    step: npt.NDArray[np.int64]
    epoch: npt.NDArray[np.int64]
    batch: npt.NDArray[np.int64]
    phase_codes: npt.NDArray[np.int32]
    site_codes: npt.NDArray[np.int32]
    statistic_codes: npt.NDArray[np.int32]
    value: npt.NDArray[np.float64]
    phase_names: list[str]
    site_names: list[str]
    statistic_names: list[str]

    columns = ("step", "epoch", "batch", "phase", "site", "statistic", "value")

    def __len__(self) -> int:
        return len(self.value)

    def __getitem__(self, column: str) -> np.ndarray:
        match column:
            case "step" | "epoch" | "batch" | "value":
                found: np.ndarray = getattr(self, column)
                return found
            case "phase":
                return np.asarray(self.phase_names, dtype=np.str_)[self.phase_codes]
            case "site":
                return np.asarray(self.site_names, dtype=np.str_)[self.site_codes]
            case "statistic":
                return np.asarray(self.statistic_names, dtype=np.str_)[self.statistic_codes]
        raise KeyError(f"there is no column {column!r}; the columns are {', '.join(self.columns)}")

    def __iter__(self) -> Iterator[tuple[int, int, int, str, str, str, float]]:
        """The rows."""
        for step, epoch, batch, phase, site, statistic, value in zip(
            self.step.tolist(),
            self.epoch.tolist(),
            self.batch.tolist(),
            self.phase_codes.tolist(),
            self.site_codes.tolist(),
            self.statistic_codes.tolist(),
            self.value.tolist(),
            strict=True,
        ):
            names = self.phase_names[phase], self.site_names[site], self.statistic_names[statistic]
            yield step, epoch, batch, *names, value

    def to_arrow(self) -> pyarrow.Table:
        """An Arrow table; sites and statistics are dictionary-encoded."""
        with needing("pyarrow", "arrow", who="Table.to_arrow"):
            import pyarrow
        return pyarrow.table(
            {
                "step": self.step,
                "epoch": pyarrow.array(self.epoch, mask=self.epoch == -1),
                "batch": pyarrow.array(self.batch, mask=self.batch == -1),
                "phase": pyarrow.DictionaryArray.from_arrays(
                    self.phase_codes, pyarrow.array(self.phase_names, pyarrow.string())
                ),
                "site": pyarrow.DictionaryArray.from_arrays(
                    self.site_codes,
                    pyarrow.array([storable(name) for name in self.site_names], pyarrow.string()),
                ),
                "statistic": pyarrow.DictionaryArray.from_arrays(
                    self.statistic_codes,
                    pyarrow.array([storable(name) for name in self.statistic_names], pyarrow.string()),
                ),
                "value": self.value,
            }
        )

    def to_pandas(self) -> pandas.DataFrame:
        """A pandas frame; sites and statistics are categories, unset epochs and batches are missing."""
        with needing("pandas", "pandas", who="Table.to_pandas"):
            import pandas
        return pandas.DataFrame(
            {
                "step": self.step,
                "epoch": pandas.array(self.epoch, dtype="Int64").copy(),
                "batch": pandas.array(self.batch, dtype="Int64").copy(),
                "phase": pandas.Categorical.from_codes(self.phase_codes, categories=self.phase_names),  # type: ignore[arg-type, call-overload, unused-ignore]
                "site": pandas.Categorical.from_codes(self.site_codes, categories=self.site_names),  # type: ignore[arg-type, call-overload, unused-ignore]
                "statistic": pandas.Categorical.from_codes(
                    self.statistic_codes, categories=self.statistic_names
                ),  # type: ignore[arg-type, call-overload, unused-ignore]
                "value": self.value,
            }
        ).assign(
            epoch=lambda frame: frame["epoch"].mask(self.epoch == -1),
            batch=lambda frame: frame["batch"].mask(self.batch == -1),
        )

    def to_polars(self) -> polars.DataFrame:
        """A polars frame."""
        try:
            import polars
        except ImportError:
            raise MissingExtraError(
                "Table.to_polars needs polars and pyarrow: pip install polars 'torchtap[arrow]'",
                extra="arrow",
            ) from None
        return polars.from_arrow(self.to_arrow())

    def __repr__(self) -> str:
        return f"Table({len(self)} rows: {', '.join(self.columns)}; {len(self.site_names)} sites)"
