"""Faults beside the 42 of the list (U): rules follow from causes, so these are to be named as well."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.corpus.diagnosis.kit import Case, Kit, sequence_loss
from tests.corpus.diagnosis.models import CNN, GPT, MLP, Attention, images, points, texts, tokens
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

__all__ = ["UNLISTED"]


def no_step(kit: Kit) -> None:
    model, batches = MLP(), points(kit.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    call = kit.ready(model)
    kit.doctor(call, optimizer)
    for step in range(30):
        x, y = batches(step)
        optimizer.zero_grad()
        F.cross_entropy(call(x), y).backward()
        kit.updates = step + 1
        if not kit.sick:
            optimizer.step()


def no_backward(kit: Kit) -> None:
    model, batches = MLP(), points(kit.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    call = kit.ready(model)
    kit.doctor(call, optimizer)
    for step in range(12):
        x, y = batches(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(call(x), y)
        if not kit.sick:
            loss.backward()
        optimizer.step()
        kit.updates = step + 1


def loss_made_anew(kit: Kit) -> None:
    """A loss that was taken out of the graph and given a gradient again."""

    def loss(logits: Tensor, wanted: Tensor) -> Tensor:
        found = F.cross_entropy(logits, wanted)
        return torch.tensor(found.item(), requires_grad=True) if kit.sick else found

    model = MLP()
    kit.fit(model, torch.optim.AdamW(model.parameters(), lr=1e-3), points(kit.seed), 12, loss=loss)


def optimizer_in_the_loop(kit: Kit) -> None:
    model, batches = MLP(), points(kit.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    call = kit.ready(model)
    kit.doctor(call, optimizer)
    for step in range(20):
        if kit.sick:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        x, y = batches(step)
        optimizer.zero_grad()
        F.cross_entropy(call(x), y).backward()
        optimizer.step()
        kit.updates = step + 1


def maximised(kit: Kit) -> None:
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, maximize=kit.sick)
    kit.fit(model, optimizer, points(kit.seed), 40)


def wrong_sign(kit: Kit) -> None:
    def loss(logits: Tensor, wanted: Tensor) -> Tensor:
        found = F.cross_entropy(logits, wanted)
        return -found if kit.sick else found

    model = MLP()
    kit.fit(model, torch.optim.AdamW(model.parameters(), lr=1e-3), points(kit.seed), 40, loss=loss)


def softmax_over_the_batch(kit: Kit) -> None:
    def loss(logits: Tensor, wanted: Tensor) -> Tensor:
        return F.nll_loss(F.log_softmax(logits, dim=0 if kit.sick else 1), wanted)

    model = MLP()
    kit.fit(model, torch.optim.AdamW(model.parameters(), lr=1e-3), points(kit.seed), 20, loss=loss)


def broadcast_loss(kit: Kit) -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x = points(kit.seed)(step)[0]
        return x, x[:, 0] + x[:, 1]

    def loss(said: Tensor, wanted: Tensor) -> Tensor:
        wanted = wanted if kit.sick else wanted[:, None]
        return F.mse_loss(said, wanted) if kit.seed % 2 else ((said - wanted) ** 2).mean()

    kit.fit(model, torch.optim.AdamW(model.parameters(), lr=1e-3), batch, 20, loss=loss)


def empty_inputs(kit: Kit) -> None:
    model, batches = CNN(), images(kit.seed)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x, y = batches(step)
        return torch.zeros_like(x) if kit.sick else x, y

    kit.fit(model, torch.optim.AdamW(model.parameters(), lr=1e-3), batch, 20)


def one_logit(kit: Kit) -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1 if kit.sick else 4))

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x, y = points(kit.seed)(step)
        return x, torch.zeros_like(y) if kit.sick else y

    kit.fit(model, torch.optim.AdamW(model.parameters(), lr=1e-3), batch, 20)


def sorted_data(kit: Kit) -> None:
    x, y = points(kit.seed, 640)(0)
    if kit.sick:
        order = y.argsort()
        x, y = x[order], y[order]
    loader = DataLoader(TensorDataset(x, y), batch_size=32)
    model = MLP()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    call = kit.ready(model)
    kit.doctor(call, optimizer)
    for _ in range(2):
        for given, wanted in loader:
            optimizer.zero_grad()
            F.cross_entropy(call(given), wanted).backward()
            optimizer.step()
            kit.updates += 1


def all_zero_init(kit: Kit) -> None:
    model = MLP()
    if kit.sick:
        for layer in [*model.layers, model.head]:
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
    kit.fit(model, torch.optim.SGD(model.parameters(), lr=0.05), points(kit.seed), 20)


def tiny_init(kit: Kit) -> None:
    model = MLP(depth=6)
    if kit.sick:
        for layer in [*model.layers, model.head]:
            nn.init.normal_(layer.weight, std=1e-3)
            nn.init.zeros_(layer.bias)
    kit.fit(model, torch.optim.SGD(model.parameters(), lr=0.05), points(kit.seed), 40)


def half_dead(kit: Kit) -> None:
    """Half of one layer's units fire for nobody, the other half for some."""
    model = MLP(depth=4)
    if kit.sick:
        with torch.no_grad():
            model.layers[1].bias[::2] = -10.0
    kit.fit(model, torch.optim.SGD(model.parameters(), lr=0.05), points(kit.seed), 12)


