"""Is a parametrisation right at every width? A small language model, with and without scaled learning rates.

    python examples/coordinate_check.py
    torchtap rcc examples/coordinate_check.py:standard examples/coordinate_check.py:mup

Both train the same model at several widths for a few steps and draw how the size of (W_t-W_0)x_t grows with the
width, layer by layer. Flat lines are right: what is learned in a step does not depend on how wide the model is.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

from torchtap.monitors.widths import Setup, check_widths, plot_widths

TOKENS, LENGTH, BATCH, RATE, BASE = 50, 16, 16, 5e-3, 64


class LanguageModel(nn.Module):
    """An embedding, an attention, a feed-forward part, a readout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, width)
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.readout = nn.Linear(width, TOKENS, bias=False)
        nn.init.zeros_(self.readout.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        query, key, value = self.qkv(self.norm(x)).chunk(3, dim=-1)
        # Scores are divided by the width and not by its root, since queries and keys come to agree.
        scale = 8.0 / query.shape[-1]
        x = x + nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
        x = x + self.down(torch.relu(self.up(x)))
        return self.readout(x).flatten(0, 1)


def standard(width: int) -> Setup:
    """Adam with one learning rate for all."""
    model = LanguageModel(width)
    return Setup(model, torch.optim.Adam(model.parameters(), lr=RATE), batches())


def mup(width: int) -> Setup:
    """Adam with a learning rate divided by the width for matrices whose input is as wide as the model."""
    model = LanguageModel(width)
    wide = [model.qkv.weight, model.up.weight, model.down.weight, model.readout.weight]
    others = [*model.embedding.parameters(), *model.norm.parameters()]
    groups = [{"params": others, "lr": RATE}, {"params": wide, "lr": RATE * BASE / width}]
    return Setup(model, torch.optim.Adam(groups), batches())


def batches() -> list[tuple[Tensor, Tensor]]:
    """Sequences in which each token says which one follows."""
    generator = torch.Generator().manual_seed(0)
    follows = torch.randperm(TOKENS, generator=generator)
    found = []
    for _ in range(20):
        rows = [torch.randint(0, TOKENS, (BATCH,), generator=generator)]
        for _ in range(LENGTH):
            rows.append(follows[rows[-1]])
        tokens = torch.stack(rows, dim=1)
        found.append((tokens[:, :-1], tokens[:, 1:].flatten()))
    return found


def main(path: str = "coordinate_check.png", widths: tuple[int, ...] = (32, 64, 128, 256)) -> None:
    """Check both and draw them."""
    checks = [check_widths(build, widths, steps=4) for build in (standard, mup)]
    for check in checks:
        layer, exponent = check.worst()
        print(f"{check.name:<10} depends on the width most in {layer}: as width^{exponent:+.2f}")
    plot_widths(checks, path)
    print(f"drawn in {path}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
