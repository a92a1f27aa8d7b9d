"""``python -m tests.corpus.diagnosis.learned``: what `learn` says of healthy runs, and of runs with a small change.

Three small trainings with 15 seeds each. Invariants are learned from three (or five) of them at a time; every other run
is held against these, and each warning is a false one. Then the same for runs that differ in one thing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tests.corpus.diagnosis.kit import sequence_loss
from tests.corpus.diagnosis.models import CNN, GPT, MLP, Batches, images, points, tokens
from torch import Tensor, nn

import torchtap as tt
from torchtap.diagnosis.learned import what_no_longer_holds

SITES = ("*:output", "*:param", "*:param_grad", "*:grad_output")
SEEDS = 15


@dataclass(frozen=True)
class Training:
    """How one is made."""

    name: str
    model: Callable[[], nn.Module]
    data: Callable[[int], Batches]
    loss: Callable[[Tensor, Tensor], Tensor]
    rate: float
    steps: int

    def run(
        self, folder: Path, seed: int, change: Callable[[Any], object] = lambda model: None, **other: float
    ) -> Path:
        """One training with a seed, and perhaps something changed."""
        torch.manual_seed(seed)
        model, batches = self.model(), self.data(seed)
        change(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.rate * other.get("rate", 1.0))
        path = folder / f"{self.name}-{seed}-{len(list(folder.iterdir()))}"
        with tt.watch(model, path, SITES).follow(optimizer) as watch:
            for step in range(self.steps):
                x, y = batches(step)
                optimizer.zero_grad()
                loss = self.loss(model(x * other["scale"] if "scale" in other else x), y)
                loss.backward()
                optimizer.step()
                watch.log(loss=loss.detach())
        return path


TRAININGS = (
    Training("MLP", MLP, points, F.cross_entropy, 3e-3, 150),
    Training("CNN", CNN, images, F.cross_entropy, 2e-3, 60),
    Training("GPT", lambda: GPT(dropout=0.1), tokens, sequence_loss, 1e-2, 100),
)
CHANGES: dict[str, dict[str, Any]] = {
    "one layer's weights × 1.5": {"change": lambda model: model.layers[1].weight.data.mul_(1.5)},
    "a bias of one in the head": {"change": lambda model: model.head.bias.data.fill_(1.0)},
    "a frozen layer": {"change": lambda model: model.layers[0].requires_grad_(False)},
    "learning rate × 5": {"rate": 5.0},
    "learning rate / 5": {"rate": 0.2},
    "inputs × 2": {"scale": 2.0},
}


def warnings_of(good: tt.Invariants, run: Path) -> list[str]:
    """What is told of a run."""
    return [str(each) for each in what_no_longer_holds(good, tt.open(run)) if each.severity != "info"]


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for training in TRAININGS:
            runs = [training.run(folder, seed) for seed in range(SEEDS)]
            for size in (3, 5):
                _healthy(training.name, runs, size)
            if training.name == "MLP":
                good = tt.learn(runs[:3])
                for what, options in CHANGES.items():
                    found = [
                        warnings_of(good, training.run(folder, 20 + seed, **options)) for seed in range(3)
                    ]
                    print(
                        f"{what}: told in {sum(map(bool, found))} of 3; {(found[0] or ['nothing'])[0]}",
                        flush=True,
                    )


def _healthy(name: str, runs: list[Path], size: int) -> None:
    wrong, pairs = [], 0
    for first in range(0, len(runs) - size + 1, size):
        good = tt.learn(runs[first : first + size])
        others = [run for number, run in enumerate(runs) if not first <= number < first + size]
        pairs += len(others)
        wrong += [text for run in others for text in warnings_of(good, run)[:1]]
    print(f"{name}, learned from {size}: {len(wrong)} of {pairs} healthy runs have a warning", flush=True)
    for text in wrong:
        print(f"- {text}")


if __name__ == "__main__":
    main()
