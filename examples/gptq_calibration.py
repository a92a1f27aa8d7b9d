"""Quantize a small GPT to 3 bits, block by block, with what calibration data passes through each layer.

    python examples/gptq_calibration.py

Three pieces of torchtap do what such code usually builds by hand:
- `Catcher` runs the model only as far as its first block and keeps what that block is called with;
- a `Gram` tap put on by wrapping (``way="wrap"``) accumulates XᵀX of each Linear's inputs over all batches;
- `edit` measures what a layer's error does to the model's output, without changing the layer.

Weights are then rounded one column at a time, each column's error being spread over the columns not yet rounded, in
the way that the inputs' XᵀX says costs least.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional

import torchtap as tt

WIDTH, HEADS, LENGTH, VOCABULARY = 64, 4, 32, 64


class Block(nn.Module):
    """Attention and a feed-forward part, each added to what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + scale * self.proj(y.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Two blocks between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, scale=1.0)
        return self.head(x)


def text(rows: int, seed: int) -> Tensor:
    """Sequences with something to learn: each token is one of a few that may follow the one before."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (rows, LENGTH), generator=generator)
    for place in range(1, LENGTH):
        tokens[:, place] = (3 * tokens[:, place - 1] + tokens[:, place] % 3) % VOCABULARY
    return tokens


def trained(steps: int = 150) -> GPT:
    """The model that is to be quantized."""
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        tokens = text(16, step)
        loss = functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def to_grid(column: Tensor, scale: Tensor, bits: int) -> Tensor:
    """The nearest of the values that ``bits`` can say."""
    top = 2 ** (bits - 1) - 1
    return (column / scale).round().clamp(-top - 1, top) * scale


def rounded(weight: Tensor, bits: int) -> Tensor:
    """Each weight to its nearest value: what calibration has to beat."""
    scale = weight.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    return to_grid(weight, scale, bits)


def calibrated(weight: Tensor, gram: Tensor, bits: int, damping: float = 0.01) -> Tensor:
    """Columns rounded one by one, each error passed on to the columns that are left."""
    rest = weight.double().clone()
    scale = rest.abs().amax(1) / (2 ** (bits - 1) - 1)
    damped = gram + damping * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    factor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)
    result = torch.zeros_like(rest)
    for column in range(rest.shape[1]):
        result[:, column] = to_grid(rest[:, column], scale, bits)
        error = (rest[:, column] - result[:, column]) / factor[column, column]
        rest[:, column:] -= error[:, None] * factor[column, column:]
    return result.to(weight.dtype)


@torch.no_grad()
def quantize(model: GPT, batches: list[Tensor], bits: int) -> list[tuple[str, float, float]]:
    """Quantize the blocks in place; for each layer the squared error of its output, rounded and calibrated."""
    report = []
    with tt.Catcher(model, "blocks.0:input") as caught:
        for batch in batches:
            model(batch)  # stops at the first block
    calls = caught.calls
    for number, block in enumerate(model.blocks):
        layers = {name: layer for name, layer in block.named_modules() if isinstance(layer, nn.Linear)}
        taps = [tt.tap(f"{name}:input", tt.Gram()) for name in layers]
        with tt.capture(block, *taps, way="wrap") as seen:
            for args, kwargs in calls:
                block(*args, **kwargs)
        for name, layer in layers.items():
            gram = seen[f"{name}:input"]["gram"]
            best = calibrated(layer.weight, gram, bits)
            errors = [
                float(((layer.weight - other).double() @ gram @ (layer.weight - other).double().T).trace())
                for other in (rounded(layer.weight, bits), best)
            ]
            report.append((f"blocks.{number}.{name}", *errors))
            layer.weight.copy_(best)
        calls = [call._replace(args=(block(*call.args, **call.kwargs),)) for call in calls]
    return report


def divergence(model: nn.Module, reference: nn.Module, tokens: Tensor) -> float:
    """How far the predictions are from the reference's, in nats."""
    with torch.no_grad():
        ours, theirs = model(tokens).log_softmax(-1), reference(tokens).log_softmax(-1)
    return float(functional.kl_div(ours, theirs, log_target=True, reduction="none").sum(-1).mean())


def cost_of_one_layer(model: GPT, tokens: Tensor, bits: int) -> float:
    """What rounding a single layer alone does to the predictions, by putting its output in, not by changing it."""
    layer = model.blocks[0].down
    site = "blocks.0.down"
    with tt.capture(model, f"{site}:input") as seen:
        expected = model(tokens).log_softmax(-1)
    output = functional.linear(seen[f"{site}:input"], rounded(layer.weight, bits), layer.bias)
    with tt.edit(model, {f"{site}:output": output}):
        changed = model(tokens).log_softmax(-1)
    return float(functional.kl_div(changed, expected, log_target=True, reduction="none").sum(-1).mean())


def main(bits: int = 3) -> dict[str, float]:
    """Train, quantize both ways, print the comparison."""
    model = trained()
    fresh = text(32, seed=10_000)
    plain, careful = copy.deepcopy(model), copy.deepcopy(model)
    with torch.no_grad():
        for block in plain.blocks:
            for layer in block.modules():
                if isinstance(layer, nn.Linear):
                    layer.weight.copy_(rounded(layer.weight, bits))
        alone = cost_of_one_layer(model, fresh, bits)
    report = quantize(careful, [text(16, seed=5_000 + number) for number in range(8)], bits)
    print(f"{'layer':<16}{'rounded':>12}{'calibrated':>12}   squared error of the output, {bits} bits")
    for name, before, after in report:
        print(f"{name:<16}{before:>12.1f}{after:>12.1f}")
    result = {
        "rounded": divergence(plain, model, fresh),
        "calibrated": divergence(careful, model, fresh),
        "one layer rounded": alone,
        "worst layer": max(after / before for _, before, after in report),
    }
    print(f"predictions move by {result['rounded']:.3f} nats rounded, {result['calibrated']:.3f} calibrated")
    return result


if __name__ == "__main__":
    main()
