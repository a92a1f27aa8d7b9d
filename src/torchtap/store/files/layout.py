"""Names in a run folder, and which files count when several hold the same thing.

    <run>/rank-00000/attempt-0000/manifest.json
                                  scalars-00000000-00000015_0-159.safetensors
                                  tensors-00000000-00000000_0-9.safetensors
                                  events-00000000-00000000.jsonl
                                  closed.json
                                  launch.json, where several ranks write

A segment's name says which flushes it holds (first and last number) and between which steps they lie.
Merging writes one segment for a range of flushes and then removes the ones it covers, so at every moment
the *widest* segments hold everything exactly once. Nothing inside a file ever names another file.

Pure: text in, text out.

Which launch of a training this process belongs to, as its launcher tells it.

The processes of one launch find each other at one address, and a restart counts up. ``key`` is made of what they all
must have in common; together with the number of processes it tells one launch from the next.
"""

from __future__ import annotations

import os
import re
import socket
import uuid
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, final

__all__ = [
    "CLOSED",
    "EVENT_RUN_ID",
    "FORMAT_NAME",
    "FORMAT_VERSION",
    "LAUNCH",
    "LAUNCHES",
    "LOCK",
    "MANIFEST",
    "RUN_ID",
    "TEMPORARY",
    "Kind",
    "PartOf",
    "SegmentName",
    "attempt_folder",
    "launch_digest",
    "launch_facts",
    "new_run_id",
    "node_ranks",
    "pack_name",
    "parse_attempt",
    "parse_pack",
    "parse_rank",
    "parse_segment",
    "rank_folder",
    "widest",
]


FORMAT_NAME = "torchtap-run"
FORMAT_VERSION = 2

MANIFEST = "manifest.json"
RUN_ID = "run_id"  # in every file: identifies the attempt that wrote it
EVENT_RUN_ID = "@run_id"  # in events, whose other names are the user's
CLOSED = "closed.json"
LAUNCH = "launch.json"
LAUNCHES = "launches.json"  # of a run with a fold over its ranks
LOCK = "writer.lock"
TEMPORARY = ".tmp-"  # what a file is called before it is whole

Kind = Literal["scalars", "tensors", "events"]
PartOf = tuple[int, int]  # rank and attempt

_PACK = re.compile(r"ranks-(\d{5,9})-(\d{5,9})-[0-9a-f]{8}\.pack", flags=re.ASCII)
_RANK = re.compile(r"rank-(\d{5,9})")
_ATTEMPT = re.compile(r"attempt-(\d{4,9})")
_SEGMENT = re.compile(
    r"(scalars|tensors)-(\d{8,12})-(\d{8,12})_(-?\d{1,19})-(-?\d{1,19})\.safetensors", flags=re.ASCII
)
_EVENTS = re.compile(r"events-(\d{8,12})-(\d{8,12})\.jsonl", flags=re.ASCII)


@final
@dataclass(frozen=True, slots=True, order=True)
class SegmentName:
    """What a segment's file name says."""

    kind: Kind
    first: int  # number of the first flush in it
    last: int
    low: int = 0  # smallest step in it
    high: int = 0

    @property
    def file(self) -> str:
        if self.kind == "events":
            return f"events-{self.first:08d}-{self.last:08d}.jsonl"
        return f"{self.kind}-{self.first:08d}-{self.last:08d}_{self.low}-{self.high}.safetensors"


def new_run_id() -> str:
    """Return a random id. It uses no random state of torch, numpy or Python."""
    return uuid.uuid4().hex[:16]


def rank_folder(rank: int) -> str:
    return f"rank-{rank:05d}"


def attempt_folder(attempt: int) -> str:
    return f"attempt-{attempt:04d}"


def parse_rank(name: str) -> int | None:
    found = _RANK.fullmatch(name)
    return int(found[1]) if found else None


def pack_name(first: int, last: int, launch: str) -> str:
    """Return the name of the pack of the ranks of a node; ``launch`` is `launch_digest`."""
    return f"ranks-{first:05d}-{last:05d}-{launch}.pack"


def parse_pack(name: str) -> tuple[int, int] | None:
    """Return the first and the last rank of a pack; None for every other name."""
    found = _PACK.fullmatch(name)
    return (int(found[1]), int(found[2])) if found else None


def parse_attempt(name: str) -> int | None:
    found = _ATTEMPT.fullmatch(name)
    return int(found[1]) if found else None


def parse_segment(file: str) -> SegmentName | None:
    """The parts of a segment's name; ``None`` for every other file."""
    if found := _SEGMENT.fullmatch(file):
        kind: Kind = "scalars" if found[1] == "scalars" else "tensors"
        name = SegmentName(kind, int(found[2]), int(found[3]), int(found[4]), int(found[5]))
    elif found := _EVENTS.fullmatch(file):
        name = SegmentName("events", int(found[1]), int(found[2]))
    else:
        return None
    return name if name.first <= name.last and name.low <= name.high else None


def widest(
    names: Iterable[SegmentName], usable: Callable[[SegmentName], bool] = lambda name: True
) -> tuple[list[SegmentName], list[tuple[int, int]]]:
    """Of segments of one kind: those that count, in order, and the ranges of flushes that none holds.

    ``usable`` is asked of each that would count: one that is damaged gives way to those that it covers. One pass.
    """
    kept: list[SegmentName] = []
    gaps: list[tuple[int, int]] = []
    expected = 0
    for name in sorted(names, key=lambda name: (name.first, -name.last)):
        if name.first < expected:
            continue  # covered by a wider one that was kept
        if not usable(name):
            continue
        if name.first > expected:
            gaps.append((expected, name.first - 1))
        kept.append(name)
        expected = name.last + 1
    return kept, gaps


_NUMBERS = {"restart": "TORCHELASTIC_RESTART_COUNT", "local_rank": "LOCAL_RANK", "group_rank": "GROUP_RANK"}
_COMMON = (
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_RESTART_COUNT",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def launch_facts() -> dict[str, str | int]:
    """Process, host, what tells the launch, and, under torchrun, its name and how often it was restarted."""
    facts: dict[str, str | int] = {"pid": os.getpid(), "host": socket.gethostname()}
    if name := os.environ.get("TORCHELASTIC_RUN_ID"):
        facts["run_id"] = name
    for fact, variable in _NUMBERS.items():
        if (text := os.environ.get(variable, "")).isdigit():
            facts[fact] = int(text)
    facts["key"] = "|".join(os.environ.get(variable, "") for variable in _COMMON)
    return facts


def launch_digest() -> str:
    """Return eight hex digits that the processes of one launch have in common."""
    return f"{zlib.crc32(str(launch_facts()['key']).encode()):08x}"


def node_ranks(rank: int) -> tuple[int, int] | None:
    """Return the first and the last rank on this node, if the launcher states them."""
    for local, size in (("LOCAL_RANK", "LOCAL_WORLD_SIZE"), ("SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")):
        here, count = os.environ.get(local, ""), os.environ.get(size, "")
        if here.isdigit() and count.isdigit() and int(here) < int(count) and int(here) <= rank:
            return rank - int(here), rank - int(here) + int(count) - 1
    return None
