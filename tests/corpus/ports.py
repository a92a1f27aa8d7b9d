"""Ports as people write them: other names, signatures, layouts and fused projections, with weights carried over.

Each family has a reference (transformers, from a config), a port, faults and harmless changes. A fault names the
module of the *port* whose code or weights are wrong. Families in ``FROZEN`` were written before the rules of the
comparison were tuned and were not looked at while tuning.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["FAMILIES", "FROZEN", "Family", "PortCase", "PortOutcome", "cases_of", "run_case"]

WIDTH, HEADS, GROUPS, LAYERS, WORDS, INNER, TOKENS = 48, 4, 2, 3, 97, 96, 12
Change = Callable[[Any], "str | tuple[str, ...]"]
FROZEN = ("nano gpt", "timm vit", "packed llama")


@final
@dataclass(frozen=True)
class Family:
    """A reference, its port and its inputs; faults return the port's wrong module, harmless changes nothing."""

    name: str
    make: Callable[[], tuple[nn.Module, nn.Module, Any]]
    faults: dict[str, Change]
    harmless: dict[str, Callable[[Any], None]]


class Odd(nn.Module):
    """A module with a planted bug, or none."""

    bug = ""


class Norm(Odd):
    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        gain = self.weight + 1.0 if self.bug == "offset" else self.weight
        if self.bug == "mean":
            x = x - x.mean(-1, keepdim=True)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * gain


# -- a Llama in the style of Meta's repository: complex rotary table, start_pos, mask built in the model -------------


def rotated_complex(x: Tensor, table: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * table[None, :, None]).flatten(3)


