"""Healthy trainings that look odd: every warning on one of these is false."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from tests.corpus.diagnosis.kit import Kit, sequence_loss
from tests.corpus.diagnosis.models import CNN, GPT, LSTM, MLP, images, points, texts, tokens
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

__all__ = ["CONTROLS"]


def plain_mlp(kit: Kit) -> None:
    model = MLP()
    kit.fit(model, torch.optim.Adam(model.parameters(), lr=1e-2), points(kit.seed), 80)


def plain_cnn(kit: Kit) -> None:
    model = CNN()
    kit.fit(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), images(kit.seed), 60)


def plain_gpt(kit: Kit) -> None:
    model = GPT(tied=True, dropout=0.1)
    kit.fit(model, torch.optim.AdamW(model.parameters(), lr=3e-3), tokens(kit.seed), 80, loss=sequence_loss)


def plain_lstm(kit: Kit) -> None:
    model = LSTM()
    kit.fit(model, torch.optim.Adam(model.parameters(), lr=1e-2), texts(kit.seed), 60)


class LowRank(nn.Module):
    """A frozen layer with an adapter that begins at zero."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        for parameter in base.parameters():
            parameter.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def lora(kit: Kit) -> None:
    model = GPT()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for block in model.blocks:
        block.attn.qkv = LowRank(block.attn.qkv)
        block.mlp[0] = LowRank(block.mlp[0])
    learning = [each for each in model.parameters() if each.requires_grad]
    kit.fit(model, torch.optim.AdamW(learning, lr=3e-3), tokens(kit.seed), 40, loss=sequence_loss)


def gan(kit: Kit) -> None:
    generator = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16), nn.Tanh())
    critic = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1), nn.Sigmoid())
    first = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    second = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
    kit.doctor({"G": generator, "D": critic}, first, second)
    for step in range(60):
        real = torch.tanh(points(kit.seed)(step)[0])
        critic.zero_grad()
        F.binary_cross_entropy(critic(real), torch.ones(64, 1)).backward()
        fake = generator(torch.randn(64, 8))
        F.binary_cross_entropy(critic(fake.detach()), torch.zeros(64, 1)).backward()
        second.step()
        generator.zero_grad()
        F.binary_cross_entropy(critic(fake), torch.ones(64, 1)).backward()
        first.step()


def accumulation(kit: Kit) -> None:
    model, batches = MLP(), points(kit.seed, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    call = kit.ready(model)
    kit.doctor(call, optimizer)
    for step in range(30):
        size = 2 if step % 5 == 4 else 4
        for index in range(size):
            x, y = batches(4 * step + index)
            (F.cross_entropy(call(x), y) / size).backward()
        optimizer.step()
        optimizer.zero_grad()


def warm_up(kit: Kit) -> None:
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 30))
    after: Callable[[int], None] = lambda step: schedule.step()  # noqa: E731
    kit.fit(model, optimizer, tokens(kit.seed), 50, loss=sequence_loss, after_step=after)


def cosine_to_zero(kit: Kit) -> None:
    model = CNN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
    kit.fit(model, optimizer, images(kit.seed), 60, after_step=lambda step: schedule.step())


def scaler(kit: Kit) -> None:
    model = MLP()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    call, batches = kit.ready(model), points(kit.seed)
    scale = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    kit.doctor(call, optimizer)
    for step in range(40):
        x, y = batches(step)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(call(x), y)
        # the first scales overflow as they do in float16
        (scale.scale(loss) * (1e30 if step < 5 else 1.0)).backward()
        scale.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scale.step(optimizer)
        scale.update()


def rare_tokens(kit: Kit) -> None:
    model = nn.Sequential(nn.Embedding(2000, 16), nn.Flatten(), nn.Linear(8 * 16, 4))
    kit.fit(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        lambda step: (
            torch.randint(0, 2000, (32, 8), generator=torch.Generator().manual_seed(step)) ** 2 // 2000,
            torch.randint(0, 4, (32,), generator=torch.Generator().manual_seed(step)),
        ),
        40,
    )


def sparse_relu(kit: Kit) -> None:
    model = MLP(hidden=256)
    nn.init.constant_(
        model.layers[0].bias, -0.5
    )  # four of five values are zero, each unit fires for some sample
    kit.fit(model, torch.optim.AdamW(model.parameters(), lr=1e-3), points(kit.seed), 60)


