"""One task learns fast and the other not at all: compare what each head sends back into the shared trunk.

    python examples/gradients_between_tasks.py

The gradient of the trunk's output is the sum over both heads, so it cannot tell. ``per_consumer=True`` keeps what each
head sends back on its own. With it the losses are weighted anew, and both tasks learn.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import torchtap as tt


class TwoTasks(nn.Module):
    """A trunk and two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 32), nn.Tanh())
        self.price, self.click = nn.Linear(32, 1), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shared = self.trunk(x)
        return self.price(shared), self.click(shared)


def sent_back(model: TwoTasks, x: Tensor, price: Tensor, click: Tensor, weight: float) -> dict[str, float]:
    """The size of the gradient that each head sends into the trunk."""
    heads = tt.tap(["price:grad_input", "click:grad_input"], tt.Full(), per_consumer=True)
    with tt.capture(model, heads) as seen:
        losses(model, x, price, click, weight)[2].backward()
    model.zero_grad()
    return {name: seen[f"{name}:grad_input"].norm().item() for name in ("price", "click")}


def losses(
    model: TwoTasks, x: Tensor, price: Tensor, click: Tensor, weight: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Of each task, and what is trained."""
    of_price, of_click = model(x)
    first = nn.functional.mse_loss(of_price, price)
    second = nn.functional.binary_cross_entropy_with_logits(of_click, click)
    return first, second, weight * first + second


def main() -> dict[str, Any]:
    """Measure, weight, and train."""
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    price, click = 300 * x.sum(1, keepdim=True), (x[:, :1] > 0).float()
    before = sent_back(TwoTasks(), x, price, click, 1.0)
    weight = before["click"] / before["price"]
    after = sent_back(TwoTasks(), x, price, click, weight)
    print(f"sent back: price {before['price']:.4g}, click {before['click']:.4g}")
    print(f"with the price's loss times {weight:.3g}: price {after['price']:.4g}, click {after['click']:.4g}")
    return {"before": before["price"] / before["click"], "after": after["price"] / after["click"]}


if __name__ == "__main__":
    main()
