"""Ranks against each other, judged on a finished run that several ranks wrote. `replicas` groups what they share."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import combinations

import numpy as np

from torchtap.diagnosis.chart import (
    BROADCAST,
    PAST_THE_WRAPPER,
    SCALED,
    SECONDS,
    TARGETS,
    UNSYNCED,
    WEIGHT,
    Chart,
    Fact,
    Numbers,
)
from torchtap.diagnosis.finding import Evidence, Finding, Severity
from torchtap.diagnosis.replicas import (
    Course,
    Replicas,
    common_steps,
    course_of,
    jumped,
    replicas,
    values_on_ranks,
)
from torchtap.diagnosis.rule_type import (
    Flags,
    Hit,
    Rule,
    built_in,
    first_run,
    of_the_model,
)
from torchtap.plan.names import read_name, site_name


def listed(ranks: Iterable[int]) -> str:
    """``rank 2``, ``ranks 0, 1 and 3``."""
    names = [str(rank) for rank in sorted(ranks)]
    if len(names) == 1:
        return f"rank {names[0]}"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"


def _say(
    rule: Rule,
    chart: Chart,
    hits: list[Hit],
    message: str,
    severity: Severity = "error",
    causes: tuple[str, ...] = (),
) -> Iterable[Finding]:
    """Yield a finding with the number of ranks as evidence."""
    evidence = [Evidence("ranks", float(len(chart.ranks)))]
    evidence += [Evidence("l2 on the first rank", hit.value, hit.site, "l2", hit.step) for hit in hits[:1]]
    yield from rule.found(hits, message, severity=severity, evidence=evidence, causes=causes)


_HYPER_PARAMETER = re.compile(r"\.(lr|weight_decay|momentum|betas1?|eps|dampening|nesterov|maximize|alpha)$")


def _known_cause(chart: Chart, step: int) -> str:
    """Describe what ranks did differently up to a step: hyper-parameters, or an update that one of them skipped."""
    first = next(iter(chart.ranks.values()))
    for name in first.pulse.names():
        if (hyper := _HYPER_PARAMETER.search(name)) is None:
            continue
        values: dict[float, list[int]] = {}
        for rank, own in chart.ranks.items():
            steps, noted = own.pulse.series(name)
            if len(before := noted[steps <= step]):
                values.setdefault(float(before[-1]), []).append(rank)
        if len(values) > 1:
            return f"{hyper[1]} is {_on_each(values)}"
    for at in (step - 1, step):
        passes: dict[float, list[int]] = {}
        for rank, own in chart.ranks.items():
            if len(column := np.flatnonzero(own.steps == at)):
                passes.setdefault(float(own.passes[column[0]]), []).append(rank)
        if len(passes) > 1:
            few = min(passes)
            skipped = [rank for count, ranks in passes.items() if count > few for rank in ranks]
            calls = _on_each(passes)
            return f"{listed(skipped)} skipped an update: calls of the model before that of step {at} are {calls}"
    return ""


def _on_each(values: dict[float, list[int]]) -> str:
    """``0.1 on rank 0 and 0.2 on rank 1``; the value that most ranks have is last."""
    ordered = sorted(values.items(), key=lambda each: len(each[1]))[:4]
    rest = len(ordered[-1][1]) > 2
    parts = [f"{value:g} on {listed(ranks)}" for value, ranks in ordered[: -1 if rest else None]]
    if rest:
        parts.append(f"{ordered[-1][0]:g} on the others")
    return " and ".join(sorted(parts) if not rest else parts)


@built_in("ranks-drift")
def ranks_drift(rule: Rule, chart: Chart) -> Iterable[Finding]:
    """Equal at first, and then not."""
    steps = common_steps(chart)
    hits: list[Hit] = []
    odd: dict[int, set[int | None]] = {}  # by step, the ranks that go apart there
    for each in replicas(chart, "param"):
        apart = np.flatnonzero(each.apart)
        if each.same_at_first and len(apart):
            step = int(steps[apart[0]])
            hits.append(Hit(each.place.name, step, float(len(apart)), each.place.index))
            odd.setdefault(step, set()).add(_odd_one(chart, each, int(apart[0]), step))
    first = odd[min(odd)] if odd else {None}
    who = "differs" if len(first) != 1 or None in first else f"rank {first.pop()} alone differs"
    cause = _known_cause(chart, min(odd)) if odd else ""
    message = f"{{site}}{{also}} was the same on all ranks and {who} from step {{step}} on"
    yield from _say(
        rule, chart, hits, f"{message}: {cause}" if cause else message, causes=(cause,) if cause else ()
    )


def _odd_one(chart: Chart, each: Replicas, column: int, step: int) -> int | None:
    """The rank that went its own way: unlike all others, or the one whose weight is not what its update left."""
    alone = each.alone(column)
    if alone is not None:
        return alone
    changed = [rank for rank in each.ranks if jumped(chart.ranks[rank], each.place.name, step)]
    return changed[0] if len(changed) == 1 else None


@built_in("ranks-apart")
def ranks_apart(rule: Rule, chart: Chart) -> Iterable[Finding]:
    """Different from the start, though gradients are shared."""
    shared = {
        (each.place.module, each.place.leaf) for each in replicas(chart, "param_grad") if each.same_at_first
    }
    hits: list[Hit] = []
    alone: set[int | None] = set()
    for each in replicas(chart, "param"):
        place = each.place
        replicated = each.stated or (place.module, place.leaf) in shared
        if replicated and each.seen[0] and not each.same[0]:
            hits.append(Hit(place.name, int(common_steps(chart)[0]), 0.0, place.index))
            alone.add(each.alone(0))
    who = "" if len(alone) != 1 or None in alone else f" (rank {alone.pop()} is unlike all others)"
    yield from _say(
        rule,
        chart,
        hits,
        f"{{site}}{{also}} differs between ranks from the start, though gradients are shared{who}",
    )


def _is_replicated(chart: Chart) -> bool | None:
    """Whether all of the model is on every rank; None where that is not known."""
    sites = {place.name for own in chart.ranks.values() for place in own.grid("l2", "param").places}
    if not sites or not len(common_steps(chart)):
        return None
    whole = {
        each.place.name
        for each in replicas(chart, "param")
        if len(each.ranks) == len(chart.ranks) and (each.same[0] or not each.seen[0])
    }
    return whole == sites


def _inputs(chart: Chart) -> dict[int, Numbers]:
    """By rank: what the model was given, as statistics of all inputs at the common steps (number, step)."""
    tables = [values_on_ranks(chart, "input", statistic) for statistic in ("mean", "l1", "l2", "absmax")]
    sites = {
        place.name
        for own in chart.ranks.values()
        for place in own.grid("l2", "input").places
        if of_the_model(place)
    }
    found: dict[int, Numbers] = {}
    for rank in chart.ranks:
        rows = [row for table in tables for site, row in sorted(table[rank].items()) if site in sites]
        if rows:
            found[rank] = np.stack(rows)
    return found


def _alike(left: Numbers, right: Numbers) -> Flags:
    """The steps at which two ranks were given the same."""
    if left.shape != right.shape:
        return np.zeros(left.shape[1], np.bool_)
    there = np.isfinite(left) & np.isfinite(right)
    return np.asarray(np.where(there, left == right, True).all(axis=0) & there.any(axis=0), np.bool_)


@built_in("ranks-fed-alike")
def ranks_fed_alike(rule: Rule, chart: Chart, *, length: int = 3) -> Iterable[Finding]:
    """Replicas that each get the same batch."""
    given = _inputs(chart)
    replicated = _is_replicated(chart)
    pairs: list[tuple[int, int, int]] = []  # the column by which it is certain, and two ranks
    for one, other in combinations(given, 2):
        if _reads_other_data(chart, one, other, replicated):
            column = first_run(_alike(given[one], given[other]), length)
            if column is not None:
                pairs.append((column - length + 1, one, other))
    if not pairs:
        return
    column = min(pairs)[0]
    ranks = {rank for at, *two in pairs if at == column for rank in two}
    who = "all ranks" if ranks == set(chart.ranks) else listed(ranks)
    hits = [Hit(_input_site(chart), int(common_steps(chart)[column]), float(length))]
    yield from _say(rule, chart, hits, f"{who} are given the same batch ({{site}})", "warning")


def _reads_other_data(chart: Chart, one: int, other: int, replicated: bool | None) -> bool:
    """Return True if two ranks are to have different samples: they differ along an axis that divides the batch."""
    site = _input_site(chart)
    first, second = chart.ranks[one].placed(site), chart.ranks[other].placed(site)
    if first is None or second is None or len(first.axes) != len(second.axes):
        return bool(replicated)
    kinds = {a.share.kind for a, b in zip(first.axes, second.axes, strict=True) if a.at != b.at}
    return kinds == {"batch"} or (kinds == {"unknown"} and bool(replicated))


def _input_site(chart: Chart) -> str:
    """The model's first argument."""
    places = (place for own in chart.ranks.values() for place in own.grid("l2", "input").places)
    return next((place.name for place in places if of_the_model(place)), ":input")


