"""Runs in every state that a view must tell apart: healthy, NaN midway, gaps, a rank missing, empty.

The numbers are known: each site's rms at step ``n`` is ``(row + 1) * (n + 1)`` unless the state says otherwise.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from torchtap.placement import Axis, Placement, Share
from torchtap.store.record import ScalarBlock, StepRecord
from torchtap.store.write.writer import RunWriter

__all__ = ["BREAKS", "GAP", "SITES", "STATES", "STEPS", "write_states"]

SITES = ("stem:output", "trunk:output", "head:output", "stem:param.weight")
STATES = ("healthy", "nan", "gaps", "ranks", "empty")
STEPS = 40
BREAKS = 25  # of the state nan: everything is NaN from here on
GAP = (12, 30)  # of the state gaps: steps between these two were not recorded
_COLUMNS = ("rms", "std", "count", "nans", "infs")


def write_states(folder: Path) -> Path:
    """Write a run for each state into ``folder``; return it."""
    for number, state in enumerate(STATES):
        ranks = (0, 1, 3) if state == "ranks" else (0,)
        for rank in ranks:
            _write(
                folder / state,
                state,
                rank,
                4 if state == "ranks" else 1,
                {"lr": 10.0**-number, "state": state},
            )
    return folder


def _write(folder: Path, state: str, rank: int, world: int, labels: dict[str, Any]) -> None:
    manifest = {"created": "2026-01-02T03:04:05+00:00", "labels": labels}
    with RunWriter(folder, manifest=manifest, rank=rank, world=world) as writer:
        if world > 1:
            same = Placement((Axis("dp", world, rank, Share("replicate")),)).to_json()
            writer.event(
                "placements", step=0, phase="train", placements=[same], sites=dict.fromkeys(SITES, 0)
            )
        for step in range(STEPS if state != "empty" else 0):
            if state == "gaps" and GAP[0] < step < GAP[1]:
                continue
            writer.write(_record(state, rank, step))


def _record(state: str, rank: int, step: int) -> StepRecord:
    broken = (state == "nan" and step >= BREAKS) or (state == "ranks" and rank == 3 and step >= BREAKS)
    rows = [[(row + 1.0) * (step + 1), row + 1.0, 8.0, 0.0, 0.0] for row in range(len(SITES))]
    if broken:  # as recorded of tensors of nothing but NaN: no moments, no norm
        rows = [[math.nan, math.nan, 8.0, 8.0, 0.0] for _ in SITES]
    loss = math.nan if broken else 5.0 * math.exp(-step / 10)
    accuracy = math.inf if broken else step / STEPS
    blocks = [
        ScalarBlock(SITES, _COLUMNS, np.array(rows)),
        ScalarBlock((":value.loss", ":value.accuracy"), ("value",), np.array([[loss], [accuracy]])),
    ]
    return StepRecord(step, step // 10, None, "train", 1000.0 + 2.0 * step, tuple(blocks), ())
