"""Encode numbers for the page, thin them out, derive statistics, and colour them.

An answer is one small JSON header followed by plain little-endian arrays::

    4 bytes   length of the header
    header    JSON: whatever facts the answer has, and ``arrays``: name, dtype, shape and offset of each
    padding   to a multiple of eight
    arrays    one after the other, each aligned to eight bytes

It guarantees:
- a header holds only numbers and texts that JSON and JavaScript accept; other numbers become null;
- the page can view each array in place, without copying;
- thinning keeps every extreme and every value that is not finite.

Not here: which numbers are sent (`charts`, `server`).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from torchtap.sanitize import browser_text
from torchtap.spi import Name

if TYPE_CHECKING:
    from torchtap.viewer.open_run import NumberGrid

__all__ = [
    "DERIVED", "EMPTY_SUMS", "NOT_FINITE", "block_extremes", "buckets", "css", "derive", "derived_of",
    "encode_json", "extremes", "keep_points", "pack", "sequential", "without_empty_sums",
]  # fmt: skip


_NAMES = {"<f4": "f4", "<f8": "f8", "|u1": "u1", "<i4": "i4"}


def _plain(value: object) -> object:
    """``value`` with numpy scalars turned into Python's and everything that JSON cannot say into null."""
    if isinstance(value, Mapping):
        return {browser_text(str(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return browser_text(str(value))


def encode_json(value: object) -> bytes:
    """``value`` as JSON that every browser reads: a NaN or an infinity is null."""
    return json.dumps(_plain(value), ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode(
        "ascii"
    )


def pack(facts: Mapping[str, object], arrays: Mapping[str, np.ndarray]) -> bytes:
    """``facts`` and ``arrays`` as one body."""
    entries: list[dict[str, object]] = []
    parts: list[bytes] = []
    offset = 0
    for name, array in arrays.items():
        data = np.ascontiguousarray(array)
        if data.dtype.str not in _NAMES:
            raise TypeError(f"array {name!r} has dtype {data.dtype}, which the page does not read")
        body = data.tobytes()
        entries.append(
            {"name": name, "dtype": _NAMES[data.dtype.str], "shape": list(data.shape), "offset": offset}
        )
        body += b"\0" * (-len(body) % 8)
        parts.append(body)
        offset += len(body)
    header = encode_json({**facts, "arrays": entries})
    header += b" " * (-(len(header) + 4) % 8)
    return b"".join([struct.pack("<I", len(header)), header, *parts])


def buckets(length: int, most: int) -> npt.NDArray[np.int64]:
    """Return the start of each of at most ``most`` nearly equal stretches of ``length`` items."""
    if length <= 0:
        return np.zeros(0, dtype=np.int64)
    count = max(1, min(length, most))
    return np.arange(count, dtype=np.int64) * length // count


def extremes(
    values: npt.NDArray[np.floating],
    rows: int,
    columns: int,
    *,
    highs: npt.NDArray[np.floating] | None = None,
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The least and the greatest value of each cell of a grid of at most ``rows`` × ``columns``.

    Also returns where each row and column of the new grid starts in the old one. NaN means "nothing here":
    a cell is NaN only if all its values are. ``highs`` are the greatest values where ``values`` are already
    the least of something.
    """
    row_starts = buckets(values.shape[0], rows)
    column_starts = buckets(values.shape[1], columns)
    if not len(row_starts) or not len(column_starts):
        nothing = np.zeros((len(row_starts), len(column_starts)), dtype=np.float32)
        return nothing, nothing, row_starts, column_starts
    # fmin and fmax skip NaN, which stands for "nothing here".
    low, high = values, values if highs is None else highs
    if len(column_starts) < values.shape[1]:
        low = np.fmin.reduceat(low, column_starts, axis=1)
        high = np.fmax.reduceat(high, column_starts, axis=1)
    if len(row_starts) < values.shape[0]:
        low = np.fmin.reduceat(low, row_starts, axis=0)
        high = np.fmax.reduceat(high, row_starts, axis=0)
    with np.errstate(over="ignore"):
        return low.astype(np.float32), high.astype(np.float32), row_starts, column_starts


def block_extremes(
    values: npt.NDArray[np.float32], size: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """The least and the greatest of every ``size`` columns; the last block may be shorter."""
    whole = values.shape[1] // size * size
    low, high = values[:, 0:whole:size], values[:, 0:whole:size]
    for offset in range(1, size):
        column = values[:, offset:whole:size]
        low, high = np.fmin(low, column), np.fmax(high, column)
    if whole < values.shape[1]:
        rest = values[:, whole:]
        low = np.concatenate([low, np.fmin.reduce(rest, axis=1, keepdims=True)], axis=1)
        high = np.concatenate([high, np.fmax.reduce(rest, axis=1, keepdims=True)], axis=1)
    return np.ascontiguousarray(low), np.ascontiguousarray(high)


def keep_points(columns: Sequence[npt.NDArray[np.floating]], points: int) -> npt.NDArray[np.int64]:
    """Which indices of several series of one length to keep so that each keeps every stretch's extremes.

    The first and the last are always kept, and in each stretch the first value that is not finite, so that
    a gap or an infinity shows where it begins.
    """
    length = len(columns[0]) if columns else 0
    if length <= points:
        return np.arange(length, dtype=np.int64)
    starts = buckets(length, max(1, points // 2))
    ends = np.append(starts[1:], length)
    kept: set[int] = {0, length - 1}
    for values in columns:
        finite = np.isfinite(values)
        low = np.where(finite, values, np.inf)
        high = np.where(finite, values, -np.inf)
        odd = np.flatnonzero(~finite)
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            kept.add(start + int(low[start:end].argmin()))
            kept.add(start + int(high[start:end].argmax()))
        if len(odd):
            positions = np.searchsorted(odd, starts)
            nearest = odd[np.minimum(positions, len(odd) - 1)]
            kept.update(nearest[(positions < len(odd)) & (nearest < ends)].tolist())
    return np.array(sorted(kept), dtype=np.int64)


DERIVED = ("nonfinite", "grad/weight")
EMPTY_SUMS = frozenset({"l1", "l2"})  # sums: zero where no value is finite


def _parameter_of(site: str) -> str:
    """The parameter whose gradient ``site`` is."""
    return str(Name.read(site)._replace(kind="param"))


def without_empty_sums(
    statistic: str, values: npt.NDArray[np.float64], broken: npt.NDArray[np.float64] | None
) -> npt.NDArray[np.float64]:
    """``values`` with NaN where a norm is zero because nothing was finite; ``broken`` counts the NaNs."""
    if statistic not in EMPTY_SUMS or broken is None or len(broken) != len(values):
        return values
    return np.where((values == 0) & (broken > 0), np.nan, values)


def derived_of(site: str, statistics: list[str], sites: set[str]) -> list[str]:
    """Which derived statistics ``site`` has, given what was recorded of it."""
    found = []
    if Name.read(site).kind == "param_grad" and "l2" in statistics and _parameter_of(site) in sites:
        found.append("grad/weight")
    return found


def derive(
    statistic: str, grid: Callable[[str], NumberGrid], sites: list[str], recorded: set[str]
) -> tuple[list[str], npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Sites, steps and values of a derived statistic; ``grid`` reads those that were ``recorded``."""
    if statistic == "nonfinite":
        nans = grid("nans")
        infinities = grid("infs") if "infs" in recorded else None
        if infinities is not None and nans.sites == infinities.sites:
            return nans.sites, nans.steps, nans.values + infinities.values
        return nans.sites, nans.steps, nans.values
    sizes = grid("l2")
    names = [
        s
        for s in sites
        if Name.read(s).kind == "param_grad" and s in sizes.row and _parameter_of(s) in sizes.row
    ]
    gradients = sizes.values[[sizes.row[s] for s in names]]
    weights = sizes.values[[sizes.row[_parameter_of(s)] for s in names]]
    with np.errstate(divide="ignore", invalid="ignore"):
        return names, sizes.steps, np.where(weights > 0, gradients / weights, np.nan).astype(np.float32)


NOT_FINITE = "#e51452"
_SIZE = 256


def _srgb(lightness: float, chroma: float, hue: float) -> tuple[int, int, int] | None:
    """A colour of OKLCH as a screen shows it; None if no screen can."""
    a, b = chroma * math.cos(math.radians(hue)), chroma * math.sin(math.radians(hue))
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    middle = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3
    linear = (
        4.0767416621 * long - 3.3077115913 * middle + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * middle - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * middle + 1.707614701 * short,
    )
    if any(c < -1e-4 or c > 1.0001 for c in linear):
        return None
    shown = [
        12.92 * c if c <= 0.0031308 else 1.055 * c ** (1 / 2.4) - 0.055 for c in (max(0.0, x) for x in linear)
    ]
    red, green, blue = (round(255 * min(1.0, c)) for c in shown)
    return red, green, blue


@cache
def sequential() -> tuple[tuple[int, int, int], ...]:
    """From deep blue over green to pale yellow, in 256 steps."""
    table = []
    for number in range(_SIZE):
        t = number / (_SIZE - 1)
        chroma, colour = 0.13, None
        while colour is None and chroma > 0:
            colour = _srgb(0.24 + 0.7 * t, chroma, 285 - 185 * t**0.9)
            chroma -= 0.004
        table.append(colour or (0, 0, 0))
    return tuple(table)


def css(t: float) -> str:
    """Return the CSS colour at ``t``, from 0 to 1."""
    red, green, blue = sequential()[round(min(1.0, max(0.0, t)) * (_SIZE - 1))]
    return f"#{red:02x}{green:02x}{blue:02x}"
