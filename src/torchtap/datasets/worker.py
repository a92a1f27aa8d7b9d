"""Turn a unit of documents into a shard: run the model, select rows, permute them, write the file.

The same code runs in every engine. It guarantees:
- the bytes of a shard depend on the model, the settings and the unit only;
- the model is called under ``no_grad`` in evaluation mode, and left in the mode in which it was.

Memory: the rows of the unit being computed, those of the unit being written, and one site's rows in their new order.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from torchtap import Full, Plan, capture, make_plan
from torchtap.datasets.documents import Inputs, Unit, batch_size_of, collate
from torchtap.datasets.encoding import SiteStatistics, dtype_of, encode, tensors_of
from torchtap.datasets.rows import RowFunction, RowSelector
from torchtap.datasets.shard import Buffers, pack, shard_name, view_of
from torchtap.errors import FormError, PlanError, SessionError
from torchtap.spi import SharedFolder, unwrap

__all__ = ["Job", "Worker", "accepted_names", "permutation"]


@final
@dataclass(frozen=True)
class Job:
    """Everything that a worker needs. It is pickled once for each process."""

    model: Any  # a module, or a function that makes one
    sites: tuple[Any, ...]
    out: str
    rows: str | RowFunction
    dtype: str | None
    batch_size: int
    batched: bool
    pad: int
    exclude: Any
    seed: int
    shuffle: bool
    covariance: bool
    threads: int
    expected: dict[str, Any] = field(default_factory=dict)  # facts of shards that exist

    def packed(self) -> bytes:
        """Return the job as bytes, with functions by value if cloudpickle is installed."""
        with suppress(ImportError):
            packed: bytes = import_module("cloudpickle").dumps(self)
            return packed
        return pickle.dumps(self)


def permutation(seed: int, number: int, count: int) -> Tensor:
    """Return a permutation of ``count`` rows. The same on every machine and with every version of numpy."""
    key = np.array([seed % (1 << 64), number], dtype=np.uint64)
    return torch.from_numpy(np.argsort(np.random.Philox(key=key).random_raw(count), kind="stable"))


@final
class _Content:
    """The rows of a unit, batch by batch."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.identity: list[tuple[Tensor, Tensor, Tensor]] = []
        self.stored: dict[str, list[Tensor]] = {}
        self.scales: dict[str, list[Tensor]] = {}
        self.statistics: dict[str, SiteStatistics] = {}
        self.counts = torch.zeros(len(unit.hashes), dtype=torch.int64)
        self.shapes: dict[str, dict[str, Any]] = {}


@final
class Worker:
    """Computes and commits units with one model."""

    def __init__(self, job: Job) -> None:
        self._job = job
        torch.set_num_threads(job.threads)  # results may depend on it in their last bits
        self._model = _made(job.model)
        self._folder = SharedFolder(job.out)
        self._plan: Plan = make_plan(self._model, [*job.sites], Full())
        self._dtype = dtype_of(job.dtype)
        config = getattr(unwrap(self._model), "config", None)
        self._selector = RowSelector(job.rows, job.exclude, getattr(config, "patch_size", None))
        self._device = next((each.device for each in self._model.parameters()), torch.device("cpu"))
        self._fingerprint = _fingerprint(self._model)
        self._buffers = Buffers()
        _compare(job.expected, "model", self._fingerprint)
        self._takes = accepted_names(self._model)

    def run(self, unit: Unit) -> dict[str, Any]:
        """Compute and commit a unit; return what was written."""
        return self.commit(self.compute(unit))

    @torch.no_grad()
    def compute(self, unit: Unit) -> _Content:
        """Run the model over a unit."""
        content = _Content(unit)
        with _evaluating(self._model):
            for inputs, documents in self._batches(unit):
                with capture(self._model, self._plan) as seen:
                    self._call(inputs)
                self._take(content, dict(seen), inputs, documents)
        return content

    def _batches(self, unit: Unit) -> Iterator[tuple[Inputs, Tensor]]:
        """Yield model inputs with the number within the unit of each of their documents."""
        if self._job.batched:
            first = 0
            for inputs in unit.items:
                count = batch_size_of(inputs)
                yield inputs, torch.arange(first, first + count)
                first += count
            return
        kept = [index for index, keep in enumerate(unit.kept) if keep]
        for start in range(0, len(kept), self._job.batch_size):
            chosen = kept[start : start + self._job.batch_size]
            yield collate([unit.items[index] for index in chosen], self._job.pad), torch.tensor(chosen)

    def _call(self, inputs: Inputs) -> None:
        moved = {
            name: value.to(self._device) if isinstance(value, Tensor) else value
            for name, value in inputs.items()
            if self._takes is None or isinstance(name, int) or name in self._takes
        }
        args = [moved[name] for name in sorted(name for name in moved if isinstance(name, int))]
        try:
            self._model(*args, **{name: value for name, value in moved.items() if isinstance(name, str)})
        except TypeError as error:
            raise PlanError(
                f"the model cannot be called with these inputs ({error}): give inputs=, a function that makes model "
                "inputs of an item"
            ) from error

    def _take(self, content: _Content, values: dict[str, Tensor], inputs: Inputs, documents: Tensor) -> None:
        rows, cut = self._selector.select(values, inputs)
        keep = torch.tensor(content.unit.kept)[documents][rows.document]
        chosen = None if bool(keep.all()) else keep
        within = documents[rows.document]
        identity = (within + content.unit.first, rows.position, rows.token)
        content.identity.append(tuple(each if chosen is None else each[chosen] for each in identity))  # type: ignore[arg-type]
        content.counts += torch.bincount(within[keep], minlength=len(content.counts))
        for site, found in cut.items():
            self._keep(content, site, found if chosen is None else found[chosen])
        if len(content.stored) != len(values) or any(site not in content.stored for site in values):
            raise PlanError(
                f"the sites changed between batches: {sorted(content.stored)} and {sorted(values)}"
            )

    def _keep(self, content: _Content, site: str, rows: Tensor) -> None:
        if not rows.is_floating_point():
            rows = rows.float()
        stored, scale = encode(rows, self._dtype)
        if site not in content.statistics:
            content.statistics[site] = SiteStatistics.empty(rows.shape[1], self._job.covariance)
            content.shapes[site] = {
                "width": rows.shape[1],
                "dtype": str(stored.dtype).removeprefix("torch."),
                "values": str(rows.dtype).removeprefix("torch."),
            }
        if rows.shape[1] != content.shapes[site]["width"]:
            raise PlanError(
                f"{site!r} has rows of width {content.shapes[site]['width']} and {rows.shape[1]}: rows of one site "
                "must have one width"
            )
        content.statistics[site].add(rows, stored, scale)
        content.stored.setdefault(site, []).append(stored)
        if scale is not None:
            content.scales.setdefault(site, []).append(scale)

    def commit(self, content: _Content) -> dict[str, Any]:
        """Write the shard of a unit. It appears whole, or not at all."""
        unit, job = content.unit, self._job
        if content.shapes:
            _compare(job.expected, "sites", content.shapes)
        columns = _columns(content.identity)
        count = len(columns["document"])
        order = permutation(job.seed, unit.number, count) if job.shuffle else None
        if order is not None:
            columns = {name: value[order] for name, value in columns.items()}
        for site in content.shapes:
            columns[site] = _ordered(content.stored.pop(site), order, self._buffers)
            if site in content.scales:
                columns[f"scale/{site}"] = _ordered(content.scales.pop(site), order, self._buffers)
        tokens = columns["token"]
        others = {
            **tensors_of(content.statistics),
            "documents/rows": torch.where(torch.tensor(unit.kept), content.counts, -1),
            "documents/hash": torch.tensor([list(each) for each in unit.hashes], dtype=torch.uint8),
            "token_counts": torch.bincount(tokens[tokens >= 0]),
        }
        facts = {
            "unit": unit.number,
            "first": unit.first,
            "rows": count,
            "sites": content.shapes,
            "model": self._fingerprint,
            **({"names": unit.names} if any(unit.names) else {}),
        }
        buffers = pack(columns, others, facts)
        self._folder.put(shard_name(unit.number), buffers)
        return {"rows": count, "documents": len(unit.hashes), "bytes": sum(len(each) for each in buffers)}


