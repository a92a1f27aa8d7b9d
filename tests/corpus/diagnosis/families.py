"""Faults by family: each is a change of a healthy training, so that its twin is the same training without the change.

`KEPT_OUT` names the families that rules are not written on: they are run to report figures, never to adjust a limit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchtap as tt

__all__ = ["FAMILIES", "KEPT_OUT", "Family", "Job", "Outcome", "jobs", "run_family"]

KEPT_OUT = (
    "zero_after_backward", "optimizer_on_a_copy", "trains_in_eval", "nan_in_a_sample", "unscaled_input",
    "betas_swapped", "group_rate_zero", "weights_reloaded", "no_causal_mask", "loss_broadcasts", "hidden_layer",
    "constant_input", "two_ahead", "loss_maximised", "frozen_moves", "sorted_classes",
)  # fmt: skip


class Flat(nn.Module):
    """A classifier of vectors."""

    def __init__(self, width: int = 48, depth: int = 3, classes: int = 5, inputs: int = 12) -> None:
        super().__init__()
        sizes = [inputs, *[width] * depth]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.activations = nn.ModuleList(nn.ReLU() for _ in self.layers)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        for layer, activation in zip(self.layers, self.activations, strict=True):
            x = activation(layer(x))
        return self.head(self.drop(x))


class Images(nn.Module):
    """A small convolutional network with batch norm."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.relu1, self.relu2 = nn.ReLU(), nn.ReLU()
        self.head = nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.relu1(self.norm1(self.conv1(x))), 2)
        x = self.relu2(self.norm2(self.conv2(x)))
        return self.head(x.mean((2, 3)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.heads, self.causal = heads, True

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2)
        )
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Text(nn.Module):
    """A language model of two blocks."""

    def __init__(self, words: int = 24, width: int = 32, length: int = 16) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)
        for each in (self.words, self.places):
            nn.init.normal_(each.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Curve(nn.Module):
    """A regression of one number."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, 64), nn.Linear(64, 64), nn.Linear(64, 1)
        self.act1, self.act2, self.last = nn.Tanh(), nn.Tanh(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.head(self.act2(self.b(self.act1(self.a(x)))))).squeeze(-1)


class Recurrent(nn.Module):
    """A GRU that classifies sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(4, 32, batch_first=True), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x)[0][:, -1])


