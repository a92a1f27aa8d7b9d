"""A fixed number of calls into all native parts, with tensors of any dtype, size and layout, and with nonsense.

``python -m tests.native.fuzz 100000`` under a sanitizer (``make sanitize``) finds what reads or writes beside its
memory; without one it still holds the answers against numpy's. The same number and seed give the same calls.
"""

from __future__ import annotations

import random
import sys
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from torchtap.comparison import measures
from torchtap.comparison.measures import measure
from torchtap.reduce import Histogram, Stats, StatsBlock, kernel
from torchtap.store.format import checksum

DTYPES = list(kernel.DTYPE_CODES)
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


class Fuzzer:
    """All choices come from one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.block = StatsBlock(4)
        self.calls: Counter[str] = Counter()

    def size(self) -> int:
        pick = self.random.random()
        if pick < 0.9:
            return self.random.randrange(0, 300)
        return self.random.randrange(0, 9000 if pick < 0.995 else 300_000)

    def tensor(self, dtypes: list[torch.dtype] = DTYPES, size: int | None = None) -> Tensor:
        """Any numbers in any layout; what lies before and behind them belongs to somebody else."""
        dtype = self.random.choice(dtypes)
        count = self.size() if size is None else size
        offset = self.random.randrange(0, 4)
        step = self.random.choice([1, 1, 1, 2, 3]) if size is None else 1
        whole = torch.randn(offset + count * step, generator=self.generator) * 10 ** self.random.randint(
            -3, 2
        )
        value = whole.to(dtype)[offset : offset + count * step : step]
        if dtype.is_floating_point and count and self.random.random() < 0.3:
            value[self.random.randrange(count)] = self.random.choice([np.nan, np.inf, -np.inf, 0.0])
        if size is None and self.random.random() < 0.3 and count:
            value = value.reshape(-1, self.random.choice([k for k in (1, 2, 3, 4, 6) if count % k == 0])).T
        return value

    def one_way_or_the_other(self) -> AbstractContextManager[object]:
        """Tensors tell the kernel where they lie, or Python does, as it does with older torches."""
        return patch.object(kernel, "_has_takers", kernel._has_takers and self.random.random() < 0.5)

    def statistics(self) -> None:
        value = self.tensor()
        with self.one_way_or_the_other():
            found = Stats().result(Stats().update(None, value))
        numbers = value.double().numpy()
        finite = numbers[np.isfinite(numbers)]
        assert found["count"] == numbers.size
        assert found["nans"] == np.isnan(numbers).sum()
        if finite.size:
            assert (found["min"], found["max"]) == (finite.min(), finite.max())
            near = 2e-6 * (np.abs(finite).max() + 1e-300)
            assert abs(found["mean"] - finite.mean()) <= near
            if finite.size > 1:
                assert abs(found["std"] - finite.std(ddof=1)) <= near

    def rows(self) -> None:
        value = self.tensor()
        row, slot = self.random.randrange(len(self.block)), self.random.randrange(8)
        before = self.block.results()[row, 0]
        with self.one_way_or_the_other():
            self.block.measure_into(row, slot, value)
        self.block.fold(row, slot)
        assert self.block.results()[row, 0] == before + 2 * value.numel()
        # Taken as it is; a second time it is recognised. What cannot be taken leaves the row as it was.
        times = self.block.take_any(row, value) + self.block.take(row, value)
        assert self.block.results()[row, 0] == before + (2 + times) * value.numel()
        if self.random.random() < 0.01:
            self.block.grow(len(self.block) + 7)
        if len(self.block) > 200:
            self.block = StatsBlock(4)

    def many(self) -> None:
        """Several tensors replace their rows in one call; what is left has changed nothing."""
        values = [self.tensor() for _ in range(self.random.randrange(0, 4))]
        left = self.block.put_each(list(range(len(values))), values)
        for row, value in enumerate(values):
            if row not in left:
                assert self.block.results()[row, 0] == value.numel()
        self.block.reset()

    def histogram(self) -> None:
        value = self.tensor()
        grid = self.random.choice([Histogram(), Histogram(bins=7, range=(-2, 3)), Histogram(per_octave=64)])
        assert int(grid.update(None, value).sum()) == value.numel()

    def distance(self) -> None:
        count = self.size()
        reference, target = self.tensor(FLOATS, count), self.tensor(FLOATS, count)
        found = measure(reference, target)
        r, t = reference.double().numpy(), target.double().numpy()
        both = np.isfinite(r) & np.isfinite(t)
        assert found.compared == both.sum()
        if both.any():
            assert found.max_abs == np.abs(t[both] - r[both]).max()

    def checksum(self) -> None:
        size, start = self.size(), self.random.randrange(0, 70)
        data = torch.randint(0, 256, (size + start,), dtype=torch.uint8, generator=self.generator)
        part = data[start:].numpy().data
        assert checksum.checksum(part) == zlib.crc32(part)
        if checksum.copy_bytes is not None:
            target = torch.empty(size + start, dtype=torch.uint8)
            crc = checksum.copy_bytes(target.data_ptr() + start, data.data_ptr() + start, size)
            assert crc == zlib.crc32(part)
            assert torch.equal(target[start:], data[start:])

    def nonsense(self) -> None:
        """Numbers that cannot be: refused, and nothing is read."""
        room = torch.zeros(16, dtype=torch.float64)
        here = room.data_ptr()
        pick = self.random.choice
        calls: list[Callable[[], object]] = []
        if kernel.native is not None:
            native = kernel.native
            calls += [
                lambda: native.measure(here, pick([0, here + 1]), pick([1, -1]), pick([0, 99, -1, "x"]), 1),
                lambda: native.measure_strided(here, here, 0, 1, (pick([-1, "x"]),), (1,)),
                lambda: native.measure_strided(here, here, pick([99, -1]), 1, (2,), (1, 1)),
                lambda: native.count(here, 0, 5, 0, 0, 0, 0, 0),
                lambda: native.fold(pick(["x", None, 2**70]), here),
                lambda: native.Taker(1).put_each(pick([None, [1], [0, 1]]), pick([None, [room, room], room])),
                lambda: native.Taker(1).put_each([pick([0, -1, "x"])], [room]),
            ]
        if measures.native is not None:
            distance = measures.native
            calls.append(lambda: distance.sums(0, 0, here, 0, 3, 0.0, 0.0, 1.0, 1.0, 0))
        if not calls:
            return
        try:
            pick(calls)()
        except (TypeError, ValueError, OverflowError, IndexError):
            return
        raise AssertionError("nonsense was taken")

    def run(self, calls: int) -> None:
        ways = [
            self.statistics,
            self.statistics,
            self.rows,
            self.many,
            self.histogram,
            self.distance,
            self.checksum,
            self.nonsense,
        ]
        for _ in range(calls):
            way = self.random.choice(ways)
            way()
            self.calls[way.__name__] += 1


def main() -> None:
    torch.set_num_threads(1)
    calls, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    fuzzer = Fuzzer(seed)
    fuzzer.run(calls)
    built = [name for name, module in (("statistics", kernel), ("distance", measures)) if module.native]
    print(f"{calls} calls, seed {seed}, native: {', '.join(built)}: {dict(fuzzer.calls)}")


if __name__ == "__main__":
    main()
