"""Folders of activations beside the runs that a viewer shows: size, rows, sites and progress of each."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from torchtap import open_activations
from torchtap.errors import TorchtapError

__all__ = ["list_activations"]

_DEPTH = 3
_MOST = 200


def list_activations(folders: Sequence[Path]) -> list[dict[str, object]]:
    """Return one line for each folder of activations below the given ones; links are not followed."""
    found: list[dict[str, object]] = []
    for root in folders:
        for place, inner, names in os.walk(root):
            if "activations.json" in names:
                inner.clear()
                found.append(_line(Path(place), root))
            elif len(Path(place).relative_to(root).parts) >= _DEPTH:
                inner.clear()
            if len(found) >= _MOST:
                return found
    return found


def _line(place: Path, root: Path) -> dict[str, object]:
    name = place.name if place == root else place.relative_to(root).as_posix()
    try:
        acts = open_activations(place)
    except (TorchtapError, OSError) as error:
        return {"name": name, "problem": str(error)[:400]}
    state = "complete" if acts.complete else "writing" if acts.writing else "interrupted"
    return {"name": name, "rows": len(acts), "size": acts.nbytes, "shards": len(acts.shards), "sites": acts.sites,
            "progress": acts.progress, "status": state}  # fmt: skip
