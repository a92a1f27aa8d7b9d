"""Run a model forwards and backwards and leave no trace: gradients, buffers, modes and random state as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["untouched"]


@contextmanager
def untouched(model: Any) -> Iterator[None]:
    """Inside the block the model has no gradients; at its end it has those that it had, and its old buffers."""
    if not isinstance(model, nn.Module):
        with torch.random.fork_rng():
            yield
        return
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    for parameter in parameters:
        parameter.grad = None
    with torch.random.fork_rng():
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    if buffer.shape == before.shape and not torch.equal(buffer, before):
                        buffer.copy_(before)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
