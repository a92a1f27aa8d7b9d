"""Healthy trainings whose model looks odd: what people build on purpose and a rule may take for a fault."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from tests.corpus.diagnosis.kit import Kit
from tests.corpus.diagnosis.models import MLP, points, texts
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

__all__ = ["ODD_MODELS"]


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.actor, self.critic = nn.Linear(64, 3), nn.Linear(64, 1)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.orthogonal_(module.weight, 2**0.5)
                nn.init.zeros_(module.bias)
        nn.init.orthogonal_(self.actor.weight, 0.01)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(x)
        return self.actor(x), self.critic(x)


def proximal_policy(kit: Kit) -> None:
    """Rollouts in training mode, several updates on the same samples, rewards whose scale changes."""
    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4, eps=1e-5)
    call = kit.ready(model)
    kit.doctor(call, optimizer)
    make = torch.Generator().manual_seed(kit.seed)
    for round_ in range(12):
        states = torch.randn(128, 16, generator=make)
        with torch.no_grad():
            logits, values = call(states)
        actions = torch.distributions.Categorical(logits=logits).sample()
        rewards = (actions == (states[:, 0] > 0)).float() * (10 if round_ > 5 else 1)
        old = F.log_softmax(logits, -1).gather(1, actions[:, None])[:, 0]
        gain = rewards - values[:, 0]
        gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        for _ in range(4):
            for part in torch.randperm(128, generator=make).split(32):
                logits, values = call(states[part])
                chosen = torch.distributions.Categorical(logits=logits)
                ratio = (chosen.log_prob(actions[part]) - old[part]).exp()
                held = ratio.clamp(0.8, 1.2)
                policy = -torch.min(ratio * gain[part], held * gain[part]).mean()
                value = F.mse_loss(values[:, 0], rewards[part])
                optimizer.zero_grad()
                (policy + 0.5 * value - 0.01 * chosen.entropy().mean()).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()


def much_dropout(kit: Kit) -> None:
    model = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Dropout(0.9), nn.Linear(256, 4))
    kit.fit(model, torch.optim.Adam(model.parameters(), lr=3e-3), points(kit.seed), 80)


def plain_stack(kit: Kit) -> None:
    """Eight layers as torch makes them: deep inside, units are on or off for all samples alike."""
    model = MLP(depth=8)
    kit.fit(model, torch.optim.SGD(model.parameters(), lr=0.05), points(kit.seed), 40)


class SquaredReLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x).square()


def squared_relu(kit: Kit) -> None:
    model = MLP(depth=4, activation=SquaredReLU)
    kit.fit(model, torch.optim.AdamW(model.parameters(), lr=3e-3), points(kit.seed), 80)


def wasserstein_gan(kit: Kit) -> None:
    """A critic whose loss has no bottom, five updates for each of the generator, a gradient penalty."""
    generator = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 16))
    critic = nn.Sequential(nn.Linear(16, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    first = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.9))
    second = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.9))
    kit.doctor({"G": generator, "D": critic}, first, second)
    for step in range(30):
        for inner in range(5):
            real = points(kit.seed)(5 * step + inner)[0]
            fake = generator(torch.randn(64, 8)).detach()
            mixed = torch.lerp(real, fake, torch.rand(64, 1)).requires_grad_()
            slope = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)[0]
            penalty = (slope.norm(dim=1) - 1).square().mean()
            second.zero_grad()
            (critic(fake).mean() - critic(real).mean() + 10 * penalty).backward()
            second.step()
        first.zero_grad()
        (-critic(generator(torch.randn(64, 8))).mean()).backward()
        first.step()


class MeanTeacher(nn.Module):
    """A student and, in the same tree, a teacher that follows it and is in no optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.student = MLP()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            wanted = self.teacher(x)
        return self.student(x + 0.1 * torch.randn_like(x)), wanted


def mean_teacher(kit: Kit) -> None:
    model = MeanTeacher()
    optimizer = torch.optim.AdamW(model.student.parameters(), lr=3e-3)
    call, batches = kit.ready(model), points(kit.seed)
    kit.doctor(call, optimizer)
    for step in range(50):
        x, y = batches(step)
        said, wanted = call(x)
        optimizer.zero_grad()
        (F.cross_entropy(said, y) + F.mse_loss(said, wanted)).backward()
        optimizer.step()
        with torch.no_grad():
            for mine, other in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
                mine.lerp_(other, 0.05)


class Experts(nn.Module):
    """Each sample goes to one of eight experts; some get none in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 8)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(8)
        )
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        chances = self.router(x).softmax(-1)
        most, where = chances.max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.nonzero(where == number)[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * most[rows, None])
        return self.head(x + out)


def experts(kit: Kit) -> None:
    model = Experts()
    kit.fit(model, torch.optim.AdamW(model.parameters(), lr=3e-3), points(kit.seed, 16), 60)


class StochasticDepth(MLP):
    """Layers that are left out at random while it learns."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.activations[0](self.layers[0](x))
        for layer, activation in zip(self.layers[1:], self.activations[1:], strict=True):
            if not self.training or torch.rand(()) > 0.5:
                x = x + activation(layer(x))
        return self.head(x)


def stochastic_depth(kit: Kit) -> None:
    model = StochasticDepth(depth=6)
    kit.fit(model, torch.optim.AdamW(model.parameters(), lr=1e-3), points(kit.seed), 50)