def target_not_a_number(kit: Kit) -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x = points(kit.seed)(step)[0]
        wanted = x[:, :1] + x[:, 1:2]
        if kit.sick and step == 6:
            wanted[3] = torch.nan
        return x, wanted

    kit.fit(model, torch.optim.AdamW(model.parameters(), lr=1e-3), batch, 14, loss=F.mse_loss)


def nothing_to_tell(kit: Kit) -> None:
    """A batch all of whose targets are left out of the loss: the mean of nothing."""
    model, batches = GPT(), tokens(kit.seed)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x, y = batches(step)
        return x, torch.full_like(y, -100) if kit.sick and step == 6 else y

    kit.fit(model, torch.optim.AdamW(model.parameters(), lr=1e-3), batch, 14, loss=sequence_loss)


def all_dropped(kit: Kit) -> None:
    drop = nn.Dropout(1.0 if kit.sick else 0.1)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), drop, nn.Linear(64, 4))
    kit.fit(model, torch.optim.AdamW(model.parameters(), lr=1e-3), points(kit.seed), 20)


def decay_too_strong(kit: Kit) -> None:
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=2.0 if kit.sick else 1e-4)
    kit.fit(model, optimizer, points(kit.seed), 80)


def clipped_to_nothing(kit: Kit) -> None:
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def clip() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1e-5 if kit.sick else 5.0)

    kit.fit(model, optimizer, points(kit.seed), 20, before_step=clip)


