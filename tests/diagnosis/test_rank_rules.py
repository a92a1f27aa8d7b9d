"""Rules on ranks, on made-up charts: what tells a fault from layouts and trainings that only look like one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest

import torchtap.diagnosis.diagnose as diagnosing
from torchtap.diagnosis.chart import Block, Chart, Fact
from torchtap.diagnosis.diagnose import diagnose
from torchtap.diagnosis.finding import Finding
from torchtap.diagnosis.replicas import course_of, replicas
from torchtap.diagnosis.rule_type import Rule
from torchtap.diagnosis.rules.numbers import nonfinite
from torchtap.diagnosis.rules.ranks import (
    BROADCAST,
    SCALED,
    SECONDS,
    TARGETS,
    UNSYNCED,
    WEIGHT,
    rank_lost,
    rank_slow,
    ranks_buffers,
    ranks_drift,
    ranks_fed_alike,
    ranks_scale,
    ranks_swapped,
    ranks_uneven,
    ranks_unreduced,
)
from torchtap.placement import Axis, Placement, Share
from torchtap.store.record import ScalarBlock, StepRecord
from torchtap.store.write.writer import RunWriter

STEPS = 10
Numbers = dict[str, dict[str, float]]  # by site, then by statistic
Of = Callable[[int, int], Numbers]  # of a rank and a step


def stats(size: float, **more: float) -> dict[str, float]:
    return {"mean": size / 3, "l1": 4 * size, "l2": size, "absmax": size / 2, **more}


def charts(
    of: Of,
    world: int = 2,
    *,
    placed: Callable[[int, str], Placement | None] = lambda rank, site: None,
    facts: Iterable[tuple[int, str]] = (),
    ends: dict[int, str] | None = None,
    last: dict[int, int] | None = None,
) -> Chart:
    """A chart of all ranks; ``last`` is a rank's number of steps where it has fewer."""
    whole = Chart(dict)
    for rank in range(world):
        own = Chart(dict)
        for step in range((last or {}).get(rank, STEPS)):
            blocks: list[Block] = [
                ((site,), tuple(numbers), np.array([list(numbers.values())]), None)
                for site, numbers in of(rank, step).items()
            ]
            own.add(step, blocks)
        for who, name in facts:
            if who == rank:
                own.note(Fact(name, ":output", 0))
        own.placed = lambda site, rank=rank: placed(rank, site)  # type: ignore[misc]
        whole.ranks[rank] = own
    whole.ends = ends or dict.fromkeys(range(world), "closed")
    return whole


def found(rule: Rule, chart: Chart) -> list[Finding]:
    return list(rule.judge(chart))


def along(share: Share, world: int = 2) -> Callable[[int, str], Placement]:
    return lambda rank, site: Placement((Axis("dp", world, rank, share),))


SHARD, COPY, UNTOLD = Share("shard", 0), Share("replicate"), Share("unknown")


def test_a_nan_on_one_replica_is_named_with_its_rank() -> None:
    def of(rank: int, step: int) -> Numbers:
        return {"norm:param.weight": stats(1.0, nans=float(rank == 1 and step >= 4), infs=0.0)}

    (told,) = found(nonfinite, charts(of, placed=along(COPY)))
    assert (told.site, told.step) == ("norm:param.weight", 4)
    assert "NaN at norm:param.weight on rank 1, step 4" in told.message


# -- what is replicated ---------------------------------------------------------------------------------------


def norms(rank: int, step: int) -> Numbers:
    """A norm's weight: ones at first, then its own way on each rank."""
    return {"norm:param.weight": stats(1.0 if step == 0 else 1.0 + rank / 10 + step / 100)}


def test_shards_that_look_alike_at_first_are_no_replicas_that_drift() -> None:
    assert found(ranks_drift, charts(norms, placed=along(SHARD))) == []
    (told,) = found(ranks_drift, charts(norms, placed=along(COPY)))
    assert (told.site, told.step) == ("norm:param.weight", 1)