@built_in("ranks-disagree")
def ranks_disagree(rule: Rule, chart: Chart, *, length: int = 1) -> Iterable[Finding]:
    """One question, as many answers as ranks, in a model whose parts are spread over them."""
    given = _inputs(chart)
    if len(given) < len(chart.ranks) or _is_replicated(chart) is not False:
        return
    first, *others = given.values()
    asked = np.all([_alike(first, other) for other in others], axis=0)
    said = [each for each in replicas(chart, "output") if len(each.ranks) == len(chart.ranks)]
    steps = common_steps(chart)
    for answer in (each for each in said if not each.place.module):
        column = first_run(np.asarray(asked & answer.apart), length)
        if column is None:
            continue
        step = int(steps[column])
        hits = [Hit(answer.place.name, step, 0.0, -1)]
        hits += [Hit(each.place.name, step, 0.0, each.place.index) for each in said if each.apart[column]]
        yield from _say(
            rule, chart, hits, "ranks were given the same input and give different answers ({site}{also})"
        )


_L2 = 2  # its place among the prints


@built_in("ranks-unreduced")
def ranks_unreduced(
    rule: Rule,
    chart: Chart,
    *,
    alike: float = 0.001,  # factors of a rank's gradients that differ by less are one factor
) -> Iterable[Finding]:
    """A weight that every rank has is updated by a gradient that every rank has for itself."""
    steps = common_steps(chart)
    weights = {(each.place.name, each.ranks): each for each in replicas(chart, "param")}
    moves = {(each.place.name, each.ranks): each for each in replicas(chart, "update")}
    hits: list[Hit] = []
    first: dict[int, list[Replicas]] = {}
    for each in replicas(chart, "param_grad"):
        module, _, leaf, _ = read_name(each.place.name)
        weight = weights.get((site_name(module, "param", leaf), each.ranks))
        move = moves.get((site_name(module, "update", leaf), each.ranks))
        column = None if weight is None else _first_apart(each, weight, move)
        if column is not None:
            hits.append(Hit(each.place.name, int(steps[column]), 0.0, each.place.index))
            first.setdefault(column, []).append(each)
    if hits:
        column = min(first)
        told, causes, fix = _why(chart, int(steps[column]))
        if not told and (told := _known_cause(chart, int(steps[column]))):
            causes = (told,)
        who = told or _who(chart, first[column], column, alike)
        message = f"{{site}}{{also}} is not the same on all ranks at step {{step}}: {who}"
        yield from rule.found(hits, message, severity="error", causes=(*causes, *rule.causes), fix=fix)


