"""Hugging Face's Trainer, as people use it: every number of a run is that of hooks written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.by_hand import ByHand
from tests.optional import need
from torch.utils.data import Dataset

import torchtap as tt

transformers = need("transformers")
GPT2Config, GPT2LMHeadModel = transformers.GPT2Config, transformers.GPT2LMHeadModel
Trainer, TrainingArguments = (
    need("transformers.trainer").Trainer,
    need("transformers.training_args").TrainingArguments,
)
TrainerCallback = transformers.TrainerCallback

from torchtap.integrations.transformers import TorchtapCallback  # noqa: E402

SITES = ("transformer.h.0.mlp", "transformer.h.1.ln_1", "lm_head")
TAPS = ["*:output", "*:param_grad"]


class Tokens(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 32, (6,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


class Reference(TrainerCallback):
    """Tells hooks written by hand which optimizer there is."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.by_hand = ByHand(model, SITES)

    def on_train_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        optimizer = known["optimizer"]
        self.by_hand.follow(getattr(optimizer, "optimizer", optimizer))


def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=32,
        n_positions=6,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.1,
        tie_word_embeddings=False,
    )
    return GPT2LMHeadModel(config)


def trainer(net: GPT2LMHeadModel, folder: Path, callbacks: list[Any], **options: Any) -> Trainer:
    arguments = TrainingArguments(
        str(folder / "out"),
        per_device_train_batch_size=2,
        num_train_epochs=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_steps=2,
        seed=1,
        **options,
    )
    return Trainer(net, arguments, train_dataset=Tokens(), eval_dataset=Tokens(), callbacks=callbacks)


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, 8),
        ({"gradient_accumulation_steps": 2}, 4),
        ({"eval_strategy": "steps", "eval_steps": 2}, 8),
        (
            {
                "gradient_accumulation_steps": 2,
                "eval_strategy": "steps",
                "eval_steps": 1,
                "eval_on_start": True,
            },
            4,
        ),
        ({"max_grad_norm": 1e-2}, 8),
        ({"bf16": True}, 8),
        ({"gradient_checkpointing": True}, 8),
    ],
    ids=["plain", "accumulated", "evaluated", "both", "clipped", "bf16", "checkpointed"],
)
def test_every_number_is_that_of_hooks_by_hand(tmp_path: Path, options: dict[str, Any], steps: int) -> None:
    net = model()
    reference = Reference(net)
    if options.get("gradient_checkpointing"):
        reference.by_hand.remove()  # hooks by hand count a recomputed block twice
    trainer(net, tmp_path, [reference, TorchtapCallback(tmp_path / "run", TAPS)], **options).train()
    reference.by_hand.remove()
    reference.by_hand.check(tmp_path / "run")
    run = tt.open(tmp_path / "run")
    assert len(run.series("lm_head:output", "std", phase="train").steps) == steps
    assert run.status == "closed"


def test_the_losses_are_those_of_a_training_without_it(tmp_path: Path) -> None:
    losses = []
    for callbacks in ([], [TorchtapCallback(tmp_path / "run", TAPS)]):
        net = model()
        made = trainer(net, tmp_path, callbacks, eval_strategy="steps", eval_steps=2)
        made.train()
        losses.append([entry.get("loss", entry.get("eval_loss")) for entry in made.state.log_history])
    assert losses[0] == losses[1]


def test_what_the_trainer_logs_is_in_the_run(tmp_path: Path) -> None:
    made = trainer(model(), tmp_path, [TorchtapCallback(tmp_path / "run", TAPS)])
    made.train()
    logged = {entry["step"] - 1: entry["loss"] for entry in made.state.log_history if "loss" in entry}
    series = tt.open(tmp_path / "run").series("loss")
    assert dict(zip(series.steps.tolist(), series.values.tolist(), strict=True)) == pytest.approx(logged)


def test_a_resumed_training_goes_on_at_its_step(tmp_path: Path) -> None:
    net = model()
    first = trainer(
        net, tmp_path, [TorchtapCallback(tmp_path / "run", "lm_head:output")], max_steps=4, save_steps=4
    )
    first.train()
    second = trainer(net, tmp_path, [TorchtapCallback(tmp_path / "run", "lm_head:output")], max_steps=8)
    second.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-4"))
    assert list(tt.open(tmp_path / "run").series("lm_head:output", "std").steps) == list(range(8))


def test_without_a_folder_the_run_is_in_the_output_folder(tmp_path: Path) -> None:
    trainer(model(), tmp_path, [TorchtapCallback(taps="lm_head:output")], max_steps=1).train()
    assert len(tt.open(tmp_path / "out" / "torchtap").steps()) == 1
