"""Group the attempts of all ranks into launches. A restart, or a world of another size, is another launch.

Each rank numbers its attempts by itself, so numbers do not identify a launch: a rank that joined late has fewer. The
facts that the processes of a launch share (`launch_facts`) do. If several launches share them, a rank that appears a
second time, in another process, begins the next launch. An attempt whose notes are damaged is placed between the other
attempts of its rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple, final

from torchtap.errors import RunError
from torchtap.store.files.folder import Folder
from torchtap.store.files.layout import LAUNCH, MANIFEST, attempt_folder, parse_attempt, rank_folder
from torchtap.store.format.checksum import JSON_LIMIT, is_sealed, load_json

__all__ = ["Launch", "find_launches"]


@final
@dataclass(slots=True)
class Launch:
    """Processes that trained together."""

    world: int  # how many there were; 0 if unknown
    began: float
    attempts: dict[int, int] = field(default_factory=dict)  # by rank

    @property
    def absent(self) -> list[int]:
        """Return the ranks that recorded nothing."""
        return [rank for rank in range(self.world) if rank not in self.attempts]


class _Part(NamedTuple):
    """The facts of an attempt that are known without reading its records."""

    rank: int
    attempt: int
    world: int
    key: str
    process: tuple[str, int]
    created: float
    noted: bool  # its notes could be read


def find_launches(root: Folder, ranks: Iterable[int]) -> list[Launch]:
    """Return the launches of a run, oldest first."""
    every = [part for rank in ranks for part in _parts(root.child(rank_folder(rank)), rank)]
    launches = _grouped([part for part in every if part.noted])
    for part in sorted(
        (part for part in every if not part.noted), key=lambda part: (part.attempt, part.rank)
    ):
        _place(part, launches)
    return launches


def _grouped(parts: list[_Part]) -> list[Launch]:
    """Return the launches of attempts whose notes can be read, oldest first."""
    parts.sort(key=lambda part: (part.created, part.attempt, part.rank))
    newest: dict[tuple[str, int], int] = {}  # by key and world: which launch with them is the newest
    turns: dict[tuple[str, int, int, int], int] = {}  # by launch and rank: how many parts its process wrote
    members: dict[tuple[str, int, int], dict[int, tuple[str, int]]] = {}  # of a launch: the ranks' processes
    found: dict[tuple[str, int, int, int], Launch] = {}
    for part in parts:
        same = part.key, part.world
        number = newest.setdefault(same, 0)
        processes = members.setdefault((*same, number), {})
        if processes.get(part.rank, part.process) != part.process:
            newest[same] = number = number + 1
            processes = members.setdefault((*same, number), {})
        processes[part.rank] = part.process
        # One process may watch several times, one after the other: its n-th part belongs to the others' n-th.
        whose = (*same, number, part.rank)
        turn = turns[whose] = turns.get(whose, -1) + 1
        launch = found.setdefault((*same, number, turn), Launch(part.world, part.created))
        launch.attempts[part.rank] = part.attempt
    return sorted(found.values(), key=lambda launch: (launch.began, max(launch.attempts.values())))


def _place(part: _Part, launches: list[Launch]) -> None:
    """Place an attempt without notes between its rank's earlier and later attempts.

    It joins the one launch there that lacks its rank, or else is a launch of its own.
    """
    own = {
        at: launch.attempts[part.rank] for at, launch in enumerate(launches) if part.rank in launch.attempts
    }
    after = max((at for at, attempt in own.items() if attempt < part.attempt), default=-1)
    before = min((at for at, attempt in own.items() if attempt > part.attempt), default=len(launches))
    room = [
        launch
        for launch in launches[after + 1 : before]
        if part.rank not in launch.attempts and (launch.world == 0 or part.rank < launch.world)
    ]
    if len(room) == 1:
        room[0].attempts[part.rank] = part.attempt
    else:
        began = launches[after].began if after >= 0 else 0.0
        launches.insert(before, Launch(0, began, {part.rank: part.attempt}))


def _parts(folder: Folder, rank: int) -> list[_Part]:
    attempts = sorted(number for name in folder.names() if (number := parse_attempt(name)) is not None)
    parts, latest = [], 0.0
    for attempt in attempts:
        part = _part(folder.child(attempt_folder(attempt)), rank, attempt)
        # Attempts of a rank follow their numbers, even if a document is damaged or a clock was set back.
        latest = max(latest, part.created)
        parts.append(part._replace(created=latest))
    return parts


def _part(folder: Folder, rank: int, attempt: int) -> _Part:
    facts = _object(folder, LAUNCH) or _object(folder, MANIFEST)
    world, launch = facts.get("world"), facts.get("launch")
    facts_of: dict[str, Any] = launch if isinstance(launch, dict) else {}
    process = str(facts_of.get("host")), facts_of.get("pid")
    return _Part(
        rank,
        attempt,
        world if type(world) is int and 0 < world < 2**20 else 0,
        str(facts_of.get("key", "")),
        (process[0], process[1] if type(process[1]) is int else -1),
        _seconds(facts.get("created")),
        bool(facts),
    )


def _object(folder: Folder, file: str) -> dict[str, Any]:
    with suppress(OSError, RunError, ValueError), folder.open(file) as opened:
        if opened.size <= JSON_LIMIT:
            text = opened.read(0, opened.size)
            is_sealed(text)  # raises where it is not what was written
            found = load_json(text)
            return found if isinstance(found, dict) else {}
    return {}


def _seconds(text: Any) -> float:
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return 0.0