def _who(chart: Chart, found: list[Replicas], column: int, alike: float) -> str:
    """Which rank's gradients are other than the rest's, and by how much."""
    alone = {each.alone(column) for each in found}
    ranks = found[0].ranks
    sizes = np.array([each.prints[:, _L2, column] for each in found if each.ranks == ranks])
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = sizes / sizes.max(axis=1, keepdims=True)
    one_factor = len(sizes) > 1 and bool((np.ptp(factors, axis=0) <= alike * factors.max(axis=0)).all())
    small = ranks[int(np.argmin(factors[0]))]
    times = factors[0].min()
    if one_factor and len(ranks) == 2:
        return _of_two(chart, found, column, small, float(times), alike)
    if one_factor and alone == {small}:
        return f"rank {small}'s gradients are {times:.3g} × the others', clipped or scaled there alone"
    if len(alone) == 1 and None not in alone:
        return f"rank {alone.pop()} alone has another one"
    return "each rank uses its own, which nobody reduced"


def _of_two(chart: Chart, found: list[Replicas], column: int, small: int, times: float, alike: float) -> str:
    """Return which of two ranks changed its gradients. The average of what both computed is the third witness."""
    own = values_on_ranks(chart, "param_grad_local", "projection")
    used = values_on_ranks(chart, "param_grad", "projection")
    wrong: set[int] = set()
    for each in found:
        module, _, leaf, _ = read_name(each.place.name)
        local = site_name(module, "param_grad_local", leaf)
        if any(local not in own[rank] for rank in each.ranks):
            continue
        average = np.mean([own[rank][local][column] for rank in each.ranks])
        for rank in each.ranks:
            if abs(used[rank][each.place.name][column] - average) > alike * abs(average):
                wrong.add(rank)
    one, other = found[0].ranks
    large = other if small == one else one
    if len(wrong) == 1:
        (rank,) = wrong
        factor = times if rank == small else 1 / times
        return f"rank {rank}'s gradients are {factor:.3g} × the average of what both computed, scaled there alone"
    return f"rank {small}'s gradients are {times:.3g} × rank {large}'s; of two ranks it is not known which one is right"


