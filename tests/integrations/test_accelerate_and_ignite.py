"""Accelerate and Ignite: steps are real updates, phases have the evaluators' names."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.by_hand import ByHand
from tests.optional import need
from torch import Tensor, nn

import torchtap as tt
from torchtap.errors import SessionError

Accelerator = need("accelerate").Accelerator
engine = need("ignite.engine")
Engine, Events = engine.Engine, engine.Events

from torchtap.integrations.accelerate import TorchtapTracker, watch_prepared  # noqa: E402
from torchtap.integrations.ignite import TorchtapHandler  # noqa: E402

TAPS = ["*:output", "*:param_grad"]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def test_batches_that_are_accumulated_are_one_step(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    plain = net()
    model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=0.1))
    by_hand = ByHand(plain, ("0", "2"))
    by_hand.follow(optimizer.optimizer)
    watch = watch_prepared(accelerator, tmp_path / "run", TAPS)
    for number in range(12):
        with accelerator.accumulate(model):
            loss = model(torch.randn(5, 4)).square().mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        if number % 6 == 5:
            model.eval()
            with torch.no_grad():
                model(torch.randn(7, 4))
            model.train()
    watch.close()
    by_hand.remove()
    by_hand.check(tmp_path / "run")
    assert len(tt.open(tmp_path / "run").series("0:output", "std").steps) == 4


def test_the_tracker_logs_into_the_watch(tmp_path: Path) -> None:
    tracker = TorchtapTracker()
    accelerator = Accelerator(cpu=True, log_with=tracker)
    accelerator.init_trackers("project", config={"lr": 0.1})
    plain = net()
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    tracker.attach(watch_prepared(accelerator, tmp_path / "run", TAPS))
    for number in range(3):
        accelerator.backward(model(torch.randn(5, 4)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": float(number), "note": "text"})
    accelerator.end_training()
    assert tt.open(tmp_path / "run").series(":value.loss", "value").values.tolist() == [0.0, 1.0, 2.0]


def test_an_accelerator_that_has_prepared_nothing_is_told_so() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.free_memory()
    with pytest.raises(SessionError, match="prepared 0 models"):
        watch_prepared(accelerator, None)


def update_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    def update(engine: Engine, batch: Any) -> float:
        model.train()
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    return update


def test_an_engine_is_followed_and_its_evaluator_has_a_phase_of_its_own(tmp_path: Path) -> None:
    from ignite.engine import Events

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    by_hand = ByHand(model, ("0",))
    by_hand.follow(optimizer)
    trainer = Engine(update_of(model, optimizer))

    def evaluate(engine: Engine, batch: Any) -> None:
        model.eval()
        with torch.no_grad():
            model(batch)

    evaluator = Engine(evaluate)
    TorchtapHandler(model, optimizer, tmp_path / "run", TAPS).attach(trainer, {"valid": evaluator})
    held_out = [torch.randn(3, 4) for _ in range(2)]
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda _: evaluator.run(held_out))
    trainer.run([torch.randn(5, 4) for _ in range(4)], max_epochs=2)
    by_hand.remove()
    by_hand.outputs["0", "valid"] = by_hand.outputs.pop(("0", "eval"))
    by_hand.check(tmp_path / "run")
    run = tt.open(tmp_path / "run")
    assert run.status == "closed"
    assert len(run.series(":value.loss", "value").steps) == 8
    assert set(run.table().to_pandas()["epoch"].dropna()) == {0, 1}


def test_an_engine_that_fails_leaves_a_closed_run(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = update_of(model, optimizer)

    def update(engine: Engine, batch: Any) -> float:
        if engine.state.iteration == 3:
            raise RuntimeError("out of luck")
        return float(step(engine, batch))

    trainer = Engine(update)
    TorchtapHandler(model, optimizer, tmp_path / "run", TAPS).attach(trainer)
    with pytest.raises(RuntimeError, match="out of luck"):
        trainer.run([torch.randn(5, 4) for _ in range(4)])
    run = tt.open(tmp_path / "run")
    assert run.status == "closed"
    assert list(run.series("0:output", "std").steps)[:2] == [0, 1]


def test_an_evaluator_that_is_the_trainer_is_refused() -> None:
    engine = Engine(lambda engine, batch: None)
    model = net()
    with pytest.raises(SessionError, match="is the trainer itself"):
        TorchtapHandler(model, torch.optim.SGD(model.parameters()), None).attach(engine, {"valid": engine})


def test_ignite_an_evaluation_that_fails_ends_its_phase(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batches = [torch.randn(3, 4) for _ in range(6)]
    evaluated: list[int] = []  # Ignite does not run a failed engine every time it is asked

    def update(engine: Engine, batch: Tensor) -> float:
        model.train()
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    def evaluate(engine: Engine, batch: Tensor) -> None:
        model.eval()
        model(batch)
        evaluated.append(trainer.state.iteration - 1)
        raise OSError("a batch that cannot be read")

    def evaluate_and_go_on(engine: Engine) -> None:
        with contextlib.suppress(OSError):
            evaluator.run(batches)

    trainer, evaluator = Engine(update), Engine(evaluate)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=2), evaluate_and_go_on)
    TorchtapHandler(model, optimizer, tmp_path / "run", "*:output").attach(trainer, {"val": evaluator})
    trainer.run(batches)
    run = tt.open(tmp_path / "run")
    assert run.series(":output", "count", phase="train").steps.tolist() == [0, 1, 2, 3, 4, 5]
    assert run.series(":output", "count", phase="val").steps.tolist() == evaluated != []
