"""More models for planting faults: Hugging Face's from small configurations, and hand-written ones of other kinds.

Together with `planted_models` and `planted_more` they are twenty-six architectures. All are in eval mode, with norms
away from their initial values, so that a wrong norm shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tests.corpus.planted_models import FAMILIES
from tests.corpus.planted_models import build as build_family
from tests.corpus.planted_more import MORE
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["ARCHITECTURES", "build"]


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.act = nn.SiLU()
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Mixture(nn.Module):
    """Sends each token to its best two experts, so that experts get other numbers of tokens when it goes wrong."""

    def __init__(self, width: int, experts: int = 4) -> None:
        super().__init__()
        self.top = 2
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(Expert(width) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x).flatten(0, 1)
        weights, chosen = self.router(y).softmax(-1).topk(self.top, -1)
        out = torch.zeros_like(y)
        for n, expert in enumerate(self.experts):
            hit = (chosen == n).any(-1)
            if hit.any():
                out[hit] += (weights * (chosen == n)).sum(-1)[hit, None] * expert(y[hit])
        return x + out.view_as(x)


class MixtureModel(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(97, width)
        self.layers = nn.ModuleList(Mixture(width) for _ in range(3))
        self.head = nn.Linear(width, 97)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class TimmAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class TimmMlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 2 * width)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class TimmBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = TimmAttention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = TimmMlp(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PatchEmbed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, 4, 4)

    def forward(self, images: Tensor) -> Tensor:
        return self.proj(images).flatten(2).transpose(1, 2)


class TimmViT(nn.Module):
    def __init__(self, width: int = 48, heads: int = 4, layers: int = 4) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed(width)
        self.pos_embed = nn.Parameter(torch.randn(1, 16, width) * 0.1)
        self.blocks = nn.ModuleList(TimmBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embed(images) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class Scale(nn.Module):
    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inner, outer, 3, padding=1)
        self.norm = nn.GroupNorm(4, outer)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.conv(x)))


class UNet(nn.Module):
    """Down and up again with skips, as diffusion models do."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([Scale(3, 16), Scale(16, 32), Scale(32, 32)])
        self.middle = Scale(32, 32)
        self.up = nn.ModuleList([Scale(64, 32), Scale(64, 16), Scale(32, 16)])
        self.out = nn.Conv2d(16, 3, 1)

    def forward(self, images: Tensor) -> Tensor:
        skips, x = [], images
        for scale in self.down:
            x = scale(x)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x)
        for scale in self.up:
            x = scale(torch.cat([F.interpolate(x, scale_factor=2), skips.pop()], 1))
        return self.out(x)


def _tokens() -> Tensor:
    return torch.randint(1, 90, (2, 12), generator=torch.Generator().manual_seed(1))


def _hf(name: str, **given: Any) -> tuple[nn.Module, Any]:
    import transformers

    config = transformers.AutoConfig.for_model(name, **given)
    kinds = {
        "t5": transformers.AutoModelForSeq2SeqLM, "bert": transformers.AutoModel, "vit": transformers.AutoModel,
        "roberta": transformers.AutoModel,
    }  # fmt: skip
    model = kinds.get(name, transformers.AutoModelForCausalLM).from_config(config)
    model.generation_config = None
    tokens = _tokens()
    if name == "vit":
        return model, {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))}
    if name == "t5":
        return model, {"input_ids": tokens, "decoder_input_ids": tokens.flip(1), "use_cache": False}
    if name in ("bert", "roberta"):
        mask = torch.ones_like(tokens)
        mask[1, 8:] = 0
        return model, {"input_ids": tokens, "attention_mask": mask}
    return model, {"input_ids": tokens, "use_cache": False}


_WORDS = {"vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SMALL = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
_BUILD: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "gpt2": lambda: _hf("gpt2", n_positions=32, n_embd=32, n_layer=3, n_head=4, **_WORDS),
    "llama": lambda: _hf("llama", num_key_value_heads=2, **_SMALL, **_WORDS),
    "bert": lambda: _hf("bert", **_SMALL, **_WORDS),
    "mixtral": lambda: _hf("mixtral", num_key_value_heads=2, num_local_experts=4, **_SMALL, **_WORDS),
    "t5": lambda: _hf(
        "t5", d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, **{**_WORDS, "eos_token_id": 1}
    ),
    "vit": lambda: _hf("vit", image_size=16, patch_size=4, **_SMALL),
    "gpt_neox": lambda: _hf("gpt_neox", max_position_embeddings=64, **_SMALL, **_WORDS),
    "opt": lambda: _hf(
        "opt",
        ffn_dim=64,
        word_embed_proj_dim=32,
        max_position_embeddings=64,
        **{k: v for k, v in _SMALL.items() if k != "intermediate_size"},
        **_WORDS,
    ),
    "MoE": lambda: (MixtureModel(), (_tokens(),)),
    "timm ViT": lambda: (TimmViT(), (torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1)),)),
    "UNet": lambda: (UNet(), (torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1)),)),
}
_BUILD |= MORE
ARCHITECTURES = (*FAMILIES, *_BUILD)


def build(architecture: str, seed: int = 0) -> tuple[nn.Module, Any]:
    """A model in eval mode and its inputs."""
    if architecture in FAMILIES:
        return build_family(architecture, seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model, inputs = _BUILD[architecture]()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("A_log", ".D")):
                    continue  # of a state space: its decay must stay one
                if "norm" in name or "ln_" in name or "layer_norm" in name or ".bn" in name:
                    parameter.add_(0.2 * torch.randn_like(parameter))
                elif parameter.dim() == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
                else:
                    parameter.mul_(3.0)  # initial weights are small: attention would hardly look anywhere
            for name, buffer in model.named_buffers():
                if name.endswith("running_mean"):
                    buffer.normal_(0, 0.2)
                elif name.endswith("running_var"):
                    buffer.uniform_(0.5, 1.5)
    return model.eval(), inputs