def contrastive(kit: Kit) -> None:
    """Two views of each sample; the classes of the loss are the samples of the batch."""
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    call, batches = kit.ready(model), points(kit.seed)
    kit.doctor(call, optimizer)
    for step in range(100):
        x = batches(step)[0]
        one, other = (F.normalize(call(x + 0.3 * torch.randn_like(x)), dim=-1) for _ in range(2))
        optimizer.zero_grad()
        F.cross_entropy(one @ other.T / 0.1, torch.arange(len(x))).backward()
        optimizer.step()


def denoiser(kit: Kit) -> None:
    """Learns to tell the noise: the loss begins at one and falls slowly."""
    model = nn.Sequential(nn.Linear(17, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 16))
    nn.init.zeros_(model[-1].weight)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        make = torch.Generator().manual_seed(1000 * kit.seed + step)
        clean, noise = (torch.randn(128, 16, generator=make) for _ in range(2))
        time = torch.rand(128, 1, generator=make)
        return torch.cat([clean * (1 - time) + noise * time, time], 1), noise

    kit.fit(model, torch.optim.AdamW(model.parameters(), lr=2e-4), batch, 100, loss=F.mse_loss)


class TwoTasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(16, 64)
        self.heads = nn.ModuleList([nn.Linear(64, 4), nn.Linear(64, 4)])

    def forward(self, x: Tensor, task: int) -> Tensor:
        return self.heads[task](F.relu(self.body(x)))


def tasks_in_turn(kit: Kit) -> None:
    """One of two heads has a gradient in each step."""
    model = TwoTasks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches = points(kit.seed)
    kit.doctor(model, optimizer)
    for step in range(60):
        x, y = batches(step)
        optimizer.zero_grad()
        F.cross_entropy(model(x, step // 8 % 2), y).backward()
        optimizer.step()


class Packed(nn.Module):
    """A recurrent classifier that packs its sequences, as it should."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 32, padding_idx=0)
        self.rnn = nn.GRU(32, 48, batch_first=True)
        self.fc = nn.Linear(48, 4)

    def forward(self, ids: Tensor) -> Tensor:
        packed = pack_padded_sequence(
            self.embedding(ids), (ids != 0).sum(1).cpu(), batch_first=True, enforce_sorted=False
        )
        return self.fc(self.rnn(packed)[1][-1])


def packed_sequences(kit: Kit) -> None:
    model = Packed()
    kit.fit(model, torch.optim.Adam(model.parameters(), lr=1e-2), texts(kit.seed), 50)


class Rezero(MLP):
    """Branches whose factor begins at zero."""

    def __init__(self) -> None:
        super().__init__(depth=6)
        self.factors = nn.Parameter(torch.zeros(len(self.layers)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.activations[0](self.layers[0](x))
        for number in range(1, len(self.layers)):
            x = x + self.factors[number] * self.activations[number](self.layers[number](x))
        return self.head(x)


def factors_from_zero(kit: Kit) -> None:
    model = Rezero()
    nn.init.zeros_(model.head.weight)
    kit.fit(model, torch.optim.AdamW(model.parameters(), lr=3e-3), points(kit.seed), 60)


class Quantised(nn.Module):
    """The nearest of 32 codes, whose gradient goes straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 8), nn.Linear(8, 16)
        self.codes = nn.Parameter(torch.randn(32, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.inner(x)
        near = self.codes[torch.cdist(x.detach(), self.codes.detach()).argmin(1)]
        extra = F.mse_loss(near, x.detach()) + 0.25 * F.mse_loss(x, near.detach())
        return self.outer(x + (near - x).detach()), extra


def straight_through(kit: Kit) -> None:
    model = Quantised()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    call, batches = kit.ready(model), points(kit.seed)
    kit.doctor(call, optimizer)
    for step in range(60):
        x = batches(step)[0]
        again, extra = call(x)
        optimizer.zero_grad()
        (F.mse_loss(again, x) + extra).backward()
        optimizer.step()


def target_network(kit: Kit) -> None:
    """Values against those of an older copy, one epoch of random states."""
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    older = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    call, batches = kit.ready(model), points(kit.seed)
    kit.doctor(call, optimizer)
    for step in range(80):
        x, best = batches(step)
        with torch.no_grad():
            wanted = older(batches(step + 500)[0]).max(1).values * 0.99 + (best == 0)
        optimizer.zero_grad()
        F.smooth_l1_loss(call(x).gather(1, best[:, None])[:, 0], wanted).backward()
        optimizer.step()
        if step % 20 == 19:
            older.load_state_dict(model.state_dict())


def counted_words(kit: Kit) -> None:
    """Bags of words: nearly all of an input is zero."""
    model = nn.Sequential(nn.Linear(800, 64), nn.ReLU(), nn.Linear(64, 4))

    def batch(step: int) -> tuple[Tensor, Tensor]:
        make = torch.Generator().manual_seed(1000 * kit.seed + step)
        words = torch.randint(0, 800, (64, 12), generator=make)
        return torch.zeros(64, 800).scatter_add_(1, words, torch.ones(64, 12)), words[:, 0] % 4

    kit.fit(model, torch.optim.AdamW(model.parameters(), lr=3e-3), batch, 60)


ODD_MODELS: list[tuple[str, Callable[[Kit], None]]] = [
    (work.__name__, work)
    for work in (
        proximal_policy,
        much_dropout,
        plain_stack,
        squared_relu,
        wasserstein_gan,
        mean_teacher,
        experts,
        stochastic_depth,
        contrastive,
        denoiser,
        tasks_in_turn,
        packed_sequences,
        factors_from_zero,
        straight_through,
        target_network,
        counted_words,
    )
]
