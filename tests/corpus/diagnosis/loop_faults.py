"""Faults of the loop and the optimizer (A)."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from tests.corpus.diagnosis.kit import Case, Kit, sequence_loss
from tests.corpus.diagnosis.models import CNN, GPT, MLP, images, points, tokens
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["CASES"]


def no_zero_grad(kit: Kit) -> None:
    model = MLP()
    kit.fit(model, torch.optim.SGD(model.parameters(), lr=0.05), points(kit.seed), zero=not kit.sick)


def zero_before_step(kit: Kit) -> None:
    model = CNN()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    kit.fit(
        model, optimizer, images(kit.seed), 12, before_step=optimizer.zero_grad if kit.sick else lambda: None
    )


def old_parameters(kit: Kit) -> None:
    model = MLP()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if kit.sick:
        model = copy.deepcopy(model)
    kit.fit(model, optimizer, points(kit.seed), 12)


def forgotten_head(kit: Kit) -> None:
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if kit.sick:
        model.head = nn.Linear(64, model.head.out_features, bias=False)
    kit.fit(model, optimizer, tokens(kit.seed), 12, loss=sequence_loss)


def frozen_but_norms(kit: Kit) -> None:
    model = CNN()
    for module in model.modules():
        keep = isinstance(module, nn.BatchNorm2d) or (module is model.fc and not kit.sick)
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad_(keep)
    learning = [each for each in model.parameters() if each.requires_grad]
    kit.fit(model, torch.optim.AdamW(learning, lr=1e-3), images(kit.seed), 12)


class Cut(MLP):
    """Detaches between its layers."""

    cut = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.activations[0](self.layers[0](x))
        if self.cut:
            x = x.detach()
        return self.head(self.activations[1](self.layers[1](x)))


def graph_cut(kit: Kit) -> None:
    model = Cut()
    model.cut = kit.sick
    kit.fit(model, torch.optim.AdamW(model.parameters(), lr=1e-3), points(kit.seed), 12)


class Checkpointed(MLP):
    """Its first layers in a checkpoint, whose input requires no gradient."""

    reentrant = True

    def forward(self, x: Tensor) -> Tensor:
        def body(x: Tensor) -> Tensor:
            for layer, activation in zip(self.layers, self.activations, strict=True):
                x = activation(layer(x))
            return x

        return self.head(checkpoint(body, x, use_reentrant=self.reentrant))


def reentrant_checkpoint(kit: Kit) -> None:
    model = Checkpointed()
    model.reentrant = kit.sick
    kit.fit(model, torch.optim.AdamW(model.parameters(), lr=1e-3), points(kit.seed), 12)


def decay_per_batch(kit: Kit) -> None:
    model = MLP()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def after(step: int) -> None:
        if kit.sick or step % 20 == 19:
            schedule.step()

    kit.fit(model, optimizer, points(kit.seed), 45, after_step=after)


def rate_too_large(kit: Kit) -> None:
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.3 if kit.sick else 3e-3)
    kit.fit(model, optimizer, tokens(kit.seed), 30, loss=sequence_loss)


def rate_too_small(kit: Kit) -> None:
    model = CNN()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5 if kit.sick else 1e-2, momentum=0.9)
    kit.fit(model, optimizer, images(kit.seed), 20)


def pure_bfloat16(kit: Kit) -> None:
    model = MLP(hidden=128)
    if kit.sick:
        model = model.bfloat16()

    def prepare(x: Tensor) -> Tensor:
        return x.bfloat16() if kit.sick else x

    def loss(logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), y)

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5 if kit.sick else 1e-3, weight_decay=0.0)
    kit.fit(model, optimizer, points(kit.seed), 12, prepare=prepare, loss=loss)


def wrong_division(kit: Kit) -> None:
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    call, batches, window, epoch = kit.ready(model), points(kit.seed), 4, 10
    kit.doctor(call, optimizer)
    for round_ in range(5):
        for first in range(0, epoch, window):
            size = min(window, epoch - first)
            optimizer.zero_grad()
            for index in range(first, first + size):
                x, y = batches(round_ * epoch + index)
                (F.cross_entropy(call(x), y) / (window if kit.sick else size)).backward()
            optimizer.step()
            kit.updates += 1


CASES = [
    Case("A1", "no zero_grad", no_zero_grad, ("stale-gradient",), ("layers.0", "head"), 1),
    Case("A2", "zero_grad before step", zero_before_step, ("erased-gradient",), ("conv1", "fc"), 0),
    Case("A3", "optimizer of other parameters", old_parameters, ("foreign-optimizer",), ("layers.0",), 0),
    Case("A4", "new head in no group", forgotten_head, ("not-in-optimizer",), ("head",), 0),
    Case("A5", "frozen but for norms", frozen_but_norms, ("only-norms-learn",), ("fc",), 0),
    Case("A7", "graph cut", graph_cut, ("gradient-cut",), ("layers.0",), 0),
    Case(
        "A8",
        "reentrant checkpoint",
        reentrant_checkpoint,
        ("gradient-cut",),
        ("layers.1",),
        0,
        compiles=False,
    ),
    Case("A9", "decay per batch", decay_per_batch, ("learning-rate-gone",), (":lr",), 14),
    Case(
        "A10",
        "learning rate × 100",
        rate_too_large,
        ("step-too-large", "exploding"),
        ("blocks", "head", "embed"),
        1,
    ),
    Case("A11", "learning rate ÷ 1000", rate_too_small, ("step-too-small",), ("conv", "fc"), 0),
    Case("A15", "pure bfloat16", pure_bfloat16, ("lost-updates",), ("layers", "head"), 0),
    Case("A16", "wrong division of windows", wrong_division, ("window-scale",), ("layers", "head"), 2),
]
