"""Random training loops: every recorded number is that of plain hooks, and the weights are bit-identical."""

from __future__ import annotations

import os
import warnings

import pytest
import torch
from tests.clock.programs import SITES, Program, compare, run
from tests.clock.truth import Audited

import torchtap as tt

LOOPS = int(os.environ.get("TORCHTAP_LOOPS", "200"))
EACH = 25  # loops in one test


def differences(program: Program) -> list[str]:
    by_hand = run(program)
    kept = Audited()
    assert by_hand.oracle is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recorded = run(
            program,
            lambda model: tt.watch(
                model,
                None,
                [tt.tap(each, every=program.every) for each in SITES],
                sinks=[kept],
                follow_model=program.change[1] == "swap",
            ),
        )
    wrong = compare(program, by_hand.oracle, kept)
    for name, model in by_hand.models.items():
        same = zip(model.parameters(), recorded.models[name].parameters(), strict=True)
        if not all(torch.equal(one, other) for one, other in same):
            wrong.append(f"the weights of {name!r} differ")
    wrong += [f"lost: {each}" for each in recorded.lost if "changed between passes" not in each]
    return wrong + [f"audit: {each}" for each in kept.failed]


@pytest.mark.parametrize("first", range(0, LOOPS, EACH))
def test_every_number_of_random_loops_is_that_of_plain_hooks(first: int) -> None:
    wrong = {}
    for seed in range(first, first + EACH):
        program = Program.from_seed(seed)
        if found := differences(program):
            wrong[program] = found
    assert not wrong, "\n".join(
        f"{program}\n  " + "\n  ".join(found[:6]) for program, found in list(wrong.items())[:5]
    )


@pytest.mark.parametrize("seed", [200048, 200204, 200511, 300161])
def test_loops_that_were_recorded_wrongly_before_are_right(seed: int) -> None:
    assert differences(Program.from_seed(seed)) == []