def frozen_norm(kit: Kit) -> None:
    model = CNN()
    warm = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(10):  # a model that was trained before
        x, y = images(kit.seed + 50)(step)
        warm.zero_grad()
        F.cross_entropy(model(x), y).backward()
        warm.step()
    for module in (model.bn1, model.bn2):
        module.eval()
        for parameter in module.parameters():
            parameter.requires_grad_(False)
    learning = [each for each in model.parameters() if each.requires_grad]
    kit.fit(model, torch.optim.AdamW(learning, lr=1e-4), images(kit.seed), 40)


def ema_copy(kit: Kit) -> None:
    model = CNN()
    shadow = copy.deepcopy(model).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def after(step: int) -> None:
        with torch.no_grad():
            for mine, other in zip(shadow.parameters(), model.parameters(), strict=True):
                mine.lerp_(other, 0.1)
            shadow(images(kit.seed)(step)[0])

    kit.fit(model, optimizer, images(kit.seed), 30, after_step=after)


class TwoHeads(MLP):
    """Of two heads one is in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer, activation in zip(self.layers, self.activations, strict=True):
            x = activation(layer(x))
        self.other(x)
        return self.head(x)


def unused_head(kit: Kit) -> None:
    model = TwoHeads()
    kit.fit(model, torch.optim.AdamW(model.parameters(), lr=1e-3), points(kit.seed), 30)


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(16, 64)
        self.action, self.value = nn.Linear(64, 2), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.body(x))
        return F.softmax(self.action(x), dim=-1), self.value(x)


def actor_critic(kit: Kit) -> None:
    model = Policy()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    call = kit.ready(model)
    kit.doctor(call, optimizer)
    make = torch.Generator().manual_seed(kit.seed)
    for _ in range(25):
        losses = []
        for _ in range(8):  # one state at a time
            state = torch.randn(16, generator=make)
            chances, value = call(state)
            action = int(torch.multinomial(chances.detach(), 1, generator=make))
            reward = float(action == int(state[0] > 0))
            advantage = reward - value.item()
            losses.append(
                -chances[action].log() * advantage + F.smooth_l1_loss(value, torch.tensor([reward]))
            )
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        optimizer.step()


class Saved(GPT):
    """Its blocks in checkpoints."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.positions
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


def checkpointing(kit: Kit) -> None:
    model = Saved()
    kit.fit(model, torch.optim.AdamW(model.parameters(), lr=3e-3), tokens(kit.seed), 30, loss=sequence_loss)


