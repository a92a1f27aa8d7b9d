"""Good and bad quantizations of whole models: a bad one is a different function or its layer is named.

    python -m tests.corpus.quantizations [part of a case's name]

A good quantization rounds each weight to the nearest level of a scheme that serving engines use. A bad one makes a
mistake that people make: too few bits, scales of the wrong axis, a wrong zero point, one layer left behind. The
models have weights with outliers, as trained ones do. Written without the comparison's own code.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

__all__ = ["CASES", "QuantizationCase", "judged", "models"]

Round = Callable[[Tensor], Tensor]
Change = Callable[[nn.Module], str]


def symmetric(bits: int, group: int = -1, clip: float = 1.0) -> Round:
    """Return a rounding to ``2 ** bits - 1`` levels around zero; ``group`` 0 is the tensor, -1 a row."""

    def rounded(weight: Tensor) -> Tensor:
        parts = weight.reshape(1, -1) if group == 0 else weight if group == -1 else weight.reshape(-1, group)
        levels = 2 ** (bits - 1) - 1
        step = (clip * parts.abs().amax(1, keepdim=True) / levels).clamp(min=1e-12)
        return ((parts / step).round().clamp(-levels, levels) * step).reshape(weight.shape)

    return rounded


def asymmetric(bits: int, group: int = -1, *, zero_off_by: float = 0.0) -> Round:
    """Return a rounding to ``2 ** bits`` levels between the smallest and the largest value."""

    def rounded(weight: Tensor) -> Tensor:
        parts = weight.reshape(1, -1) if group == 0 else weight if group == -1 else weight.reshape(-1, group)
        low, high = parts.amin(1, keepdim=True), parts.amax(1, keepdim=True)
        step = ((high - low) / (2**bits - 1)).clamp(min=1e-12)
        zero = (-low / step).round()
        level = ((parts / step).round() + zero).clamp(0, 2**bits - 1)
        return ((level - zero - zero_off_by) * step).reshape(weight.shape)

    return rounded


def wrong_axis(bits: int) -> Round:
    """Quantize with a scale for each row, and multiply by the scale of the column."""

    def rounded(weight: Tensor) -> Tensor:
        levels = 2 ** (bits - 1) - 1
        rows = (weight.abs().amax(1, keepdim=True) / levels).clamp(min=1e-12)
        columns = (weight.abs().amax(0, keepdim=True) / levels).clamp(min=1e-12)
        return (weight / rows).round() * columns

    return rounded


def shifted_scales(bits: int) -> Round:
    """Quantize by rows, and multiply by the scale of the next row."""

    def rounded(weight: Tensor) -> Tensor:
        levels = 2 ** (bits - 1) - 1
        rows = (weight.abs().amax(1, keepdim=True) / levels).clamp(min=1e-12)
        return (weight / rows).round() * rows.roll(1, 0)

    return rounded


def truncated(bits: int) -> Round:
    """Round towards minus infinity instead of to the nearest level."""

    def rounded(weight: Tensor) -> Tensor:
        levels = 2 ** (bits - 1) - 1
        rows = (weight.abs().amax(1, keepdim=True) / levels).clamp(min=1e-12)
        return (weight / rows).floor() * rows

    return rounded


def wrapped(bits: int) -> Round:
    """Let levels overflow: a scale that is too small, and no clamp."""

    def rounded(weight: Tensor) -> Tensor:
        levels = 2 ** (bits - 1) - 1
        rows = (0.7 * weight.abs().amax(1, keepdim=True) / levels).clamp(min=1e-12)
        level = (weight / rows).round()
        span = 2**bits
        return ((level + span // 2) % span - span // 2) * rows

    return rounded


def linears(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of matrices, output by input, without the head."""
    for path, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter) and weight.dim() == 2 and not isinstance(module, nn.Embedding):
            if "head" in path:
                continue
            transposed = type(module).__name__ == "Conv1D"
            yield path, weight.data.t() if transposed else weight.data


def everywhere(rounding: Round, *, but: str = "", other: Round | None = None) -> Change:
    """Round every matrix; the one at ``but`` in another way, or not at all."""

    def change(model: nn.Module) -> str:
        for path, weight in linears(model):
            way = other if but and path.endswith(but) else rounding
            if way is not None:
                weight.copy_(way(weight.contiguous()))
        return next((path for path, _ in linears(model) if but and path.endswith(but)), "")

    return change


def only(path: str, rounding: Round) -> Change:
    """Round one matrix of a float model."""

    def change(model: nn.Module) -> str:
        named = {name: weight for name, weight in linears(model) if name.endswith(path)}
        name, weight = next(iter(named.items()))
        weight.copy_(rounding(weight.contiguous()))
        return name

    return change


@final
@dataclass(frozen=True)
class QuantizationCase:
    name: str
    model: str
    good: bool
    change: Change


