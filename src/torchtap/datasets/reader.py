"""``open_activations``: read a folder of activations, also while it is being written.

    acts = tt.open_activations("acts/")
    acts[5]                                     # a row: {site: tensor, "document": …, "position": …, "token": …}
    for batch in acts.batches(4096, seed=1):    # {site: [4096, width], "document": [4096], …}

It guarantees:
- every byte is checked against its checksum when it is first read; damage is an error, never a wrong value;
- `Batches` are a function of seed, epoch and batch size: with any number of workers, and after a restart in the
  middle of an epoch, the same batches come in the same order, each row once an epoch.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from torchtap.datasets import export
from torchtap.datasets.encoding import SCALED, SiteStatistics, decode
from torchtap.datasets.shard import (
    IDENTITY,
    INDEX,
    MANIFEST,
    Buffers,
    Shard,
    read_json,
    shard_name,
    unit_number,
    view_of,
)
from torchtap.errors import PlanError, RunNotFoundError, SelectionError, SessionError
from torchtap.spi import SharedFolder

__all__ = ["Activations", "Batches", "Document", "open_activations"]

_OPEN = 128  # files that stay open


def open_activations(path: str | os.PathLike[str]) -> Activations:
    """Open a folder that `harvest` wrote or is writing.

    Raises ``RunNotFoundError`` if there is none, ``RunFormatError`` if it is of a newer format.
    """
    return Activations(path)


class Document(NamedTuple):
    """The rows of one document, in order."""

    number: int
    name: str  # of a text's file, with the number of its first token
    positions: Tensor
    tokens: Tensor
    values: dict[str, Tensor]


@final
class Activations(Dataset[dict[str, Any]]):
    """A map-style dataset of rows. Its length is the number of rows that are written."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._folder = SharedFolder(path)
        self.path = self._folder.path
        self.settings = read_json(self._folder, MANIFEST)
        self.complete = False
        self._shards: list[Shard] = []
        self._open: OrderedDict[int, None] = OrderedDict()
        self._buffers = Buffers()
        self._site_facts: dict[str, dict[str, Any]] = {}
        self._starts = np.zeros(1, dtype=np.int64)
        self.refresh()

    def refresh(self) -> int:
        """Look for new shards of a folder that is being written; return how many there are."""
        names = self._folder.names()
        self.complete = INDEX in names
        known = {shard.name for shard in self._shards}
        numbers = sorted(number for name in names if (number := unit_number(name)) is not None)
        new = [Shard(self._folder, name) for number in numbers if (name := shard_name(number)) not in known]
        for shard in new:
            shard.close()
        # New shards come last: rows that were counted keep their numbers while this object lives.
        self._shards += new
        self._starts = np.cumsum([0, *(shard.rows for shard in self._shards)], dtype=np.int64)
        self._site_facts = next((shard.sites for shard in self._shards if shard.sites), {})
        self.__dict__.pop("statistics", None)
        return len(new)

    # -- facts ------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def sites(self) -> list[str]:
        return list(self._site_facts)

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self._shards)

    @property
    def shards(self) -> list[str]:
        return [shard.name for shard in self._shards]

    def opened(self) -> Iterator[Shard]:
        """Yield the shards, ready for reading, in the order of their rows."""
        return (self._shard(number) for number in range(len(self._shards)))

    @property
    def documents(self) -> int:
        """Number of documents with rows or without, repeated ones left out."""
        found = (shard.read("documents/rows") for shard in self.opened() if "documents/rows" in shard)
        return sum(int((rows >= 0).sum()) for rows in found)

    @property
    def progress(self) -> float | None:
        """Share of the data that is stored; None if their length is not known."""
        if self.complete:
            return 1.0
        items = self.settings.get("items")
        return min(1.0, len(self._shards) * self.settings["items_per_shard"] / items) if items else None

    @property
    def writing(self) -> bool | None:
        """True if a process is writing into the folder; None if that is not known."""
        return False if self.complete else self._folder.locked()

    @cached_property
    def statistics(self) -> dict[str, SiteStatistics]:
        """Statistics of each site over the rows that are written."""
        found: dict[str, SiteStatistics] = {}
        for shard in sorted(self.opened(), key=lambda each: each.name):  # sums depend on the order
            for site, one in shard.statistics().items():
                found[site] = found[site].merge(one) if site in found else one
        return found

    @property
    def token_counts(self) -> Tensor:
        """Number of rows of each token id."""
        found = [shard.read("token_counts") for shard in self.opened() if "token_counts" in shard]
        total = torch.zeros(max((len(counts) for counts in found), default=0), dtype=torch.int64)
        for counts in found:
            total[: len(counts)] += counts
        return total

    def __repr__(self) -> str:
        state = "complete" if self.complete else "incomplete"
        return (
            f"Activations({self.path!r}, {len(self)} rows, {len(self._shards)} shards, {self.nbytes / 1e9:.3g} GB, "
            f"{len(self.sites)} sites, {state})"
        )

    # -- rows -------------------------------------------------------------------------------------------------

    def _shard(self, number: int) -> Shard:
        """Return a shard and close the file that was used longest ago."""
        self._open[number] = None
        self._open.move_to_end(number)
        if len(self._open) > _OPEN:
            self._shards[self._open.popitem(last=False)[0]].close()
        return self._shards[number]

    def columns(self, sites: str | Sequence[str] | None) -> list[str]:
        """Return the chosen sites. Raise ``SelectionError`` for one that is not there."""
        chosen = self.sites if sites is None else [sites] if isinstance(sites, str) else list(sites)
        for site in chosen:
            if site not in self._site_facts and site not in IDENTITY:
                raise SelectionError(
                    f"there is no site {site!r} in {self.path}; it has {', '.join(self.sites)}"
                )
        return chosen

    def read(self, column: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Return rows of a site as values, or of ``document``, ``position`` or ``token``."""
        self.columns(column)
        stop = len(self) if stop is None else min(stop, len(self))
        return self.gather([(start, max(start, stop))], [column])[column]

    def gather(
        self, ranges: Sequence[tuple[int, int]], columns: Sequence[str], decoded: bool = True
    ) -> dict[str, Tensor]:
        """Return columns of ranges of rows, one after another; as they are stored if not ``decoded``."""
        pieces = [piece for start, stop in ranges for piece in self._pieces(start, stop)]
        found = {}
        for column in columns:
            found[column] = self._stored(pieces, column)
            if decoded and self._site_facts.get(column, {}).get("dtype") in SCALED:
                found[column] = decode(found[column], self._stored(pieces, f"scale/{column}"))
        return found

    def _stored(self, pieces: Sequence[tuple[int, int, int]], column: str) -> Tensor:
        shard = next((each for each in self._shards if column in each), None)
        if shard is None:
            raise RunNotFoundError(f"{self.path} has no rows yet")
        _, dtype, shape = shard.place(column)
        count = sum(stop - start for _, start, stop in pieces)
        out = self._buffers.empty((count, *shape[1:]), dtype)
        buffer, width = view_of(out), out.nbytes // max(count, 1)
        at = 0
        for number, start, stop in pieces:
            end = at + (stop - start) * width
            self._shard(number).read_into(column, start, stop, buffer[at:end])
            at = end
        return out

    def spans(self) -> list[tuple[int, int, int]]:
        """Return the first row, the number of rows and the rows of a block of each shard."""
        starts = self._starts[:-1].tolist()
        return [(start, shard.rows, shard.block) for start, shard in zip(starts, self._shards, strict=True)]

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Cut a range of rows at the ends of shards: (shard, first row, end)."""
        while start < stop:
            number = int(np.searchsorted(self._starts, start, side="right")) - 1
            begin = int(self._starts[number])
            end = min(stop, int(self._starts[number + 1]))
            yield number, start - begin, end - begin
            start = end

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return several rows; a DataLoader calls it with the indices of a batch."""
        found = self.rows(indices)
        numbers = {name: found[name].tolist() for name in IDENTITY}
        return [
            {name: numbers[name][at] if name in numbers else value[at] for name, value in found.items()}
            for at in range(len(indices))
        ]

    def rows(self, indices: Sequence[int], sites: str | Sequence[str] | None = None) -> dict[str, Tensor]:
        """Return rows by number, in the given order, as one tensor for each column."""
        wanted = np.asarray(indices, dtype=np.int64)
        wanted = np.where(wanted < 0, wanted + len(self), wanted)
        if len(wanted) and (wanted.min() < 0 or wanted.max() >= len(self)):
            raise IndexError(f"there are {len(self)} rows")
        order = np.argsort(wanted, kind="stable")
        gathered = self.gather(
            [(at, at + 1) for at in wanted[order].tolist()], [*self.columns(sites), *IDENTITY]
        )
        back = torch.from_numpy(np.argsort(order, kind="stable"))
        return {name: value[back] for name, value in gathered.items()}

    def arrays(self, column: str) -> list[np.ndarray[Any, Any]]:
        """Return a column as read-only memory maps, one for each shard, as it is stored and without checks.

        Local folders only. numpy has no bfloat16 and no fp8: these come as ``uint16`` and ``uint8``.
        """
        if self._folder.remote:
            raise PlanError(f"{self.path} is not on this machine: it cannot be mapped. Use read()")
        self.columns(column)
        found = []
        for shard in self._shards:
            if column not in shard:
                continue
            offset, dtype, shape = shard.place(column)
            kind = {torch.bfloat16: "uint16", torch.float8_e4m3fn: "uint8"}.get(dtype)
            name = kind or str(dtype).removeprefix("torch.")
            place = os.path.join(self.path, shard.name)
            found.append(np.memmap(place, name, "r", offset, shape) if shape[0] else np.empty(shape, name))
        return found

    def verify(self) -> int:
        """Check every byte against its checksum; return the number of bytes. Raise ``RunCorruptError`` for damage."""
        for name in self.shards:
            Shard(self._folder, name).verify()
        return self.nbytes

    # -- streams ----------------------------------------------------------------------------------------------

    def batches(
        self,
        batch_size: int,
        sites: str | Sequence[str] | None = None,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> Batches:
        """Return an iterable dataset of batches: blocks of rows from all shards, in a random order for each epoch.

        Give it to a DataLoader with ``batch_size=None``. ``state_dict`` and ``load_state_dict`` resume within an epoch.
        """
        return Batches(self, batch_size, self.columns(sites), seed, shuffle, drop_last)

    def follow(
        self,
        batch_size: int,
        sites: str | Sequence[str] | None = None,
        *,
        poll: float = 0.5,
        timeout: float = 600.0,
    ) -> Iterator[dict[str, Tensor]]:
        """Yield each row once while the folder is being written, and end when it is complete.

        Rows come shard by shard. Raises ``SessionError`` if nothing new appears for ``timeout`` seconds.
        """
        start, since = 0, time.monotonic()
        while True:
            complete = self.complete
            while len(self) - start >= batch_size or (complete and start < len(self)):
                stop = min(start + batch_size, len(self))
                yield self.gather([(start, stop)], [*self.columns(sites), *IDENTITY])
                start, since = stop, time.monotonic()
            if complete:
                return
            if not self.refresh() and not self.complete:
                if time.monotonic() - since > timeout:
                    raise SessionError(
                        f"nothing new in {self.path} for {timeout:g} s; is its writer still running?"
                    )
                time.sleep(poll)

    def iter_documents(self, sites: str | Sequence[str] | None = None) -> Iterator[Document]:
        """Yield the documents with their rows in order. Not for a folder that was shuffled as a whole."""
        if self.settings.get("reshuffled"):
            raise SessionError(
                f"{self.path} was shuffled as a whole: its documents are in {self.settings['source']}"
            )
        chosen = self.columns(sites)
        for start, shard in zip(self._starts.tolist(), self.opened(), strict=False):
            if not shard.rows:
                continue
            found = self.gather([(start, start + shard.rows)], [*chosen, *IDENTITY])
            order = torch.from_numpy(np.lexsort((found["position"].numpy(), found["document"].numpy())))
            ordered = {name: value[order] for name, value in found.items()}
            names = shard.facts.get("names")
            numbers, counts = torch.unique_consecutive(ordered["document"], return_counts=True)
            at = 0
            for document, count in zip(numbers.tolist(), counts.tolist(), strict=True):
                rows = slice(at, at + count)
                at += count
                yield Document(
                    document,
                    names[document - shard.facts["first"]] if names else "",
                    ordered["position"][rows],
                    ordered["token"][rows],
                    {site: ordered[site][rows] for site in chosen},
                )

    to_parquet = export.to_parquet
    to_hf = export.to_hf
    to_saelens = export.to_saelens
    to_speculators = export.to_speculators


@final
class Batches(IterableDataset[dict[str, Tensor]]):
    """Batches of one epoch after another; made by `Activations.batches`.

    An epoch is a random order of blocks of rows from all shards. Each pass over it is the next epoch.
    """

    def __init__(
        self, acts: Activations, size: int, sites: list[str], seed: int, shuffle: bool, drop_last: bool
    ) -> None:
        if size < 1:
            raise PlanError(f"batch_size={size}: batches have one row or more")
        self._acts = acts
        self._size = size
        self._columns = [*sites, *(name for name in IDENTITY if name not in sites)]
        self._seed, self._shuffle, self._drop_last = seed, shuffle, drop_last
        # The rows at the beginning: a folder that grows does not change what was begun.
        self._shards = acts.spans()
        self._rows = len(acts)
        self.epoch = 0
        self._next = 0  # batch of the epoch that comes next
        self._own = False  # True if that is the next one of this worker, and not of all

    def __len__(self) -> int:
        return self._rows // self._size if self._drop_last else -(-self._rows // self._size)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; as in a DistributedSampler."""
        self.epoch, self._next, self._own = epoch, 0, False

    def state_dict(self) -> dict[str, int]:
        """Return the place in the epoch, after the last batch that was yielded."""
        state = {"epoch": self.epoch, "batch": self._next}
        return state if get_worker_info() is None else {**state, "worker": 1}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on at a place in an epoch; ``{"epoch": 3, "batch": 100}`` if batches were counted elsewhere."""
        self.epoch, self._next = int(state["epoch"]), int(state["batch"])
        self._own = "worker" in state

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        worker = get_worker_info()
        step = 1 if worker is None else worker.num_workers
        # A DataLoader takes batches from its workers in turn: together they give the order of one.
        number = self._next + (0 if worker is None or self._own else worker.id)
        starts, ends = self._order(self.epoch)
        edges = np.concatenate([[0], np.cumsum(ends - starts)])
        while number < len(self):
            self._next = number + step
            yield self._batch(number, starts, edges)
            number += step
        self.set_epoch(self.epoch + 1)

    def _order(self, epoch: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return the first row and the end of each block, in the order of an epoch."""
        first = [np.arange(at, at + rows, block) for at, rows, block in self._shards]
        # A block ends where the next one begins.
        blocks = np.concatenate([*first, [self._rows]]).astype(np.int64)
        if not self._shuffle:
            return blocks[:-1], blocks[1:]
        key = np.array([self._seed % (1 << 64), epoch + (1 << 63)], dtype=np.uint64)
        order = np.argsort(np.random.Philox(key=key).random_raw(len(blocks) - 1), kind="stable")
        return blocks[order], blocks[order + 1]

    def _batch(
        self, number: int, starts: np.ndarray[Any, Any], edges: np.ndarray[Any, Any]
    ) -> dict[str, Tensor]:
        low, high = number * self._size, min((number + 1) * self._size, self._rows)
        first, last = np.searchsorted(edges, (low, high - 1), side="right")
        ranges = []
        for block in range(first - 1, last):
            shift = int(starts[block]) - int(edges[block])
            ranges.append((max(low, int(edges[block])) + shift, min(high, int(edges[block + 1])) + shift))
        return self._acts.gather(ranges, self._columns)
