"""What a run says of itself before anything is recorded: its sites, its plan, the model and the machine."""

from __future__ import annotations

import datetime
import errno
import gc
import hashlib
import os
import tempfile
from collections.abc import Mapping
from typing import IO, final
from weakref import ref

from torch import nn

from torchtap.errors import SessionError
from torchtap.plan.plan import Plan
from torchtap.session.model_tree import model_tree, source_of

__all__ = ["Claim", "run_manifest"]

_claims: dict[tuple[str, int], ref[Claim]] = {}


@final
class Claim:
    """Hold a run folder for one recording of a rank, until it is closed or the process ends. A consumer of no records.

    Two recordings at once would hide each other's steps. Raises `SessionError` for the second, also of another process
    on this machine.
    """

    name = "claim"

    def __init__(self, folder: str, rank: int) -> None:
        self._key = os.path.realpath(folder), rank
        held = _claims.get(self._key)
        if held is not None and held() is not None:
            del held
            gc.collect()  # a watch that was forgotten, not closed
            held = _claims.get(self._key)
        if held is not None and held() is not None:
            raise SessionError(
                f"{folder} is being recorded by another watch of this process: close it first, or give each watch a "
                "folder of its own"
            )
        self._file: IO[str] | None = None
        self._lock(folder, rank)
        _claims[self._key] = ref(self)

    def _lock(self, folder: str, rank: int) -> None:
        try:
            import fcntl
        except ImportError:  # Windows
            return
        name = hashlib.sha256(repr(self._key).encode()).hexdigest()[:24]
        try:
            self._file = open(os.path.join(tempfile.gettempdir(), f"torchtap-{name}.lock"), "a+")  # noqa: SIM115
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            opened = self._file is not None  # else there is no place for a lock
            self.close()
            if opened and error.errno in (errno.EACCES, errno.EAGAIN):
                raise SessionError(
                    f"{folder} is being recorded by another process as rank {rank}: give each process a folder of its "
                    "own, or set RANK and WORLD_SIZE"
                ) from None

    def __del__(self) -> None:
        file = getattr(self, "_file", None)
        if file is not None:
            file.close()

    def write(self, record: object) -> None:
        """Nothing is kept here."""

    def close(self) -> None:
        """Let others record into the folder."""
        if _claims.get(self._key, ref(self))() is self:
            _claims.pop(self._key, None)
        file, self._file = self._file, None
        if file is not None:
            file.close()


def run_manifest(
    tree: nn.Module, plan: Plan, described: Mapping[str, object], labels: Mapping[str, object]
) -> dict[str, object]:
    """A run's manifest. ``described`` is the machine, as `environment` tells it; ``labels`` are the user's."""
    return {
        "created": datetime.datetime.now(datetime.UTC).isoformat(),
        "sites": [
            {
                "name": port.site.name,
                "module": port.site.path,
                "kind": port.site.kind,
                "class": type(port.site.module).__name__,
                "source": source_of(port.site.module) if port.site.module is not None else None,
            }
            for port in plan.ports
        ],
        "aliases": plan.aliases,
        "other_names": plan.other_names,
        "plan": plan.spec(),
        "model": model_tree(tree),
        "environment": described,
        "labels": labels,
    }