class Coder(nn.Module):
    """A variational autoencoder; its answer is a probability for each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.mean, self.spread = nn.Linear(144, 64), nn.Linear(64, 8), nn.Linear(64, 8)
        self.back, self.out = nn.Linear(8, 64), nn.Linear(64, 144)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = F.relu(self.inner(x.flatten(1)))
        mean, spread = self.mean(hidden), self.spread(hidden)
        code = mean + torch.randn_like(mean) * (spread / 2).exp()
        return torch.sigmoid(self.out(F.relu(self.back(code)))), mean, spread


def vae(kit: Kit) -> None:
    model = Coder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    call, batches = kit.ready(model), images(kit.seed, 64)
    kit.doctor(call, optimizer)
    for step in range(60):
        x = (batches(step)[0] > 0.7).float()
        optimizer.zero_grad()
        again, mean, spread = call(x)
        loss = F.binary_cross_entropy(again, x.flatten(1), reduction="sum")
        (loss - 0.5 * (1 + spread - mean**2 - spread.exp()).sum()).backward()
        optimizer.step()
        if step % 20 == 19:
            model.eval()
            with torch.no_grad():
                call(x)
            model.train()


class Words(nn.Module):
    """A recurrent language model of (time, batch), as the public example has it."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.encoder = nn.Embedding(31, 48)
        self.rnn = nn.LSTM(48, 48, 2, dropout=0.2)
        self.decoder = nn.Linear(48, 31)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)

    def forward(self, ids: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        x, state = self.rnn(self.drop(self.encoder(ids)), state)
        return F.log_softmax(self.decoder(self.drop(x)).view(-1, 31), dim=1), state


def word_model(kit: Kit) -> None:
    model = Words()
    call = kit.ready(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
    kit.doctor(call, optimizer)
    state = (torch.zeros(2, 16, 48), torch.zeros(2, 16, 48))
    for step in range(60):
        ids, wanted = (each.t().contiguous() for each in tokens(kit.seed)(step))
        optimizer.zero_grad()
        state = (state[0].detach(), state[1].detach())
        said, state = call(ids, state)
        F.nll_loss(said, wanted.reshape(-1)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()


class Example(nn.Module):
    """The network of the public MNIST example, smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 3), nn.Conv2d(16, 32, 3)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(512, 64), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = torch.flatten(self.dropout1(F.max_pool2d(x, 2)), 1)
        return F.log_softmax(self.fc2(self.dropout2(F.relu(self.fc1(x)))), dim=1)


def mnist(kit: Kit) -> None:
    model = Example()
    call = kit.ready(model)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    x, y = images(kit.seed, 640)(0)
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
    kit.doctor(call, optimizer)
    for _ in range(3):
        model.train()
        for given, wanted in loader:
            optimizer.zero_grad()
            F.nll_loss(call(given), wanted).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            for given, _ in loader:
                call(given)
        schedule.step()


class Residual(nn.Module):
    """A small residual network whose branches begin at zero, as torchvision can have it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.convs = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1, bias=False) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(4))
        for norm in self.norms[1::2]:
            nn.init.zeros_(norm.weight)
        self.fc = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        for i in (0, 2):
            branch = F.relu(self.norms[i](self.convs[i](x)))
            x = F.relu(x + self.norms[i + 1](self.convs[i + 1](branch)))
        return self.fc(x.mean((2, 3)))


def imagenet_loop(kit: Kit) -> None:
    model = Residual()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    batches = images(kit.seed)
    call = kit.ready(model)

    def after(step: int) -> None:
        if step % 20 == 19:
            model.eval()
            with torch.no_grad():
                for number in range(3):
                    F.cross_entropy(call(batches(7000 + number)[0]), batches(7000 + number)[1])
            model.train()

    kit.fit(model, optimizer, batches, 60, after_step=after, call=call)


def full_batch(kit: Kit) -> None:
    model = MLP()
    x, y = points(kit.seed, 256)(0)
    kit.fit(model, torch.optim.Adam(model.parameters(), lr=1e-3), lambda step: (x, y), 40)


def lbfgs(kit: Kit) -> None:
    model = nn.Linear(16, 1)
    x, y = points(kit.seed)(0)[0], torch.randn(64, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
    kit.doctor(model, optimizer)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    for _ in range(12):
        optimizer.step(closure)


class Encoder(nn.Module):
    """torch's own encoder, whose layers begin as copies of each other, over padded texts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 32, padding_idx=0)
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.fc = nn.Linear(32, 4)

    def forward(self, ids: Tensor) -> Tensor:
        padded = ids == 0
        x = self.encoder(self.embedding(ids), src_key_padding_mask=padded)
        kept = (~padded).unsqueeze(-1).float()
        return self.fc((x * kept).sum(1) / kept.sum(1))


def torch_encoder(kit: Kit) -> None:
    model = Encoder()
    kit.fit(model, torch.optim.AdamW(model.parameters(), lr=1e-3), texts(kit.seed), 40)


def head_only(kit: Kit) -> None:
    """Only the head is given to the optimizer; the rest is not even frozen."""
    model = MLP()
    kit.fit(model, torch.optim.AdamW(model.head.parameters(), lr=1e-2), points(kit.seed), 30)


def regression(kit: Kit) -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    rule = torch.randn(16, 1)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x = points(kit.seed)(step)[0]
        return x, 100 + 10 * x @ rule

    kit.fit(model, torch.optim.Adam(model.parameters(), lr=1e-2), batch, 60, loss=F.mse_loss)


CONTROLS: list[tuple[str, Callable[[Kit], None]]] = [
    (work.__name__, work)
    for work in (
        plain_mlp, plain_cnn, plain_gpt, plain_lstm, lora, gan, accumulation, warm_up, cosine_to_zero, scaler,
        rare_tokens, sparse_relu, frozen_norm, ema_copy, unused_head, actor_critic, checkpointing, vae, word_model,
        mnist, imagenet_loop, full_batch, lbfgs, torch_encoder, head_only, regression,
    )
]  # fmt: skip
