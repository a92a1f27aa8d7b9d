"""Lightning, as people use it: every number of a run is that of hooks written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.by_hand import ByHand
from tests.optional import need
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import torchtap as tt

pl = need("lightning.pytorch")

from torchtap.integrations.lightning import TorchtapCallback, watch_fabric  # noqa: E402

TAPS = ["*:output", "*:param_grad"]


class Classifier(pl.LightningModule):
    """Calls its network, not itself, as most do."""

    def __init__(self, calls_itself: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))
        self.calls_itself = calls_itself
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = self._loss(batch)
        self.losses.append(loss.item())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", self._loss(batch))

    def _loss(self, batch: Any) -> Tensor:
        x, y = batch
        called = self if self.calls_itself else self.net
        return nn.functional.cross_entropy(called(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Adversaries(pl.LightningModule):
    """Two networks, two optimizers, moved by hand."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.generator, self.critic = nn.Linear(4, 8), nn.Linear(8, 1)

    def training_step(self, batch: Any, index: int) -> None:
        first, second = self.optimizers()
        x, _ = batch
        second.zero_grad()
        self.manual_backward(self.critic(self.generator(x[:, :4]).detach()).mean())
        second.step()
        first.zero_grad()
        self.manual_backward(-self.critic(self.generator(x[:, :4])).mean())
        first.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.generator.parameters(), 0.1), torch.optim.SGD(
            self.critic.parameters(), 0.1
        )


class Reference(pl.Callback):
    def __init__(self, model: nn.Module) -> None:
        self.by_hand = ByHand(model, ("net.0", "net.3"))
        self.by_hand.remove()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.by_hand = ByHand(pl_module, ("net.0", "net.3"))
        self.by_hand.follow(trainer.optimizers[0])


def data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    return DataLoader(
        TensorDataset(
            torch.randn(24, 8, generator=generator), torch.randint(0, 2, (24,), generator=generator)
        ),
        batch_size=4,
    )


def fit(model: pl.LightningModule, callbacks: list[Any], **options: Any) -> pl.Trainer:
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        **options,
    )
    trainer.fit(model, data(), data())
    return trainer


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("calls_itself", [False, True], ids=["calls-its-net", "calls-itself"])
@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, 12),
        ({"accumulate_grad_batches": 3}, 4),
        ({"gradient_clip_val": 0.01}, 12),
        ({"precision": "bf16-mixed"}, 12),
        ({"val_check_interval": 2}, 12),
    ],
    ids=["plain", "accumulated", "clipped", "bf16", "validated"],
)
def test_every_number_is_that_of_hooks_by_hand(
    tmp_path: Path, options: dict[str, Any], steps: int, calls_itself: bool
) -> None:
    model = Classifier(calls_itself)
    reference = Reference(model)
    fit(model, [reference, TorchtapCallback(tmp_path / "run", TAPS)], **options)
    reference.by_hand.remove()
    reference.by_hand.check(tmp_path / "run")
    run = tt.open(tmp_path / "run")
    assert len(run.series("net.0:output", "std", phase="train").steps) == steps
    assert not any("#" in site for site in run.sites())
    assert run.status == "closed"


@pytest.mark.filterwarnings("ignore")
def test_the_losses_are_those_of_a_training_without_it(tmp_path: Path) -> None:
    losses = []
    for callbacks in ([], [TorchtapCallback(tmp_path / "run", TAPS)]):
        model = Classifier()  # it sets the seed
        fit(model, callbacks)
        losses.append(model.losses)
    assert losses[0] == losses[1]


@pytest.mark.filterwarnings("ignore")
def test_the_loss_and_what_is_logged_are_in_the_run(tmp_path: Path) -> None:
    model = Classifier()
    fit(model, [TorchtapCallback(tmp_path / "run", TAPS)])
    run = tt.open(tmp_path / "run")
    assert run.series(":value.loss", "value").values.tolist() == pytest.approx(model.losses)
    assert len(run.series(":value.val_loss", "value").steps) == 2


@pytest.mark.filterwarnings("ignore")
def test_the_loss_of_accumulated_batches_is_their_mean_whose_gradient_the_optimizer_uses(
    tmp_path: Path,
) -> None:
    model = Classifier()
    fit(model, [TorchtapCallback(tmp_path / "run", TAPS)], accumulate_grad_batches=2)
    losses = tt.open(tmp_path / "run").series(":value.loss", "value").values.tolist()
    pairs = zip(model.losses[::2], model.losses[1::2], strict=True)
    assert losses == pytest.approx([(first + second) / 2 for first, second in pairs])


@pytest.mark.filterwarnings("ignore")
def test_two_networks_with_two_optimizers_make_one_step_of_a_batch(tmp_path: Path) -> None:
    fit(Adversaries(), [TorchtapCallback(tmp_path / "run", TAPS)], limit_val_batches=0)
    run = tt.open(tmp_path / "run")
    for site in ("generator:output", "critic:output", "generator:param_grad.weight"):
        assert len(run.series(site, "std").steps) == 12, site


@pytest.mark.filterwarnings("ignore")
def test_a_training_that_fails_leaves_a_closed_run_and_its_own_error(tmp_path: Path) -> None:
    class Failing(Classifier):
        def training_step(self, batch: Any, index: int) -> Tensor:
            if index == 3:
                raise RuntimeError("out of luck")
            return super().training_step(batch, index)

    with pytest.raises(RuntimeError, match="out of luck"):
        fit(Failing(), [TorchtapCallback(tmp_path / "run", TAPS)])
    run = tt.open(tmp_path / "run")
    assert run.status == "closed"
    assert len(run.series("net.0:output", "std", phase="train").steps) >= 3


@pytest.mark.filterwarnings("ignore")
def test_a_second_fit_goes_on_after_the_first(tmp_path: Path) -> None:
    model = Classifier()
    callback = TorchtapCallback(tmp_path / "run", TAPS)
    trainer = fit(model, [callback])
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model, data())
    assert list(tt.open(tmp_path / "run").series("net.0:output", "std").steps) == list(range(18))


@pytest.mark.filterwarnings("ignore")
def test_fabric_is_followed(tmp_path: Path) -> None:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu")
    net = nn.Linear(4, 2)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    watch = watch_fabric(model, optimizer, tmp_path / "run", TAPS)
    for _ in range(3):
        optimizer.zero_grad()
        fabric.backward(model(torch.randn(8, 4)).square().mean())
        optimizer.step()
    watch.close()
    run = tt.open(tmp_path / "run")
    assert list(run.series(":output", "std").steps) == [0, 1, 2]
    assert list(run.series(":param_grad.weight", "l2").steps) == [0, 1, 2]
