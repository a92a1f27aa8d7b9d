"""``reshuffle``: a second pass that permutes all rows of a folder, with the memory of one shard.

Each shard's rows are in a random order already. So a random cut of each shard into as many slices as there are new
shards, and a permutation of each new shard in memory, is a permutation of all rows. Every row is read once, in
slices, and written once. An interrupted pass goes on after its finished shards.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from torchtap.datasets.encoding import SCALED
from torchtap.datasets.harvest import writing
from torchtap.datasets.reader import Activations, open_activations
from torchtap.datasets.shard import IDENTITY, pack, shard_name
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
    settings = {**acts.settings, "seed": seed, "reshuffled": True, "source": acts.path}
    settings |= {"items": count, "items_per_shard": 1}
    cuts = [_cut(seed, number, rows, count) + start for number, (start, rows, _) in enumerate(acts.spans())]
    with writing(out, settings, {}) as mixed:
        for number in range(count):
            if shard_name(number) not in mixed.shards:
                ranges = [(int(cut[number]), int(cut[number + 1])) for cut in cuts]
                _write_shard(acts, folder, [each for each in ranges if each[0] < each[1]], seed, number)
            if progress is not None:
                progress(number + 1, count)
    return Activations(mixed.path)


def _cut(seed: int, number: int, rows: int, count: int) -> np.ndarray[Any, Any]:
    """Cut rows at random: each row goes to each slice with the same probability."""
    key = np.array([seed % (1 << 64), number + (1 << 62)], dtype=np.uint64)
    targets = np.random.Philox(key=key).random_raw(rows) % np.uint64(count)
    sizes = np.bincount(targets.astype(np.int64), minlength=count)
    return np.concatenate([[0], np.cumsum(sizes)])


def _write_shard(
    acts: Activations, folder: SharedFolder, ranges: list[tuple[int, int]], seed: int, number: int
) -> None:
    first = next(shard for shard in acts.opened() if shard.sites)
    rows = sum(stop - start for start, stop in ranges)
    order = permutation(seed, number + (1 << 61), rows)
    scaled = [f"scale/{site}" for site, each in first.sites.items() if each["dtype"] in SCALED]
    columns = {}
    for column in (*IDENTITY, *first.sites, *scaled):
        found = acts.gather(ranges, [column], decoded=False)[column]
        raw = found.view(torch.int8) if found.element_size() == 1 else found  # fp8 cannot be indexed
        columns[column] = raw[order].view(found.dtype)
        del found, raw
    if number == 0:  # sums of all rows: it does not matter where they are
        columns["token_counts"] = acts.token_counts
        for site, each in acts.statistics.items():
            columns |= each.tensors(site)
    facts = {"unit": number, "first": 0, "rows": rows, "sites": first.sites, "model": first.facts["model"]}
    folder.put(shard_name(number), pack(columns, facts, first.block))
