"""``reshuffle``: a second pass that permutes all rows of a folder, with the memory of one shard.

Each shard's rows are in a random order already. So a random cut of each shard into as many slices as there are new
shards, and a permutation of each new shard in memory, is a permutation of all rows. Every row is read once, in
slices, and written once. An interrupted pass goes on after its finished shards.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from torchtap.datasets.encoding import SCALED, tensors_of
from torchtap.datasets.harvest import write_end
from torchtap.datasets.reader import Activations, open_activations
from torchtap.datasets.shard import FORMAT, IDENTITY, INDEX, MANIFEST, Shard, pack, read_json, shard_name
from torchtap.datasets.worker import permutation
from torchtap.errors import OutputError, SessionError
from torchtap.spi import SharedFolder

__all__ = ["reshuffle"]


def reshuffle(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    seed: int = 0,
    shards: int | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Activations:
    """Write the rows of a complete folder into another one in a random order of all rows.

    shards: number of the new shards; None is as many as there are. Memory is about two of them.
    progress: called with the number of finished shards and of all.
    """
    acts = open_activations(source)
    if not acts.complete:
        raise SessionError(f"{acts.path} is not complete; harvest it to its end first")
    if not acts.settings["shuffle"]:
        raise SessionError(
            f"{acts.path} was harvested with shuffle=False: its shards have no random order to start from"
        )
    count = shards or max(1, len(acts.shards))
    folder = SharedFolder(out)
    if folder.path == acts.path:
        raise OutputError("reshuffle writes into another folder than it reads from")
    settings = {**acts.settings, "format": FORMAT, "seed": seed, "reshuffled": True, "source": acts.path}
    settings |= {"items": count, "items_per_shard": 1}
    folder.make()
    folder.lock()
    try:
        _begin(folder, settings)
        if INDEX not in folder.names():
            _write(acts, folder, seed, count, progress)
    finally:
        folder.unlock()
    return open_activations(folder.path)


def _begin(folder: SharedFolder, settings: dict[str, Any]) -> None:
    names = folder.names()
    if MANIFEST not in names and names:
        raise OutputError(f"{folder.path} has other files; give an empty folder")
    if MANIFEST not in names:
        folder.put(MANIFEST, [json.dumps(settings, indent=1).encode()])
    elif read_json(folder, MANIFEST) != settings:
        raise SessionError(f"{folder.path} was begun with another source, seed or number of shards")


def _write(
    acts: Activations,
    folder: SharedFolder,
    seed: int,
    count: int,
    progress: Callable[[int, int], object] | None,
) -> None:
    cuts = [_cut(seed, number, rows, count) + start for number, (start, rows, _) in enumerate(acts.spans())]
    listed, done = [], set(folder.names())
    facts = Shard(SharedFolder(acts.path), acts.shards[0]).facts
    for number in range(count):
        name = shard_name(number)
        if name not in done:
            ranges = [(int(cut[number]), int(cut[number + 1])) for cut in cuts]
            _write_shard(acts, folder, [each for each in ranges if each[0] < each[1]], (seed, number), facts)
        listed.append(Shard(folder, name))
        listed[-1].close()
        if progress is not None:
            progress(number + 1, count)
    write_end(folder, listed, tensors_of(acts.statistics), acts.token_counts)


def _cut(seed: int, number: int, rows: int, count: int) -> np.ndarray[Any, Any]:
    """Cut rows at random: each row goes to each slice with the same probability."""
    key = np.array([seed % (1 << 64), number + (1 << 62)], dtype=np.uint64)
    targets = np.random.Philox(key=key).random_raw(rows) % np.uint64(count)
    sizes = np.bincount(targets.astype(np.int64), minlength=count)
    return np.concatenate([[0], np.cumsum(sizes)])


def _write_shard(
    acts: Activations,
    folder: SharedFolder,
    ranges: list[tuple[int, int]],
    key: tuple[int, int],
    facts: dict[str, Any],
) -> None:
    rows = sum(stop - start for start, stop in ranges)
    order = permutation(key[0], key[1] + (1 << 61), rows)
    columns = {}
    scaled = [f"scale/{site}" for site, each in facts["sites"].items() if each["dtype"] in SCALED]
    for column in (*IDENTITY, *facts["sites"], *scaled):
        found = acts.stored(ranges, column)
        raw = found.view(torch.int8) if found.element_size() == 1 else found
        columns[column] = raw[order].view(found.dtype)
        del found, raw
    kept = {"unit": key[1], "first": 0, "rows": rows, "sites": facts["sites"], "model": facts["model"]}
    folder.put(shard_name(key[1]), pack(columns, {}, kept))
