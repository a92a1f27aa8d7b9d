"""The parts of torchtap that are compiled: which of them are missing here, and one warning where they should not be.

Everything works without them, by torch's and zlib's own functions, so that nobody would notice but by the clock.
"""

from __future__ import annotations

import platform
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from torchtap.reduce import kernel
from torchtap.session.consumers import warn
from torchtap.store.format import checksum

__all__ = ["missing_parts", "warn_of_missing_parts"]

_PROCESSORS = ("x86_64", "amd64", "aarch64", "arm64")
_PACKAGE = Path(__file__).parent
_told = False


def missing_parts() -> dict[str, str]:
    """Each compiled part that is not here, or is of another version, with what stands in for it."""
    found = {
        "statistics": "" if kernel.native is not None else "computed by torch, more slowly",
        "distances": "" if _is_built("comparison", "_distance") else "computed by torch, more slowly",
        "checksums": "" if checksum.copy_bytes is not None else "computed by zlib after the copy",
    }
    return {part: instead for part, instead in found.items() if instead}


def _is_built(room: str, name: str) -> bool:
    """Whether a room has a compiled file. Nothing is loaded for it, the room included."""
    return PathFinder.find_spec(name, [str(_PACKAGE / room)]) is not None


def warn_of_missing_parts() -> None:
    """Warn once in a process, on a platform for which they can be had."""
    global _told
    if _told:
        return
    _told = True
    has_wheels = sys.platform in ("linux", "darwin") and platform.machine().lower() in _PROCESSORS
    if has_wheels and (missing := missing_parts()):
        warn(
            f"torchtap: its compiled parts are missing ({', '.join(missing)}): watching costs several times as much. "
            "Install a wheel for this platform, or install where there is a C compiler; `torchtap selftest` lists them"
        )
