"""The models of the demo, the benchmarks and the examples compute what they did when their goldens were recorded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from benchmarks.models import GPT, mlp
from torch import nn

from torchtap.cli.demo import SmallGPT


def tokens(most: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, most, shape, generator=torch.Generator().manual_seed(1))


MODELS = {
    "demo": (lambda: SmallGPT(60, layers=2), (tokens(60, 4, 32),)),
    "gpt": (lambda: GPT(layers=2, width=64, heads=2, vocabulary=128), (tokens(128, 2, 24),)),
    "mlp": (lambda: mlp(layers=6, width=32), (torch.linspace(-1, 1, 256).view(8, 32),)),
}


@pytest.fixture(params=[1, 2], autouse=True, ids=["one thread", "two threads"])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", MODELS)
def test_an_example_computes_what_it_did(torchtap_golden: Any, name: str) -> None:
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    torchtap_golden(make().eval(), inputs, name=name)


def test_the_demo_trains_as_it_did(torchtap_golden: Any) -> None:
    def make() -> Any:
        torch.manual_seed(0)
        model = SmallGPT(60, layers=1, width=32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

        def step(number: int) -> torch.Tensor:
            text = tokens(60, 4, 33)
            loss = nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss

        return model, step

    torchtap_golden.training(make, steps=2, name="demo-training")
