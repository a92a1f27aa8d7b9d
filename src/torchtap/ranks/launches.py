"""Which attempts of which ranks were one launch: a restart, or a world of another size, is another.

Each rank numbers its attempts for itself, so numbers alone do not tell: a rank that came late, or that was not there
for a while, has fewer. What the processes of a launch have in common (`launch_facts`) tells. Where that is the same for
several launches, a rank that appears a second time, in another process, begins the next one. An attempt whose notes are
damaged goes where its rank's other attempts leave room for it: no attempt may come before an earlier one of its rank.
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
from torchtap.store.format.seal import JSON_LIMIT, is_sealed, load_json

__all__ = ["Launch", "find_launches"]


@final
@dataclass(slots=True)
class Launch:
    """Processes that trained together."""

    world: int  # how many there were; 0 where nobody says
    began: float
    attempts: dict[int, list[int]] = field(default_factory=dict)  # by rank

    @property
    def absent(self) -> list[int]:
        """The ranks that recorded nothing."""
        return [rank for rank in range(self.world) if rank not in self.attempts]


class _Part(NamedTuple):
    """What is known of an attempt without reading it."""

    rank: int
    attempt: int
    world: int
    key: str
    process: tuple[str, int]
    created: float
    noted: bool  # whether its notes could be read


def find_launches(root: Folder, ranks: Iterable[int]) -> list[Launch]:
    """The launches of a run, oldest first."""
    every = [part for rank in ranks for part in _parts(root.child(rank_folder(rank)), rank)]
    launches = _grouped([part for part in every if part.noted])
    for part in sorted(
        (part for part in every if not part.noted), key=lambda part: (part.attempt, part.rank)
    ):
        _place(part, launches)
    return launches


def _grouped(parts: list[_Part]) -> list[Launch]:
    """The launches of attempts whose notes can be read, oldest first."""
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
        launch.attempts.setdefault(part.rank, []).append(part.attempt)
    return sorted(found.values(), key=lambda launch: (launch.began, max(map(max, launch.attempts.values()))))


def _place(part: _Part, launches: list[Launch]) -> None:
    """Put an attempt of which nothing is noted behind its rank's earlier attempts and before its later ones: into the
    one launch there that lacks its rank, else into a launch of its own."""
    own = {
        at: launch.attempts[part.rank] for at, launch in enumerate(launches) if part.rank in launch.attempts
    }
    after = max((at for at, attempts in own.items() if min(attempts) < part.attempt), default=-1)
    before = min((at for at, attempts in own.items() if max(attempts) > part.attempt), default=len(launches))
    room = [
        launch
        for launch in launches[after + 1 : before]
        if part.rank not in launch.attempts and (launch.world == 0 or part.rank < launch.world)
    ]
    if len(room) == 1:
        room[0].attempts[part.rank] = [part.attempt]
    else:
        began = launches[after].began if after >= 0 else 0.0
        launches.insert(before, Launch(0, began, {part.rank: [part.attempt]}))


def _parts(folder: Folder, rank: int) -> list[_Part]:
    attempts = sorted(number for name in folder.names() if (number := parse_attempt(name)) is not None)
    parts, latest = [], 0.0
    for attempt in attempts:
        part = _part(folder.child(attempt_folder(attempt)), rank, attempt)
        # Attempts of a rank came in the order of their numbers, also where a document is damaged or a clock went back.
        latest = max(latest, part.created)
        parts.append(part._replace(created=latest))
    return parts


def _part(folder: Folder, rank: int, attempt: int) -> _Part:
    facts = _object(folder, LAUNCH) or _object(folder, MANIFEST)
    world, launch = facts.get("world"), facts.get("launch")
    told: dict[str, Any] = launch if isinstance(launch, dict) else {}
    process = str(told.get("host")), told.get("pid")
    return _Part(
        rank,
        attempt,
        world if type(world) is int and 0 < world < 2**20 else 0,
        str(told.get("key", "")),
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
