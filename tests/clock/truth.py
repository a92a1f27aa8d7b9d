"""Hand-written hooks: what a training loop's values are, by step and phase, told by the loop itself."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torchtap.store.record import StepRecord

Key = tuple[int, str, str]  # step, phase, site


class Truth:
    """Collects values with plain hooks. The loop says which step it is in; None takes nothing."""

    def __init__(
        self, model: nn.Module, prefix: str = "", into: dict[Key, list[Tensor]] | None = None
    ) -> None:
        self.model = model
        self.prefix = prefix
        self.values: dict[Key, list[Tensor]] = {} if into is None else into
        self.step: int | None = 0
        self.named: str | None = None
        for name, module in model.named_modules():
            module.register_forward_hook(self._hook(name))

    def _phase(self) -> str:
        if self.named is not None:
            return self.named
        return "train" if self.model.training and torch.is_grad_enabled() else "eval"

    def _hook(self, name: str) -> Any:
        path = f"{self.prefix}{'.' if self.prefix and name else ''}{name}"

        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            if self.step is None:
                return
            key = self.step, self._phase()
            self.values.setdefault((*key, f"{path}:output"), []).append(output.detach().clone())
            if output.requires_grad:
                site = (*key, f"{path}:grad_output")
                output.register_hook(
                    lambda grad: self.values.setdefault(site, []).append(grad.detach().clone())
                )

        return hook

    def gradients(self, kind: str = "param_grad", phase: str = "train") -> None:
        """Take every parameter's gradient as it is now, in place of what this step has had so far."""
        for name, parameter in self.model.named_parameters():
            path, _, leaf = f"{self.prefix}{'.' if self.prefix else ''}{name}".rpartition(".")
            key = (self.step or 0, phase, f"{path}:{kind}.{leaf}")
            if parameter.grad is not None:
                self.values[key] = [parameter.grad.detach().clone()]


class Kept:
    """A sink that keeps records."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def write(self, record: StepRecord) -> None:
        self.records.append(record)

    def close(self) -> None:
        pass

    def numbers(self) -> dict[Key, dict[str, float]]:
        found: dict[Key, dict[str, float]] = {}
        for record in self.records:
            for block in record.scalars:
                for row, site in enumerate(block.sites):
                    if block.present is not None and not block.present[row]:
                        continue
                    key = (record.step, record.phase, site)
                    new = dict(zip(block.statistics, block.values[row].tolist(), strict=True))
                    assert not set(new) & set(found.get(key, {})), f"{key} was recorded twice"
                    found.setdefault(key, {}).update(new)
        return found


def check(kept: Kept, truth: dict[Key, list[Tensor]]) -> None:
    """Every recorded number against the hand-written hooks', and nothing missing on either side."""
    recorded = {key: values for key, values in kept.numbers().items() if "count" in values}
    assert set(recorded) == set(truth), (
        f"only recorded: {sorted(set(recorded) - set(truth))[:6]}; "
        f"only by hand: {sorted(set(truth) - set(recorded))[:6]}"
    )
    for key, tensors in truth.items():
        whole = torch.cat([tensor.double().flatten() for tensor in tensors])
        finite = whole[whole.isfinite()]
        expected = {
            "count": float(len(whole)),
            "mean": finite.mean().item() if len(finite) else math.nan,
            "absmax": finite.abs().max().item() if len(finite) else math.nan,
            "l2": finite.norm().item(),
        }
        for statistic, number in expected.items():
            got = recorded[key][statistic]
            same = math.isnan(got) and math.isnan(number)
            assert same or math.isclose(got, number, rel_tol=1e-5, abs_tol=1e-7), (
                key,
                statistic,
                got,
                number,
            )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation as everyone writes it."""
    model.eval()
    with torch.no_grad():
        yield
    model.train()
