"""Loops that are not tidy: the step is kept, comes again to the last bit, and the losses stay what they were."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import torchtap as tt
from torchtap.diagnosis.flight.dump import Outcome
from torchtap.diagnosis.flight.step import StepSnapshot

pytestmark = pytest.mark.filterwarnings("ignore:torchtap kept")

Recorder = Callable[..., "tt.FlightRecorder | None"]
Loop = Callable[[Recorder], list[float]]


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 3))


def both(loop: Loop, folder: Path, **options: Any) -> list[Outcome]:
    """Run a loop without and with a recorder; the losses must be the same."""
    made: list[tt.FlightRecorder] = []

    def record(model: Any, optimizer: Any) -> tt.FlightRecorder:
        made.append(tt.flight_recorder(model, optimizer, folder / "flights", **options))
        return made[0]

    torch.manual_seed(5)
    plain = loop(lambda *_: None)
    torch.manual_seed(5)
    recorded = loop(record)
    made[0].close()
    assert list(map(repr, recorded)) == list(map(repr, plain))
    return made[0].outcomes


def steps(
    model: nn.Module, call: Any, optimizer: Any, bad: int = 4, count: int = 7, x_needs: bool = False
) -> list[float]:
    losses = []
    for step in range(count):
        x, y = torch.randn(8, 6), torch.randint(3, (8,))
        if step == bad:
            x[2, 1] = float("nan")
        loss = F.cross_entropy(call(x.requires_grad_(x_needs)), y)
        loss.backward()
        if step != bad:
            optimizer.step()
        else:  # as those do who skip such a step
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.grad.nan_to_num_(0.0, 0.0, 0.0)  # type: ignore[union-attr]
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(6, 8), mlp()[2:4], nn.Linear(8, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.inner, self.first(x), use_reentrant=self.reentrant)
        assert isinstance(h, Tensor)
        return self.last(h)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(reentrant: bool, tmp_path: Path) -> None:
    def loop(record: Recorder) -> list[float]:
        model = Checkpointed(reentrant)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        record(model, optimizer)
        return steps(model, model, optimizer)

    (outcome,) = both(loop, tmp_path)
    assert (outcome.step, outcome.replayed, outcome.reproduced) == (4, True, True)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_models(backend: str, tmp_path: Path) -> None:
    def loop(record: Recorder) -> list[float]:
        torch.compiler.reset()
        model = mlp()
        compiled = torch.compile(model, backend=backend)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        record(compiled, optimizer)
        return steps(model, compiled, optimizer)

    (outcome,) = both(loop, tmp_path)
    assert (outcome.step, outcome.replayed, outcome.reproduced) == (4, True, True)
    assert outcome.birth is not None
    assert outcome.birth.site == ":input"


def test_a_replay_gives_the_gradients_of_the_step_over_micro_batches(tmp_path: Path) -> None:
    def loop(record: Recorder) -> list[float]:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        recorder = record(model, optimizer)
        losses = []
        for step in range(4):
            if step == 2 and recorder is not None:
                recorder.trigger()
            for _ in range(3):
                loss = F.cross_entropy(model(torch.randn(8, 6)), torch.randint(3, (8,))) / 3
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return losses

    (outcome,) = both(loop, tmp_path)
    assert (outcome.trigger, outcome.reproduced, outcome.gradients_equal) == ("asked", True, True)


def test_several_forwards_of_one_backward(tmp_path: Path) -> None:
    def loop(record: Recorder) -> list[float]:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        recorder = record(model, optimizer)
        losses = []
        for step in range(4):
            if step == 2 and recorder is not None:
                recorder.trigger()
            loss = torch.stack([model(torch.randn(8, 6)).pow(2).mean() for _ in range(4)]).sum()
            with torch.no_grad():
                model(torch.randn(8, 6))  # a look in between, which is no pass of the step
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    (outcome,) = both(loop, tmp_path)
    assert (outcome.reproduced, outcome.gradients_equal) == (True, True)


def test_two_models_and_two_optimizers(tmp_path: Path) -> None:
    def loop(record: Recorder) -> list[float]:
        maker, judge = nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.2), nn.Linear(4, 1))
        makers, judges = (torch.optim.Adam(m.parameters(), 0.01) for m in (maker, judge))
        record({"G": maker, "D": judge}, [judges, makers])
        losses = []
        for step in range(6):
            judges.zero_grad()
            loss = (judge(maker(torch.randn(5, 4)).detach()) - judge(torch.randn(5, 6))).mean()
            loss.backward()
            judges.step()
            noise = torch.randn(5, 4)
            if step == 3:
                noise[1, 1] = float("nan")
            makers.zero_grad()
            second = -judge(maker(noise)).mean()
            second.backward()
            if step != 3:
                makers.step()
            else:
                makers.zero_grad()
                makers.step()
            losses += [loss.item(), second.item()]
        return losses

    (outcome,) = both(loop, tmp_path)
    assert outcome.reproduced is not False
    assert outcome.birth is not None
    assert outcome.birth.site == "G:input"


def test_a_double_backward_is_replayed_forwards_and_its_gradients_are_not_called_equal(
    tmp_path: Path,
) -> None:
    def loop(record: Recorder) -> list[float]:
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        recorder = record(model, optimizer)
        losses = []
        for step in range(4):
            if step == 2 and recorder is not None:
                recorder.trigger()
            x = torch.randn(8, 6, requires_grad=True)
            out = model(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            loss = out.pow(2).mean() + (slope.norm(dim=1) - 1).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    (outcome,) = both(loop, tmp_path)
    assert (outcome.reproduced, outcome.gradients_equal) == (True, False)


def test_an_optimizer_that_steps_in_the_backward_is_not_stepped_by_the_replay(tmp_path: Path) -> None:
    def loop(record: Recorder) -> list[float]:
        model = mlp()
        optimizers = {p: torch.optim.SGD([p], 0.1, momentum=0.9) for p in model.parameters()}

        def update(parameter: Tensor) -> None:
            optimizers[parameter].step()  # type: ignore[index]
            optimizers[parameter].zero_grad()  # type: ignore[index]

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        recorder = record(model, list(optimizers.values()))
        losses = []
        for step in range(6):
            if step == 3 and recorder is not None:
                recorder.trigger()
            loss = F.cross_entropy(model(torch.randn(8, 6)), torch.randint(3, (8,)))
            loss.backward()
            losses.append(loss.item())
        return losses

    (outcome,) = both(loop, tmp_path)
    assert not outcome.replayed
    assert "inside of the backward" in " ".join(outcome.notes)


def test_a_batch_that_is_used_again_is_kept_as_it_was_and_odd_arguments_are_noted(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, batch: dict[str, Tensor], *, options: Any, function: Any) -> dict[str, Tensor]:
            return {"loss": F.cross_entropy(self.layer(batch["x"]) * options["scale"], batch["y"])}

    seen: list[Tensor] = []

    def loop(record: Recorder) -> list[float]:
        model = Odd()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        recorder = record(model, optimizer)
        x, y, losses = torch.zeros(4, 6), torch.zeros(4, dtype=torch.long), []
        for step in range(4):
            x.copy_(torch.randn(4, 6))
            y.random_(3)
            if step == 2:
                seen.append(x.clone())
                if recorder is not None:
                    recorder.trigger()
            loss = model({"x": x, "y": y}, options={"scale": 2.0}, function=len)["loss"]
            loss.backward()
            x.zero_()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    (outcome,) = both(loop, tmp_path)
    assert (outcome.reproduced, outcome.gradients_equal) == (True, True)
    moment = StepSnapshot.load(tmp_path / "flights" / "step-00000002")
    assert torch.equal(moment.passes[0].args[0]["x"], seen[-1])
    assert any("builtin_function_or_method" in note for note in moment.notes)


def test_beside_a_watch_with_copies_and_saves_in_the_loop(tmp_path: Path) -> None:
    def loop(record: Recorder) -> list[float]:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        recorder = record(model, optimizer)
        losses = []
        with tt.watch(model, None, ["*:output", "*:param_grad"]) as watch:
            watch.follow(optimizer)
            for step in range(6):
                if step == 3 and recorder is not None:
                    recorder.trigger()
                loss = F.cross_entropy(model(torch.randn(8, 6)), torch.randint(3, (8,)))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                copy.deepcopy(model).eval()(torch.randn(8, 6))
                file = io.BytesIO()
                torch.save(model, file)
                assert b"torchtap" not in file.getvalue()
                losses.append(loss.item())
        if recorder is not None:
            recorder.close()
            assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())
        return losses

    (outcome,) = both(loop, tmp_path)
    assert (outcome.reproduced, outcome.gradients_equal) == (True, True)


def test_what_a_replay_cannot_know_is_not_called_reproduced(tmp_path: Path) -> None:
    class Secret(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)
            self.own = torch.Generator().manual_seed(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x + torch.randn(x.shape, generator=self.own))  # type: ignore[no-any-return]

    model = Secret()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with tt.flight_recorder(model, optimizer, tmp_path) as recorder:
        recorder.trigger()
        model(torch.randn(4, 6)).sum().backward()
        optimizer.step()
    assert recorder.outcomes[0].reproduced is False
    assert "layer:output" in recorder.outcomes[0].differing


def test_only_parts_of_the_model_are_called(tmp_path: Path) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with tt.flight_recorder(model, optimizer, tmp_path) as recorder:
        recorder.trigger()
        model[4](model[0](torch.randn(4, 6))).sum().backward()
        optimizer.step()
    (outcome,) = recorder.outcomes
    assert not outcome.replayed
    assert "give the recorder the module that is called" in outcome.notes[0]
