"""Locate the folder that starts zero-code recording: with it on ``PYTHONPATH``, a process runs `sitecustomize`."""

from __future__ import annotations

import os

__all__ = ["FOLDER", "injected_path"]

FOLDER = os.path.dirname(os.path.abspath(__file__))


def injected_path(present: str | None) -> str:
    """Return a ``PYTHONPATH`` that begins with the folder, followed by the present one."""
    # An empty entry stays: it is the current folder.
    others = (
        [each for each in present.split(os.pathsep) if os.path.abspath(each) != FOLDER] if present else []
    )
    return os.pathsep.join([FOLDER, *others])
