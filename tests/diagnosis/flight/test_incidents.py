"""Twenty incidents: the bad step's batch is kept, its values come again to the last bit, the training goes on unmoved.

Each training runs three times from one seed: plain, plain with hand-written hooks that keep every output of the bad
step, and with the flight recorder. What the dump holds is compared with the hooks'.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.diagnosis.flight.trainings import MODELS, Plan, batch, loss_of, plant
from torch import Tensor, nn

import torchtap as tt
from torchtap.diagnosis.flight.step import StepSnapshot

STEPS = 40

# model, what goes wrong, at which step, in which module, and how the loop is written
INCIDENTS = [
    ("gpt", "forward nan", 5, "blocks.0.mlp.1", "plain"),
    ("gpt", "forward nan", 0, "tokens", "plain"),
    ("gpt", "forward nan", 17, "blocks.1.attn.qkv", "accumulation"),
    ("gpt", "backward nan", 9, "blocks.0.attn", "clipping"),
    ("gpt", "square root", 12, "blocks.1.ln", "plain"),
    ("gpt", "forward inf", 7, "blocks.0.mlp", "closure"),
    ("gpt", "half", 11, "blocks.1.mlp.0", "plain"),
    ("gpt", "forward nan", 13, "head", "bf16"),
    ("gpt", "spike", 35, "", "plain"),
    ("gpt", "signal", 8, "", "accumulation"),
    ("cnn", "forward nan", 3, "bn", "scaler"),
    ("cnn", "backward nan", 21, "conv", "plain"),
    ("cnn", "bad batch", 14, "", "clipping"),
    ("cnn", "exception", 16, "", "plain"),
    ("cnn", "spike", 36, "", "clipping"),
    ("cnn", "asked", 6, "", "evaluation"),
    ("lstm", "forward nan", 10, "rnn", "plain"),
    ("lstm", "bad batch", 2, "", "closure"),
    ("lstm", "backward nan", 15, "out", "accumulation"),
    ("lstm", "file", 4, "", "plain"),
]


class Loop:
    """A training as people write them; ``around`` is told when the bad step's passes begin."""

    def __init__(self, name: str, plan: Plan, kind: str) -> None:
        torch.manual_seed(11)
        self.name, self.plan, self.kind = name, plan, kind
        self.model = MODELS[name]()
        plant(self.model, plan)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.02, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=kind == "scaler")
        self.losses: list[float] = []
        self.batches: dict[int, list[Any]] = {}

    def data(self, step: int) -> tuple[Any, ...]:
        data = batch(self.name)
        if step == self.plan.step and self.plan.how == "bad batch":
            data[0].view(-1)[5] = math.nan
        self.batches.setdefault(step, []).append(data)
        return data

    def backward(self, step: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.kind == "bf16"):
            loss = loss_of(self.name, self.model, self.data(step))
        if step == self.plan.step and self.plan.how == "spike":
            loss = loss * 500
        if step == self.plan.step and self.plan.how == "exception":
            raise ValueError("a label is out of range")
        self.scaler.scale(loss).backward()
        self.losses.append(loss.item())
        return loss

    def step(self, step: int) -> None:
        self.plan.now = step
        self.model.train()
        if self.kind == "closure":

            def closure() -> Tensor:
                self.optimizer.zero_grad()
                return self.backward(step)

            self.optimizer.step(closure)
            return
        for _ in range(3 if self.kind == "accumulation" else 1):
            self.backward(step)
        if self.kind == "evaluation":
            self.model.eval()
            with torch.no_grad():
                self.losses.append(loss_of(self.name, self.model, batch(self.name)).item())
        if self.kind in ("clipping", "scaler"):
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def run(self, before: Callable[[int], None] = lambda _: None) -> list[str]:
        for step in range(STEPS):
            before(step)
            self.step(step)
        return [repr(loss) for loss in self.losses]


def outputs_by_hand(loop: Loop) -> dict[str, list[Tensor]]:
    """Every tensor that a module returned in a training pass of the bad step, copied by plain hooks."""
    found: dict[str, list[Tensor]] = {}

    def hook(path: str) -> Any:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            if loop.plan.now == loop.plan.step and loop.model.training:
                for leaf, tensor in parts(output):
                    found.setdefault(f"{path}:output{leaf}", []).append(tensor.detach().clone())

        return keep

    for path, module in loop.model.named_modules():
        module.register_forward_hook(hook(path))
    return found


