"""Turn data into numbered documents, drop repeated ones, and cut the rest into units of work.

A *document* is one sequence, image or sample. An *item* is what the data yields: one document, or a ready batch of
several. A *unit* is a fixed range of items; it becomes one shard. It guarantees:

- the units depend on the data alone, not on the engine, on earlier interruptions or on which units are done;
- of equal documents only the first is kept, whatever unit it is in;
- if the data differ from those of an interrupted harvest, the harvest stops before it writes.

Not here: the model, rows, files.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from torchtap.datasets.shard import view_of
from torchtap.errors import PlanError, SessionError
from torchtap.sanitize import read_file

__all__ = ["Inputs", "Source", "Unit", "batch_size_of", "collate", "source_of", "units_of"]

# Model inputs: arguments by name, positional ones under their number.
Inputs = dict[str | int, Any]

_PADDING = {"attention_mask": 0, "decoder_attention_mask": 0, "special_tokens_mask": 1, "labels": -100}
_TOKENS = ("input_ids", "decoder_input_ids")
_BATCH_DIMENSIONS = {
    "input_ids": 2,
    "pixel_values": 4,
    "input_features": 3,
    "input_values": 2,
    "inputs_embeds": 3,
}
_LARGEST_TEXT = 1 << 30


@final
@dataclass(frozen=True, slots=True)
class Source:
    """Data as a sequence of items. ``take(start)`` iterates from item ``start`` on."""

    take: Callable[[int], Iterator[tuple[Inputs, str]]]
    batched: bool
    length: int | None
    indexed: bool  # True if starting later costs nothing
    first: int = 1  # documents of the first item


@final
@dataclass(slots=True)
class Unit:
    """A range of documents: ``first`` is the number of the first. ``kept`` is False for a repeated document."""

    number: int
    first: int
    items: list[Inputs] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    kept: list[bool] = field(default_factory=list)
    names: list[str] = field(default_factory=list)


def units_of(source: Source, per_unit: int, done: Mapping[int, list[bytes]]) -> Iterator[Unit]:
    """Yield the units that are not done, in order. ``done`` has the hashes of the documents of each unit that is."""
    seen: set[bytes] = set()
    document = number = 0
    while source.indexed and number in done:  # only the first item of a finished unit is loaded again
        known = done[number]
        inputs = next(source.take(number * per_unit), ({}, ""))[0]
        found = [*map(_digest, _documents(inputs, source.batched))] if inputs else [b""]
        _compare(document, found, known[: len(found)])
        seen.update(known)
        document += len(known)
        number += 1
    items = source.take(number * per_unit)
    while True:
        unit = Unit(number, document)
        for inputs, name in islice(items, per_unit):
            unit.items.append(inputs)
            for digest in map(_digest, _documents(inputs, source.batched)):
                unit.hashes.append(digest)
                unit.kept.append(digest not in seen)
                unit.names.append(name)
                seen.add(digest)
        if not unit.items:
            return
        if number in done:
            _compare(document, unit.hashes, done[number])
        else:
            yield unit
        document += len(unit.hashes)
        number += 1


def _compare(first: int, found: list[bytes], known: list[bytes]) -> None:
    if found != known:
        same = [new == old for new, old in zip(found, known, strict=False)]
        raise SessionError(
            f"document {first + [*same, False].index(False)} is not the one that is stored under this number: the data "
            "have changed or come in another order. Give the same data in the same order, or another folder"
        )


def _documents(inputs: Inputs, batched: bool) -> Iterator[Inputs]:
    if not batched:
        yield inputs
        return
    count = batch_size_of(inputs)
    for index in range(count):
        yield {
            name: value[index] if isinstance(value, Tensor) and value.dim() and len(value) == count else value
            for name, value in inputs.items()
        }


def _digest(document: Inputs) -> bytes:
    """Return a hash of a document's inputs. Padding does not change it."""
    mask: Any = document.get("attention_mask")
    digest = hashlib.blake2b(digest_size=16)
    padded = isinstance(mask, Tensor) and mask.dim() == 1
    for name in sorted(document, key=str):
        value = document[name]
        if padded and name == "attention_mask":
            continue
        if isinstance(value, Tensor):
            if padded and value.shape[:1] == mask.shape:
                value = value[mask.bool()]
            digest.update(f"{name}:{value.dtype}:{tuple(value.shape)}:".encode())
            digest.update(view_of(value.detach().cpu().contiguous()))
        else:
            digest.update(f"{name}={value!r};".encode())
    return digest.digest()


def batch_size_of(inputs: Inputs) -> int:
    """Return the number of documents in a batch."""
    named = [inputs[name] for name in _BATCH_DIMENSIONS if isinstance(inputs.get(name), Tensor)]
    tensors = named or [value for value in inputs.values() if isinstance(value, Tensor) and value.dim()]
    if not tensors:
        raise PlanError(f"the inputs {sorted(map(str, inputs))} have no tensor with a batch dimension")
    return len(tensors[0])


def collate(documents: Sequence[Inputs], pad: int) -> Inputs:
    """Make a batch of single documents. Sequences of different lengths are padded at their ends and masked."""
    tokens = [document["input_ids"] for document in documents if "input_ids" in document]
    if len({len(each) for each in tokens}) > 1 and "attention_mask" not in documents[0]:
        masks = [torch.ones(len(each), dtype=torch.int64) for each in tokens]
        documents = [{**each, "attention_mask": mask} for each, mask in zip(documents, masks, strict=True)]
    batch: Inputs = {}
    for name, first in documents[0].items():
        values = [document[name] for document in documents]
        filling = _PADDING.get(str(name), pad if name in _TOKENS else 0)
        batch[name] = _stack(values, name, filling) if isinstance(first, Tensor) else first
    return batch