@dataclass
class Job:
    """A training: everything that a fault may change."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Callable[[int], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    steps: int = 60
    zero: Callable[[], None] | None = None
    scheduler: Any = None
    before_step: Callable[[int], None] = lambda step: None
    after_step: Callable[[int], None] = lambda step: None
    scale: Callable[[int], float] = lambda step: 1.0
    step: Callable[[int], None] | None = None
    doctors: list[tt.Doctor] = field(default_factory=list)

    def run(self) -> tt.Findings:
        """Train under a doctor and return its findings."""
        doctor = tt.doctor(self.model, self.optimizer, quiet=True)
        zero = self.zero or self.optimizer.zero_grad
        try:
            for number in range(self.steps):
                x, y = self.batch(number)
                zero()
                (self.loss(self.model(x), y) * self.scale(number)).backward()
                self.before_step(number)
                if self.step is None:
                    self.optimizer.step()
                else:
                    self.step(number)
                if self.scheduler is not None:
                    self.scheduler.step()
                self.after_step(number)
        finally:
            doctor.close()
        return doctor.findings()


def flat(seed: int) -> Job:
    torch.manual_seed(seed)
    truth = torch.randn(12, 5)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(48, 12)
        return x, (x @ truth).argmax(1)

    model = Flat()
    return Job(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), batch, F.cross_entropy)


def images(seed: int) -> Job:
    torch.manual_seed(seed)
    patterns = torch.randn(4, 1, 12, 12)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        y = torch.randint(0, 4, (32,))
        return patterns[y] + 0.7 * torch.randn(32, 1, 12, 12), y

    model = Images()
    return Job(model, torch.optim.AdamW(model.parameters(), 3e-3), batch, F.cross_entropy)


def text(seed: int) -> Job:
    torch.manual_seed(seed)
    follow = torch.randperm(24)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        ids = torch.randint(0, 24, (16, 1))
        while ids.shape[1] < 17:
            chance = torch.rand(16, 1) < 0.15
            ids = torch.cat([ids, torch.where(chance, torch.randint(0, 24, (16, 1)), follow[ids[:, -1:]])], 1)
        return ids[:, :-1], ids[:, 1:]

    def loss(logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())

    model = Text()
    return Job(model, torch.optim.AdamW(model.parameters(), 3e-3), batch, loss)


def curve(seed: int) -> Job:
    torch.manual_seed(seed)
    truth = torch.randn(6)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(64, 6)
        return x, torch.sin(x @ truth) + 0.1 * torch.randn(64)

    model = Curve()
    return Job(model, torch.optim.Adam(model.parameters(), 3e-3), batch, F.mse_loss)


def recurrent(seed: int) -> Job:
    torch.manual_seed(seed)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(32, 10, 4)
        return x, (x.sum((1, 2)) > 0).long() + (x[:, -1, 0] > 0.5).long()

    model = Recurrent()
    return Job(model, torch.optim.RMSprop(model.parameters(), 2e-3), batch, F.cross_entropy)


BASES = {each.__name__: each for each in (flat, images, text, curve, recurrent)}


def sgd(job: Job, lr: float = 0.05, **options: Any) -> None:
    job.optimizer = torch.optim.SGD(job.model.parameters(), lr, **options)


def adam(job: Job, lr: float = 3e-3, **options: Any) -> None:
    job.optimizer = torch.optim.AdamW(job.model.parameters(), lr, **options)


# -- faults ---------------------------------------------------------------------------------------------------


def no_zero_grad(job: Job) -> None:
    job.zero = lambda: None


def zero_after_backward(job: Job) -> None:
    job.before_step = lambda step: job.optimizer.zero_grad()


def rate_too_large(job: Job) -> None:
    adam(job, 1.0)
    job.steps = 80


def rate_zero_late(job: Job) -> None:
    def after(step: int) -> None:
        if step == 40:
            for group in job.optimizer.param_groups:
                group["lr"] = 0.0

    job.after_step = after
    job.steps = 70


def schedule_per_batch(job: Job) -> None:
    job.scheduler = torch.optim.lr_scheduler.StepLR(job.optimizer, 1, 0.5)
    job.steps = 80


def rate_too_small(job: Job) -> None:
    sgd(job, 1e-7)


def optimizer_on_a_copy(job: Job) -> None:
    job.optimizer = torch.optim.SGD(copy.deepcopy(job.model).parameters(), 0.1)


def head_left_out(job: Job) -> None:
    names = [name for name, _ in job.model.named_parameters() if not name.startswith("head")]
    kept = dict(job.model.named_parameters())
    job.optimizer = torch.optim.SGD([kept[name] for name in names], 0.1)


def graph_cut(job: Job) -> None:
    first = next(each for each in job.model.modules() if isinstance(each, (nn.Linear, nn.Conv2d, nn.GRU)))

    def cut(module: nn.Module, args: object, output: Any) -> Any:
        return (output[0].detach(), output[1]) if isinstance(output, tuple) else output.detach()

    first.register_forward_hook(cut)


def trains_in_eval(job: Job) -> None:
    job.model.eval()


def evaluates_in_training(job: Job) -> None:
    def after(step: int) -> None:
        if step in (20, 40):
            with torch.no_grad():
                job.model(job.batch(step)[0])

    job.after_step = after


def same_batch_late(job: Job) -> None:
    batch, kept = job.batch, {}

    def repeated(step: int) -> tuple[Tensor, Tensor]:
        return batch(step) if step < 40 else kept.setdefault(0, batch(step))

    job.batch = repeated


def nan_in_a_sample(job: Job) -> None:
    batch = job.batch

    def bad(step: int) -> tuple[Tensor, Tensor]:
        x, y = batch(step)
        if step == 30:
            x = x.clone()
            x.view(-1)[5] = float("nan")
        return x, y

    job.batch = bad


def labels_shuffled(job: Job) -> None:
    batch = job.batch
    job.steps = 160

    def mixed(step: int) -> tuple[Tensor, Tensor]:
        x, y = batch(step)
        return x, y.flatten()[torch.randperm(y.numel())].view(y.shape)

    job.batch = mixed


def softmax_twice(job: Job) -> None:
    loss = job.loss
    job.loss = lambda logits, y: loss(logits.softmax(-1), y)


def init_too_large(job: Job) -> None:
    with torch.no_grad():
        for parameter in job.model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(12)


def unscaled_input(job: Job) -> None:
    batch = job.batch
    job.batch = lambda step: ((pair := batch(step))[0] * 60 + 120, pair[1])


def dead_relus(job: Job) -> None:
    first = next(each for each in job.model.modules() if isinstance(each, (nn.Linear, nn.Conv2d)))
    norms = [each for each in job.model.modules() if isinstance(each, nn.BatchNorm2d)]
    with torch.no_grad():
        (norms[0] if norms else first).bias.fill_(-10)


def equal_init(job: Job) -> None:
    with torch.no_grad():
        for parameter in job.model.parameters():
            parameter.fill_(0.02)


def eps_one(job: Job) -> None:
    adam(job, eps=1.0)


def betas_swapped(job: Job) -> None:
    adam(job, betas=(0.999, 0.9))


def moments_lost(job: Job) -> None:
    def after(step: int) -> None:
        if step == 35:
            job.optimizer.state.clear()

    job.after_step = after


def optimizer_stops(job: Job) -> None:
    kept: dict[int, Any] = {}

    def step(number: int) -> None:
        if number >= 20:
            kept[0] = [each.detach().clone() for each in job.model.parameters()]
        job.optimizer.step()

    handle = job.optimizer.register_step_post_hook(
        lambda *_: [
            each.data.copy_(old) for each, old in zip(job.model.parameters(), kept.get(0, []), strict=False)
        ]
    )
    assert handle
    job.step = step


def group_rate_zero(job: Job) -> None:
    head = list(job.model.head.parameters())  # type: ignore[union-attr, operator]
    known = {id(each) for each in head}
    rest = [each for each in job.model.parameters() if id(each) not in known]
    job.optimizer = torch.optim.SGD([{"params": rest}, {"params": head, "lr": 0.0}], 0.05)


def clipped_to_nothing(job: Job) -> None:
    sgd(job)
    job.before_step = lambda step: nn.utils.clip_grad_norm_(job.model.parameters(), 1e-5) and None


def decay_too_strong(job: Job) -> None:
    adam(job, weight_decay=30.0)


def spike(job: Job) -> None:
    job.scale = lambda step: 1e4 if step == 40 else 1.0


def weights_reloaded(job: Job) -> None:
    first = {
        name: each.clone() * 3 for name, each in job.model.state_dict().items() if each.is_floating_point()
    }

    def after(step: int) -> None:
        if step == 35:
            job.model.load_state_dict(first, strict=False)

    job.after_step = after


def no_causal_mask(job: Job) -> None:
    for each in job.model.modules():
        if isinstance(each, Block):
            each.causal = False


def loss_broadcasts(job: Job) -> None:
    loss = job.loss
    job.loss = lambda answers, y: loss(answers.unsqueeze(-1), y)


def hidden_layer(job: Job) -> None:
    class Outer(nn.Module):
        def __init__(self, inner: nn.Module, width: int) -> None:
            super().__init__()
            self.inner = inner
            self.extra = [nn.Linear(width, width)]

        def forward(self, x: Tensor) -> Tensor:
            made = self.inner(x)
            return made + self.extra[0](made) if made.dim() > 1 else made + self.extra[0](made[:, None])[:, 0]

    width = job.model(job.batch(0)[0]).shape[-1] if not isinstance(job.model, Curve) else 1
    job.model = Outer(job.model, width)
    adam(job)


def constant_input(job: Job) -> None:
    batch = job.batch
    job.batch = lambda step: (torch.zeros_like((pair := batch(step))[0]), pair[1])


def own_token(job: Job) -> None:
    batch = job.batch
    job.batch = lambda step: ((pair := batch(step))[0], pair[0])


def two_ahead(job: Job) -> None:
    batch = job.batch

    def shifted(step: int) -> tuple[Tensor, Tensor]:
        x, y = batch(step)
        return x[:, :-1], y[:, 1:]

    job.batch = shifted


def relu_at_the_end(job: Job) -> None:
    job.model.last = nn.ReLU()  # type: ignore[assignment]


def same_targets(job: Job) -> None:
    batch, kept = job.batch, {}
    job.batch = lambda step: ((pair := batch(step))[0], kept.setdefault(0, pair[1]))


def frozen_by_rate_and_decay(job: Job) -> None:
    sgd(job, momentum=0.9, weight_decay=1e-2)
    job.zero = lambda: job.optimizer.zero_grad(set_to_none=False)
    first = next(each for each in job.model.modules() if isinstance(each, (nn.Linear, nn.Conv2d)))

    def after(step: int) -> None:
        if step == 10:
            first.requires_grad_(False)

    job.after_step = after


def slow_norm(job: Job) -> None:
    for each in job.model.modules():
        if isinstance(each, nn.BatchNorm2d):
            each.momentum = 1e-4


def loss_maximised(job: Job) -> None:
    loss = job.loss
    job.loss = lambda answers, y: -loss(answers, y)


def sorted_classes(job: Job) -> None:
    batch = job.batch

    def one_class(step: int) -> tuple[Tensor, Tensor]:
        pairs = [batch(step) for _ in range(8)]
        x, y = torch.cat([pair[0] for pair in pairs]), torch.cat([pair[1] for pair in pairs])
        chosen = (y == (step // 3) % int(y.max() + 1)).nonzero()[:16, 0]
        return x[chosen], y[chosen]

    job.batch = one_class


@dataclass(frozen=True)
class Family:
    """One sort of fault on several trainings; ``kinds`` are the names that are right for it."""

    name: str
    fault: Callable[[Job], None]
    bases: tuple[str, ...]
    kinds: tuple[str, ...]
    prepare: Callable[[Job], None] = lambda job: None  # for the twin too

    @property
    def kept_out(self) -> bool:
        return self.name in KEPT_OUT


_ALL = ("flat", "images", "text", "curve", "recurrent")
_CLASSES = ("flat", "images", "recurrent")

FAMILIES = [
    Family("no_zero_grad", no_zero_grad, _ALL, ("stale-gradient",)),
    Family("zero_after_backward", zero_after_backward, _ALL, ("erased-gradient", "nothing-learns")),
    Family("rate_too_large", rate_too_large, _ALL, ("step-too-large", "loss-diverged")),
    Family("rate_zero_late", rate_zero_late, _ALL, ("rate-zero",)),
    Family("schedule_per_batch", schedule_per_batch, _ALL, ("rate-zero", "learning-rate-gone")),
    Family("rate_too_small", rate_too_small, _ALL, ("step-too-small",)),
    Family("optimizer_on_a_copy", optimizer_on_a_copy, _ALL, ("foreign-optimizer", "never-updated")),
    Family("head_left_out", head_left_out, _ALL, ("not-in-optimizer",)),
    Family("graph_cut", graph_cut, _ALL, ("gradient-cut", "no-gradient")),
    Family("trains_in_eval", trains_in_eval, ("flat", "images"), ("trains-in-eval",)),
    Family("evaluates_in_training", evaluates_in_training, ("flat", "images"), ("evaluates-in-train",)),
    Family("same_batch_late", same_batch_late, _ALL, ("repeated-batch",)),
    Family("nan_in_a_sample", nan_in_a_sample, ("flat", "images", "curve", "recurrent"), ("nonfinite",)),
    Family("labels_shuffled", labels_shuffled, ("flat", "images", "text"), ("at-chance",)),
    Family(
        "softmax_twice", softmax_twice, ("flat", "images", "text", "recurrent"), ("probabilities-as-logits",)
    ),
    Family(
        "init_too_large",
        init_too_large,
        ("flat", "images", "text", "curve"),
        ("init-too-large", "first-loss", "sharp-attention"),
    ),
    Family("unscaled_input", unscaled_input, ("flat", "images", "curve"), ("unscaled-input",)),
    Family("dead_relus", dead_relus, ("flat", "images"), ("dead-units", "dead")),
    Family("equal_init", equal_init, ("flat", "images", "curve", "recurrent"), ("equal-rows",)),
    Family("eps_one", eps_one, _ALL, ("odd-hyper-parameters",), adam),
    Family("betas_swapped", betas_swapped, _ALL, ("odd-hyper-parameters",), adam),
    Family(
        "moments_lost",
        moments_lost,
        ("flat", "images", "text", "curve"),
        ("moments-reset", "optimizer-renewed"),
    ),
    Family("optimizer_stops", optimizer_stops, _ALL, ("update-zero",)),
    Family("group_rate_zero", group_rate_zero, _ALL, ("rate-zero", "update-zero"), sgd),
    Family("clipped_to_nothing", clipped_to_nothing, _ALL, ("clipped-away", "step-too-small"), sgd),
    Family("decay_too_strong", decay_too_strong, _ALL, ("odd-hyper-parameters", "shrinking"), adam),
    Family("spike", spike, _ALL, ("loss-spike",)),
    Family("weights_reloaded", weights_reloaded, _ALL, ("changed-outside",)),
    Family("no_causal_mask", no_causal_mask, ("text",), ("sees-the-future",)),
    Family("loss_broadcasts", loss_broadcasts, ("curve",), ("loss-broadcasts",)),
    Family("hidden_layer", hidden_layer, ("flat", "images", "recurrent"), ("hidden-module",)),
    Family("constant_input", constant_input, _ALL, ("constant-input",)),
    Family("own_token", own_token, ("text",), ("targets-shifted",)),
    Family("two_ahead", two_ahead, ("text",), ("targets-shifted",)),
    Family("relu_at_the_end", relu_at_the_end, ("curve",), ("out-of-reach",)),
    Family("same_targets", same_targets, _CLASSES, ("same-targets", "at-chance")),
    Family("frozen_moves", frozen_by_rate_and_decay, ("flat", "images"), ("frozen-moves",)),
    Family("slow_norm", slow_norm, ("images",), ("slow-statistics",)),
    Family("loss_maximised", loss_maximised, ("flat", "images", "curve", "recurrent"), ("loss-maximised",)),
    Family("sorted_classes", sorted_classes, _CLASSES, ("sorted-classes",)),
]


@dataclass(frozen=True)
class Outcome:
    """One fault on one training, with its twin."""

    family: str
    base: str
    seed: int
    place: int | None  # of the first right name among the findings, from 1
    said: tuple[str, ...]
    twin: tuple[str, ...]  # warnings of the twin


def run_family(family: Family, base: str, seed: int) -> Outcome:
    """Run a fault and its twin."""
    job = BASES[base](seed)
    family.prepare(job)
    family.fault(job)
    found = job.run()
    twin_job = BASES[base](seed)
    family.prepare(twin_job)
    twin = twin_job.run()
    place = next((number for number, each in enumerate(found, 1) if each.kind in family.kinds), None)
    warned = tuple(str(each.kind) for each in twin if each.severity != "info")
    return Outcome(family.name, base, seed, place, tuple(each.kind for each in found), warned)


def jobs() -> list[tuple[Family, str]]:
    """Return every fault: a family on each of its trainings."""
    return [(family, base) for family in FAMILIES for base in family.bases]
