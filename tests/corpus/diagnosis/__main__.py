"""``python -m tests.corpus.diagnosis``: the table of faults, and the false alarms over healthy trainings.

python -m tests.corpus.diagnosis                   every fault and control, three seeds
python -m tests.corpus.diagnosis --compiled        the same under torch.compile (backend aot_eager)
python -m tests.corpus.diagnosis --unlisted        faults beside those of the list
python -m tests.corpus.diagnosis --seeds 1 A1 B4   some of them
python -m tests.corpus.diagnosis --families open       faults by family: those that rules are written on
python -m tests.corpus.diagnosis --families kept-out   and those that they are not
"""

from __future__ import annotations

import argparse
import sys
import traceback

import torch
from tests.corpus.diagnosis.bench import FAULTS, UNLISTED, Outcome, tried, warned
from tests.corpus.diagnosis.controls import CONTROLS
from tests.corpus.diagnosis.families import FAMILIES, run_family
from tests.corpus.diagnosis.kit import Case
from tests.corpus.diagnosis.odd_loops import ODD_LOOPS
from tests.corpus.diagnosis.odd_models import ODD_MODELS
from tests.corpus.diagnosis.rank_controls import RANK_CONTROLS
from tests.corpus.diagnosis.rank_faults import (
    RANK_CASES,
    RankCase,
    RankOutcome,
    tried_on_ranks,
    warned_on_ranks,
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.corpus.diagnosis")
    parser.add_argument("only", nargs="*", help="numbers of faults, or names of controls")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--no-controls", action="store_true")
    parser.add_argument("--unlisted", action="store_true", help="faults beside those of the list")
    parser.add_argument("--families", choices=("open", "kept-out", "all"), help="faults by family")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.families:
        return _families(asked.families, asked.only, asked.seeds)
    seeds = range(asked.seeds)
    print("| fault | | named | site | late | twin | s |\n| --- | --- | --- | --- | --- | --- | --- |")
    good, twins = 0, 0
    known = UNLISTED if asked.unlisted else FAULTS
    chosen = [case for case in known if not asked.only or case.number in asked.only]
    for case in chosen:
        outcomes = [found for seed in seeds if (found := _tried(case, seed, asked.compiled)) is not None]
        good += bool(outcomes) and all(each.good for each in outcomes)
        twins += sum(len(each.twin_warnings) for each in outcomes)
        print(_row(case, outcomes), flush=True)
    on_ranks = (
        []
        if asked.compiled or asked.unlisted
        else [each for each in RANK_CASES if not asked.only or each.number in asked.only]
    )
    found = list(tried_on_ranks(on_ranks, seeds))
    for each in on_ranks:
        of_ranks = [outcome for outcome in found if outcome.case is each]
        good += all(outcome.good for outcome in of_ranks)
        twins += sum(len(outcome.twin) for outcome in of_ranks)
        print(_rank_row(each, of_ranks), flush=True)
    total = len(chosen) + len(on_ranks)
    print(
        f"\n{good} of {total} named first or second at the right site with every seed; {twins} warnings of twins"
    )
    every = [*CONTROLS, *ODD_LOOPS, *ODD_MODELS]
    controls = [each for each in every if not asked.only or each[0] in asked.only]
    if controls and not asked.no_controls:
        said = [text for seed in seeds for text in warned(controls, seed, compiled=asked.compiled)]
        print(f"\n{len(said)} warnings over {len(controls)} healthy trainings × {len(seeds)} seeds")
        print("\n".join(f"- {text}" for text in said))
    on_ranks_healthy = [name for name in RANK_CONTROLS if not asked.only or name in asked.only]
    if on_ranks_healthy and not asked.no_controls and not asked.compiled:
        said = warned_on_ranks(on_ranks_healthy, seeds)
        print(
            f"\n{len(said)} warnings over {len(on_ranks_healthy)} healthy trainings on four ranks × {len(seeds)} seeds"
        )
        print("\n".join(f"- {text}" for text in said))
    return 0


def _families(which: str, only: list[str], seeds: int) -> int:
    """Print a row for each family, and the shares: cause first or second, alarms of the twins."""
    named = total = alarms = 0
    print("| family | named first or second | missed | twins' warnings |\n| --- | --- | --- | --- |")
    for family in FAMILIES:
        if (only and family.name not in only) or (
            which != "all" and family.kept_out != (which == "kept-out")
        ):
            continue
        found = [run_family(family, base, seed) for base in family.bases for seed in range(seeds)]
        good = [each for each in found if each.place is not None and each.place <= 2]
        missed = "; ".join(
            f"{each.base}: {', '.join(each.said[:3]) or 'silent'}" for each in found if each not in good
        )
        warned = sorted({f"{each.base}: {', '.join(each.twin)}" for each in found if each.twin})
        named, total, alarms = (
            named + len(good),
            total + len(found),
            alarms + sum(bool(each.twin) for each in found),
        )
        print(f"| {family.name} | {len(good)} of {len(found)} | {missed} | {'; '.join(warned)} |", flush=True)
    print(
        f"\n{named} of {total} named first or second ({named / max(1, total):.0%}); {alarms} of {total} twins warned"
    )
    return 0


def _tried(case: Case, seed: int, compiled: bool) -> Outcome | None:
    try:
        return tried(case, seed, compiled=compiled)
    except Exception:
        traceback.print_exc(limit=-4, file=sys.stdout)
        return None


def _rank_row(case: RankCase, outcomes: list[RankOutcome]) -> str:
    """Whether a fault of ranks is named first or second with its site, step and rank; what its twins were told."""
    named = "/".join("yes" if case.named(each.found) else "no" for each in outcomes)
    twins = "; ".join(text for each in outcomes for text in each.twin)
    bad = "" if all(each.good for each in outcomes) else f" {[str(each) for each in outcomes[0].found]}"
    return f"| {case.number} | {case.title} | {named} | {named} | after the run | {twins} | |{bad}"


def _row(case: Case, outcomes: list[Outcome]) -> str:
    named = "/".join("–" if each.place is None else str(each.place) for each in outcomes)
    site = "/".join("yes" if each.located else "no" for each in outcomes)
    late = "/".join("–" if each.late is None else str(each.late) for each in outcomes)
    twin = "; ".join(text for each in outcomes for text in each.twin_warnings)
    seconds = max((each.seconds for each in outcomes), default=0.0)
    bad = "" if outcomes and all(each.good for each in outcomes) else f" {outcomes and outcomes[0].said}"
    return f"| {case.number} | {case.title} | {named} | {site} | {late} | {twin} | {seconds:.1f} |{bad}"


if __name__ == "__main__":
    raise SystemExit(main())
