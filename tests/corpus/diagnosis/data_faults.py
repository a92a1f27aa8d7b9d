"""Faults of modes and data (B)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.corpus.diagnosis.kit import Case, Kit
from tests.corpus.diagnosis.models import CNN, LSTM, MLP, images, points, texts
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

__all__ = ["CASES"]


def trains_in_eval(kit: Kit) -> None:
    model = CNN()
    if kit.sick:
        model.eval()
    kit.fit(model, torch.optim.AdamW(model.parameters(), lr=1e-3), images(kit.seed), 12)


def evaluates_in_train(kit: Kit) -> None:
    model = CNN()
    call, batches = kit.ready(model), images(kit.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def after(step: int) -> None:
        if step % 5 == 4:
            if not kit.sick:
                model.eval()
            with torch.no_grad():
                for number in range(3):
                    call(batches(5000 + number)[0])
            model.train()

    kit.fit(model, optimizer, batches, 15, after_step=after, call=call)


class OwnDropout(MLP):
    """Functional dropout that forgets the mode."""

    forgets = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.activations[0](self.layers[0](x))
        x = F.dropout(x, 0.2, training=self.forgets or self.training)
        return self.head(self.activations[1](self.layers[1](x)))


def ignores_eval(kit: Kit) -> None:
    model = nn.Sequential(OwnDropout(), nn.Dropout(0.1))
    inner = model[0]
    assert isinstance(inner, OwnDropout)
    inner.forgets = kit.sick
    call, batches = kit.ready(model), points(kit.seed)

    def after(step: int) -> None:
        if step % 5 == 4:
            model.eval()
            with torch.no_grad():
                call(batches(5000)[0])
            model.train()

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    kit.fit(model, optimizer, batches, 12, after_step=after, call=call)


def shuffled_labels(kit: Kit) -> None:
    model, batches = MLP(), points(kit.seed)

    def shuffled(step: int) -> tuple[Tensor, Tensor]:
        x, y = batches(step)
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(step))
        return x, y[order] if kit.sick else y

    kit.fit(model, torch.optim.AdamW(model.parameters(), lr=1e-3), shuffled, 160)


def raw_pixels(kit: Kit) -> None:
    model, batches = CNN(norm=False), images(kit.seed)

    def raw(step: int) -> tuple[Tensor, Tensor]:
        x, y = batches(step)
        return ((x + 2).clamp(0, 4) * 63).round() if kit.sick else x, y

    kit.fit(model, torch.optim.AdamW(model.parameters(), lr=1e-3), raw, 12)


def same_batch(kit: Kit) -> None:
    model, batches = MLP(), points(kit.seed)
    x = torch.cat([batches(step)[0] for step in range(12)])
    y = torch.cat([batches(step)[1] for step in range(12)])
    loader = DataLoader(TensorDataset(x, y), batch_size=64)
    call = kit.ready(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    kit.doctor(call, optimizer)
    stream = iter(loader)
    for _ in range(12):
        given, wanted = next(iter(loader)) if kit.sick else next(stream)
        optimizer.zero_grad()
        F.cross_entropy(call(given), wanted).backward()
        optimizer.step()
        kit.updates += 1


def bad_sample(kit: Kit) -> None:
    model, batches = MLP(), points(kit.seed)

    def broken(step: int) -> tuple[Tensor, Tensor]:
        x, y = batches(step)
        if kit.sick and step == 7:
            x[5, 3] = torch.nan
        return x, y

    kit.fit(model, torch.optim.AdamW(model.parameters(), lr=1e-3), broken, 12)


def padding_counts(kit: Kit) -> None:
    model = LSTM(masked=not kit.sick)
    kit.fit(model, torch.optim.AdamW(model.parameters(), lr=3e-3), texts(kit.seed), 12)


def collapse(kit: Kit) -> None:
    model, batches = MLP(depth=4), points(kit.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def after(step: int) -> None:
        if kit.sick and step == 9:  # one bad update silences the layer before the head
            with torch.no_grad():
                model.layers[-1].bias.fill_(-50)

    kit.fit(model, optimizer, batches, 30, after_step=after)


CASES = [
    Case("B1", "trains in eval mode", trains_in_eval, ("trains-in-eval",), ("bn", "drop"), 1),
    Case("B2", "evaluates in train mode", evaluates_in_train, ("evaluates-in-train",), ("bn", "drop"), 4),
    Case("B3", "a module ignores eval", ignores_eval, ("ignores-eval",), ("0:",), 4, compiles=False),
    Case("B4", "shuffled labels", shuffled_labels, ("at-chance",), (":output",), 79),
    Case("B6", "raw pixels", raw_pixels, ("unscaled-input",), (":input",), 0),
    Case("B9", "the same batch", same_batch, ("same-batch",), (":input",), 1),
    Case("B10", "a bad sample", bad_sample, ("nonfinite",), (":input",), 7),
    Case("B11", "padding counts", padding_counts, ("padding-learns",), ("embedding",), 0, compiles=False),
    Case("B13", "collapse", collapse, ("collapsed", "dead-units", "dead"), (":output", "layers.2"), 10),
]