def _first_apart(gradient: Replicas, weight: Replicas, move: Replicas | None) -> int | None:
    """The first step at which one weight got several gradients, and was changed by them."""
    if not weight.same_at_first:
        return None
    changed = np.r_[weight.apart[1:], False]  # a step later
    if move is not None:
        changed |= move.apart
    found = np.flatnonzero(gradient.apart & weight.seen & weight.same & changed)
    return int(found[0]) if len(found) else None


def _why(chart: Chart, step: int) -> tuple[str, tuple[str, ...], str]:
    """What a rank said of how its gradients came: a sentence, the cause, and what to change."""
    told: list[tuple[Fact, str, str, str]] = []
    for own in chart.ranks.values():
        told += [
            (fact, "no_sync() was on in the backward before the update", "no_sync() is left on",
             "with ddp_model.no_sync():  # around all micro-batches but the last")
            for fact in own.facts(UNSYNCED)
        ]  # fmt: skip
        told += [
            (fact, "the forward went past the wrapper that reduces them",
             "the forward is called on ddp_model.module", "loss = loss_of(ddp_model(x), y)  # not ddp_model.module")
            for fact in own.facts(PAST_THE_WRAPPER)
        ]  # fmt: skip
    for fact, sentence, cause, fix in told:
        if fact.step <= step:
            return sentence, (cause,), fix
    return "", (), ""


@built_in("ranks-scale")
def ranks_scale(
    rule: Rule,
    chart: Chart,
    *,
    length: int = 2,
    slack: float = 0.02,
    most: float = 0.9,  # of the sites have to say the same
    clear: float = 0.001,  # a sum that cancels to less than this of its parts says nothing
) -> Iterable[Finding]:
    """What is used is not the average of what was computed, but so many times it as there are ranks."""
    if any(own.facts(SCALED) for own in chart.ranks.values()):
        return  # what ranks computed is in other units than what the optimizer got
    ratios, sites = _ratios(chart, clear)
    if not sites:
        return
    world = len(chart.ranks)
    for factor, words in ((float(world), f"{world} times"), (1 / world, f"1/{world} of")):
        with np.errstate(invalid="ignore"):
            near = np.abs(ratios - factor) <= slack * factor
        told = np.isfinite(ratios).sum(axis=0)
        holds = (told > 0) & (near.sum(axis=0) >= most * np.maximum(told, 1))
        column = first_run(np.asarray(holds), length)
        if column is None:
            continue
        column -= length - 1
        step = int(common_steps(chart)[column])
        hits = [Hit(site, step, factor, order) for order, site in enumerate(sites) if near[order, column]]
        message = (
            f"{{site}}{{also}} is {words} the average of what {world} ranks computed, from step {{step}} on"
        )
        yield from rule.found(hits, message, severity="warning")


