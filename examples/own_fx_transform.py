"""A graph transform of one's own changes the model's answers: see the model before and after, module by module.

    python examples/own_fx_transform.py

The transform folds a batch norm into the convolution before it and forgets the convolution's bias. `compare` runs both
and names the module after which they part; with the mistake corrected they agree.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

import torchtap as tt


def folded(model: nn.Module, *, correct: bool) -> fx.GraphModule:
    """The model with every batch norm folded into the convolution before it."""
    traced = fx.symbolic_trace(model)
    for node in list(traced.graph.nodes):
        if node.op != "call_module" or not isinstance(traced.get_submodule(node.target), nn.BatchNorm2d):
            continue
        norm, convolution = traced.get_submodule(node.target), traced.get_submodule(node.args[0].target)
        scale = norm.weight / torch.sqrt(norm.running_var + norm.eps)
        with torch.no_grad():
            convolution.weight.mul_(scale.view(-1, 1, 1, 1))
            bias = convolution.bias if correct else torch.zeros_like(norm.bias)
            convolution.bias.copy_((bias - norm.running_mean) * scale + norm.bias)
        node.replace_all_uses_with(node.args[0])
        traced.graph.erase_node(node)
    traced.recompile()
    return traced


def network() -> nn.Sequential:
    """Two convolutions, each with a norm that has seen data."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
    )
    for _ in range(10):
        model(torch.randn(16, 3, 12, 12))
    return model.eval()


def main() -> dict[str, Any]:
    """Compare the wrong transform and the right one with the model."""
    x = torch.randn(4, 3, 12, 12)
    # Where a norm is folded, the convolution answers what the norm did: these are compared with one another.
    rules = ["1:output=0:output", "4:output=3:output"]
    wrong = tt.compare(network(), folded(network(), correct=False), inputs=(x,), rules=rules)
    right = tt.compare(network(), folded(network(), correct=True), inputs=(x,), rules=rules)
    print(wrong)
    print(right)
    return {"wrong": wrong.first.site if wrong.first else None, "right": right.diverged}


if __name__ == "__main__":
    main()
