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


class Call:
    """One call of the model: its step and mode are known at once, a backward through it later."""

    def __init__(self, step: int, named: str | None, training: bool) -> None:
        self.step, self.named, self.training = step, named, training
        self.backward = False
        self.values: dict[str, list[Tensor]] = {}

    def phase(self) -> str:
        if self.named is not None:
            return self.named
        return "train" if self.backward else "forward" if self.training else "eval"


class Truth:
    """Collects values with plain hooks. The loop says which step it is in; None takes nothing."""

    def __init__(self, model: nn.Module, prefix: str = "", calls: list[Call] | None = None) -> None:
        self.model = model
        self.prefix = prefix
        self.calls: list[Call] = [] if calls is None else calls
        self.read: dict[Key, list[Tensor]] = {}
        self.step: int | None = 0
        self.named: str | None = None
        model.register_forward_pre_hook(self._begin)
        for name, module in model.named_modules():
            module.register_forward_hook(self._hook(name))

    def _begin(self, module: nn.Module, args: Any) -> None:
        if self.step is not None:
            self.calls.append(Call(self.step, self.named, module.training))

    def _hook(self, name: str) -> Any:
        path = f"{self.prefix}{'.' if self.prefix and name else ''}{name}"

        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            if self.step is None:
                return
            call = self.calls[-1]
            call.values.setdefault(f"{path}:output", []).append(output.detach().clone())
            if output.requires_grad:

                def arrived(grad: Tensor) -> None:
                    call.backward |= not name
                    call.values.setdefault(f"{path}:grad_output", []).append(grad.detach().clone())

                output.register_hook(arrived)

        return hook

    @property
    def values(self) -> dict[Key, list[Tensor]]:
        """All values by step, phase and site."""
        found: dict[Key, list[Tensor]] = {}
        for call in self.calls:
            for site, tensors in call.values.items():
                found.setdefault((call.step, call.phase(), site), []).extend(tensors)
        return found | self.read

    def gradients(self, kind: str = "param_grad", phase: str = "train") -> None:
        """Take every parameter's gradient as it is now, in place of what this step has had so far."""
        for name, parameter in self.model.named_parameters():
            path, _, leaf = f"{self.prefix}{'.' if self.prefix else ''}{name}".rpartition(".")
            key = (self.step or 0, phase, f"{path}:{kind}.{leaf}")
            if parameter.grad is not None:
                self.read[key] = [parameter.grad.detach().clone()]


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


class Audited(Kept):
    """A sink that also keeps the audit."""

    def __init__(self) -> None:
        super().__init__()
        self.failed: list[str] = []
        self.reported: set[tuple[int, str]] = (
            set()
        )  # steps and phases of which something is said to be missing

    def event(self, kind: str, **facts: Any) -> None:
        if kind == "audit":
            self.failed += facts["failed"]
        elif kind == "lost" and "step" in facts:
            self.reported.add((facts["step"], facts["phase"]))


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
