"""The address book against simulated engines: chunks, preemption, drafts, prefix caches, aborts."""

from __future__ import annotations

import random

import pytest
import torch

from torchtap.errors import SelectionError
from torchtap.serving.addresses import PassTable, Request, RowLog, audit


def value_of(tokens: list[int]) -> float:
    """A value that depends on all tokens up to a position, as a hidden state does."""
    total = 0
    for token in tokens:
        total = (total * 31 + token + 1) % 1_000_003
    return float(total)


def simulate(seed: int) -> tuple[RowLog, dict[str, list[int]], set[str]]:
    """Run a made-up engine; return what it logged, the tokens of each request, and those that were aborted."""
    rng = random.Random(seed)
    log = RowLog()
    cached: set[tuple[int, ...]] = set()
    truth = {}
    stop = {}
    done: dict[str, int] = {}
    shared = [rng.randrange(9) for _ in range(8)]
    for number in range(6):
        prompt = (shared if rng.random() < 0.5 else [])[: rng.randrange(9)] + [
            rng.randrange(9) for _ in range(4)
        ]
        truth[f"r{number}"] = prompt + [rng.randrange(9) for _ in range(rng.randrange(1, 6))]
        stop[f"r{number}"] = len(prompt)
        log.requests[f"r{number}"] = Request(f"r{number}", prompt)
    aborted = {name for name in truth if rng.random() < 0.2}
    running = set(truth)
    while running:
        names, counts, positions, tokens, rows = [], [], [], [], []
        for name in sorted(running, key=lambda _: rng.random()):
            sequence = truth[name]
            if name not in done:
                done[name] = 0
                while tuple(sequence[: done[name] + 4]) in cached and done[name] + 4 < stop[name]:
                    done[name] += 4
            if rng.random() < 0.15:
                done[name] = 0  # preempted: computed again from the start
            size = min(rng.randrange(1, 5), max(stop[name] - done[name], 1))
            fed = sequence[done[name] : done[name] + size]
            accepted = len(fed)
            if done[name] + size >= stop[name] and rng.random() < 0.4:
                fed = [*fed, 10, 11]  # drafts that are rejected
            names.append(name)
            counts.append(len(fed))
            for offset, token in enumerate(fed):
                before = [*sequence[: done[name]], *fed[: offset + 1]]
                positions.append(done[name] + offset)
                tokens.append(token)
                rows.append([value_of(before), float(token)])
            done[name] += accepted
            for end in range(4, done[name] + 1, 4):
                cached.add(tuple(sequence[:end]))
            if done[name] >= len(sequence) - 1 or (name in aborted and rng.random() < 0.3):
                running.discard(name)
                request = log.requests[name]
                request.finished = True
                kept = sequence if name not in aborted else sequence[: max(done[name], stop[name]) + 1]
                request.output = kept[stop[name] :]
        table = PassTable(
            (len(rows) + 2,), tuple(names), tuple(counts), torch.tensor(positions), torch.tensor(tokens)
        )
        assert audit(table, log.requests) == ""
        packed = torch.cat([torch.tensor(rows), torch.full((2, 2), -1.0)])  # with padding
        picked = table.rows(packed)
        assert picked is not None
        log.put(log.add(table), "layer:output", picked)
    return log, truth, aborted


@pytest.mark.parametrize("seed", range(40))
def test_each_position_has_the_row_of_its_own_tokens(seed: int) -> None:
    log, truth, aborted = simulate(seed)
    for name, sequence in truth.items():
        values = log.of_request(name)
        for at, row in zip(values.positions, values["layer:output"].tolist(), strict=True):
            assert row == [value_of(sequence[: at + 1]), sequence[at]]
        if name not in aborted:
            assert values.positions == list(range(len(sequence) - 1))
            assert values.missing == {}


def test_a_table_with_shifted_rows_is_refused() -> None:
    requests = {"a": Request("a", [1, 2, 3]), "b": Request("b", [4, 5])}
    fine = PassTable((5,), ("a", "b"), (3, 2), torch.tensor([0, 1, 2, 0, 1]), torch.tensor([1, 2, 3, 4, 5]))
    assert audit(fine, requests) == ""
    swapped = PassTable((5,), ("b", "a"), (2, 3), fine.positions, fine.tokens)
    assert "other tokens" in audit(swapped, requests) or "not consecutive" in audit(swapped, requests)
    assert "not consecutive" in audit(
        PassTable((2,), ("a",), (2,), torch.tensor([0, 2]), torch.tensor([1, 3])), requests
    )
    assert "announced" in audit(PassTable((1,), ("c",), (1,), torch.tensor([0]), torch.tensor([1])), requests)


def test_positions_that_nobody_computed_are_missing_with_the_reason() -> None:
    log = RowLog()
    log.requests = {"a": Request("a", [1, 2, 3, 4], [5], finished=True)}
    table = PassTable((2,), ("a",), (2,), torch.tensor([2, 3]), torch.tensor([3, 4]))
    log.put(log.add(table), "layer:output", torch.ones(2, 3))
    values = log.of_request("a")
    assert values.positions == [2, 3]
    assert set(values.missing) == {0, 1}
    assert "prefix cache" in values.missing[0]
    with pytest.raises(SelectionError):
        log.of_request("a", sample=1)


def test_some_requests_of_a_table_keep_their_addresses() -> None:
    table = PassTable((6,), ("a", "b", "c"), (3, 2, 1), torch.arange(6), torch.arange(6) * 10)
    part = table.only({"c": [0], "a": [1, 2]})
    assert (part.requests, part.counts) == (("a", "c"), (2, 1))
    assert part.positions.tolist() == [1, 2, 5]
    rows = part.rows(torch.arange(6.0)[:, None])
    assert rows is not None
    assert rows.flatten().tolist() == [1, 2, 5]