def rotated_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class MetaAttention(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.size = WIDTH // HEADS
        self.wq = nn.Linear(WIDTH, HEADS * self.size, bias=False)
        self.wk = nn.Linear(WIDTH, GROUPS * self.size, bias=False)
        self.wv = nn.Linear(WIDTH, GROUPS * self.size, bias=False)
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, start_pos: int, freqs_cis: Tensor, mask: Tensor | None) -> Tensor:
        b, t, _ = x.shape
        q = self.wq(x).view(b, t, HEADS, self.size)
        k = self.wk(x).view(b, t, GROUPS, self.size)
        v = self.wv(x).view(b, t, GROUPS, self.size)
        if self.bug == "rope layout":
            cos, sin = (torch.cat((p, p), -1)[None, :, None] for p in (freqs_cis.real, freqs_cis.imag))
            q, k = rotated_halves(q, cos, sin), rotated_halves(k, cos, sin)
        else:
            q = rotated_complex(q, freqs_cis)
            k = k if self.bug == "no rope on keys" else rotated_complex(k, freqs_cis)
        if self.bug == "kv repeat":
            k, v = (p.repeat(1, 1, HEADS // GROUPS, 1) for p in (k, v))
        else:
            k, v = (p.repeat_interleave(HEADS // GROUPS, 2) for p in (k, v))
        q, k, v = (p.transpose(1, 2) for p in (q, k, v))
        scores = q @ k.transpose(2, 3) / (self.size if self.bug == "scale" else math.sqrt(self.size))
        if mask is not None and self.bug != "mask ignored":
            scores = scores + mask
        weights = scores.softmax(-1)
        out = (weights @ v).transpose(1, 2)
        if self.bug == "heads order":
            out = out.flip(2)
        return self.wo(out.reshape(b, t, -1))


class MetaFeedForward(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(WIDTH, INNER, bias=False)
        self.w2 = nn.Linear(INNER, WIDTH, bias=False)
        self.w3 = nn.Linear(WIDTH, INNER, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w1(x), self.w3(x)
        if self.bug == "gate and up swapped":
            gate, up = up, gate
        act = F.gelu(gate) if self.bug == "gelu" else F.silu(gate)
        return self.w2(act * up)


class MetaBlock(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = MetaAttention(), MetaFeedForward()
        self.attention_norm, self.ffn_norm = Norm(WIDTH), Norm(WIDTH)

    def forward(self, x: Tensor, start_pos: int, freqs_cis: Tensor, mask: Tensor | None) -> Tensor:
        h = self.attention(self.attention_norm(x), start_pos, freqs_cis, mask)
        h = h if self.bug == "no residual" else x + h
        return h + self.feed_forward(self.ffn_norm(x if self.bug == "norm of x" else h))


class MetaLlama(Odd):
    def __init__(self, theta: float) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(MetaBlock() for _ in range(LAYERS))
        self.norm = Norm(WIDTH)
        self.output = nn.Linear(WIDTH, WORDS, bias=False)
        self.theta = theta

    def table(self, tokens: int) -> Tensor:
        size = WIDTH // HEADS
        inverse = 1.0 / self.theta ** (torch.arange(0, size, 2).float() / size)
        start = 1 if self.bug == "positions from one" else 0
        angles = torch.outer(torch.arange(start, start + tokens).float(), inverse)
        return torch.polar(torch.ones_like(angles), angles)

    def forward(self, tokens: Tensor, start_pos: int = 0) -> Tensor:
        h = self.tok_embeddings(tokens)
        if self.bug == "embedding scale":
            h = h * math.sqrt(WIDTH)
        size = tokens.shape[1]
        diagonal = 2 if self.bug == "mask too wide" else 1
        mask = torch.full((size, size), float("-inf")).triu(diagonal)
        table = self.table(size)
        for layer in self.layers:
            h = layer(h, start_pos, table, mask)
        logits = self.output(self.norm(h))
        return torch.tanh(logits / 2.0) * 2.0 if self.bug == "soft cap" else logits


def llama_reference() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=GROUPS, rms_norm_eps=1e-5, initializer_range=0.2,
        use_cache=False, attn_implementation="eager", tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data = 1.0 + 0.2 * torch.randn_like(parameter)
    return model


def ids() -> Tensor:
    return torch.randint(0, WORDS, (2, TOKENS), generator=torch.Generator().manual_seed(1))


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """The rows of a rotary projection in the order in which pairs are neighbours."""
    out, width = weight.shape
    return weight.view(heads, 2, out // heads // 2, width).transpose(1, 2).reshape(out, width)


def theta_of(model: Any) -> float:
    found = model.config.rope_parameters["rope_theta"]
    return float(found)


def meta_llama() -> tuple[nn.Module, nn.Module, Any]:
    reference = llama_reference()
    port = MetaLlama(theta_of(reference)).eval()
    source = reference.model
    port.tok_embeddings.weight.data = source.embed_tokens.weight.data.clone()
    port.norm.weight.data = source.norm.weight.data.clone()
    port.output.weight.data = reference.lm_head.weight.data.clone()
    for mine, theirs in zip(source.layers, port.layers, strict=True):
        theirs.attention.wq.weight.data = interleaved(mine.self_attn.q_proj.weight.data, HEADS)
        theirs.attention.wk.weight.data = interleaved(mine.self_attn.k_proj.weight.data, GROUPS)
        theirs.attention.wv.weight.data = mine.self_attn.v_proj.weight.data.clone()
        theirs.attention.wo.weight.data = mine.self_attn.o_proj.weight.data.clone()
        theirs.feed_forward.w1.weight.data = mine.mlp.gate_proj.weight.data.clone()
        theirs.feed_forward.w3.weight.data = mine.mlp.up_proj.weight.data.clone()
        theirs.feed_forward.w2.weight.data = mine.mlp.down_proj.weight.data.clone()
        theirs.attention_norm.weight.data = mine.input_layernorm.weight.data.clone()
        theirs.ffn_norm.weight.data = mine.post_attention_layernorm.weight.data.clone()
    return reference, port, (ids(),)


def with_bug(path: str, bug: str, *also: str) -> Change:
    def plant(model: Any) -> tuple[str, ...]:
        model.get_submodule(path).bug = bug
        return (path, *also)

    return plant


def setting(path: str, name: str, value: Any, *also: str) -> Change:
    def plant(model: Any) -> tuple[str, ...]:
        setattr(model.get_submodule(path), name, value)
        return (path, *also)

    return plant


def on_weight(path: str, change: Callable[[Tensor], Tensor], name: str = "weight") -> Change:
    def plant(model: Any) -> str:
        module = model.get_submodule(path)
        getattr(module, name).data = change(getattr(module, name).data.clone())
        return path

    return plant


def swapped(first: str, second: str) -> Change:
    def plant(model: Any) -> tuple[str, ...]:
        a, b = model.get_submodule(first), model.get_submodule(second)
        state = copy.deepcopy(a.state_dict())
        a.load_state_dict(b.state_dict())
        b.load_state_dict(state)
        # Modules are known by their weights, so "the model runs its layers in another order" is right as well.
        return ("", *(path for path, _ in model.named_modules() if path.startswith((first, second))))

    return plant


def one_element(weight: Tensor) -> Tensor:
    weight[1, 2] += 0.5
    return weight


def rolled(weight: Tensor) -> Tensor:
    return weight.roll(1, 0)


def nothing(_: Any) -> None:
    pass


def frozen_parameters(model: Any) -> None:
    model.requires_grad_(False)


def wrapped_forward(path: str, change: Callable[[Any, Any], Any]) -> Callable[[Any], None]:
    """Replace a module's forward by another way of computing the same."""

    def plant(model: Any) -> None:
        module = model.get_submodule(path)
        forward = module.forward
        module.forward = lambda *args, **kwargs: change(forward, args)

    return plant


def in_double(forward: Any, args: Any) -> Any:
    module = forward.__self__
    wide = copy.deepcopy(module).double()
    del wide.__dict__["forward"]
    return wide(*(a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)).float()


def sample_by_sample(forward: Any, args: Any) -> Any:
    return torch.cat([forward(args[0][n : n + 1], *args[1:]) for n in range(len(args[0]))])


def clone_of_output(forward: Any, args: Any) -> Any:
    return forward(*args).clone()


META = Family(
    "meta llama",
    meta_llama,
    {
        "rope layout": with_bug("layers.1.attention", "rope layout"),
        "rope theta": setting("", "theta", 1e6),
        "no rope on keys": with_bug("layers.1.attention", "no rope on keys"),
        "kv repeat": with_bug("layers.1.attention", "kv repeat"),
        "scale": with_bug("layers.2.attention", "scale"),
        "mask ignored": with_bug("layers.0.attention", "mask ignored"),
        "mask too wide": with_bug("", "mask too wide"),
        "heads order": with_bug("layers.1.attention", "heads order"),
        "eps": setting("layers.1.ffn_norm", "eps", 1e-1),
        "norm offset": with_bug("layers.2.attention_norm", "offset"),
        "norm with mean": with_bug("norm", "mean"),
        "gelu": with_bug("layers.1.feed_forward", "gelu"),
        "gate and up": with_bug("layers.0.feed_forward", "gate and up swapped"),
        "no residual": with_bug("layers.1", "no residual"),
        "norm of x": with_bug("layers.1", "norm of x"),
        "embedding scale": with_bug("", "embedding scale"),
        "soft cap": with_bug("", "soft cap"),
        "swapped layers": swapped("layers.1", "layers.2"),
        "transposed square": on_weight("layers.1.attention.wo", lambda w: w.T.contiguous()),
        "rows rolled": on_weight("layers.1.attention.wq", rolled),
        "one element": on_weight("layers.2.feed_forward.w2", one_element),
        "tied head": lambda m: on_weight("output", lambda _: m.tok_embeddings.weight.data.clone())(m),
    },
    {
        "as it is": nothing,
        "rotary positions from one": lambda m: setattr(m, "bug", "positions from one"),  # they are relative
        "frozen": frozen_parameters,
        "ffn in float64": wrapped_forward("layers.1.feed_forward", in_double),
        "head in float64": wrapped_forward("output", in_double),
        "ffn by sample": wrapped_forward("layers.1.feed_forward", sample_by_sample),
        "norm by sample": wrapped_forward("layers.0.ffn_norm", sample_by_sample),
        "cloned block": wrapped_forward("layers.1", clone_of_output),
    },
)


# -- lit-gpt style: one interleaved projection for query, key and value, cos and sin as arguments ---------------------


class LitAttention(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.size = WIDTH // HEADS
        self.attn = nn.Linear(WIDTH, (HEADS + 2 * GROUPS) * self.size, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, _ = x.shape
        each = HEADS // GROUPS
        qkv = self.attn(x).view(b, t, GROUPS, each + 2, self.size).permute(0, 2, 3, 1, 4)
        q, k, v = qkv.split((each, 1, 1), dim=2)
        if self.bug == "qkv order":
            k, v = v, k
        k, v = (p.expand(b, GROUPS, each, t, self.size) for p in (k, v))
        if self.bug == "kv repeat":
            k, v = (p.flip(1) for p in (k, v))
        q, k, v = (p.reshape(b, HEADS, t, self.size) for p in (q, k, v))
        if self.bug == "rope sign":
            sin = -sin
        q = rotated_halves(q, cos, sin)
        k = rotated_halves(k, cos, sin)
        scale = 1.0 if self.bug == "scale" else 1.0 / math.sqrt(self.size)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.bug != "not causal", scale=scale)
        return self.proj(y.transpose(1, 2).reshape(b, t, -1))


class LitMLP(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.fc_1 = nn.Linear(WIDTH, INNER, bias=False)
        self.fc_2 = nn.Linear(WIDTH, INNER, bias=False)
        self.proj = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.fc_1(x), self.fc_2(x)
        return self.proj((F.relu(a) if self.bug == "relu" else F.silu(a)) * b)


class LitBlock(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.attn, self.norm_2, self.mlp = Norm(WIDTH), LitAttention(), Norm(WIDTH), LitMLP()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.attn(self.norm_1(x), cos, sin)
        if self.bug == "parallel residual":
            return x + h + self.mlp(self.norm_2(x))
        x = x + h
        return x + (0.5 if self.bug == "half" else 1.0) * self.mlp(self.norm_2(x))


class LitGPT(Odd):
    def __init__(self, theta: float) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(WORDS, WIDTH),
                "h": nn.ModuleList(LitBlock() for _ in range(LAYERS)),
                "ln_f": Norm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        size = WIDTH // HEADS
        angles = torch.outer(
            torch.arange(64).float(), 1.0 / theta ** (torch.arange(0, size, 2).float() / size)
        )
        angles = angles.repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, idx: Tensor) -> Tensor:
        t = idx.shape[1]
        start = 1 if self.bug == "shifted table" else 0
        cos, sin = self.cos[start : start + t], self.sin[start : start + t]
        x = self.transformer["wte"](idx)
        if self.bug == "embedding scale":
            x = x * 2.0
        for block in self.transformer["h"]:
            x = block(x, cos, sin)
        return self.lm_head(x if self.bug == "no final norm" else self.transformer["ln_f"](x))


def lit_gpt() -> tuple[nn.Module, nn.Module, Any]:
    reference = llama_reference()
    port = LitGPT(theta_of(reference)).eval()
    source, size, each = reference.model, WIDTH // HEADS, HEADS // GROUPS
    port.transformer["wte"].weight.data = source.embed_tokens.weight.data.clone()
    port.transformer["ln_f"].weight.data = source.norm.weight.data.clone()
    port.lm_head.weight.data = reference.lm_head.weight.data.clone()
    for mine, theirs in zip(source.layers, port.transformer["h"], strict=True):
        q, k, v = (getattr(mine.self_attn, f"{n}_proj").weight.data for n in "qkv")
        q = q.view(GROUPS, each, size, WIDTH)
        k, v = (p.view(GROUPS, 1, size, WIDTH) for p in (k, v))
        theirs.attn.attn.weight.data = torch.cat((q, k, v), 1).reshape(-1, WIDTH)
        theirs.attn.proj.weight.data = mine.self_attn.o_proj.weight.data.clone()
        theirs.mlp.fc_1.weight.data = mine.mlp.gate_proj.weight.data.clone()
        theirs.mlp.fc_2.weight.data = mine.mlp.up_proj.weight.data.clone()
        theirs.mlp.proj.weight.data = mine.mlp.down_proj.weight.data.clone()
        theirs.norm_1.weight.data = mine.input_layernorm.weight.data.clone()
        theirs.norm_2.weight.data = mine.post_attention_layernorm.weight.data.clone()
    return reference, port, (ids(),)


LIT = Family(
    "lit gpt",
    lit_gpt,
    {
        "qkv order": with_bug("transformer.h.1.attn", "qkv order"),
        "kv repeat": with_bug("transformer.h.1.attn", "kv repeat"),
        "rope sign": with_bug("transformer.h.0.attn", "rope sign"),
        "scale": with_bug("transformer.h.2.attn", "scale"),
        "not causal": with_bug("transformer.h.1.attn", "not causal"),
        "relu": with_bug("transformer.h.1.mlp", "relu"),
        "parallel residual": with_bug("transformer.h.1", "parallel residual"),
        "half residual": with_bug("transformer.h.2", "half"),
        "embedding scale": with_bug("", "embedding scale"),
        "no final norm": with_bug("", "no final norm", "transformer.ln_f"),
        "eps": setting("transformer.h.1.norm_2", "eps", 1e-1),
        "norm offset": with_bug("transformer.h.1.norm_1", "offset"),
        "swapped layers": swapped("transformer.h.0", "transformer.h.1"),
        "transposed square": on_weight("transformer.h.1.attn.proj", lambda w: w.T.contiguous()),
        "one element": on_weight("transformer.h.2.mlp.fc_2", one_element),
    },
    {
        "as it is": nothing,
        "shifted rotary table": lambda m: setattr(m, "bug", "shifted table"),  # rotary positions are relative
        "frozen": frozen_parameters,
        "mlp in float64": wrapped_forward("transformer.h.1.mlp", in_double),
        "head in float64": wrapped_forward("lm_head", in_double),
        "mlp by sample": wrapped_forward("transformer.h.1.mlp", sample_by_sample),
        "cloned block": wrapped_forward("transformer.h.1", clone_of_output),
    },
)


# -- nanoGPT and transformers' GPT-2 ----------------------------------------------------------------------------------


class NanoAttention(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.c_attn(x).split(c, 2)
        if self.bug == "qkv order":
            q, k = k, q
        q, k, v = (p.view(b, t, HEADS, c // HEADS).transpose(1, 2) for p in (q, k, v))
        if self.bug == "head split":
            v = v.reshape(b, t, HEADS, c // HEADS).transpose(1, 2)
        att = q @ k.transpose(-2, -1) * (1.0 / math.sqrt(c if self.bug == "scale" else c // HEADS))
        keep = torch.ones(t, t).tril(-1 if self.bug == "mask" else 0)
        if self.bug == "mask":
            keep[0, 0] = 1
        att = att.masked_fill(keep == 0, float("-inf")).softmax(-1)
        y = (att @ v).transpose(1, 2).reshape(b, t, c)
        return self.c_proj(y)


class NanoMLP(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate="none" if self.bug == "gelu" else "tanh"))


class NanoBlock(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp = NanoAttention(), NanoMLP()

    def forward(self, x: Tensor) -> Tensor:
        if self.bug == "post norm":
            return self.ln_2(x + self.attn(self.ln_1(x))) + self.mlp(self.ln_2(x))
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, WIDTH), nn.Embedding(32, WIDTH)
        self.h = nn.ModuleList(NanoBlock() for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, idx: Tensor) -> Tensor:
        start = 1 if self.bug == "positions from one" else 0
        x = self.wte(idx) + self.wpe(torch.arange(start, start + idx.shape[1]))
        for block in self.h:
            x = block(x)
        return self.head(self.ln_f(x)) * (0.5 if self.bug == "logit scale" else 1.0)


def nano_gpt() -> tuple[nn.Module, nn.Module, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=WORDS, n_positions=32, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, initializer_range=0.2,
        use_cache=False, attn_implementation="eager", tie_word_embeddings=False,
    )  # fmt: skip
    reference = GPT2LMHeadModel(config).eval()
    port = NanoGPT().eval()
    source = reference.transformer
    port.wte.weight.data = source.wte.weight.data.clone()
    port.wpe.weight.data = source.wpe.weight.data.clone()
    port.head.weight.data = reference.lm_head.weight.data.clone()
    port.ln_f.load_state_dict(source.ln_f.state_dict())
    for mine, theirs in zip(source.h, port.h, strict=True):
        theirs.ln_1.load_state_dict(mine.ln_1.state_dict())
        theirs.ln_2.load_state_dict(mine.ln_2.state_dict())
        for path in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
            a, b = mine.get_submodule(path), theirs.get_submodule(path)
            b.weight.data, b.bias.data = a.weight.data.T.contiguous(), a.bias.data.clone()
    return reference, port, (ids(),)


NANO = Family(
    "nano gpt",
    nano_gpt,
    {
        "qkv order": with_bug("h.1.attn", "qkv order"),
        "head split": with_bug("h.1.attn", "head split"),
        "scale": with_bug("h.2.attn", "scale"),
        "mask": with_bug("h.0.attn", "mask"),
        "gelu kind": with_bug("h.1.mlp", "gelu"),
        "post norm": with_bug("h.1", "post norm"),
        "positions from one": with_bug("", "positions from one", "wpe"),
        "logit scale": with_bug("", "logit scale"),
        "eps": setting("h.1.ln_2", "eps", 1e-1),
        "transposed square": on_weight("h.1.attn.c_proj", lambda w: w.T.contiguous()),
        "rows rolled": on_weight("h.1.mlp.c_fc", rolled),
        "one element": on_weight("h.2.mlp.c_proj", one_element),
        "bias dropped": on_weight("h.0.mlp.c_fc", lambda b: b + 0.3, "bias"),
        "swapped layers": swapped("h.1", "h.2"),
        "tied head": lambda m: on_weight("head", lambda _: m.wte.weight.data.clone())(m),
    },
    {
        "as it is": nothing,
        "frozen": frozen_parameters,
        "mlp in float64": wrapped_forward("h.1.mlp", in_double),
        "attention in float64": wrapped_forward("h.1.attn", in_double),
        "block by sample": wrapped_forward("h.0", sample_by_sample),
        "head in float64": wrapped_forward("head", in_double),
    },
)


# -- a vision transformer in the style of timm ------------------------------------------------------------------------


class TimmAttention(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        if self.bug == "qkv order":
            k, v = v, k
        scale = (c // HEADS) ** (-1.0 if self.bug == "scale" else -0.5)
        att = (q * scale) @ k.transpose(-2, -1)
        att = att.softmax(-2 if self.bug == "softmax axis" else -1)
        y = att @ v
        y = y if self.bug == "no transpose" else y.transpose(1, 2)
        return self.proj(y.reshape(b, n, c))


class TimmMlp(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh" if self.bug == "gelu" else "none"))


class TimmBlock(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, eps=1e-6), nn.LayerNorm(WIDTH, eps=1e-6)
        self.attn, self.mlp = TimmAttention(), TimmMlp()

    def forward(self, x: Tensor) -> Tensor:
        x = (0.0 if self.bug == "no residual" else 1.0) * x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TimmViT(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, WIDTH, 4, 4)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(torch.zeros(1, 17, WIDTH))
        self.blocks = nn.Sequential(*(TimmBlock() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH, eps=1e-6)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        token = self.cls_token.expand(len(x), -1, -1)
        x = torch.cat((x, token) if self.bug == "cls last" else (token, x), 1)
        x = x if self.bug == "no positions" else x + self.pos_embed
        x = self.norm(self.blocks(x))
        return self.head(x.mean(1) if self.bug == "pooling" else x[:, 0])


def timm_vit() -> tuple[nn.Module, nn.Module, Any]:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS, intermediate_size=INNER,
        image_size=16, patch_size=4, num_labels=10, initializer_range=0.2, layer_norm_eps=1e-6,
        attn_implementation="eager",
    )  # fmt: skip
    reference = ViTForImageClassification(config).eval()
    port = TimmViT().eval()
    named = {name: value.data for name, value in reference.named_parameters()}
    kinds = [name for name in named if "layers." in name or "layer." in name]
    first = next(name for name in kinds)
    prefix = first[: first.index("layer")] + first[first.index("layer") :].split(".")[0]

    def pick(layer: int, *words: str) -> Tensor:
        found = [n for n in named if n.startswith(f"{prefix}.{layer}.") and all(w in n for w in words)]
        return named[found[0]].clone()

    def fill(module: nn.Module, layer: int, *words: str) -> None:
        module.weight.data = pick(layer, *words, "weight")  # type: ignore[union-attr]
        module.bias.data = pick(layer, *words, "bias")  # type: ignore[union-attr]

    embeddings = {n: v for n, v in named.items() if "embeddings" in n}
    port.patch_embed.weight.data = next(
        v for n, v in embeddings.items() if n.endswith("projection.weight")
    ).clone()
    port.patch_embed.bias.data = next(
        v for n, v in embeddings.items() if n.endswith("projection.bias")
    ).clone()
    port.cls_token.data = next(v for n, v in embeddings.items() if "cls" in n).clone()
    port.pos_embed.data = next(v for n, v in embeddings.items() if "position" in n).clone()
    for n, block in enumerate(port.blocks):
        words = (
            ("query", "key", "value") if any("query" in k for k in kinds) else ("q_proj", "k_proj", "v_proj")
        )
        block.attn.qkv.weight.data = torch.cat([pick(n, w, "weight") for w in words])
        block.attn.qkv.bias.data = torch.cat([pick(n, w, "bias") for w in words])
        fill(
            block.attn.proj,
            n,
            "attention.output.dense" if any("attention.output" in k for k in kinds) else "o_proj",
        )
        fill(block.norm1, n, "layernorm_before")
        fill(block.norm2, n, "layernorm_after")
        fill(block.mlp.fc1, n, "intermediate" if any("intermediate" in k for k in kinds) else "fc1")
        fill(block.mlp.fc2, n, f"{n}.output.dense" if any("intermediate" in k for k in kinds) else "fc2")
    port.norm.load_state_dict(reference.vit.layernorm.state_dict())
    port.head.load_state_dict(reference.classifier.state_dict())
    return reference, port, (torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1)),)


VIT = Family(
    "timm vit",
    timm_vit,
    {
        "qkv order": with_bug("blocks.1.attn", "qkv order"),
        "scale": with_bug("blocks.1.attn", "scale"),
        "softmax axis": with_bug("blocks.2.attn", "softmax axis"),
        "no transpose": with_bug("blocks.0.attn", "no transpose"),
        "gelu kind": with_bug("blocks.1.mlp", "gelu"),
        "no residual": with_bug("blocks.1", "no residual"),
        "cls last": with_bug("", "cls last"),
        "no positions": with_bug("", "no positions"),
        "pooling": with_bug("", "pooling"),
        "eps": setting("blocks.1.norm1", "eps", 1e-1),
        "transposed square": on_weight("blocks.1.attn.proj", lambda w: w.T.contiguous()),
        "one element": on_weight("blocks.2.mlp.fc1", one_element),
        "swapped layers": swapped("blocks.0", "blocks.1"),
        "norm bias": on_weight("norm", lambda b: b + 0.2, "bias"),
    },
    {
        "as it is": nothing,
        "frozen": frozen_parameters,
        "mlp in float64": wrapped_forward("blocks.1.mlp", in_double),
        "attention in float64": wrapped_forward("blocks.1.attn", in_double),
        "block by sample": wrapped_forward("blocks.0", sample_by_sample),
        "head in float64": wrapped_forward("head", in_double),
    },
)


# -- packed tokens in the style of vLLM: no batch axis, positions as an argument, fused projections -------------------


class PackedAttention(Odd):
    def __init__(self, theta: float) -> None:
        super().__init__()
        self.size = WIDTH // HEADS
        self.theta = theta
        self.qkv_proj = nn.Linear(WIDTH, (HEADS + 2 * GROUPS) * self.size, bias=False)
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        n = hidden_states.shape[0]
        q, k, v = self.qkv_proj(hidden_states).split(
            [HEADS * self.size, GROUPS * self.size, GROUPS * self.size], -1
        )
        if self.bug == "qkv order":
            k, v = v, k
        inverse = 1.0 / self.theta ** (torch.arange(0, self.size, 2).float() / self.size)
        angles = (positions.float() + (1 if self.bug == "cache slot" else 0))[:, None] * inverse
        cos, sin = (torch.cat((p, p), -1)[:, None] for p in (angles.cos(), angles.sin()))
        q = rotated_halves(q.view(n, HEADS, self.size), cos, sin)
        k = k.view(n, GROUPS, self.size)
        k = k if self.bug == "no rope on keys" else rotated_halves(k, cos, sin)
        v = v.view(n, GROUPS, self.size)
        if self.bug == "kv repeat":
            k, v = (p.repeat(1, HEADS // GROUPS, 1) for p in (k, v))
        else:
            k, v = (p.repeat_interleave(HEADS // GROUPS, 1) for p in (k, v))
        sample = (positions == 0).cumsum(0)
        allowed = (sample[:, None] == sample[None]) & (positions[:, None] >= positions[None])
        if self.bug == "samples mixed":
            allowed = positions[:, None] >= positions[None]
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(self.size)
        if self.bug == "scale":
            scores = scores * 2.0
        weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
        return self.o_proj(torch.einsum("hqk,khd->qhd", weights, v).reshape(n, -1))


class PackedMLP(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(WIDTH, 2 * INNER, bias=False)
        self.down_proj = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        if self.bug == "gate and up":
            gate, up = up, gate
        return self.down_proj(F.silu(gate) * up)


class PackedLayer(Odd):
    def __init__(self, theta: float) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = Norm(WIDTH), PackedAttention(theta)
        self.post_attention_layernorm, self.mlp = Norm(WIDTH), PackedMLP()

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        x = hidden_states + self.self_attn(positions, self.input_layernorm(hidden_states))
        return x + (0.5 if self.bug == "half" else 1.0) * self.mlp(self.post_attention_layernorm(x))


class PackedLlama(Odd):
    def __init__(self, theta: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(PackedLayer(theta) for _ in range(LAYERS))
        self.final_norm = Norm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        positions = torch.arange(input_ids.shape[1]).repeat(len(input_ids))
        x = self.embed(input_ids.reshape(-1))
        if self.bug == "embedding scale":
            x = x * math.sqrt(WIDTH)
        for layer in self.layers:
            x = layer(positions, x)
        logits = self.head(self.final_norm(x))
        return logits.view(*input_ids.shape, -1)


def packed_llama() -> tuple[nn.Module, nn.Module, Any]:
    reference = llama_reference()
    port = PackedLlama(theta_of(reference)).eval()
    source = reference.model
    port.embed.weight.data = source.embed_tokens.weight.data.clone()
    port.final_norm.weight.data = source.norm.weight.data.clone()
    port.head.weight.data = reference.lm_head.weight.data.clone()
    for mine, theirs in zip(source.layers, port.layers, strict=True):
        theirs.self_attn.qkv_proj.weight.data = torch.cat(
            [getattr(mine.self_attn, f"{n}_proj").weight.data for n in "qkv"]
        )
        theirs.self_attn.o_proj.weight.data = mine.self_attn.o_proj.weight.data.clone()
        theirs.mlp.gate_up_proj.weight.data = torch.cat(
            (mine.mlp.gate_proj.weight.data, mine.mlp.up_proj.weight.data)
        )
        theirs.mlp.down_proj.weight.data = mine.mlp.down_proj.weight.data.clone()
        theirs.input_layernorm.weight.data = mine.input_layernorm.weight.data.clone()
        theirs.post_attention_layernorm.weight.data = mine.post_attention_layernorm.weight.data.clone()
    return reference, port, (ids(),)


PACKED = Family(
    "packed llama",
    packed_llama,
    {
        "qkv order": with_bug("layers.1.self_attn", "qkv order"),
        "no rope on keys": with_bug("layers.1.self_attn", "no rope on keys"),
        "kv repeat": with_bug("layers.1.self_attn", "kv repeat"),
        "samples mixed": with_bug("layers.0.self_attn", "samples mixed"),
        "scale": with_bug("layers.2.self_attn", "scale"),
        "rope theta": setting("layers.1.self_attn", "theta", 1e6),
        "gate and up": with_bug("layers.1.mlp", "gate and up"),
        "half residual": with_bug("layers.1", "half"),
        "embedding scale": with_bug("", "embedding scale"),
        "eps": setting("layers.1.post_attention_layernorm", "eps", 1e-1),
        "norm offset": with_bug("final_norm", "offset"),
        "transposed square": on_weight("layers.1.self_attn.o_proj", lambda w: w.T.contiguous()),
        "one element": on_weight("layers.2.mlp.gate_up_proj", one_element),
        "swapped layers": swapped("layers.1", "layers.2"),
    },
    {
        "as it is": nothing,
        "frozen": frozen_parameters,
        "mlp in float64": wrapped_forward("layers.1.mlp", in_double),
        "attention in float64": wrapped_forward("layers.1.self_attn", in_double),
        "head in float64": wrapped_forward("head", in_double),
        "cloned norm": wrapped_forward("layers.1.input_layernorm", clone_of_output),
    },
)

FAMILIES = {family.name: family for family in (META, LIT, NANO, VIT, PACKED)}


@final
@dataclass(frozen=True)
class PortCase:
    family: str
    change: str
    harmless: bool


@final
@dataclass(frozen=True)
class PortOutcome:
    """What the comparison answered about a case."""

    case: PortCase
    expected: tuple[str, ...]
    named: str | None  # the port's module
    outcome: str
    sure: str
    verdict: str

    @property
    def right(self) -> bool:
        if self.case.harmless:
            return self.outcome == "same"
        return self.outcome == "differs" and self.named in self.expected


def cases_of(family: str) -> list[PortCase]:
    found = FAMILIES[family]
    return [
        *(PortCase(family, change, harmless=False) for change in found.faults),
        *(PortCase(family, change, harmless=True) for change in found.harmless),
    ]


def run_case(case: PortCase, compare: Callable[..., Any]) -> PortOutcome:
    """Plant a change into a port and compare it with its reference, without rules."""
    family = FAMILIES[case.family]
    reference, port, inputs = family.make()
    expected: tuple[str, ...] = ()
    with torch.no_grad():
        if case.harmless:
            family.harmless[case.change](port)
        else:
            found = family.faults[case.change](port)
            expected = (found,) if isinstance(found, str) else found
    result = compare(reference, port, inputs=inputs)
    named = None
    if result.first is not None:
        theirs = result.first.in_target
        named = "" if theirs == "the model itself" else theirs or result.first.module
    return PortOutcome(
        case,
        expected,
        named,
        result.outcome,
        "" if result.first is None else result.first.sure,
        result.verdict,
    )


if __name__ == "__main__":
    import sys

    import torchtap

    for name in sys.argv[1:] or FAMILIES:
        outcomes = [run_case(case, torchtap.compare) for case in cases_of(name)]
        for each in outcomes:
            if not each.right:
                print(
                    f"  {each.case.change}: {each.named!r} not {each.expected[:3]}, {each.sure}: {each.verdict}"
                )
        faults = [each for each in outcomes if not each.case.harmless]
        alarms = sum(not each.right for each in outcomes if each.case.harmless)
        certain = sum(each.sure == "certain" and not each.right for each in outcomes)
        print(
            f"{name}: {sum(e.right for e in faults)}/{len(faults)} right, {alarms} alarms, {certain} wrong certain"
        )
