"""`MonitoredTrainer`: callbacks where they are taken, and what it finds out by itself where they are not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.monitors.training import FFN, WEIGHTS, criterion, setting
from tests.optional import need
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from torchtap import Monitor, MonitoredTrainer

LAYERS = {WEIGHTS: {"alias": "maps"}, FFN: {"alias": "ffn", "record_type": "epoch_full"}}


def monitored(training: Any, folder: Path, **options: Any) -> MonitoredTrainer:
    return MonitoredTrainer(Monitor(training.model, LAYERS, [1, 2, 3], folder, [0, 1]), **options)


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*.pt")}


def expected_files(epochs: int, batches: int = 4) -> set[str]:
    found: set[str] = set()
    for epoch in range(1, epochs + 1):
        found |= {f"maps/epoch_{epoch:04}/batch_{batch:06}.pt" for batch in (0, 1)}
        found |= {f"ffn/epoch_{epoch:04}/batch_{batch:06}.pt" for batch in range(batches)}
        found.add(f"ffn/epoch_{epoch:04}/statistics.pt")
    return found


def one_step(training: Any, batch: Any) -> None:
    loss = criterion(training.model(batch[0]), batch[1])
    training.optimizer.zero_grad()
    loss.backward()
    training.optimizer.step()


def test_callbacks_are_given_to_a_function_that_takes_them(tmp_path: Path) -> None:
    training = setting()
    trainer = monitored(training, tmp_path)

    def fit(epochs: int, epoch_callback: Any = None, batch_callback: Any = None) -> str:
        for epoch in range(1, epochs + 1):
            epoch_callback(epoch)
            for index, batch in enumerate(training.loader):
                batch_callback(index)
                one_step(training, batch)
        return "done"

    heard: list[int] = []
    assert trainer.wrap_training_function(fit)(2, epoch_callback=heard.append) == "done"
    assert heard == [1, 2]
    assert files(tmp_path) == expected_files(2)
    assert trainer.report.source == "callbacks"
    assert (trainer.report.epochs, trainer.report.batches, trainer.report.updates) == (2, 8, 8)


def test_a_function_without_callbacks_is_followed_by_its_dataloader(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training, plain = setting(), DataLoader.__iter__
    validation = DataLoader(TensorDataset(*training.loader.dataset.tensors), batch_size=2)
    trainer = monitored(training, tmp_path)
    updates = []

    def fit(epochs: int) -> None:
        for _ in range(epochs):
            training.model.train()
            for batch in training.loader:
                one_step(training, batch)
                updates.append(1)
            training.model.eval()
            for tokens, _ in validation:
                training.model(tokens)

    with caplog.at_level(logging.INFO, "torchtap"):
        trainer.wrap_training_function(fit)(2)
    assert files(tmp_path) == expected_files(2)
    shapes = [torch.load(path)["output_shape"] for path in tmp_path.rglob("ffn/*/batch*.pt")]
    assert shapes == [[3, 6, 16]] * 8
    assert trainer.report.source == "dataloader"
    assert trainer.report.passed_over == 2
    assert "epochs are iterations of a DataLoader in training mode" in caplog.text
    assert "2 epochs, 8 batches, 8 updates, 2 iterations passed over" in caplog.text
    assert DataLoader.__iter__ is plain
    assert not training.model.get_submodule(FFN)._forward_hooks


def test_what_is_found_equals_what_callbacks_would_have_said(tmp_path: Path) -> None:
    def with_callbacks(training: Any, **kwargs: Any) -> None:
        for epoch in (1, 2):
            kwargs["epoch_callback"](epoch)
            for index, batch in enumerate(training.loader):
                kwargs["batch_callback"](index)
                one_step(training, batch)

    def without(training: Any) -> None:
        for _ in (1, 2):
            for batch in training.loader:
                one_step(training, batch)

    for name, fit in {"told": with_callbacks, "found": without}.items():
        training = setting()
        monitored(training, tmp_path / name).wrap_training_function(fit)(training)
    assert files(tmp_path / "told") == files(tmp_path / "found") == expected_files(2)
    for path in (tmp_path / "told").rglob("batch*.pt"):
        other = tmp_path / "found" / path.relative_to(tmp_path / "told")
        assert torch.equal(torch.load(path)["output"], torch.load(other)["output"])


def test_keyword_callbacks_that_are_never_called_do_not_stop_it_from_looking(tmp_path: Path) -> None:
    training = setting()
    trainer = monitored(training, tmp_path)

    def fit(**kwargs: Any) -> None:
        for batch in training.loader:
            one_step(training, batch)

    trainer.wrap_training_function(fit)()
    assert trainer.report.source == "dataloader"
    assert files(tmp_path) == expected_files(1)


def test_a_loop_that_breaks_off_ends_its_epoch(tmp_path: Path) -> None:
    training = setting()
    trainer = monitored(training, tmp_path)

    def fit() -> None:
        for _ in range(3):
            for index, batch in enumerate(training.loader):
                one_step(training, batch)
                if index == 1:
                    break

    trainer.wrap_training_function(fit)()
    assert files(tmp_path) == expected_files(3, batches=2)


def test_a_validation_in_training_mode_is_found_out_by_its_missing_updates(tmp_path: Path) -> None:
    training = setting()
    trainer = monitored(training, tmp_path)

    def fit() -> None:
        for _ in range(2):
            for batch in training.loader:
                one_step(training, batch)
            for tokens, _ in DataLoader(training.loader.dataset, batch_size=1):
                training.model(tokens)

    trainer.wrap_training_function(fit)()
    assert files(tmp_path) == expected_files(2)
    assert trainer.report.passed_over == 2


def test_two_loaders_side_by_side_are_one_epoch(tmp_path: Path) -> None:
    training = setting()
    trainer = monitored(training, tmp_path)

    def fit() -> None:
        for batch, _ in zip(training.loader, DataLoader(training.loader.dataset, batch_size=3), strict=True):
            one_step(training, batch)

    trainer.wrap_training_function(fit)()
    assert files(tmp_path) == expected_files(1)


def test_batches_that_are_fetched_ahead_are_numbered_as_they_are_used(tmp_path: Path) -> None:
    def ahead(loader: Any) -> Iterator[Any]:
        iterator = iter(loader)
        current = next(iterator)
        for following in iterator:
            yield current
            current = following
        yield current

    def fit(training: Any, batches: Callable[[Any], Iterator[Any]]) -> None:
        for _ in range(2):
            for batch in batches(training.loader):
                one_step(training, batch)

    for name, batches in {"plain": iter, "ahead": ahead}.items():
        training = setting()
        trainer = monitored(training, tmp_path / name)
        trainer.wrap_training_function(fit)(training, batches)
        assert (trainer.report.epochs, trainer.report.batches) == (2, 8)
    assert files(tmp_path / "plain") == files(tmp_path / "ahead") == expected_files(2)
    for path in (tmp_path / "plain").rglob("batch*.pt"):
        other = tmp_path / "ahead" / path.relative_to(tmp_path / "plain")
        assert torch.equal(torch.load(path)["output"], torch.load(other)["output"])


def test_a_model_that_is_only_called_in_parts_is_followed_too(tmp_path: Path) -> None:
    training = setting()
    trainer = monitored(training, tmp_path)

    def fit() -> None:
        for tokens, _ in training.loader:
            x = training.model.embedding(tokens)
            for layer in training.model.transformer.encoder.layers:
                x = layer(x)
            training.optimizer.zero_grad()
            x.square().mean().backward()
            training.optimizer.step()

    trainer.wrap_training_function(fit)()
    assert files(tmp_path) == expected_files(1)


def test_without_a_dataloader_each_update_ends_a_batch(tmp_path: Path) -> None:
    training = setting()
    trainer = monitored(training, tmp_path)
    stranger = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)

    def fit(batches: list[Any]) -> None:
        for batch in batches:
            one_step(training, batch)
            stranger.step()

    trainer.wrap_training_function(fit)(list(training.loader))
    assert files(tmp_path) == expected_files(1)
    assert trainer.report.source == "optimizer"
    assert "no DataLoader was iterated" in str(trainer.report)


def test_a_training_that_raises_leaves_what_it_had_and_a_clean_model(tmp_path: Path) -> None:
    training, plain = setting(), DataLoader.__iter__
    trainer = monitored(training, tmp_path)

    def fit() -> None:
        for index, batch in enumerate(training.loader):
            one_step(training, batch)
            if index == 2:
                raise ZeroDivisionError("out of luck")

    with pytest.raises(ZeroDivisionError, match="out of luck"):
        trainer.wrap_training_function(fit)()
    assert "ffn/epoch_0001/batch_000002.pt" in files(tmp_path)
    assert DataLoader.__iter__ is plain
    assert not any(module._forward_hooks for module in training.model.modules())


def test_a_function_that_does_nothing_known_says_so(tmp_path: Path) -> None:
    trainer = monitored(setting(), tmp_path)
    assert trainer.wrap_training_function(lambda: 3)() == 3
    assert "nothing was recorded" in str(trainer.report)


def test_hugging_face_s_trainer_with_evaluation_and_accumulation(tmp_path: Path) -> None:
    transformers = need("transformers")
    need("accelerate")

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.head = nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            logits = self.head(self.hidden(x).relu())
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    torch.manual_seed(0)
    model = Classifier()
    data = [{"x": torch.randn(4), "labels": torch.tensor(index % 2)} for index in range(32)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "hf"), num_train_epochs=3, per_device_train_batch_size=4,
        gradient_accumulation_steps=2, eval_strategy="epoch", save_strategy="no", logging_strategy="no",
        report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:8])
    expected: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        if module.training:
            expected.append(output.detach().clone())

    model.hidden.register_forward_hook(keep)
    monitor = Monitor(model, {"hidden": {"record_type": "epoch_full"}}, [1, 2, 3], tmp_path / "out")
    monitored_trainer = MonitoredTrainer(monitor)
    monitored_trainer.wrap_training_function(trainer.train)()
    report = monitored_trainer.report
    assert (report.epochs, report.batches, report.updates, report.passed_over) == (3, 24, 12, 3)
    for epoch in (1, 2, 3):
        for batch in range(8):
            item = torch.load(
                tmp_path / f"out/hidden/epoch_{epoch:04}/batch_{batch:06}.pt", weights_only=True
            )
            assert torch.equal(item["output"], expected[(epoch - 1) * 8 + batch])
    assert "train" not in model.__dict__
