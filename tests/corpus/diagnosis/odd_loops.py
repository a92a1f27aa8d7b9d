"""Healthy trainings whose loop looks odd: schedules, data and orders that a rule may take for a fault."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from tests.corpus.diagnosis.kit import Kit, sequence_loss
from tests.corpus.diagnosis.models import CNN, GPT, MLP, images, points, tokens
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

__all__ = ["ODD_LOOPS"]


def warm_restarts(kit: Kit) -> None:
    model = CNN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 15)
    kit.fit(model, optimizer, images(kit.seed), 70, after_step=lambda step: schedule.step())


def one_cycle(kit: Kit) -> None:
    model = MLP(depth=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=80)
    kit.fit(model, optimizer, points(kit.seed), 79, after_step=lambda step: schedule.step())


def large_batch(kit: Kit) -> None:
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=20)
    kit.fit(model, optimizer, points(kit.seed, 2048), 60, after_step=lambda step: schedule.step())


def sparse_embedding(kit: Kit) -> None:
    embedding, head = nn.EmbeddingBag(5000, 16, mode="mean", sparse=True), nn.Linear(16, 4)
    model = nn.Sequential(embedding, head)
    sparse = torch.optim.SparseAdam(list(embedding.parameters()), lr=1e-2)
    dense = torch.optim.Adam(head.parameters(), lr=1e-2)
    kit.doctor(model, sparse, dense)
    for step in range(60):
        make = torch.Generator().manual_seed(1000 * kit.seed + step)
        rare = (torch.rand(64, 8, generator=make) ** 6 * 5000).long()
        sparse.zero_grad()
        dense.zero_grad()
        F.cross_entropy(model(rare), rare.sum(1) % 4).backward()
        sparse.step()
        dense.step()


def uneven_accumulation(kit: Kit) -> None:
    """Micro-batches of different sizes, each weighted by its samples."""
    model, batches = MLP(), points(kit.seed, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    call = kit.ready(model)
    kit.doctor(call, optimizer)
    for step in range(40):
        x, y = batches(step)
        cuts = [[40, 24], [64], [10, 20, 34], [8, 56]][step % 4]
        optimizer.zero_grad()
        for given, wanted in zip(x.split(cuts), y.split(cuts), strict=True):
            (F.cross_entropy(call(given), wanted) * len(wanted) / len(y)).backward()
        optimizer.step()


def frozen_backbone(kit: Kit) -> None:
    """A trained backbone in evaluation mode, without gradients; a fresh head."""
    backbone = CNN()
    warm = torch.optim.AdamW(backbone.parameters(), lr=1e-3)
    for step in range(15):
        x, y = images(kit.seed + 50)(step)
        warm.zero_grad()
        F.cross_entropy(backbone(x), y).backward()
        warm.step()
    backbone.requires_grad_(False).eval()
    backbone.fc = nn.Linear(256, 4)

    kit.fit(backbone, torch.optim.AdamW(backbone.fc.parameters(), lr=1e-2), images(kit.seed), 40)


def gradual_unfreezing(kit: Kit) -> None:
    model = MLP(depth=4)
    model.layers.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.head.parameters(), lr=1e-2)

    def after(step: int) -> None:
        if step == 19:
            model.layers.requires_grad_(True)
            optimizer.add_param_group({"params": model.layers.parameters(), "lr": 1e-3})

    kit.fit(model, optimizer, points(kit.seed), 50, after_step=after)


def skipping_scaler(kit: Kit) -> None:
    """A scaler that grows often and so leaves an update out every few steps, as it is meant to."""
    model = MLP()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    call, batches = kit.ready(model), points(kit.seed)
    scale = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
    factor = 1.0
    model.head.weight.register_hook(lambda gradient: gradient * factor)  # float16 would overflow by itself
    kit.doctor(call, optimizer)
    for step in range(60):
        x, y = batches(step)
        optimizer.zero_grad()
        factor = torch.inf if step % 6 == 5 else 1.0
        scale.scale(F.cross_entropy(call(x), y)).backward()
        scale.step(optimizer)
        scale.update()


def growing_sequences(kit: Kit) -> None:
    model = GPT()
    batches = tokens(kit.seed)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x, y = batches(step)
        length = min(16, 4 + step // 5)
        return x[:, :length].contiguous(), y[:, :length].contiguous()

    kit.fit(model, torch.optim.AdamW(model.parameters(), lr=3e-3), batch, 70, loss=sequence_loss)


def noisy_labels(kit: Kit) -> None:
    model, batches = MLP(), points(kit.seed)

    def noisy(step: int) -> tuple[Tensor, Tensor]:
        x, y = batches(step)
        make = torch.Generator().manual_seed(step)
        wrong = torch.rand(len(y), generator=make) < 0.5
        return x, torch.where(wrong, torch.randint(0, 4, y.shape, generator=make), y)

    kit.fit(model, torch.optim.AdamW(model.parameters(), lr=3e-3), noisy, 160)


def by_heart(kit: Kit) -> None:
    """A tiny data set that is learned until nothing is left of the loss."""
    model = MLP(hidden=128)
    x, y = points(kit.seed, 32)(0)
    loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    call = kit.ready(model)
    kit.doctor(call, optimizer)
    for _ in range(100):
        for given, wanted in loader:
            optimizer.zero_grad()
            F.cross_entropy(call(given), wanted).backward()
            optimizer.step()


def tail_of_a_schedule(kit: Kit) -> None:
    """A cosine to exactly zero, and three more steps."""
    model = MLP()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * min(1.0, step / 57)))
    )
    kit.fit(model, optimizer, points(kit.seed), 60, after_step=lambda step: schedule.step())


def rare_class(kit: Kit) -> None:
    """One sample in fifty is positive: most batches look alike to the loss."""
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x = points(kit.seed)(step)[0]
        return x, (x[:, :1] > 2.0).float()

    loss = F.binary_cross_entropy_with_logits
    kit.fit(model, torch.optim.Adam(model.parameters(), lr=1e-3), batch, 80, loss=loss)


class SignDescent(torch.optim.Optimizer):
    """An optimizer of somebody's own."""

    def __init__(self, parameters: object, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    held = self.state[each].setdefault("m", torch.zeros_like(each))
                    each.sub_(group["lr"] * (0.9 * held + 0.1 * each.grad).sign())
                    held.lerp_(each.grad, 0.01)


def own_optimizer(kit: Kit) -> None:
    model = GPT()
    kit.fit(model, SignDescent(model.parameters(), 3e-4), tokens(kit.seed), 60, loss=sequence_loss)


def masked_tokens(kit: Kit) -> None:
    """Attention to both sides, as it is meant where masked tokens are to be told."""
    model = GPT(causal=False)
    batches = tokens(kit.seed)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        ids = batches(step)[0]
        hidden = torch.rand(ids.shape, generator=torch.Generator().manual_seed(step)) < 0.15
        return ids.masked_fill(hidden, 30), ids.masked_fill(~hidden, -100)

    kit.fit(model, torch.optim.AdamW(model.parameters(), lr=1e-3), batch, 80, loss=sequence_loss)


def nudged(kit: Kit) -> None:
    """Trained weights and a learning rate of 2e-5."""
    model = GPT(tied=True)
    warm, batches = torch.optim.AdamW(model.parameters(), lr=3e-3), tokens(kit.seed + 9)
    for step in range(60):
        x, y = batches(step)
        warm.zero_grad()
        sequence_loss(model(x), y).backward()
        warm.step()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    kit.fit(model, optimizer, tokens(kit.seed), 40, loss=sequence_loss)


def in_bfloat16(kit: Kit) -> None:
    """Autocast to bfloat16 with weights in float32, as one should."""
    model = GPT()

    def loss(logits: Tensor, wanted: Tensor) -> Tensor:
        return sequence_loss(logits.float(), wanted)

    with torch.autocast("cpu", torch.bfloat16):
        kit.fit(model, torch.optim.AdamW(model.parameters(), lr=3e-3), tokens(kit.seed), 50, loss=loss)


def evaluated_first(kit: Kit) -> None:
    """An evaluation before the first step and after each epoch; the best weights are put back at the end."""
    model = CNN()
    call, batches = kit.ready(model), images(kit.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def evaluate() -> None:
        model.eval()
        with torch.inference_mode():
            for number in range(3):
                call(batches(7000 + number)[0])
        model.train()

    evaluate()
    kit.fit(
        model,
        optimizer,
        batches,
        50,
        call=call,
        after_step=lambda step: evaluate() if step % 10 == 9 else None,
    )


ODD_LOOPS: list[tuple[str, Callable[[Kit], None]]] = [
    (work.__name__, work)
    for work in (
        warm_restarts,
        one_cycle,
        large_batch,
        sparse_embedding,
        uneven_accumulation,
        frozen_backbone,
        gradual_unfreezing,
        skipping_scaler,
        growing_sequences,
        noisy_labels,
        by_heart,
        tail_of_a_schedule,
        rare_class,
        own_optimizer,
        masked_tokens,
        nudged,
        in_bfloat16,
        evaluated_first,
    )
]
