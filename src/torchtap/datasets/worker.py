"""Turn a unit of documents into a shard: run the model, select rows, permute them, write the file.

The same code runs in every engine. It guarantees:
- the bytes of a shard depend on the model, the settings and the unit only;
- the model is called under ``no_grad`` in evaluation mode, and left in the mode in which it was.

Memory: the rows of the unit being computed, those of the unit being written, and one site of it a second time. Rows
are permuted, encoded, summed, checked and written block by block, while a block is in the processor's cache.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from torchtap import Full, Plan, capture, make_plan
from torchtap.datasets.documents import Inputs, Unit, batch_size_of, collate
from torchtap.datasets.encoding import SCALED, SiteStatistics, decode, dtype_of, encode
from torchtap.datasets.rows import RowFunction, RowSelector
from torchtap.datasets.shard import Buffers, Column, block_rows, pack, shard_name, view_of
from torchtap.errors import FormError, PlanError, SessionError
from torchtap.spi import SharedFolder, unwrap

__all__ = ["Job", "Worker", "accepted_names", "permutation"]

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@final
@dataclass(frozen=True)
class Job:
    """Everything that a worker needs. It is pickled once for each process."""

    model: Any  # a module, or a function that makes one
    sites: tuple[Any, ...]
    out: str
    rows: str | RowFunction
    exclude: Any
    pad: int
    settings: dict[str, Any]  # of the folder
    expected: dict[str, Any]  # facts of shards that exist

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
        self.identity: list[tuple[Tensor, ...]] = []  # document, position and token of each row
        self.values: dict[str, list[Tensor]] = {}


@final
class Worker:
    """Computes and commits units with one model."""

    def __init__(self, job: Job) -> None:
        self._job = job
        torch.set_num_threads(job.settings["threads"])  # results may depend on it in their last bits
        self._model = _made(job.model)
        self._folder = SharedFolder(job.out)
        self._plan: Plan = make_plan(self._model, [*job.sites], Full())
        self._dtype = dtype_of(job.settings["dtype"])
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
        if self._job.settings["batched"]:
            first = 0
            for inputs in unit.items:
                count = batch_size_of(inputs)
                yield inputs, torch.arange(first, first + count)
                first += count
            return
        kept = [index for index, keep in enumerate(unit.kept) if keep]
        size = self._job.settings["batch_size"]
        for start in range(0, len(kept), size):
            chosen = kept[start : start + size]
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
        chosen = slice(None) if bool(keep.all()) else keep
        identity = (documents[rows.document] + content.unit.first, rows.position, rows.token)
        content.identity.append(tuple(each[chosen] for each in identity))
        if content.values and content.values.keys() != cut.keys():
            raise PlanError(f"the sites changed between batches: {[*content.values]} and {[*cut]}")
        for site, found in cut.items():
            pieces = content.values.setdefault(site, [])
            pieces.append((found if found.dtype in _FLOATS else found.float())[chosen])
            if pieces[-1].shape[1:] != pieces[0].shape[1:] or pieces[-1].dtype != pieces[0].dtype:
                raise PlanError(
                    f"{site!r} has rows of {pieces[0].shape[1]} × {pieces[0].dtype} and of {pieces[-1].shape[1]} × "
                    f"{pieces[-1].dtype}: rows of one site must have one width and one dtype"
                )

    @torch.no_grad()
    def commit(self, content: _Content) -> dict[str, Any]:
        """Write the shard of a unit. It appears whole, or not at all."""
        unit, job = content.unit, self._job
        sites = {site: self._facts(pieces[0]) for site, pieces in content.values.items()}
        if sites:
            _compare(job.expected, "sites", sites)
        empty = torch.empty(0, dtype=torch.int64)
        document, position, token = (
            torch.cat([empty, *(each[index] for each in content.identity)]) for index in range(3)
        )
        counts = torch.bincount(document - unit.first, minlength=len(unit.hashes))
        count = len(document)
        shuffle, seed = job.settings["shuffle"], job.settings["seed"]
        order = permutation(seed, unit.number, count) if shuffle else torch.arange(count)
        tensors: dict[str, Tensor | Column] = {
            "documents/rows": torch.where(torch.tensor(unit.kept), counts, -1),
            "token_counts": torch.bincount(token[token >= 0]),
            "document": document[order],
            "position": position[order].to(torch.int32),
            "token": token[order].to(torch.int32),
            "documents/hash": torch.tensor([list(each) for each in unit.hashes], dtype=torch.uint8),
        }
        block = block_rows(max((8, *(each["width"] * each["bytes"] for each in sites.values()))))
        for site, found in sites.items():
            tensors |= self._columns(site, found, content.values[site], order, block)
        facts = {
            "unit": unit.number,
            "first": unit.first,
            "rows": count,
            "sites": sites,
            "model": self._fingerprint,
            **({"names": unit.names} if any(unit.names) else {}),
        }
        size = self._folder.put(shard_name(unit.number), pack(tensors, facts, block))
        return {"rows": count, "documents": len(unit.hashes), "bytes": size}

    def _facts(self, rows: Tensor) -> dict[str, Any]:
        dtype = self._dtype or rows.dtype
        names = [str(each).removeprefix("torch.") for each in (dtype, rows.dtype)]
        return {"width": rows.shape[1], "bytes": dtype.itemsize, "dtype": names[0], "values": names[1]}

    def _columns(
        self, site: str, facts: dict[str, Any], pieces: list[Tensor], order: Tensor, block: int
    ) -> dict[str, Tensor | Column]:
        """Return the tensors of a site. The scales and the statistics are filled while its rows are written."""
        statistics = SiteStatistics.empty(facts["width"], self._job.settings["covariance"])
        scales = torch.empty(len(order) if facts["dtype"] in SCALED else 0)
        shape = (len(order), int(facts["width"]))

        def blocks() -> Iterator[Tensor]:
            joined = self._buffers.empty(shape, pieces[0].dtype)
            torch.cat(pieces, out=joined)
            pieces.clear()
            for start in range(0, len(order), block):
                rows = joined.index_select(0, order[start : start + block])
                stored, scale = encode(rows, self._dtype)
                statistics.add(rows, None if stored is rows else decode(stored, scale))
                if scale is not None:
                    scales[start : start + block] = scale
                yield stored

        found: dict[str, Tensor | Column] = {site: Column(self._dtype or pieces[0].dtype, shape, blocks())}
        if len(scales):
            found[f"scale/{site}"] = scales
        return {**found, **statistics.tensors(site)}


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