LAYER = {"gpt": "1.mlp.c_fc", "llama": "1.mlp.up_proj", "mlp": "4"}
# Inputs of this layer have a mean: after a layer norm a constant added to a row of weights changes nothing.
SECOND = {"gpt": "1.mlp.c_proj", "llama": "1.mlp.down_proj", "mlp": "4"}
GOOD: dict[str, Callable[[str], Change]] = {
    "int8 rows": lambda _: everywhere(symmetric(8)),
    "int8 tensor": lambda _: everywhere(symmetric(8, 0)),
    "int8 asymmetric": lambda _: everywhere(asymmetric(8)),
    "int8 groups of 16": lambda _: everywhere(symmetric(8, 16)),
    "int8 in one layer": lambda m: only(LAYER[m], symmetric(8)),
    "int8 but one layer in float": lambda m: everywhere(symmetric(8), but=LAYER[m]),
    "int6 groups of 16": lambda _: everywhere(asymmetric(6, 16)),
}
BAD: dict[str, Callable[[str], Change]] = {
    "4 bits a tensor": lambda _: everywhere(symmetric(4, 0)),
    "2 bits": lambda _: everywhere(symmetric(2)),
    "3 bits in one layer of int8": lambda m: everywhere(symmetric(8), but=LAYER[m], other=symmetric(3)),
    "wrong axis": lambda _: everywhere(wrong_axis(8)),
    "wrong axis in one layer": lambda m: everywhere(symmetric(8), but=LAYER[m], other=wrong_axis(8)),
    "zero point off by 8": lambda _: everywhere(asymmetric(8, zero_off_by=8)),
    "zero point off in one layer": lambda m: everywhere(
        asymmetric(8), but=SECOND[m], other=asymmetric(8, zero_off_by=8)
    ),
    "scales shifted by a row": lambda m: everywhere(symmetric(8), but=LAYER[m], other=shifted_scales(8)),
    "clipped at half": lambda _: everywhere(symmetric(8, clip=0.5)),
    "truncated at 4 bits": lambda _: everywhere(truncated(4)),
    "overflow in one layer": lambda m: everywhere(symmetric(8), but=LAYER[m], other=wrapped(8)),
}
MODELS = ("gpt", "llama", "mlp")
CASES = [
    QuantizationCase(f"{model}: {name}", model, good, make(model))
    for model in MODELS
    for good, kinds in ((True, GOOD), (False, BAD))
    for name, make in kinds.items()
]


def models(name: str) -> tuple[nn.Module, Any]:
    """Return a model with heavy-tailed weights, and inputs for it."""
    torch.manual_seed(3)
    model: Any
    if name == "mlp":
        parts: list[nn.Module] = []
        for _ in range(4):
            parts += [nn.Linear(64, 64), nn.GELU()]
        model = nn.Sequential(*parts, nn.Linear(64, 10))
        inputs: Any = (torch.randn(64, 64),)
    else:
        from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

        if name == "gpt":
            model = GPT2LMHeadModel(
                GPT2Config(n_layer=3, n_head=4, n_embd=64, vocab_size=211, n_positions=64)
            )
        else:
            model = LlamaForCausalLM(
                LlamaConfig(
                    num_hidden_layers=3,
                    hidden_size=64,
                    intermediate_size=128,
                    num_attention_heads=4,
                    num_key_value_heads=2,
                    vocab_size=211,
                )
            )
        inputs = {"input_ids": torch.randint(0, 211, (4, 24))}
    for _, weight in linears(model):
        weight.mul_(1 + 2 * (torch.rand_like(weight) < 0.01))  # a few outliers
        weight.mul_(4.0 if name != "mlp" else 1.5)  # blocks that matter beside the residual
    return model.eval(), inputs


@torch.no_grad()
def judged(case: QuantizationCase, compare: Callable[..., Any]) -> tuple[bool, str]:
    """Return True if the comparison is right about a case, and what it found."""
    reference, inputs = models(case.model)
    target = copy.deepcopy(reference)
    layer = case.change(target)
    result = compare(reference, target, inputs=inputs)
    shown = f"{result.outcome}, {result.confidence}, {result.function} | {result.verdict[:160]}"
    if case.good:
        return result.outcome == "same" and (result.function is None or result.function.same), shown
    accused = result.outcome == "differs" and (
        (result.function is not None and not result.function.same)
        or (result.first is not None and result.first.module == layer)
    )
    return accused, shown


def main() -> int:
    import torchtap

    wrong = 0
    for case in CASES:
        if len(sys.argv) > 1 and sys.argv[1] not in case.name:
            continue
        right, shown = judged(case, torchtap.compare)
        wrong += not right
        print(
            "ok   " if right else "WRONG", "good" if case.good else "bad ", case.name, "->", shown, flush=True
        )
    print(f"{len(CASES) - wrong} passed, {wrong} failed")
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
