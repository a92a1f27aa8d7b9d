"""Many ranks: what a watch costs each of two under DDP beside one process, and how a thousand are read as one run.

The cost is the share of a step's own CPU time inside torchtap (`benchmarks.share`), of the same model and batch: first
in a process by itself, then in the same process as one of two, so that both meet the same machine. The thousand ranks
are made up: each writes one statistic of 1,000 sites, half of them parts of a batch and half of them replicas, at 1,000
steps, through the writer that a training has.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from benchmarks.models import gpt_training, mlp_training
from benchmarks.share import share
from benchmarks.steps import EVERYTHING, OUTPUTS
from torchtap.diagnosis.diagnose import diagnose
from torchtap.ranks.packed import fold_in_place
from torchtap.sinks.export import export_run
from torchtap.store.files import system
from torchtap.store.read.reader import Run, open_run
from torchtap.store.record import ScalarBlock, StepRecord
from torchtap.store.write.writer import RunWriter
from torchtap.viewer.charts import ranks_at, ranks_of
from torchtap.viewer.open_run import OpenRun

__all__ = ["run", "write_world"]

_STATISTIC = "l1"


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Rows for the tables."""
    packed = (
        [(256, 200, 1000)]
        if quick
        else [(16, 200, 1000), (256, 200, 1000), (1024, 200, 1000), (10_000, 200, 1000)]
    )
    rows = [row for size in packed for row in _packed_world(*size)]
    return [*_costs(quick), *_world(64 if quick else 1024, 1000, 1000), *rows]


# -- what it costs a rank -------------------------------------------------------------------------------------


def _costs(quick: bool) -> list[dict[str, Any]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_measure, (port, folder, quick), nprocs=2)  # type: ignore[no-untyped-call]
        found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in (0, 1)]
    rows = []
    for number, (case, *_) in enumerate(found[0]):
        alone = max((each[number][1] for each in found), key=lambda quartiles: quartiles[1])
        ranks = [each[number][2] for each in found]
        inside = " and ".join(f"{each[number][4] * 1e3:.3g}" for each in found)
        rows.append(
            {
                "case": case,
                "measured": f"{' and '.join(map(_shown, ranks))} on two ranks, {_shown(alone)} alone; "
                f"inside torchtap {inside} ms a step, {found[0][number][3] * 1e3:.3g} alone",
                "bar": "≤ alone, or quartiles that meet",
                "holds": all(low <= alone[2] for low, _, _ in ranks),
            }
        )
    return rows


def _shown(quartiles: Sequence[float]) -> str:
    low, middle, high = quartiles
    return f"{middle:.4f} [{low:.4f}–{high:.4f}]"


