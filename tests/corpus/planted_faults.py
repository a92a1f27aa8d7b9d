"""Plant known faults and harmless changes into models, and see whether the comparison names the right module.

    python -m tests.corpus.planted_modes          the whole table, in every way of comparing

Each case is a deep copy of a reference in which one thing was changed. `torchtap.compare` gets the reference, the
changed copy and the inputs: no tolerance, no hint. A fault counts as found when ``first.module`` is the module
whose own code or weights were changed; a harmless change counts as a false alarm when it is not called the same.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, final

import torch
from tests.corpus.planted_code import CODE_FAULTS, CODE_HARMLESS
from tests.corpus.planted_everywhere import EVERYWHERE_FAULTS, EVERYWHERE_HARMLESS, Everywhere
from tests.corpus.planted_models import FAMILIES, LAYERS
from tests.corpus.planted_zoo import ARCHITECTURES, build
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Case", "Outcome", "at_depth", "cases", "everywhere", "judge", "summary"]

DEPTHS = {"early": 0, "middle": LAYERS // 2, "last": LAYERS - 1}
FRACTIONS = {"early": 0.1, "middle": 0.5, "last": 0.85}
Plant = Callable[[nn.Module, str], "str | None"]


@final
@dataclass(frozen=True)
class Case:
    """One changed copy: ``plant(model, block path)`` changes it and returns the module that is now wrong."""

    family: str
    change: str
    depth: str
    plant: Plant
    harmless: bool

    @property
    def name(self) -> str:
        return f"{self.family}/{self.change}/{self.depth}"


@final
@dataclass(frozen=True)
class Outcome:
    """What the comparison said about a case."""

    case: Case
    expected: str | None
    named: str | None
    verdict: str
    sure: str = ""
    outcome: str = ""

    @property
    def right(self) -> bool:
        if self.expected is None:
            return self.outcome == "same"
        return self.named == self.expected

    @property
    def near(self) -> bool:
        """Whether the module that was named is the right one, one around it, or one inside it or beside it."""
        if self.named is None or self.expected is None:
            return self.right
        outer = self.expected.rpartition(".")[0]
        return self.right or self.named == outer or self.named.rpartition(".")[0] in (outer, self.expected)


def judge(case: Case, compare: Callable[..., Any]) -> Outcome | None:
    """Plant one case and compare; ``None`` when the model has no place for it."""
    reference, inputs = build(case.family)
    target = copy.deepcopy(reference)
    with torch.no_grad():
        planted = case.plant(target, f"blocks.{DEPTHS[case.depth]}")
    if planted is None:
        return None
    result = compare(reference, target, inputs=inputs)
    named = None if result.first is None else result.first.module
    sure = "" if result.first is None else result.first.sure
    return Outcome(case, None if case.harmless else planted, named, result.verdict, sure, result.outcome)


def everywhere() -> Iterator[Case]:
    """Every architecture by every change that fits any model, at depths that take turns."""
    depths = list(DEPTHS)
    for at, family in enumerate(ARCHITECTURES):
        for table, harmless in (
            (EVERYWHERE_FAULTS | CODE_FAULTS, False),
            (EVERYWHERE_HARMLESS | CODE_HARMLESS, True),
        ):
            for n, (change, plant) in enumerate(table.items()):
                depth = depths[(n + at) % len(depths)]
                yield Case(family, change, depth, at_depth(plant, depth), harmless)


def at_depth(plant: Everywhere, depth: str) -> Plant:
    """A plant for one of the depths by name."""
    return lambda model, block: plant(model, FRACTIONS[depth])


def cases() -> Iterator[Case]:
    """Every case: families by changes by depths."""
    for family in FAMILIES:
        for table, harmless in ((FAULTS, False), (HARMLESS, True)):
            for change, plants in table.items():
                plant = plants.get(family)
                if plant is not None:
                    for depth in DEPTHS:
                        yield Case(family, change, depth, plant, harmless)


def summary(outcomes: list[Outcome]) -> str:
    """The table: right out of all for each change and family, then what was missed."""
    families = list(dict.fromkeys(outcome.case.family for outcome in outcomes))
    lines = [f"{'':26}" + "".join(f"{family:>9}" for family in families)]
    for change in dict.fromkeys(outcome.case.change for outcome in outcomes):
        row = [o for o in outcomes if o.case.change == change]
        cells = ""
        for family in families:
            mine = [o for o in row if o.case.family == family]
            cells += f"{f'{sum(o.right for o in mine)}/{len(mine)}' if mine else '-':>9}"
        lines.append(f"{change + (' (harmless)' if row[0].case.harmless else ''):26}{cells}")
    faults = [o for o in outcomes if not o.case.harmless]
    harmless = [o for o in outcomes if o.case.harmless]
    found = sum(o.right for o in faults)
    alarms = sum(not o.right for o in harmless)
    if faults:
        wrong = sum(o.sure == "certain" and not o.right for o in faults)
        lines.append(f"first module right: {found}/{len(faults)} ({found / len(faults):.1%})")
        lines.append(
            f"right or its neighbour: {sum(o.near for o in faults)}/{len(faults)}; wrong and certain: {wrong}"
        )
    if harmless:
        lines.append(f"false alarms: {alarms}/{len(harmless)} ({alarms / len(harmless):.1%})")
    lines += [
        f"missed: {o.case.name}: expected {o.expected!r}, named {o.named!r}" for o in outcomes if not o.right
    ]
    return "\n".join(lines)


# The faults. Each takes the copy and the path of a block and returns the path of the module that is now wrong.


def _in(path: str) -> Callable[[Plant], Plant]:
    """Plant into a part of the block."""

    def wrap(plant: Plant) -> Plant:
        return lambda model, block: plant(model, f"{block}.{path}")

    return wrap


def one_weight(model: nn.Module, path: str) -> str:
    weight = _weight(model.get_submodule(path))
    weight.view(-1)[weight.numel() // 3] += 0.1 * weight.abs().max()
    return path


def wrong_epsilon(model: nn.Module, path: str) -> str:
    model.get_submodule(path).eps = 1e-6  # type: ignore[assignment]
    return path


def transposed_weight(model: nn.Module, path: str) -> str:
    weight = _weight(model.get_submodule(path))
    weight.copy_(weight.transpose(-1, -2).clone())
    return path


def tanh_gelu(model: nn.Module, path: str) -> str:
    model.get_submodule(path).approximate = "tanh"  # type: ignore[assignment]
    return path


def missing_scale(model: nn.Module, path: str) -> str:
    return _override(model, path, "scale", lambda self, scores, *rest: scores)


def missing_norm_scale(model: nn.Module, path: str) -> str:
    model.get_submodule(path).weight.fill_(1.0)  # type: ignore[operator,union-attr]
    return path


def swapped_heads(model: nn.Module, path: str) -> str:
    def merge(self: nn.Module, heads: Tensor) -> Tensor:
        return heads[:, [1, 0, *range(2, heads.shape[1])]].transpose(1, 2).flatten(2)

    return _override(model, path, "merge", merge)


def swapped_gates(model: nn.Module, path: str) -> str:
    lstm = model.get_submodule(path)
    weight: Any = lstm.weight_hh_l0
    first, second, rest = weight[:32].clone(), weight[32:64].clone(), weight[64:]
    weight.copy_(torch.cat([second, first, rest]))
    return path


def causal_off_by_one(model: nn.Module, path: str) -> str:
    def masked(self: nn.Module, scores: Tensor, mask: Tensor) -> Tensor:
        shifted = mask | mask.roll(1, -1) & (torch.arange(mask.shape[-1]) > 0)
        return scores.masked_fill(~shifted, float("-inf"))

    return _override(model, path, "masked", masked)


def padding_off_by_one(model: nn.Module, path: str) -> str:
    def masked(self: nn.Module, value: Tensor, mask: Tensor) -> Tensor:
        shorter = mask & mask.roll(-1, -1)
        if value.dim() == 4:
            return value.masked_fill(~shorter, float("-inf"))
        return value * shorter[..., None]

    return _override(model, path, "masked", masked)


def shifted_padding(model: nn.Module, path: str) -> str:
    def forward(self: nn.Conv2d, x: Tensor) -> Tensor:
        return F.conv2d(F.pad(x, (2, 0, 1, 1)), self.weight, self.bias)

    return _override(model, path, "forward", forward)


def bf16_layer(model: nn.Module, path: str) -> str:
    module = copy.deepcopy(model.get_submodule(path)).bfloat16()

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return module(x.bfloat16()).float()

    return _override(model, path, "forward", forward)


def stale_buffer(model: nn.Module, path: str) -> str:
    buffer = dict(model.get_submodule(path).named_buffers()).get("table")
    if buffer is None:
        buffer = dict(model.get_submodule(path).named_buffers())["running_mean"]
    buffer.mul_(0.97)
    return path


def dropped_residual(model: nn.Module, path: str) -> str:
    return _override(model, path, "join", lambda self, x, branch: branch)


# The harmless changes: other kernels, another order of summation, another but equal arrangement of the weights.


def fused_attention(model: nn.Module, path: str) -> str:
    def forward(self: Any, x: Tensor, mask: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (
            p.view(batch, tokens, self.heads, -1).transpose(1, 2) for p in self.qkv(x).chunk(3, dim=-1)
        )
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))

    return _override(model, path, "forward", forward)


def split_sum(model: nn.Module, path: str) -> str:
    """A matrix product summed in four parts, last part first."""

    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        parts = zip(x.chunk(4, -1), self.weight.chunk(4, 1), strict=True)
        total = self.bias
        for part, weight in reversed(list(parts)):
            total = total + part @ weight.t()
        return total

    return _override(model, path, "forward", forward)


def reordered_norm(model: nn.Module, path: str) -> str:
    """A norm in two passes, in another order of operations."""

    def forward(self: Any, x: Tensor) -> Tensor:
        if isinstance(self, nn.BatchNorm2d):
            assert self.running_mean is not None
            assert self.running_var is not None
            scale = self.weight * torch.rsqrt(self.running_var + self.eps)
            return x * scale[:, None, None] + (self.bias - self.running_mean * scale)[:, None, None]
        centred = x - x.mean(-1, keepdim=True)
        variance = centred.pow(2).mean(-1, keepdim=True)
        return centred / (variance + self.eps).sqrt() * self.weight + self.bias

    return _override(model, path, "forward", forward)


def gathered_convolution(model: nn.Module, path: str) -> str:
    """A convolution as a matrix product over gathered patches."""

    def forward(self: nn.Conv2d, x: Tensor) -> Tensor:
        patches = F.unfold(x, 3, padding=1)
        assert self.bias is not None
        return ((self.weight.flatten(1) @ patches) + self.bias[:, None]).view(x.shape[0], -1, *x.shape[2:])

    return _override(model, path, "forward", forward)


def channels_last(model: nn.Module, path: str) -> str:
    model.get_submodule(path).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return path


def folded_norm(model: nn.Module, path: str) -> str:
    """A batch norm folded into the convolution before it."""
    block = model.get_submodule(path)
    fused = torch.nn.utils.fuse_conv_bn_eval(block.conv1, block.norm1)  # type: ignore[type-var,arg-type]
    block.conv1, block.norm1 = fused, nn.Identity()  # type: ignore[assignment]
    return path


def permuted_hidden(model: nn.Module, path: str) -> str:
    """Hidden units in another order: the weights before and after are permuted alike."""
    mlp: Any = model.get_submodule(path)
    order = torch.randperm(mlp.up.out_features, generator=torch.Generator().manual_seed(1))
    mlp.up.weight.copy_(mlp.up.weight[order].clone())
    mlp.up.bias.copy_(mlp.up.bias[order].clone())
    mlp.down.weight.copy_(mlp.down.weight[:, order].clone())
    return path


def unrolled_recurrence(model: nn.Module, path: str) -> str:
    """An LSTM step by step, with its gates computed apart."""

    def forward(self: Any, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        h = c = x.new_zeros(x.shape[0], self.hidden_size)
        steps = []
        for step in x.unbind(1):
            gates = (h @ self.weight_hh_l0.t() + self.bias_hh_l0) + (
                step @ self.weight_ih_l0.t() + self.bias_ih_l0
            )
            i, f, g, o = gates.chunk(4, 1)
            c = torch.sigmoid(i) * torch.tanh(g) + torch.sigmoid(f) * c
            h = torch.sigmoid(o) * torch.tanh(c)
            steps.append(h)
        return torch.stack(steps, 1), (h[None], c[None])

    return _override(model, path, "forward", forward)


def erf_by_hand(model: nn.Module, path: str) -> str:
    return _override(
        model, path, "forward", lambda self, x: 0.5 * x * (1 + torch.erf(x * 0.7071067811865476))
    )


def untouched(model: nn.Module, path: str) -> str:
    return path


def _override(model: nn.Module, path: str, method: str, instead: Callable[..., Any]) -> str:
    module = model.get_submodule(path)
    setattr(module, method, types.MethodType(instead, module))
    return path


def _weight(module: nn.Module) -> Tensor:
    weight = getattr(module, "weight", None)
    return (module.weight_hh_l0 if weight is None else weight).data  # type: ignore[return-value,union-attr]


def _transformers(plant: Plant) -> dict[str, Plant]:
    return {"GPT": plant, "BERT": plant}


FAULTS: dict[str, dict[str, Plant]] = {
    "one weight": {
        **_transformers(_in("attn.qkv")(one_weight)),
        "CNN": _in("conv2")(one_weight),
        "LSTM": _in("lstm")(one_weight),
    },
    "wrong epsilon": {
        **_transformers(_in("norm1")(wrong_epsilon)),
        "CNN": _in("norm2")(wrong_epsilon),
        "LSTM": _in("norm")(wrong_epsilon),
    },
    "missing scale": {
        **_transformers(_in("attn")(missing_scale)),
        "CNN": _in("norm1")(missing_norm_scale),
        "LSTM": missing_scale,
    },
    "swapped heads": {**_transformers(_in("attn")(swapped_heads)), "LSTM": _in("lstm")(swapped_gates)},
    "tanh GELU": {
        **_transformers(_in("mlp.act")(tanh_gelu)),
        "CNN": _in("act")(tanh_gelu),
        "LSTM": _in("act")(tanh_gelu),
    },
    "transposed weight": {
        **_transformers(_in("attn.out")(transposed_weight)),
        "CNN": _in("conv1")(transposed_weight),
        "LSTM": _in("proj")(transposed_weight),
    },
    "off-by-one mask": {
        "GPT": _in("attn")(causal_off_by_one),
        "BERT": _in("attn")(padding_off_by_one),
        "CNN": _in("conv1")(shifted_padding),
        "LSTM": padding_off_by_one,
    },
    "bf16 in one layer": {
        **_transformers(_in("mlp.down")(bf16_layer)),
        "CNN": _in("conv2")(bf16_layer),
        "LSTM": _in("proj")(bf16_layer),
    },
    "stale buffer": {
        **_transformers(_in("rotation")(stale_buffer)),
        "CNN": _in("norm1")(stale_buffer),
        "LSTM": _in("rotation")(stale_buffer),
    },
    "dropped residual": dict.fromkeys(FAMILIES, dropped_residual),
}

HARMLESS: dict[str, dict[str, Plant]] = {
    "untouched": dict.fromkeys(FAMILIES, untouched),
    "fused attention": _transformers(_in("attn")(fused_attention)),
    "split sum": {
        **_transformers(_in("mlp.up")(split_sum)),
        "LSTM": _in("proj")(split_sum),
    },
    "reordered norm": {
        **_transformers(_in("norm2")(reordered_norm)),
        "CNN": _in("norm1")(reordered_norm),
        "LSTM": _in("norm")(reordered_norm),
    },
    "gathered convolution": {"CNN": _in("conv1")(gathered_convolution)},
    "channels last": {"CNN": channels_last},
    "folded norm": {"CNN": folded_norm},
    "permuted hidden units": _transformers(_in("mlp")(permuted_hidden)),
    "unrolled recurrence": {"LSTM": _in("lstm")(unrolled_recurrence)},
    "erf by hand": {
        **_transformers(_in("mlp.act")(erf_by_hand)),
        "CNN": _in("act")(erf_by_hand),
        "LSTM": _in("act")(erf_by_hand),
    },
}