def _columns(identity: list[tuple[Tensor, Tensor, Tensor]]) -> dict[str, Tensor]:
    empty = torch.empty(0, dtype=torch.int64)
    joined = [torch.cat([empty, *(each[index] for each in identity)]) for index in range(3)]
    return {"document": joined[0], "position": joined[1].to(torch.int32), "token": joined[2].to(torch.int32)}


def _ordered(pieces: list[Tensor], order: Tensor | None, buffers: Buffers) -> Tensor:
    """Join pieces in a new order and release each piece when it is copied."""
    count = sum(len(piece) for piece in pieces)
    joined = buffers.empty((count, *pieces[0].shape[1:]), pieces[0].dtype)
    target = None if order is None else torch.empty_like(order)
    if target is not None and order is not None:
        target[order] = torch.arange(count)
    start = 0
    pieces.reverse()
    # Integers of the same size: fp8 has no indexing of its own.
    raw = joined.view(torch.int8) if joined.element_size() == 1 else joined
    while pieces:
        piece = pieces.pop()
        source = piece.view(torch.int8) if piece.element_size() == 1 else piece
        if target is None:
            raw[start : start + len(piece)] = source
        else:
            raw.index_copy_(0, target[start : start + len(piece)], source)
        start += len(piece)
    return joined


def _compare(expected: dict[str, Any], name: str, found: Any) -> None:
    if name in expected and expected[name] != found:
        raise SessionError(
            f"this folder was begun with another {name.removesuffix('s')}: {expected[name]}, now {found}. Use the same "
            "one, or another folder"
        )


def _made(maker: Any) -> nn.Module:
    model = maker() if callable(maker) and not isinstance(maker, nn.Module) else maker
    if not isinstance(model, nn.Module):
        raise FormError(
            f"a {type(model).__name__} is not a model: give an nn.Module, or a function that makes one"
        )
    return model


def _fingerprint(model: nn.Module) -> dict[str, Any]:
    """Return the class of a model and a checksum of its parameters and buffers."""
    check = 0
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        check = SharedFolder.checksum(f"{name}{value.dtype}{tuple(value.shape)}".encode(), check)
        if not value.is_meta and value.numel():
            check = SharedFolder.checksum(view_of(value.detach().cpu().contiguous()), check)
    return {"class": type(unwrap(model)).__qualname__, "parameters": f"{check:08x}"}


def accepted_names(model: nn.Module) -> frozenset[str] | None:
    """Return the named arguments of the forward; None if it names none."""
    parameters = inspect.signature(unwrap(model).forward).parameters.values()
    named = frozenset(
        each.name for each in parameters if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
    )
    return named or None


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
