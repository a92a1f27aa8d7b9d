"""``harvest``: run a model over data and store the values at some sites as a folder of shuffled rows.

The folder: ``activations.json`` (settings), ``shard-<unit>.safetensors``, and, when all units are done, ``index.json``
and ``statistics.safetensors``. It guarantees:

- a document is stored with its unit, which appears whole or not at all, and is never written again;
- interrupted at any moment and called again, it goes on after the finished units, and the files are the same as
  those of a run that was not interrupted;
- a folder has one writer; other settings, another model or other data than those it was begun with are refused.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from torchtap.datasets.documents import Inputs, Source, source_of, units_of
from torchtap.datasets.encoding import SiteStatistics, dtype_of, tensors_of
from torchtap.datasets.engines import drive
from torchtap.datasets.reader import Activations, open_activations
from torchtap.datasets.rows import RowFunction, RowSelector
from torchtap.datasets.shard import (
    FORMAT,
    INDEX,
    MANIFEST,
    STATISTICS,
    Shard,
    pack,
    read_json,
    shard_name,
    unit_number,
)
from torchtap.datasets.worker import Job, accepted_names
from torchtap.errors import OutputError, PlanError, SessionError
from torchtap.sanitize import shown
from torchtap.spi import SharedFolder

__all__ = ["Progress", "harvest"]

_WINDOWS = {"sample": 4096}  # documents of a shard; 64 for other rows


@final
@dataclass(frozen=True, slots=True)
class Progress:
    """How far a harvest is. ``documents`` counts those of finished shards; totals are None if they are not known."""

    documents: int
    total: int | None
    rows: int
    bytes: int
    rows_per_second: float
    seconds_left: float | None

    def __str__(self) -> str:
        share = f" of {self.total:,}" if self.total else ""
        left = "" if self.seconds_left is None else f" · {_clock(self.seconds_left)} left"
        return (
            f"{self.documents:,}{share} documents · {self.rows:,} rows · {self.rows_per_second:,.0f} rows/s · "
            f"{self.bytes / 1e9:.2f} GB{left}"
        )


def harvest(
    model: Any,
    data: Any,
    sites: Any,
    out: str | os.PathLike[str],
    rows: str | RowFunction = "token",
    *,
    dtype: str | torch.dtype | None = None,
    tokenizer: Callable[..., Any] | None = None,
    column: str = "text",
    context: int = 512,
    inputs: Callable[[Any], Any] | None = None,
    batched: bool | None = None,
    batch_size: int = 8,
    exclude: Collection[int] | Callable[[Inputs], Tensor] | None = None,
    window: int | None = None,
    shuffle: bool = True,
    seed: int = 0,
    covariance: bool = False,
    engine: str | None = None,
    workers: int = 1,
    progress: bool | Callable[[Progress], object] = False,
) -> Activations:
    """Run a model over data and store the values at some sites, one row per token.

        acts = tt.harvest(model, texts, "transformer.h.5:output", "acts/", tokenizer=tokenizer)

    Call it again with the same arguments to go on after an interruption. Nothing is written twice, and a document
    that was seen before is left out.

    model: a module, or a function without arguments that makes one in each worker.
    data: an iterable of model inputs (tensors, tuples, dicts), a dataset, a DataLoader, texts, or a folder of texts.
    sites: a selector, or a list of them. All sites have the same rows in the same order.
    out: the folder, or an address such as ``s3://bucket/acts``.
    rows: ``"token"``, ``"sample"`` (a value of shape [batch, …], or the last token), ``"patch"``, or a function of
        (value, inputs) that returns [documents, rows, width], or a tuple (rows, document of each, position of each).
    dtype: None stores values as they are; ``"float32"``, ``"bfloat16"``, ``"float16"``, or ``"int8"`` and ``"fp8"``
        with a scale for each row. The error is measured (``acts.statistics[site].error``).
    tokenizer, column, context: for texts; a text of more than ``context`` tokens becomes several documents.
    inputs: makes model inputs of an item of the data.
    batched: whether an item has several documents; None decides by the data.
    batch_size: documents of one call of the model, if items are single documents. Padding can change the last bits
        of a value; ``batch_size=1`` avoids it.
    exclude: token ids without a row, or a function of the inputs that returns True for positions to leave out. None
        leaves out the tokenizer's special tokens. Padding never has a row.
    window: documents of a shard. Rows are permuted within it. Memory is about three times a shard.
    shuffle, seed: False keeps the order of the documents.
    covariance: also sum the outer products of rows (about 8 % of the forward of a transformer's layer, for each site).
    engine, workers: ``"here"``, ``"processes"``, ``"ray"`` or ``"dask"``. The files are the same.
    progress: True prints a line; a function is called with a `Progress`.

    Returns the folder, open for reading. Raises ``OutputError`` if the folder cannot be written or has another writer,
    ``SessionError`` if it was begun differently or a worker died, ``PlanError`` for arguments that do not fit.
    """
    RowSelector(rows, None)
    accepted = accepted_names(model) if isinstance(model, nn.Module) else None
    source = source_of(data, tokenizer, column, context, inputs, batched, accepted)
    if exclude is None and tokenizer is not None:
        exclude = tuple(getattr(tokenizer, "all_special_ids", ()))
    selectors = tuple(sites) if isinstance(sites, (list, tuple)) else (sites,)
    settings: dict[str, Any] = {
        "format": FORMAT,
        "sites": [str(each) for each in selectors],
        "rows": _spelled(rows),
        "dtype": None if dtype is None else str(dtype_of(dtype)).removeprefix("torch."),
        "batched": source.batched,
        "batch_size": None if source.batched else batch_size,
        "exclude": _spelled(exclude) if callable(exclude) else sorted(exclude or ()),
        "window": window or _WINDOWS.get(rows if isinstance(rows, str) else "", 64),
        "shuffle": shuffle,
        "seed": seed,
        "covariance": covariance,
        "items": source.length,
    }
    folder = SharedFolder(out)
    _check_numbers(batch_size, settings["window"], workers)
    folder.make()
    folder.lock()
    try:
        settings = _begin(folder, settings, source)
        if INDEX not in folder.names():
            done, shared = _done(folder)
            job = Job(
                model=model,
                sites=selectors,
                out=folder.path,
                rows=rows,
                dtype=settings["dtype"],
                batch_size=batch_size,
                batched=source.batched,
                pad=int(getattr(tokenizer, "pad_token_id", None) or 0),
                exclude=exclude,
                seed=seed,
                shuffle=shuffle,
                covariance=covariance,
                threads=settings["threads"],
                expected=shared,
            )
            units = units_of(source, settings["items_per_shard"], done)
            total = None if source.batched else settings["items"]
            report = _Reporter(progress, total, [*_shards(folder)] if progress else ())
            chosen = engine or ("processes" if workers > 1 else "here")
            with closing(drive(chosen, workers, job, units)) as results:
                for result in results:
                    report.add(result)
            _finish(folder)
    finally:
        folder.unlock()
    return open_activations(folder.path)


def _check_numbers(*numbers: Any) -> None:
    if any(type(each) is not int or each < 1 for each in numbers):
        raise PlanError(
            f"batch_size, window and workers are numbers from 1 on, not {', '.join(map(str, numbers))}"
        )


def _begin(folder: SharedFolder, settings: dict[str, Any], source: Source) -> dict[str, Any]:
    """Write the settings into a new folder, or compare them with those it was begun with."""
    names = folder.names()
    if MANIFEST not in names:
        if names:
            raise OutputError(
                f"{folder.path} has other files: {shown(', '.join(names[:3]))}. Give an empty folder"
            )
        per_shard = max(1, settings["window"] // source.first)
        begun = {**settings, "items_per_shard": per_shard, "threads": torch.get_num_threads()}
        folder.put(MANIFEST, [json.dumps(begun, indent=1).encode()])
    begun = read_json(folder, MANIFEST)
    other = {name: (begun.get(name), value) for name, value in settings.items() if begun.get(name) != value}
    if None in other.get("items", ()):  # the length of an iterator is not known
        del other["items"]
    if other:
        words = "; ".join(f"{name} was {old!r}, now {new!r}" for name, (old, new) in other.items())
        raise SessionError(
            f"{folder.path} was begun with other settings: {words}. Use the same, or another folder"
        )
    return begun


def _spelled(given: Any) -> str:
    if isinstance(given, str):
        return given
    return f"{getattr(given, '__module__', '')}.{getattr(given, '__qualname__', type(given).__name__)}"


def _shards(folder: SharedFolder) -> Iterable[Shard]:
    numbers = sorted(number for name in folder.names() if (number := unit_number(name)) is not None)
    for number in numbers:
        shard = Shard(folder, shard_name(number))
        yield shard
        shard.close()


def _done(folder: SharedFolder) -> tuple[dict[int, list[bytes]], dict[str, Any]]:
    """Return the hashes of the documents of each unit that is done, and the facts that all shards share."""
    found, shared = {}, {}
    for shard in _shards(folder):
        hashes = bytes(shard.whole("documents/hash").numpy())
        found[int(shard.facts["unit"])] = [hashes[at : at + 16] for at in range(0, len(hashes), 16)]
        if shard.sites:
            shared = {"model": shard.facts["model"], "sites": shard.sites}
    return found, shared


def _finish(folder: SharedFolder) -> None:
    """Write the index and the merged statistics of a folder whose shards are all there."""
    shards: list[Shard] = []
    statistics: dict[str, SiteStatistics] = {}
    tokens = torch.zeros(0, dtype=torch.int64)
    for number, shard in enumerate(_shards(folder)):
        if shard.facts["unit"] != number:
            raise SessionError(f"{shard_name(number)} is missing in {folder.path}; harvest again")
        shards.append(shard)
        for site, found in shard.all_statistics().items():
            statistics[site] = statistics[site].merge(found) if site in statistics else found
        counts = shard.whole("token_counts")
        wider = max(len(tokens), len(counts))
        padded = [nn.functional.pad(each, (0, wider - len(each))) for each in (tokens, counts)]
        tokens = padded[0] + padded[1]
    write_end(folder, shards, tensors_of(statistics), tokens)


def write_end(
    folder: SharedFolder, shards: Sequence[Shard], statistics: Mapping[str, Tensor], tokens: Tensor
) -> None:
    """Write the two files that make a folder complete."""
    rows = sum(shard.rows for shard in shards)
    folder.put(STATISTICS, pack({}, {**statistics, "token_counts": tokens}, {"rows": rows, "sites": {}}))
    listed = [{"name": shard.name, "rows": shard.rows, "bytes": shard.nbytes} for shard in shards]
    folder.put(INDEX, [json.dumps({"format": FORMAT, "rows": rows, "shards": listed}, indent=1).encode()])
    folder.sync()


@final
class _Reporter:
    """Counts what is committed and reports it."""

    def __init__(
        self, progress: bool | Callable[[Progress], object], total: int | None, done: Sequence[Shard]
    ) -> None:
        self._report = progress if callable(progress) else _print if progress else None
        self._total = total
        self._before = [len(each.whole("documents/hash")) for each in done], [each.rows for each in done]
        self._counts = [sum(self._before[0]), sum(self._before[1]), sum(each.nbytes for each in done)]
        self._began = time.monotonic()

    def add(self, result: Mapping[str, Any]) -> None:
        for index, name in enumerate(("documents", "rows", "bytes")):
            self._counts[index] += result[name]
        if self._report is None:
            return
        documents, rows, size = self._counts
        seconds = max(time.monotonic() - self._began, 1e-9)
        new = max(documents - sum(self._before[0]), 1)
        left = None if self._total is None else (self._total - documents) * seconds / new
        speed = (rows - sum(self._before[1])) / seconds
        self._report(Progress(documents, self._total, rows, size, speed, left))


def _print(progress: Progress) -> None:
    end = "\n" if progress.documents == progress.total else ""
    sys.stderr.write(f"\r{progress}\x1b[K{end}")  # numbers only
    sys.stderr.flush()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