def _stack(values: Sequence[Tensor], name: str | int, filling: int) -> Tensor:
    if len({value.shape for value in values}) == 1:
        return torch.stack(list(values))
    if len({value.shape[1:] for value in values}) > 1 or not values[0].dim():
        shapes = sorted({tuple(value.shape) for value in values})
        raise PlanError(
            f"inputs {name!r} of shapes {shapes} cannot be one batch: use batch_size=1, or give batches"
        )
    return pad_sequence([*values], batch_first=True, padding_value=filling)


# -- sources --------------------------------------------------------------------------------------------------


def source_of(
    data: Any,
    tokenizer: Callable[..., Any] | None = None,
    column: str = "text",
    context: int = 512,
    inputs: Callable[[Any], Any] | None = None,
    batched: bool | None = None,
    accepted: frozenset[str] | None = None,
) -> Source:
    """Return what `harvest` is given as items. ``accepted`` are the names that the model takes; None is all."""
    if isinstance(data, (str, os.PathLike)):
        files = _text_files(data)
        return _text_source(lambda: map(_text_of, files), tokenizer, context)

    def convert(item: Any) -> Inputs:
        return _inputs(inputs(item) if inputs is not None else item, accepted)

    first, data = _peek(data)
    text = first if isinstance(first, str) else first.get(column) if isinstance(first, Mapping) else None
    if inputs is None and (isinstance(first, str) or (isinstance(text, str) and tokenizer is not None)):
        texts = lambda: ((item if isinstance(item, str) else item[column], "") for item in data)  # noqa: E731
        return _text_source(texts, tokenizer, context)
    if batched is None:
        batched = _is_batched(data, convert(first))
    size = batch_size_of(convert(first)) if batched else 1
    length = len(data) if hasattr(data, "__len__") else None
    indexed = length is not None and hasattr(data, "__getitem__")

    def take(start: int) -> Iterator[tuple[Inputs, str]]:
        items = (
            (data[index] for index in range(start, length or 0))
            if indexed
            else islice(iter(data), start, None)
        )
        return ((convert(item), "") for item in items)

    return Source(take, batched, length, indexed, size)


def _text_source(texts: Callable[[], Iterable[tuple[str, str]]], tokenizer: Any, context: int) -> Source:
    if tokenizer is None:
        raise PlanError("the data are texts: give a tokenizer=")
    return Source(lambda start: islice(_chunks(texts(), tokenizer, context), start, None), False, None, False)


def _peek(data: Any) -> tuple[Any, Any]:
    """Return the first item, and the data with it."""
    if not isinstance(data, Iterable) and not hasattr(data, "__getitem__"):
        raise PlanError(
            f"data of type {type(data).__name__} cannot be harvested: give an iterable of model inputs, a dataset, "
            "a DataLoader, or a folder of texts with a tokenizer"
        )
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and len(data):
        return data[0], data
    iterator = iter(data)
    for first in iterator:
        return first, chain([first], iterator) if iterator is data else data
    raise PlanError("the data are empty")


def _is_batched(data: Any, first: Inputs) -> bool:
    """Datasets have single documents; loaders and plain iterables have what the model is called with."""
    for name, dimensions in _BATCH_DIMENSIONS.items():
        if isinstance(value := first.get(name), Tensor):
            return value.dim() == dimensions
    dataset = isinstance(data, torch.utils.data.Dataset) or type(data).__module__.startswith("datasets.")
    return not dataset


def _inputs(item: Any, accepted: frozenset[str] | None) -> Inputs:
    if isinstance(item, Tensor):
        return {0: item}
    if isinstance(item, (tuple, list)):
        if item and all(type(each) is int for each in item):
            return {"input_ids": torch.tensor(item)}
        return {number: _tensor(value) for number, value in enumerate(item)}
    if isinstance(item, Mapping):
        found: Inputs = {
            str(name): _tensor(value)
            for name, value in item.items()
            if name == "special_tokens_mask"
            or (str(name) in accepted if accepted is not None else not isinstance(value, str))
        }
        if not found:
            raise PlanError(
                f"none of {sorted(map(str, item))} is an argument of the model's forward: "
                "give inputs=, a function that makes model inputs of an item, or a tokenizer= for texts"
            )
        return found
    raise PlanError(
        f"an item of type {type(item).__name__} is not a model input: give inputs=, a function that makes a tensor, "
        "a tuple or a dict of it"
    )


def _tensor(value: Any) -> Any:
    return torch.as_tensor(value) if isinstance(value, list) or type(value).__module__ == "numpy" else value


def _text_files(folder: str | os.PathLike[str]) -> list[Path]:
    place = Path(folder)
    if not place.exists():
        raise PlanError(f"there is no folder of texts at {place}")
    found = [place] if place.is_file() else sorted(each for each in place.rglob("*") if each.is_file())
    files = [each for each in found if each.suffix in (".txt", ".md", ".text") or each == place]
    if not files:
        raise PlanError(f"{place} has no .txt, .text or .md file")
    return files


def _text_of(path: Path) -> tuple[str, str]:
    return read_file(path, _LARGEST_TEXT).decode("utf-8", "replace"), path.name


def _chunks(texts: Iterable[tuple[str, str]], tokenizer: Any, context: int) -> Iterator[tuple[Inputs, str]]:
    """Yield texts as documents of at most ``context`` tokens."""
    for text, name in texts:
        encoded = tokenizer(text)
        found = encoded["input_ids"] if isinstance(encoded, Mapping) else encoded
        tokens = torch.as_tensor(getattr(found, "ids", found), dtype=torch.int64).reshape(-1)
        for start in range(0, len(tokens), context):
            yield {"input_ids": tokens[start : start + context]}, f"{name}@{start}" if name else ""
