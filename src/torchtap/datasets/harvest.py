"""``harvest``: run a model over data and store the values at some sites as a folder of shuffled rows.

The folder: ``activations.json`` (settings), ``shard-<unit>.safetensors``, and, when all units are done, ``index.json``.
It guarantees:

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
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from torchtap.datasets.documents import Inputs, source_of, units_of
from torchtap.datasets.encoding import dtype_of
from torchtap.datasets.engines import drive
from torchtap.datasets.reader import Activations
from torchtap.datasets.rows import RowFunction, RowSelector
from torchtap.datasets.shard import FORMAT, INDEX, MANIFEST, read_json, shard_name
from torchtap.datasets.worker import Job, accepted_names
from torchtap.errors import OutputError, PlanError, SessionError
from torchtap.sanitize import shown
from torchtap.spi import SharedFolder

__all__ = ["Progress", "harvest", "writing"]

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
    window: documents of a shard. Rows are permuted within it. Memory is three to four times a shard.
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
    if any(type(each) is not int or each < 1 for each in (batch_size, window or 1, workers)):
        raise PlanError(f"{batch_size=}, {window=}, {workers=}: these are numbers from 1 on")
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
    chosen = {
        "items_per_shard": max(1, settings["window"] // source.first),
        "threads": torch.get_num_threads(),
    }
    with writing(out, settings, chosen) as acts:
        if not acts.complete:
            done, expected = {}, {}
            for shard in acts.opened():
                hashes = bytes(shard.read("documents/hash").numpy())
                done[int(shard.facts["unit"])] = [hashes[at : at + 16] for at in range(0, len(hashes), 16)]
                if shard.sites:
                    expected = {"model": shard.facts["model"], "sites": shard.sites}
            pad = int(getattr(tokenizer, "pad_token_id", None) or 0)
            job = Job(model, selectors, acts.path, rows, exclude, pad, acts.settings, expected)
            units = units_of(source, acts.settings["items_per_shard"], done)
            before = (sum(map(len, done.values())), len(acts), acts.nbytes)
            report = _Reporter(progress, None if source.batched else source.length, before)
            engine = engine or ("processes" if workers > 1 else "here")
            with closing(drive(engine, workers, job, units)) as results:
                for result in results:
                    report.add(result)
    return Activations(acts.path)


@contextmanager
def writing(
    out: str | os.PathLike[str], settings: Mapping[str, Any], chosen: Mapping[str, Any]
) -> Iterator[Activations]:
    """Become the writer of a folder; at the end of the block, write the index that makes it complete.

    A new folder gets ``settings`` and ``chosen``. One that was begun must have the same settings.
    """
    folder = SharedFolder(out)
    folder.make()
    folder.lock()
    try:
        names = folder.names()
        if MANIFEST not in names:
            if names:
                raise OutputError(
                    f"{folder.path} has other files: {shown(', '.join(names[:3]))}. Give an empty folder"
                )
            folder.put(MANIFEST, [json.dumps({**settings, **chosen}, indent=1).encode()])
        _compare(folder, settings)
        acts = Activations(folder.path)
        yield acts
        if not acts.complete:
            shards = [*Activations(folder.path).opened()]
            for number, shard in enumerate(shards):
                if shard.name != shard_name(number):
                    raise SessionError(f"{shard_name(number)} is missing in {folder.path}; start again")
            listed = [{"name": shard.name, "rows": shard.rows, "bytes": shard.nbytes} for shard in shards]
            index = {"format": FORMAT, "rows": sum(shard.rows for shard in shards), "shards": listed}
            folder.put(INDEX, [json.dumps(index, indent=1).encode()])
            folder.sync()
    finally:
        folder.unlock()


def _compare(folder: SharedFolder, settings: Mapping[str, Any]) -> None:
    begun = read_json(folder, MANIFEST)
    other = {name: (begun.get(name), value) for name, value in settings.items() if begun.get(name) != value}
    if None in other.get("items", ()):  # the length of an iterator is not known
        del other["items"]
    if other:
        words = "; ".join(f"{name} was {old!r}, now {new!r}" for name, (old, new) in other.items())
        raise SessionError(
            f"{folder.path} was begun with other settings: {words}. Use the same, or another folder"
        )


def _spelled(given: Any) -> str:
    if isinstance(given, str):
        return given
    return f"{getattr(given, '__module__', '')}.{getattr(given, '__qualname__', type(given).__name__)}"


@final
class _Reporter:
    """Counts the documents, rows and bytes that are committed, and reports them."""

    def __init__(
        self,
        progress: bool | Callable[[Progress], object],
        total: int | None,
        before: tuple[int, int, int],
    ) -> None:
        self._report = progress if callable(progress) else _print if progress else None
        self._total = total
        self._before, self._counts = before, [*before]
        self._began = time.monotonic()

    def add(self, result: Mapping[str, Any]) -> None:
        for index, name in enumerate(("documents", "rows", "bytes")):
            self._counts[index] += result[name]
        if self._report is not None:
            documents, rows, size = self._counts
            seconds = max(time.monotonic() - self._began, 1e-9)
            new = max(documents - self._before[0], 1)
            left = None if self._total is None else (self._total - documents) * seconds / new
            speed = (rows - self._before[1]) / seconds
            self._report(Progress(documents, self._total, rows, size, speed, left))


def _print(progress: Progress) -> None:
    end = "\n" if progress.documents == progress.total else ""
    sys.stderr.write(f"\r{progress}\x1b[K{end}")  # numbers only
    sys.stderr.flush()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
