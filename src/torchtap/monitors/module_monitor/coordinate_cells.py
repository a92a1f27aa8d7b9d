"""Sums over rows of many values in one table that native code writes into, and the keys that they belong to.

Each value has cells: the number of its rows, their width and its sums (`reduce.row_norms.rows_into`). Which key wants
which cell is laid out once; as long as the same cells are filled, a step only looks numbers up.
"""

from __future__ import annotations

from typing import NamedTuple, final

import numpy as np
import numpy.typing as npt

from torchtap.reduce.row_norms import CELLS

__all__ = ["Cells", "Columns", "Sums"]

Numbers = npt.NDArray[np.float64]


@final
class Columns:
    """Keys, and which sum of a value is whose."""

    __slots__ = ("first", "keys", "sums")

    def __init__(self, first: int, keys: tuple[str, ...], sums: tuple[int, ...]) -> None:
        self.first = first  # of the value's cells
        self.keys = keys
        self.sums = sums


class Sums(NamedTuple):
    """What is to be averaged under each key: a sum, over how many rows it is, and how wide these are."""

    keys: tuple[str, ...]
    totals: Numbers
    rows: Numbers
    widths: Numbers


@final
class Cells:
    """Cells for so many modules, two values each."""

    def __init__(self, modules: int) -> None:
        self._numbers = np.zeros(modules * 2 * CELLS)
        self._address = int(self._numbers.ctypes.data)
        self._used = 0
        self._filled: list[Columns] = []
        self._layout = _Layout([])

    def add(self) -> tuple[int, int, int]:
        """One more module: where its cells are, for good, and which is the first of its output and of its input."""
        first = self._used
        self._used += 2 * CELLS
        assert self._used <= len(self._numbers)
        return self._address + first * self._numbers.itemsize, first, first + CELLS

    def sums(self, filled: list[Columns]) -> Sums:
        """The numbers of cells that were filled."""
        if filled != self._filled:
            self._filled, self._layout = filled, _Layout(filled)
        layout, numbers = self._layout, self._numbers
        return Sums(layout.keys, numbers[layout.totals], numbers[layout.rows], numbers[layout.rows + 1])


@final
class _Layout:
    """Which cell is which key's."""

    def __init__(self, filled: list[Columns]) -> None:
        self.keys = tuple(key for columns in filled for key in columns.keys)
        self.totals = np.array(
            [each.first + 2 + sum_ for each in filled for sum_ in each.sums], dtype=np.intp
        )
        self.rows = np.array([each.first for each in filled for _ in each.sums], dtype=np.intp)
