"""What a careful user would write with plain hooks: outputs and gradients of each step, evaluation apart."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import torchtap as tt


class ByHand:
    """Hooks on a few modules and on the optimizer; after the training `check` compares them with a run."""

    def __init__(self, model: nn.Module, sites: tuple[str, ...]) -> None:
        self.step = 0
        self.outputs: dict[tuple[str, str], dict[int, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
        self.gradients: dict[str, dict[int, Tensor]] = defaultdict(dict)
        self._parameters = dict(model.named_parameters())
        self._handles: list[Any] = []
        modules = dict(model.named_modules())
        self._root = model
        for name in sites:
            self._handles.append(modules[name].register_forward_hook(self._output(name)))

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        self._handles.append(optimizer.register_step_post_hook(self._updated))

    def _output(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            phase = "train" if module.training and torch.is_grad_enabled() else "eval"
            step = self.step if phase == "train" else max(0, self.step - 1)  # before the first: with it
            value = output if isinstance(output, Tensor) else output[0]
            self.outputs[name, phase][step].append(value.detach().clone())

        return hook

    def _updated(self, *_: Any) -> None:
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                self.gradients[name][self.step] = parameter.grad.detach().clone()
        self.step += 1

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def check(self, folder: Any, leaf: str = "", prefix: str = "") -> None:
        """Every number of the run against these."""
        run = tt.open(folder)
        for (name, phase), steps in self.outputs.items():
            for statistic in ("mean", "std", "absmax", "count"):
                series = run.series(f"{prefix}{name}:output{leaf}", statistic, phase=phase)
                expected = [
                    _number(torch.cat([v.flatten() for v in steps[s]]), statistic) for s in sorted(steps)
                ]
                assert list(series.steps) == sorted(steps), (name, phase)
                np.testing.assert_allclose(series.values, expected, rtol=1e-5, atol=1e-7)
        for name, steps_of in self.gradients.items():
            path, _, weight = name.rpartition(".")
            series = run.series(f"{prefix}{path}:param_grad.{weight}", "l2")
            assert list(series.steps) == sorted(steps_of), name
            expected = [steps_of[s].double().norm().item() for s in sorted(steps_of)]
            np.testing.assert_allclose(series.values, expected, rtol=1e-5, atol=1e-9)


def _number(values: Tensor, statistic: str) -> float:
    values = values.double()
    if statistic == "count":
        return float(values.numel())
    if statistic == "std":
        return float(values.std())
    return float(values.abs().max() if statistic == "absmax" else values.mean())