def test_a_bias_of_zeros_beside_a_weight_in_parts_is_a_part_where_nobody_said() -> None:
    def halves(rank: int, step: int) -> Numbers:
        bias = {"mean": 0.0, "l1": 0.0, "l2": 0.0, "absmax": 0.0} if step == 0 else stats(rank + step + 1.0)
        return {"up:param.weight": stats(rank + step + 1.0), "up:param.bias": bias}

    assert found(ranks_drift, charts(halves)) == []


def test_replicas_of_a_hybrid_are_compared_within_their_place() -> None:
    def place(rank: int, site: str) -> Placement:
        return Placement((Axis("replicate", 2, rank // 2, COPY), Axis("shard", 2, rank % 2, SHARD)))

    def of(rank: int, step: int) -> Numbers:
        odd = 0.5 if rank == 3 and step >= 4 else 0.0
        return {"up:param.weight": stats(rank % 2 + step + 1.0 + odd)}

    assert [each.ranks for each in replicas(charts(of, 4, placed=place), "param")] == [(0, 2), (1, 3)]
    (told,) = found(ranks_drift, charts(of, 4, placed=place))
    assert told.step == 4


def test_of_two_ranks_the_one_is_named_whose_update_does_not_explain_its_weight() -> None:
    def of(rank: int, step: int) -> Numbers:
        jump = 3.0 if rank == 1 and step >= 5 else 0.0
        weight = stats(10.0 + jump, projection=2.0 + 0.5 * step + jump, fingerprint=step + jump)
        return {"up:param.weight": weight, "up:update.weight": stats(0.1, projection=0.5)}

    (told,) = found(ranks_drift, charts(of, placed=along(COPY)))
    assert "rank 1 alone differs from step 5" in told.message


def test_a_fingerprint_alone_tells_replicas_apart() -> None:
    def of(rank: int, step: int) -> Numbers:
        return {"up:param.weight": stats(1.0, fingerprint=7.0 + (rank == 2 and step >= 3))}

    (told,) = found(ranks_drift, charts(of, 3))
    assert "rank 2 alone differs from step 3" in told.message


# -- gradients ------------------------------------------------------------------------------------------------


def gradients(own: Callable[[int, int], float], moves: bool = True) -> Of:
    """A weight, its gradient and its update; the update follows the gradient where the optimizer uses it."""

    def of(rank: int, step: int) -> Numbers:
        size = own(rank, step)
        weight = 10.0 + (0.0 if step == 0 or not moves else sum(own(rank, at) for at in range(step)))
        return {
            "up:param.weight": stats(weight),
            "up:param_grad.weight": stats(size),
            "up:param_grad.bias": stats(2 * size),
            "up:param.bias": stats(weight + 1),
            "up:update.weight": stats(size if moves else 0.1),
            "up:update.bias": stats(size if moves else 0.1),
        }

    return of


def test_a_gradient_of_each_rank_is_told_at_its_own_step() -> None:
    (told,) = found(ranks_unreduced, charts(gradients(lambda rank, step: 1.0 + step + rank), 2))
    assert told.step == 0
    (told,) = found(
        ranks_unreduced, charts(gradients(lambda rank, step: 1.0 + (rank * 1.0 if step >= 4 else 0)), 3)
    )
    assert told.step == 4


def test_gradients_that_an_optimizer_shares_afterwards_are_no_fault() -> None:
    """As where each rank updates its part of the weights from gradients that it alone has reduced."""
    assert (
        found(ranks_unreduced, charts(gradients(lambda rank, step: 1.0 + step + rank, moves=False), 2)) == []
    )


def test_a_rank_that_clips_and_no_sync_are_told_apart() -> None:
    clipped = charts(gradients(lambda rank, step: 0.25 if rank == 2 else 1.0), 3)
    assert "rank 2's gradients are 0.25 × the others'" in found(ranks_unreduced, clipped)[0].message
    unsynced = charts(gradients(lambda rank, step: 1.0 + rank), 3, facts=[(1, UNSYNCED)])
    (told,) = found(ranks_unreduced, unsynced)
    assert "no_sync() was on" in told.message
    assert "no_sync" in told.advice


def scaled(factor: float) -> Of:
    def of(rank: int, step: int) -> Numbers:
        local = {f"l{n}:param_grad_local.weight": stats(5.0, projection=n + 1.0 + rank) for n in range(4)}
        used = {f"l{n}:param_grad.weight": stats(5.0, projection=factor * (n + 1.5)) for n in range(4)}
        weights = {f"l{n}:param.weight": stats(3.0 + step) for n in range(4)}
        return {**local, **used, **weights}

    return of


@pytest.mark.parametrize(("factor", "words"), [(2.0, "2 times"), (0.5, "1/2 of")])
def test_a_factor_of_the_world_is_told(factor: float, words: str) -> None:
    (told,) = found(ranks_scale, charts(scaled(factor)))
    assert (told.site, told.step) == ("l0:param_grad.weight", 0)
    assert words in told.message


@pytest.mark.parametrize("factor", [1.0, 0.37, 3.0])
def test_an_average_and_a_clip_are_no_factor_of_the_world(factor: float) -> None:
    assert found(ranks_scale, charts(scaled(factor))) == []


def test_a_scaled_loss_says_nothing_about_the_world() -> None:
    assert found(ranks_scale, charts(scaled(0.5), facts=[(0, SCALED)])) == []


# -- state ----------------------------------------------------------------------------------------------------


def buffers(rank: int, step: int) -> Numbers:
    return {"norm:param.weight": stats(1.0 + step), "norm:buffer.running_mean": stats(0.1 + rank + step)}


def test_buffers_that_go_apart_are_told_unless_a_wrapper_sends_them() -> None:
    (told,) = found(ranks_buffers, charts(buffers))
    assert (told.site, told.step) == ("norm:buffer.running_mean", 0)
    assert found(ranks_buffers, charts(buffers, facts=[(0, BROADCAST), (1, BROADCAST)])) == []


def test_buffers_of_a_norm_in_parts_are_parts() -> None:
    def parts(rank: int, step: int) -> Numbers:
        return {**buffers(rank, step), "norm:param.weight": stats(1.0 + step * (1 + rank))}

    assert found(ranks_buffers, charts(parts)) == []


def shards(swap: bool, everywhere: float = 0.0) -> Of:
    def of(rank: int, step: int) -> Numbers:
        holds = 1 - rank if swap and step >= 6 else rank
        jump = everywhere if step >= 6 else 0.0
        weight = stats(10.0 + holds, projection=100.0 * (holds + 1) + step + jump)
        return {"up:param.weight": weight, "up:update.weight": stats(0.1, projection=1.0)}

    return of


def test_shards_that_change_owners_are_told_with_both_ranks() -> None:
    (told,) = found(ranks_swapped, charts(shards(swap=True), placed=along(SHARD)))
    assert told.step == 6
    assert "rank 0 holds rank 1's part, rank 1 holds rank 0's part" in told.message


def test_weights_that_something_else_changes_on_every_rank_are_no_swap() -> None:
    assert found(ranks_swapped, charts(shards(swap=False, everywhere=5.0), placed=along(SHARD))) == []


def test_a_weight_is_followed_only_over_steps_that_were_recorded() -> None:
    chart = Chart(dict)
    for step in (0, 1, 5, 6):
        weight = (("up:param.weight",), ("l2", "projection"), np.array([[10.0, 3.0 * step]]), None)
        update = (("up:update.weight",), ("l2", "projection"), np.array([[0.1, 3.0]]), None)
        chart.add(step, [weight, update])
    course = course_of(chart, "up:param.weight")
    assert course is not None
    assert np.isnan(course.expected).tolist() == [True, False, True, False]
    assert not course.jumps.any()


# -- data and progress ----------------------------------------------------------------------------------------


def inputs(alike: set[int]) -> Of:
    def of(rank: int, step: int) -> Numbers:
        return {
            ":input.0": stats(step + (1.0 if rank in alike else 2.0 + rank)),
            "up:param.weight": stats(3.0),
        }

    return of


def test_the_ranks_that_read_the_same_are_named() -> None:
    batch = Share("batch", 0)
    (told,) = found(ranks_fed_alike, charts(inputs({1, 3}), 4, placed=along(batch, 4)))
    assert "ranks 1 and 3 are given the same batch" in told.message
    assert found(ranks_fed_alike, charts(inputs({1}), 4, placed=along(batch, 4))) == []


def test_ranks_of_a_tensor_parallel_group_may_read_the_same() -> None:
    def place(rank: int, site: str) -> Placement:
        share = UNTOLD if site.startswith(":input") else SHARD
        return Placement((Axis("tp", 2, rank, share),))

    assert found(ranks_fed_alike, charts(inputs({0, 1}), placed=place)) == []


def seconds(slow: Callable[[int], float]) -> Of:
    return lambda rank, step: {SECONDS: {"value": 0.01 + (slow(step) if rank == 1 else 0.0)}}


def test_a_rank_that_is_slow_for_a_while_is_named_and_one_slow_step_is_not() -> None:
    (told,) = found(rank_slow, charts(seconds(lambda step: 0.2 * (step >= 3)), 3))
    assert told.step == 3
    assert "rank 1 takes" in told.message
    assert found(rank_slow, charts(seconds(lambda step: 0.2 * (step % 4 == 0)), 3)) == []
    assert (
        found(rank_slow, charts(seconds(lambda step: 0.015), 3)) == []
    )  # more than twice, but nothing to wait for


def test_a_rank_whose_record_breaks_off_is_named_with_its_last_step() -> None:
    def of(rank: int, step: int) -> Numbers:
        return {"up:output": stats(1.0)}

    lost = charts(of, 3, ends={0: "closed", 1: "interrupted", 2: "closed"}, last={1: 4})
    (told,) = found(rank_lost, lost)
    assert told.step == 3
    assert "rank 1 breaks off after step 3; ranks 0 and 2 ended in good order" in told.message
    assert found(rank_lost, charts(of, 3)) == []


def targets(weight: Callable[[float], float], counts: tuple[float, float]) -> Of:
    def of(rank: int, step: int) -> Numbers:
        count = counts[rank]
        return {TARGETS: {"value": count}, WEIGHT: {"value": weight(count)}}

    return of


def test_losses_divided_by_own_counts_are_told_where_counts_differ_much() -> None:
    (told,) = found(ranks_uneven, charts(targets(lambda count: 1 / count, (10, 40))))
    assert "rank 0: 10, rank 1: 40" in told.message
    assert "counts 4 times as much" in told.message
    assert found(ranks_uneven, charts(targets(lambda count: 1 / 25, (10, 40)))) == []
    assert found(ranks_uneven, charts(targets(lambda count: 1 / count, (32, 31)))) == []


def test_where_ranks_do_not_fit_into_memory_some_are_judged_and_the_rest_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(4):
        with RunWriter(tmp_path / "run", rank=rank, world=4, manifest={}) as writer:
            for step in range(3):
                numbers = stats(1.0 + step + (rank == 1 and step == 2))
                values = np.array([list(numbers.values())])
                block = ScalarBlock(("up:param.weight",), tuple(numbers), values)
                writer.write(StepRecord(step, None, None, "train", 0.0, (block,), ()))
    whole = diagnose(tmp_path / "run")
    assert "rank 1 alone differs from step 2" in whole[0].message
    assert not [each for each in whole.unjudged if each.rule == "ranks"]
    monkeypatch.setattr(diagnosing, "_MEMORY", 1)
    some = diagnose(tmp_path / "run")
    assert some[0].kind == "ranks-drift"
    (told,) = [each for each in some.unjudged if each.rule == "ranks"]
    assert "of 4 ranks the first 2" in told.reason


def test_rules_on_ranks_say_nothing_of_one_process() -> None:
    chart = Chart(dict)
    rules = [
        ranks_drift,
        ranks_unreduced,
        ranks_scale,
        ranks_buffers,
        ranks_swapped,
        rank_slow,
        rank_lost,
    ]
    assert all(found(rule, chart) == [] for rule in rules)
