"""Faults and harmless changes in the code of a module rather than in one weight, and wrappers that programs put on.

As in `planted_everywhere` each plant gets a deep copy of a model and a depth, changes it, and returns the module that
is now wrong, or ``None`` when the model has no place for it.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["CODE_FAULTS", "CODE_HARMLESS"]

Everywhere = Callable[[nn.Module, float], "str | None"]

_KEYS = (
    "k_proj",
    "key",
    "k",
    "key_proj",
    "pos_key_proj",
    "pos_query_proj",
)  # a softmax may not depend on them


def _linears(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    """Linear layers that are called as modules, and whose weights are theirs alone."""
    users: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users[id(parameter)] = users.get(id(parameter), 0) + 1
    return [
        (path, module)
        for path, module in model.named_modules()
        if type(module) is nn.Linear
        and users[id(module.weight)] == 1
        and path.split(".")[-1] not in _KEYS
        and not _is_read_by_its_owner(model, path)
    ]


def _is_read_by_its_owner(model: nn.Module, path: str) -> bool:
    """Whether the module around takes the weight and never makes the call."""
    owner = model.get_submodule(path.rpartition(".")[0])
    return isinstance(owner, nn.MultiheadAttention) or type(owner).__name__ == "MambaMixer"


def _norms(model: nn.Module) -> list[tuple[str, Any]]:
    return [
        (path, module)
        for path, module in model.named_modules()
        if "Norm" in type(module).__name__ and isinstance(getattr(module, "weight", None), Tensor)
    ]


def _blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules in lists, which as a rule are a model's layers."""
    lists = (nn.ModuleList, nn.Sequential)
    return [
        (path, module)
        for path, module in model.named_modules()
        if path.rpartition(".")[2].isdigit()
        and list(module.children())
        and isinstance(model.get_submodule(path.rpartition(".")[0]), lists)
    ]


def _at(found: list[tuple[str, Any]], depth: float) -> tuple[str, Any] | None:
    return found[min(len(found) - 1, int(depth * len(found)))] if found else None


def _put(model: nn.Module, path: str, module: nn.Module) -> None:
    owner, _, name = path.rpartition(".")
    setattr(model.get_submodule(owner), name, module)


def _changed(module: nn.Module, change: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Let a module return something else, made of its first result and its first input."""
    plain = module.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        out = plain(*args, **kwargs)
        return change(out, given) if isinstance(out, Tensor) else type(out)((change(out[0], given), *out[1:]))

    module.forward = types.MethodType(forward, module)  # type: ignore[method-assign]


def permuted_outputs(model: nn.Module, depth: float) -> str | None:
    found = _at(_linears(model), depth)
    if found:
        order = torch.randperm(len(found[1].weight), generator=torch.Generator().manual_seed(3))
        found[1].weight.data = found[1].weight.data[order]
        if found[1].bias is not None:
            found[1].bias.data = found[1].bias.data[order]
    return found and found[0]


def transposed_weight(model: nn.Module, depth: float) -> str | None:
    found = _at([(p, m) for p, m in _linears(model) if m.weight.shape[0] == m.weight.shape[1]], depth)
    if found:
        found[1].weight.data = found[1].weight.data.t().contiguous()
    return found and found[0]


def forgotten_bias(model: nn.Module, depth: float) -> str | None:
    found = _at([(path, module) for path, module in _linears(model) if module.bias is not None], depth)
    if found:
        found[1].bias.data.zero_()
    return found and found[0]


def other_layers_weight(model: nn.Module, depth: float) -> str | None:
    linears = _linears(model)
    for path, module in linears[int(depth * len(linears)) :]:
        for _, other in reversed(linears):
            if other is not module and other.weight.shape == module.weight.shape:
                module.weight.data.copy_(other.weight.data)
                return path
    return None


def block_forgets_its_residual(model: nn.Module, depth: float) -> str | None:
    found = _at(_blocks(model), depth)
    if found:
        _changed(found[1], lambda out, given: out - given if out.shape == given.shape else out * 0.5)
    return found and found[0]


def leaks_between_samples(model: nn.Module, depth: float) -> str | None:
    found = _at(_blocks(model), depth)
    if found:
        _changed(found[1], lambda out, given: out + 0.05 * out.roll(1, 0))
    return found and found[0]


def norm_twice(model: nn.Module, depth: float) -> str | None:
    found = _at(_norms(model), depth)
    if found:
        plain = found[1].forward
        found[1].forward = types.MethodType(
            lambda self, x, *a, **k: plain(plain(x, *a, **k), *a, **k), found[1]
        )
    return found and found[0]


def through_half(model: nn.Module, depth: float) -> str | None:
    found = _at(_linears(model), depth)
    if found:
        _changed(found[1], lambda out, given: out.half().to(out.dtype))
    return found and found[0]


# What changes nothing.


class Adapter(nn.Module):
    """A low-rank adapter that was not trained yet: it adds zero."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.Linear(base.in_features, 4, bias=False)
        self.lora_B = nn.Linear(4, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    @property
    def weight(self) -> Tensor:  # models that look at a layer's dtype find it here
        return self.base_layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


class Transposed(nn.Module):
    """A linear layer that keeps its weight the other way round."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(linear.weight.t().contiguous()), linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight if self.bias is None else x @ self.weight + self.bias


class Checkpointed(nn.Module):
    """A wrapper as activation checkpointing puts it around a layer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._checkpoint_wrapped_module = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_checkpoint_wrapped_module"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._checkpoint_wrapped_module(*args, **kwargs)


def adapters(model: nn.Module, depth: float) -> str | None:
    linears = _linears(model)[::2]
    with torch.random.fork_rng():
        for path, linear in linears:
            _put(model, path, Adapter(linear))
    return "" if linears else None


def stored_transposed(model: nn.Module, depth: float) -> str | None:
    linears = _linears(model)
    for path, linear in linears:
        _put(model, path, Transposed(linear))
    return "" if linears else None


def checkpointed(model: nn.Module, depth: float) -> str | None:
    blocks = _blocks(model)
    for path, block in blocks:
        _put(model, path, Checkpointed(block))
    return "" if blocks else None


def normed_weights(model: nn.Module, depth: float) -> str | None:
    linears = [(p, m) for p, m in _linears(model)[::3] if bool(m.weight.norm(dim=1).all())]
    for _, linear in linears:
        torch.nn.utils.parametrizations.weight_norm(linear)
    return "" if linears else None


def eager_attention(model: Any, depth: float) -> str | None:
    if getattr(getattr(model, "config", None), "_attn_implementation", None) != "sdpa":
        return None
    model.set_attn_implementation("eager")
    return ""


def turned_layout(model: nn.Module, depth: float) -> str | None:
    found = _at(_linears(model), depth)
    if found:
        _changed(found[1], lambda out, given: out.transpose(0, -1).contiguous().transpose(0, -1))
    return found and found[0]


CODE_FAULTS: dict[str, Everywhere] = {
    "permuted outputs": permuted_outputs,
    "transposed weight": transposed_weight,
    "forgotten bias": forgotten_bias,
    "another layer's weight": other_layers_weight,
    "block without residual": block_forgets_its_residual,
    "leak between samples": leaks_between_samples,
    "norm twice": norm_twice,
    "fp16 in one layer": through_half,
}
CODE_HARMLESS: dict[str, Everywhere] = {
    "adapters that add zero": adapters,
    "weights stored transposed": stored_transposed,
    "checkpointed layers": checkpointed,
    "normed weights": normed_weights,
    "eager attention": eager_attention,
    "turned layout": turned_layout,
}