def _measure(rank: int, port: int, folder: str, quick: bool) -> None:
    """The ratios of one process by itself, then as one of two, as quartiles, and seconds inside."""
    torch.set_num_threads(1)
    cases = [
        ("MLP 50 × 256, outputs", mlp_training, OUTPUTS, 40),
        ("MLP 50 × 256, everything", mlp_training, EVERYTHING, 40),
    ]
    if not quick:
        cases.append(("GPT 12 × 384, everything", gpt_training, EVERYTHING, 5))
    alone = [share(make(), taps, steps) for _, make, taps, steps in cases]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    rows = []
    for (case, make, taps, steps), (seconds, ratios) in zip(cases, alone, strict=True):
        training = make()
        inside, among = share(training, taps, steps, DistributedDataParallel(training.model))
        rows.append((f"{case}, under DDP", ratios, among, seconds, inside))
    (Path(folder) / f"{rank}.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


# -- a thousand ranks -----------------------------------------------------------------------------------------


def write_world(folder: Path, ranks: int, sites: int, steps: int, node: int | None = None) -> None:
    """Write what so many ranks would leave behind; with ``node`` ranks on each node, in packs."""
    half = sites // 2
    outputs = [f"blocks.{number}:output" for number in range(half)]
    names = (*outputs, *(f"blocks.{number}:param.weight" for number in range(sites - half)))
    values = np.random.default_rng(0).random((sites, 1))
    for rank in range(ranks):
        places = [{"axes": [["dp", ranks, rank, share]]} for share in ("batch(0)", "replicate")]
        numbers = {site: int(number >= half) for number, site in enumerate(names)}
        first = rank // node * node if node else 0
        pack = (first, first + node - 1) if node else None
        with RunWriter(folder, manifest={}, rank=rank, world=ranks, flush_seconds=1e9, pack=pack) as writer:
            writer.event("placements", step=0, phase="train", placements=places, sites=numbers)
            for step in range(steps):
                block = ScalarBlock(names, (_STATISTIC,), values + step)
                writer.write(StepRecord(step, None, None, "train", 1e9 + step, (block,), ()))


def _packed_world(ranks: int, sites: int, steps: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "run"
        with patch.object(os, "fsync", lambda _: None):
            write_world(place, ranks, sites, steps, node=8)
            fold_in_place(open_run(place))
        return _read(
            place, f"{ranks:,} ranks × {sites:,} sites × {steps:,} steps, in packs of 8, with the fold"
        )


def _world(ranks: int, sites: int, steps: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "run"
        with patch.object(os, "fsync", lambda _: None):  # what a disk takes is not measured here
            write_world(place, ranks, sites, steps)
        rows = _read(place, f"{ranks:,} ranks × {sites:,} sites × {steps:,} steps")
        packed = export_run(open_run(place), "packed", Path(folder) / "packed")
        return [*rows, *_read(packed, "the same, packed")]


def _read(place: Path, what: str) -> list[dict[str, Any]]:
    """Time each task, and count the files that it opens, its reads and the bytes that it reads."""
    counted = {"opens": 0, "reads": 0, "bytes": 0}
    real_open, real_read = system.open_below, system.read_at

    def counting_open(*where: Any) -> int:
        counted["opens"] += 1
        return real_open(*where)

    def counting_read(descriptor: int, buffer: memoryview, offset: int) -> int:
        found = real_read(descriptor, buffer, offset)
        counted["reads"] += 1
        counted["bytes"] += found
        return found

    with patch.object(system, "open_below", counting_open), patch.object(system, "read_at", counting_read):
        files = [file for file in place.rglob("*") if file.is_file()]
        size = sum(file.stat().st_size for file in files)
        what = f"{what} ({len(files):,} files, {size / 1e9:.2g} GB)"
        opened: list[Run] = []
        shown: list[OpenRun] = []
        tasks: list[tuple[str, Callable[[], object]]] = [
            ("open", lambda: opened.append(open_run(place))),
            ("its sites, from every rank", lambda: opened[0].sites()),
            ("one series over all ranks", lambda: opened[0].series("blocks.3:output", _STATISTIC)),
            ("another one", lambda: opened[0].series("blocks.4:output", _STATISTIC)),
            ("what is missing", lambda: opened[0].problems),
            (
                "map of a site: ranks × steps",
                lambda: ranks_of(_once(shown, opened), "blocks.3:output", _STATISTIC),
            ),
            (
                "map of a step: sites × ranks",
                lambda: ranks_at(_once(shown, opened), _STATISTIC, "output", None),
            ),
            ("every rule, and ranks beside each other", lambda: diagnose(opened[0])),
        ]
        rows = []
        for number, (name, work) in enumerate(tasks):
            counted.update(opens=0, reads=0, bytes=0)
            cpu, begin = time.process_time(), time.perf_counter()
            work()
            measured = f"{time.perf_counter() - begin:.3g} s ({time.process_time() - cpu:.3g} s of CPU)"
            measured += (
                f"; {counted['opens']:,} opens, {counted['reads']:,} reads, {counted['bytes']:,} bytes"
            )
            rows.append(
                {
                    "case": f"{what}: {name}" if not number else name,
                    "measured": measured,
                    "bar": "",
                    "holds": "",
                }
            )
        return rows


def _once(shown: list[OpenRun], opened: list[Run]) -> OpenRun:
    if not shown:
        shown.append(OpenRun(opened[0], "world"))
    return shown[0]
