"""What `docs/devices.md` promises, as numbers: launches, copies, waits and memory."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.device import lag
from tests.device.campaign import Program, by_hand, nothing, run_seed
from torch import nn

import torchtap as tt
from torchtap.integrations.zero_code.recording import DEFAULT_SITES


class Dropped:
    """A sink that remembers the number of sites in the last record."""

    sites = 0

    def write(self, record: Any) -> None:
        Dropped.sites = sum(len(block.sites) for block in record.scalars)

    def close(self) -> None: ...


def watching(*sites: str, **options: Any) -> Any:
    @contextmanager
    def around(model: nn.Module, optimizer: Any) -> Iterator[None]:
        with tt.watch(model, None, list(sites), sinks=[Dropped()], **options) as watch:
            watch.follow(optimizer)
            yield

    return around


def steps_of(program: Program, around: Any) -> tuple[list[dict[str, int]], list[list[str]]]:
    """Train; return the counts of each step, and everything that was asked of the device in it."""
    counts, records = [], []

    @contextmanager
    def each(_: int) -> Iterator[None]:
        before, asked = lag.counts(), list[str]()
        with lag.recorded(asked):
            yield
        after = lag.counts()
        counts.append({name: after[name] - before[name] for name in after})
        records.append(asked)

    program.train(program.model().to(program.device), around, each)
    return counts, records


def plain_program(**changes: Any) -> Program:
    program = Program(5)
    vars(program).update(
        {"steps": 6, "parts": 1, "depth": 3, "held": True, "dropout": 0.0, "autocast": False, "beside": False}
    )
    vars(program).update({"own_stream": False, "device": torch.device("lag", 0), **changes})
    return program


# `python -m tests.device.campaign` runs 1,000.
@pytest.mark.parametrize("seed", range(int(os.environ.get("TORCHTAP_LAG_SEEDS", "36"))))
def test_a_schedule_of_the_campaign(seed: int) -> None:
    assert run_seed(seed) == []


@pytest.mark.parametrize("sites", [["*:output"], ["*:output", "*:grad_output"], ["*:param", "*:param_grad"]])
def test_statistics_take_at_most_three_launches_for_a_site_and_one_copy_for_a_step(sites: list[str]) -> None:
    program = plain_program()
    plain, _ = steps_of(program, nothing)
    counted, _ = steps_of(program, watching(*sites))
    expected = Dropped.sites
    assert expected >= 12
    print(sites, expected, counted[-1]["launches"] - plain[-1]["launches"])
    for one, other in zip(plain[1:], counted[1:], strict=True):
        assert one["launches"] < other["launches"] <= one["launches"] + 3 * expected
        assert other["to_host"] - one["to_host"] <= 1
        assert other["waits"] == other["to_device"] == 0


@pytest.mark.parametrize("sites", [1, 2, 3, 13])
@pytest.mark.parametrize("changing", [False, True])
def test_few_sites_take_no_more_launches_each(sites: int, changing: bool) -> None:
    """Also if every value has another size than the last, so that its padding is written anew."""
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(sites)]).to("lag")

    def launches(step: Callable[[], Any]) -> int:
        before = lag.counts()["launches"]
        for number in range(28):
            with step(), torch.no_grad():
                model(torch.zeros(3 + number * 7 % 5 * changing, 8, device="lag"))
        after: int = lag.counts()["launches"]
        return after - before

    plain = launches(nothing)
    with tt.watch(model, None, [f"{site}:output" for site in range(sites)], sinks=[Dropped()]) as watch:
        counted = launches(watch.step)
    assert plain < counted <= plain + 3 * sites * 28


def test_a_live_step_makes_the_same_launches_each_time() -> None:
    """As a CUDA graph needs it: no new memory, no read by the host, no event before the last launch."""
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)).to("lag")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    value, records, counts = torch.randn(3, 4, device="lag"), list[list[str]](), list[dict[str, int]]()
    with watching("*:output", "*:grad_output")(model, optimizer), lag.held():
        for _ in range(12):
            before, asked = lag.counts(), list[str]()
            with lag.recorded(asked):
                optimizer.zero_grad(set_to_none=False)
                model(value).square().mean().backward()
                optimizer.step()
            counts.append({name: count - before[name] for name, count in lag.counts().items()})
            records.append(asked)
    assert len(records[5]) > 30
    # Ops and sizes, of the model's too; and what torchtap writes to, which no graph may find elsewhere at a replay.
    # Fewer than 14 values are measured together with those of the next steps: of six values, every third step.
    for one, other in ((6, 9), (7, 10), (8, 11)):
        assert _sizes(records[one]) == _sizes(records[other])
        assert _targets(records[one]) == _targets(records[other])
    assert sum(step["to_host"] for step in counts) <= len(counts)
    for step, asked in zip(counts[6:], records[6:], strict=True):
        assert step["segments"] == step["waits"] == step["to_device"] == 0
        events = [place for place, what in enumerate(asked) if what.startswith(("event", "stream"))]
        copies = [place for place, what in enumerate(asked) if what.startswith("to_host")]
        assert events == [place + 1 for place in copies]
        assert len(copies) <= 1


def _sizes(asked: list[str]) -> list[list[str]]:
    return [[part.rpartition(":")[2] for part in what.split()] for what in asked]


def _targets(asked: list[str]) -> list[str]:
    return [what.split()[-1] for what in asked if what.startswith("copy")]


def test_after_its_first_looks_the_doctor_waits_once_for_a_live_step() -> None:
    @contextmanager
    def around(model: nn.Module, optimizer: Any) -> Iterator[None]:
        with tt.doctor(model, optimizer, quiet=True, share=None, dense=20, every=4):
            yield

    counts, _ = steps_of(plain_program(steps=32, held=True), around)
    live = [15, 16, 17, 18, 19, 23, 27]  # each is collected in the next step
    assert [step for step, each in enumerate(counts) if step >= 16 and each["waits"]] == [
        step + 1 for step in live
    ]
    assert all(each["waits"] <= 1 for each in counts[16:])


def test_losses_under_the_doctor_and_a_full_plan_are_those_without() -> None:
    program = plain_program(dropout=0.1)
    plain, _ = by_hand(program)
    everything = watching("*:output", "*:grad_output", "*:param", "*:param_grad", "*:update")
    traced = program.train(program.model().to(program.device), everything, nothing)
    assert all(map(torch.equal, plain.losses, traced.losses))
    assert traced.counts["waits"] == 0


def test_a_compiled_model_is_recorded_without_waits() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to("lag")
    compiled, value = torch.compile(model, backend="aot_eager"), torch.randn(3, 4, device="lag")
    found = []

    class Sink(Dropped):
        def write(self, record: Any) -> None:
            found.append(record)

    with tt.watch(compiled, None, ["*:output"], sinks=[Sink()]) as watch:
        for step in range(4):
            if step == 2:
                lag.reset()
            with watch.step():
                compiled(value).sum().backward()
        assert lag.counts()["waits"] == 0
    wanted = model(value).cpu().double().mean().item()
    for record in found:
        (block,) = record.scalars
        assert block.values[block.sites.index("2:output"), 1] == pytest.approx(wanted, rel=1e-5)


def test_memory_on_the_device_does_not_grow() -> None:
    """`python -m tests.device.growth` runs 10,000 steps."""
    from tests.device.growth import grown

    assert grown(150, warm=30) == 0


@pytest.mark.parametrize("way", ["default plan", "doctor"])
def test_peak_memory_stays_within_two_percent_of_the_parameters_and_64_mib(way: str) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(1600, 1600) for _ in range(6)]).to("lag")
        return model, torch.optim.AdamW(model.parameters())

    def peak(around: Any) -> int:
        gc.collect()
        lag.settle()
        start: int = lag.load().bytes(0)[0]
        model, optimizer = build()
        value = torch.randn(4, 1600, device="lag")
        with around(model, optimizer):
            for step in range(4):
                if step == 1:
                    lag.settle()
                    lag.load().reset_peak(0)
                optimizer.zero_grad()
                model(value).square().mean().backward()
                optimizer.step()
        lag.settle()
        found: int = lag.load().bytes(0)[1]
        return found - start

    @contextmanager
    def default_plan(model: nn.Module, optimizer: Any) -> Iterator[None]:
        with tt.watch(model, None, list(DEFAULT_SITES), sinks=[Dropped()]) as watch:
            watch.follow(optimizer)
            yield

    @contextmanager
    def doctor(model: nn.Module, optimizer: Any) -> Iterator[None]:
        with tt.doctor(model, optimizer, quiet=True, share=None):
            yield

    parameters = 6 * 4 * (1600 * 1600 + 1600)
    more = peak({"default plan": default_plan, "doctor": doctor}[way]) - peak(nothing)
    print(
        f"{way}: {more / 2**20:.1f} MiB above the training's own peak; parameters {parameters / 2**20:.0f} MiB"
    )
    assert more <= 0.02 * parameters + 64 * 2**20