def _ratios(chart: Chart, clear: float) -> tuple[Numbers, list[str]]:
    """Of each gradient, at each step: what is used over the average of what the ranks computed."""
    used = values_on_ranks(chart, "param_grad", "projection")
    own = values_on_ranks(chart, "param_grad_local", "projection")
    sizes = values_on_ranks(chart, "param_grad_local", "l2")
    rows, sites = [], []
    for each in replicas(chart, "param_grad"):
        module, _, leaf, _ = read_name(each.place.name)
        local = site_name(module, "param_grad_local", leaf)
        if len(each.ranks) < len(chart.ranks) or any(local not in own[rank] for rank in each.ranks):
            continue
        parts = np.stack([own[rank][local] for rank in each.ranks])
        size = np.stack([sizes[rank][local] for rank in each.ranks]).max(axis=0)
        average = parts.mean(axis=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(
                np.abs(average) > clear * size, used[each.ranks[0]][each.place.name] / average, np.nan
            )
        rows.append(np.where(each.same, ratio, np.nan))
        sites.append(each.place.name)
    return np.array(rows), sites


@built_in("ranks-buffers")
def ranks_buffers(rule: Rule, chart: Chart) -> Iterable[Finding]:
    """Batch norm that learns from a rank's own samples alone."""
    if any(own.facts(BROADCAST) for own in chart.ranks.values()):
        return
    weights: dict[str, list[Replicas]] = {}
    for each in replicas(chart, "param"):
        weights.setdefault(each.place.module, []).append(each)
    steps = common_steps(chart)
    hits = []
    for each in replicas(chart, "buffer"):
        apart = np.flatnonzero(each.apart)
        if len(apart) and _stays_one(weights.get(each.place.module, []), int(apart[0])):
            hits.append(Hit(each.place.name, int(steps[apart[0]]), 0.0, each.place.index))
    message = "{site}{also} differs between ranks from step {step} on, though the weights are the same"
    yield from rule.found(hits, message)


def _stays_one(weights: list[Replicas], column: int) -> bool:
    """Return True if a module's weights are the same on all ranks, also after an update: they are no shards."""
    later = [each.seen & each.same for each in weights]
    return bool(later) and all(
        bool(flags[column:].all()) and bool(flags[column + 1 :].any()) for flags in later
    )


@built_in("ranks-swapped")
def ranks_swapped(rule: Rule, chart: Chart) -> Iterable[Finding]:
    """A rank goes on with another rank's shard."""
    whole = {each.place.name for each in replicas(chart, "param") if each.stated or each.same_at_first}
    hits: list[Hit] = []
    told: dict[int, str] = {}
    first = next(iter(chart.ranks.values()))
    for order, place in enumerate(first.grid("projection", "param").places):
        if place.name in whole:
            continue
        courses = {
            rank: found
            for rank, own in chart.ranks.items()
            if (found := course_of(own, place.name)) is not None
        }
        if (swap := _first_swap(courses)) is not None:
            step, words = swap
            hits.append(Hit(place.name, step, 0.0, order))
            told.setdefault(step, words)
    if hits:
        yield from _say(rule, chart, hits, f"{{site}}{{also}}: from step {{step}} on {told[min(told)]}")


def _first_swap(courses: dict[int, Course]) -> tuple[int, str] | None:
    """The first step at which ranks hold what others should, and who holds whose."""
    jumps: dict[int, list[int]] = {}
    for rank, course in courses.items():
        for step in course.steps[course.jumps].tolist():
            jumps.setdefault(step, []).append(rank)
    for step, ranks in sorted(jumps.items()):
        owners = _owners({rank: courses[rank] for rank in ranks}, step)
        if len(owners) > 1 and len(owners) == len(ranks):
            held = ", ".join(f"rank {rank} holds rank {owner}'s part" for rank, owner in owners.items())
            return step, held
    return None


def _owners(courses: dict[int, Course], step: int) -> dict[int, int]:
    """By rank: the one other rank that should hold at a step what it holds."""
    at = {rank: int(np.searchsorted(course.steps, step)) for rank, course in courses.items()}
    found = {}
    for rank, course in courses.items():
        value, slack = course.found[at[rank]], course.slack[at[rank]]
        near = [
            other
            for other, its in courses.items()
            if other != rank and abs(value - its.expected[at[other]]) <= slack + its.slack[at[other]]
        ]
        if len(near) == 1:
            found[rank] = near[0]
    return found


def _on_ranks(chart: Chart, site: str) -> Numbers | None:
    """A logged number at the common steps, by rank; None where a rank has none."""
    steps = common_steps(chart)
    rows = []
    for own in chart.ranks.values():
        at, values = own.series(site)
        if not len(at):
            return None
        row = np.full(len(steps), np.nan)
        _, here, there = np.intersect1d(steps, at, return_indices=True)
        row[here] = values[there]
        rows.append(row)
    return np.array(rows)


@built_in("rank-slow")
def rank_slow(
    rule: Rule,
    chart: Chart,
    *,
    length: int = 5,
    times: float = 2.0,  # as long as the next slowest
    seconds: float = 0.02,  # and so much longer
) -> Iterable[Finding]:
    """All others wait for one rank in every step."""
    taken = _on_ranks(chart, SECONDS)
    if taken is None or taken.shape[1] < length:
        return
    ranks, steps = list(chart.ranks), common_steps(chart)
    for index, rank in enumerate(ranks):
        rest = np.delete(taken, index, axis=0).max(axis=0)
        with np.errstate(invalid="ignore"):
            slow = taken[index] > np.maximum(times * rest, rest + seconds)
        column = first_run(np.asarray(slow), length)
        if column is not None:
            begin = column - length + 1
            window = slice(begin, column + 1)
            own, others = np.median(taken[index, window]), np.median(rest[window])
            message = (
                f"rank {rank} takes {own:.3g} s from an update to its next backward, the slowest other rank "
                f"{others:.3g} s (from step {{step}} on): all wait for it"
            )
            evidence = [Evidence("seconds", float(own), SECONDS, "value", int(steps[begin]))]
            yield from rule.found([Hit(SECONDS, int(steps[begin]), float(own))], message, evidence=evidence)
            return


@built_in("rank-lost")
def rank_lost(rule: Rule, chart: Chart) -> Iterable[Finding]:
    """A rank whose record breaks off."""
    lost = [rank for rank, end in chart.ends.items() if end == "interrupted" and rank in chart.ranks]
    last = {rank: int(own.steps[-1]) for rank, own in chart.ranks.items() if len(own.steps)}
    here = [rank for rank in lost if rank in last]
    if not here:
        return
    first = min(here, key=lambda rank: last[rank])
    went_on = [rank for rank in last if rank not in lost]
    rest = f"; {listed(went_on)} ended in good order" if went_on else ""
    also = [rank for rank in lost if rank != first]
    more = f", and so does that of {listed(also)}" if also else ""
    message = f"the record of rank {first} breaks off after step {{step}}{more}{rest}"
    yield from rule.found([Hit(":output", last[first], float(first))], message, severity="error")


@built_in("ranks-uneven")
def ranks_uneven(
    rule: Rule,
    chart: Chart,
    *,
    length: int = 2,
    apart: float = 1.25,  # of the most targets over the fewest; less does no harm
    slack: float = 0.01,
) -> Iterable[Finding]:
    """Each rank divides its loss by its own number of targets, and then ranks are averaged."""
    targets, weight = _on_ranks(chart, TARGETS), _on_ranks(chart, WEIGHT)
    if targets is None or weight is None:
        return
    with np.errstate(divide="ignore", invalid="ignore"):
        whole = targets * weight  # what a rank counts in all
        even = whole.max(axis=0) <= (1 + slack) * whole.min(axis=0)
        uneven = targets.max(axis=0) > apart * targets.min(axis=0)
    column = first_run(np.asarray(even & uneven & (targets.min(axis=0) > 0)), length)
    if column is None:
        return
    column -= length - 1
    few, many = int(np.argmin(targets[:, column])), int(np.argmax(targets[:, column]))
    ranks, step = list(chart.ranks), int(common_steps(chart)[column])
    message = (
        f"the loss is divided by each rank's own number of targets (rank {ranks[few]}: "
        f"{targets[few, column]:g}, rank {ranks[many]}: {targets[many, column]:g} at step {{step}}): a target of "
        f"rank {ranks[few]} counts {targets[many, column] / targets[few, column]:.3g} times as much"
    )
    evidence = [Evidence("targets", float(targets[few, column]), TARGETS, "value", step)]
    yield from rule.found([Hit(":output", step, 0.0)], message, evidence=evidence)
