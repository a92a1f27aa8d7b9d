"""``make torture``: every attack, bounded, with a table of what was tried at the end.

    python -m tests.torture [--seed N | --random] [--scale F] [--seconds S] [--only NAME ...]

``--scale 1`` is the whole: 20,000 damaged runs, 2,000 hostile names, 500 kills. A smaller number is a part of it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from tests.torture import limit
from tests.torture.damage import Tally, damaged_runs, memory_disk
from tests.torture.dying import killed_recordings
from tests.torture.faults import failing_disk
from tests.torture.lying_disk import lost_power
from tests.torture.names import hostile_names
from tests.torture.scale import many_sites, many_steps, reader_beside_writer, two_writers
from tests.torture.showing import check_every_way_out, record_names


def shown_names(count: int, seed: int) -> Tally:
    """Hostile names through every reader, terminal, export, page and report."""
    tally = Tally()
    names = hostile_names(count, seed)
    for start in range(0, count, 100):
        if limit.over():
            break
        part = names[start : start + 100]
        with tempfile.TemporaryDirectory(dir=memory_disk()) as name:
            record_names(Path(name) / "run", part)
            answers = check_every_way_out(Path(name) / "run", part, Path(name))
        tally["hostile names"] = tally.get("hostile names", 0) + len(part)
        tally["answers looked at"] = tally.get("answers looked at", 0) + answers
    return tally


def _damaged(count: int, seed: int) -> Tally:
    """Damaged runs, on two cores."""
    halves = [(count - count // 2, seed), (count // 2, seed + 1_000_003)]
    whole = Tally()
    with multiprocessing.get_context("fork").Pool(2) as pool:
        for part in pool.starmap(damaged_runs, [half for half in halves if half[0]]):
            for what, number in part.items():
                whole[what] = whole.get(what, 0) + number
    return whole


def attacks(scale: float, seed: int) -> dict[str, Callable[[], Tally]]:
    def times(number: float) -> int:
        return max(1, round(number * scale))

    return {
        "damage": lambda: _damaged(times(20_000), seed),
        "names": lambda: shown_names(times(2_000), seed),
        "kill": lambda: killed_recordings(times(500), seed),
        "power": lambda: lost_power(times(5_000), seed),
        "faults": lambda: failing_disk(times(1_000), seed),
        "live": lambda: reader_beside_writer(max(2.0, 120 * scale)),
        "writers": lambda: two_writers(max(1.0, 30 * scale)),
        "steps": lambda: many_steps(times(1_000_000)),
        "sites": lambda: many_sites(times(100_000)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="make torture", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--random", action="store_true", help="a seed of its own, which is printed")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument(
        "--seconds", type=float, help="of each attack at most; the table says how far it came"
    )
    parser.add_argument("--only", nargs="*", default=[])
    asked = parser.parse_args()
    seed = random.SystemRandom().randrange(10**9) if asked.random else asked.seed
    print(f"seed {seed}, scale {asked.scale}", flush=True)
    print("| attack | what was tried and seen | seconds | |\n| --- | --- | --- | --- |", flush=True)
    failed = 0
    for name, attack in attacks(asked.scale, seed).items():
        if asked.only and name not in asked.only:
            continue
        started = time.monotonic()
        limit.begin(asked.seconds)
        try:
            found, verdict = attack(), "held"
        except Exception:
            traceback.print_exc()
            found, verdict, failed = Tally(), "**did not hold**", failed + 1
        told = ", ".join(f"{number:,} {what}" for what, number in found.items())
        print(f"| {name} | {told} | {time.monotonic() - started:.0f} | {verdict} |", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