def parts(output: Any, leaf: str = "") -> list[tuple[str, Tensor]]:
    """The tensors of an output, by their place in it."""
    if isinstance(output, Tensor):
        return [(leaf, output)]
    inside = output.items() if isinstance(output, dict) else enumerate(output or ())
    return [each for key, value in inside for each in parts(value, f"{leaf}.{key}")]


def trigger(plan: Plan, recorder: tt.FlightRecorder) -> Callable[[int], None]:
    """Ask from outside at the planned step."""

    def before(step: int) -> None:
        if step != plan.step:
            return
        if plan.how == "signal":
            os.kill(os.getpid(), signal.SIGUSR1)
        elif plan.how == "asked":
            recorder.trigger("the engineer wants to see it")
        elif plan.how == "file":
            recorder.folder.mkdir(parents=True, exist_ok=True)
            (recorder.folder / "dump").touch()

    return before


@pytest.mark.filterwarnings("ignore:torchtap kept")
@pytest.mark.parametrize("incident", INCIDENTS, ids=lambda each: "-".join(map(str, each)))
def test_the_step_is_kept_comes_again_to_the_last_bit_and_the_training_goes_on(
    incident: tuple[str, str, int, str, str], tmp_path: Path
) -> None:
    name, how, step, module, kind = incident
    raises = how == "exception"

    def run(loop: Loop, before: Any = lambda _: None) -> list[str]:
        if raises:
            with pytest.raises(ValueError, match="out of range"):
                loop.run(before)
            return [repr(loss) for loss in loop.losses]
        return loop.run(before)

    plain = run(Loop(name, Plan(step, how, module), kind))
    by_hand = Loop(name, Plan(step, how, module), kind)
    truth = outputs_by_hand(by_hand)
    assert run(by_hand) == plain

    loop = Loop(name, Plan(step, how, module), kind)
    recorder = tt.flight_recorder(loop.model, loop.optimizer, tmp_path / "flights", spike=30.0)
    if raises:
        with pytest.raises(ValueError, match="out of range"), recorder:
            loop.run(trigger(loop.plan, recorder))
    else:
        with recorder:
            loop.run(trigger(loop.plan, recorder))
    assert [repr(loss) for loss in loop.losses] == plain
    assert recorder.dumps[0].name == f"step-{step:08d}", recorder.dumps
    outcome = recorder.outcomes[0]
    assert outcome.replayed
    assert outcome.reproduced, outcome.differing
    check_batch(loop, recorder.dumps[0], step)
    check_values(recorder.dumps[0], step, truth)
    check_birth(outcome, how, module)


def check_batch(loop: Loop, dump: Path, step: int) -> None:
    """The file holds what the model was called with at the bad step."""
    moment = StepSnapshot.load(dump)
    assert moment.step == step
    assert len(moment.passes) == len(loop.batches[step])
    for kept, given in zip(moment.passes, loop.batches[step], strict=True):
        for mine, theirs in zip(kept.args, given, strict=False):
            assert torch.equal(mine.nan_to_num(7.0), theirs.nan_to_num(7.0))


def check_values(dump: Path, step: int, truth: dict[str, list[Tensor]]) -> None:
    """The replay's whole tensors against the hooks' copies. Micro-batches join along the first dimension."""
    run = tt.open(dump)
    assert "replay" in run.phases
    assert len(truth) >= 3
    for site, tensors in truth.items():
        if tensors[0].ndim == 0 and len(tensors) == 1:
            series = run.series(site, "value", phase="replay")
            assert torch.equal(torch.tensor(series.values), tensors[0].double().reshape(1)) or math.isnan(
                series.values[0]
            )
            continue
        mine = run.tensor(site, step=step, phase="replay")
        whole = torch.cat([each.reshape(1) if each.ndim == 0 else each for each in tensors])
        assert mine.dtype == whole.dtype
        assert torch.equal(mine.isnan(), whole.isnan()), site
        assert torch.equal(mine.nan_to_num(), whole.nan_to_num()), site


def check_birth(outcome: Any, how: str, module: str) -> None:
    birth = outcome.birth
    if how == "bad batch":
        assert birth.kind == "nan"
        assert birth.site in (":input", ":input.x")
    elif how in ("forward nan", "forward inf", "half"):
        assert (birth.kind, birth.direction) == ("inf", "forward")
        assert birth.module in (module, module.rpartition(".")[0])
        assert birth.overflow == (how != "forward nan")
    elif how in ("backward nan", "square root"):
        assert birth.direction == "backward"
        assert birth.kind in ("nan", "inf")
        assert birth.node
        assert birth.module in (module, module.rpartition(".")[0]), birth
    else:
        assert birth is None