def inverted_mask(kit: Kit) -> None:
    model = GPT()
    if kit.sick:
        for block in model.blocks:
            block.attn = _Backwards(64, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    kit.fit(model, optimizer, tokens(kit.seed), 12, loss=sequence_loss)


class _Backwards(Attention):
    """A mask that hides the past and shows what comes."""

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (
            each.view(b, t, self.heads, c // self.heads).transpose(1, 2) for each in self.qkv(x).split(c, 2)
        )
        mask = torch.ones(t, t, dtype=torch.bool).triu(0)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.proj(y.transpose(1, 2).reshape(b, t, c))


def padding_in_attention(kit: Kit) -> None:
    """An encoder that averages over padded positions."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(31, 32)
            self.encoder = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
            self.fc = nn.Linear(32, 4)

        def forward(self, ids: Tensor) -> Tensor:
            padded = ids == 0
            x = self.encoder(self.embedding(ids), src_key_padding_mask=None if kit.sick else padded)
            kept = torch.ones_like(padded) if kit.sick else ~padded
            return self.fc((x * kept.unsqueeze(-1)).sum(1) / kept.sum(1, keepdim=True))

    model = Model()
    kit.fit(model, torch.optim.AdamW(model.parameters(), lr=1e-3), texts(kit.seed), 12)


def huge_targets(kit: Kit) -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x = points(kit.seed)(step)[0]
        return x, (1e5 if kit.sick else 1.0) * (x[:, :1] + x[:, 1:2])

    kit.fit(model, torch.optim.SGD(model.parameters(), lr=0.05), batch, 20, loss=F.mse_loss)


def one_layer_many_times(kit: Kit) -> None:
    model = MLP(depth=1)
    layer = nn.Linear(16, 16)
    layers = [layer] * 3 if kit.sick else [nn.Linear(16, 16) for _ in range(3)]
    body = nn.Sequential(*(each for one in layers for each in (one, nn.ReLU())), model.head.__class__(16, 4))
    kit.fit(body, torch.optim.AdamW(body.parameters(), lr=1e-3), points(kit.seed), 12)


def stays_in_eval(kit: Kit) -> None:
    """The first evaluation leaves the model in evaluation mode."""
    model = CNN()
    call, batches = kit.ready(model), images(kit.seed)

    def after(step: int) -> None:
        if step == 7:
            model.eval()
            with torch.no_grad():
                call(batches(5000)[0])
            model.train(not kit.sick)

    kit.fit(model, torch.optim.AdamW(model.parameters(), lr=1e-3), batches, 20, after_step=after, call=call)


def thawed_too_late(kit: Kit) -> None:
    """Parameters that are thawed without being given to the optimizer."""
    model = MLP(depth=4)
    model.layers.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.head.parameters(), lr=1e-2)

    def after(step: int) -> None:
        if step == 9:
            model.layers.requires_grad_(True)
            if not kit.sick:
                optimizer.add_param_group({"params": model.layers.parameters()})

    kit.fit(model, optimizer, points(kit.seed), 30, after_step=after)


UNLISTED = [
    Case("U1", "optimizer.step() missing", no_step, ("never-updated",), (":param",), 8),
    Case("U2", "backward() missing", no_backward, ("nothing-learns",), (":param", "layers"), 1),
    Case("U3", "loss made anew", loss_made_anew, ("nothing-learns",), (":param", "layers"), 1),
    Case("U4", "an optimizer for each step", optimizer_in_the_loop, ("optimizer-renewed",), (":param",), 2),
    Case("U5", "loss maximised", maximised, ("loss-maximised",), (":output",), 0),
    Case("U6", "wrong sign of the loss", wrong_sign, ("loss-maximised",), (":output",), 0),
    Case("U7", "softmax over the batch", softmax_over_the_batch, ("softmax-dimension",), (":output",), 0),
    Case("U8", "target is broadcast", broadcast_loss, ("loss-broadcasts",), (":output",), 0),
    Case("U9", "empty inputs", empty_inputs, ("constant-input",), (":input",), 2),
    Case("U10", "cross-entropy of one logit", one_logit, ("one-class",), (":output",), 0),
    Case("U11", "sorted data", sorted_data, ("sorted-classes",), (":output",), 12),
    Case("U12", "all weights zero", all_zero_init, ("equal-rows", "zero-gradient", "dead"), ("layers",), 0),
    Case("U13", "tiny initialisation", tiny_init, ("vanishing", "collapsed"), ("layers", ":output"), 0),
    Case("U14", "NaN in a target", target_not_a_number, ("nonfinite",), (":value.loss", "grad_output"), 6),
    Case("U15", "no target in a batch", nothing_to_tell, ("nonfinite",), (":value.loss", "grad_output"), 6),
    Case("U16", "dropout of everything", all_dropped, ("dead", "collapsed"), ("2:output", ":output"), 4),
    Case(
        "U17",
        "weight decay too strong",
        decay_too_strong,
        ("shrinking", "collapsed"),
        ("layers", ":output"),
        10,
    ),
    Case("U18", "clipped to nothing", clipped_to_nothing, ("step-too-small",), ("layers", "head"), 9),
    Case(
        "U19", "mask the wrong way round", inverted_mask, ("sees-the-future",), ("attn",), 0, compiles=False
    ),
    Case(
        "U20", "no padding mask", padding_in_attention, ("padding-learns",), ("embedding",), 0, compiles=False
    ),
    Case("U21", "targets of 1e5", huge_targets, ("step-too-large", "exploding", "nonfinite"), ("0", "2"), 2),
    Case("U22", "one layer many times", one_layer_many_times, ("one-for-many",), ("0:", "param"), 0),
    Case("U23", "stays in eval mode", stays_in_eval, ("trains-in-eval",), ("bn", "drop"), 9),
    Case("U24", "thawed, not optimized", thawed_too_late, ("not-in-optimizer",), ("layers",), 10),
    Case("U25", "half of a layer is dead", half_dead, ("dead-units",), ("layers.1",), 0),
]
