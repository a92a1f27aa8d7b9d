"""Models that tests share: small, seeded, each with an odd corner of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Attention(nn.Module):
    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int = 16, inplace: bool = False) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(width)
        self.attn = Attention(width)
        self.ln2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.ReLU(inplace=True) if inplace else nn.GELU(),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    """GPT-like, with the head tied to the embedding."""

    def __init__(
        self,
        layers: int = 2,
        width: int = 16,
        vocabulary: int = 11,
        checkpointed: str | None = None,
        tied: bool = True,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.checkpointed = checkpointed

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.checkpointed is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.checkpointed == "reentrant")
        return self.head(self.norm(x))


class CNN(nn.Module):
    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(6)
        self.act = nn.ReLU(inplace=inplace)
        self.conv2 = nn.Conv2d(6, 6, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(6)
        self.fc = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.bn1(self.conv1(x)))
        x = self.act(x + self.bn2(self.conv2(x)))
        return self.fc(x.mean((2, 3)))


class Tagger(nn.Module):
    """An LSTM: its output is a tuple of a tensor and a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 12, batch_first=True, num_layers=2)
        self.fc = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.lstm(x)
        return self.fc(y)


@dataclass
class Output:
    logits: Tensor
    hidden: tuple[Tensor, ...]
    extra: Tensor | None = None


class Structured(nn.Module):
    """Dict in, dict out, with a dataclass, a keyword and a None on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.inner = Dataclassed()

    def forward(self, batch: dict[str, Tensor], *, scale: Tensor | None = None) -> dict[str, Any]:
        x = self.first(batch["x"])
        out = self.inner(x, mask=batch["mask"], scale=scale)
        return {"logits": out.logits, "all": [out.hidden, {"x": x}], "none": None}


class Dataclassed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: Tensor | None = None) -> Output:
        y = self.fc(x if mask is None else x * mask)
        return Output(y if scale is None else y * scale, (x, y))


class Thrice(nn.Module):
    """One module called three times, another never."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(5, 5)
        self.never = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.shared(x))
        return x


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 3))


@dataclass
class Case:
    """A model with arguments to call it with."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def loss(self) -> Tensor:
        total = torch.zeros(())
        for tensor in tensors_of(self.model(*self.args, **self.kwargs)):
            if tensor.is_floating_point() and tensor.requires_grad:
                total = total + tensor.float().pow(2).mean()
        return total


def tensors_of(tree: Any) -> list[Tensor]:
    """Every tensor of a structure, found without torchtap."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        return [tensor for value in tree.values() for tensor in tensors_of(value)]
    if isinstance(tree, (list, tuple)):
        return [tensor for value in tree for tensor in tensors_of(value)]
    if hasattr(tree, "__dataclass_fields__"):
        return [tensor for name in tree.__dataclass_fields__ for tensor in tensors_of(getattr(tree, name))]
    return []


def _hf(build: Callable[[], tuple[nn.Module, dict[str, Any]]]) -> Callable[[], Case]:
    def make() -> Case:
        model, kwargs = build()
        return Case(model, (), kwargs)

    return make


def _bert() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertModel(config), {"input_ids": torch.randint(0, 40, (2, 6))}


def _gpt2() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=40,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=16,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(config), {"input_ids": torch.randint(0, 40, (2, 6)), "use_cache": False}


def _llama() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    return LlamaForCausalLM(config), {"input_ids": torch.randint(0, 40, (2, 6)), "use_cache": False}


def _t5() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=40, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    inputs = {"input_ids": torch.randint(0, 40, (2, 6)), "decoder_input_ids": torch.randint(0, 40, (2, 4))}
    return T5ForConditionalGeneration(config), {**inputs, "use_cache": False}


def _vit() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=8, patch_size=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return ViTModel(config), {"pixel_values": torch.randn(2, 3, 8, 8)}


def _transformer() -> Case:
    model = nn.Transformer(16, 2, 2, 2, 32, dropout=0.0, batch_first=True)
    return Case(model, (torch.randn(2, 5, 16), torch.randn(2, 4, 16)), {})


def _structured() -> Case:
    batch = {"x": torch.randn(4, 6), "mask": torch.ones(4, 6)}
    return Case(Structured(), (batch,), {"scale": torch.tensor(2.0)})


PLAIN: dict[str, Callable[[], Case]] = {
    "mlp": lambda: Case(mlp(), (torch.randn(4, 7),), {}),
    "cnn": lambda: Case(CNN(), (torch.randn(2, 3, 6, 6),), {}),
    "lstm": lambda: Case(Tagger(), (torch.randn(2, 5, 8),), {}),
    "transformer": _transformer,
    "gpt": lambda: Case(GPT(), (torch.randint(0, 11, (2, 6)),), {}),
    "structured": _structured,
    "thrice": lambda: Case(Thrice(), (torch.randn(3, 5),), {}),
}
HUGGING_FACE: dict[str, Callable[[], Case]] = {
    "bert": _hf(_bert),
    "gpt2": _hf(_gpt2),
    "llama": _hf(_llama),
    "t5": _hf(_t5),
    "vit": _hf(_vit),
}
CASES = {**PLAIN, **HUGGING_FACE}


def make(name: str) -> Case:
    """A case by name, the same weights and inputs each time."""
    torch.manual_seed(0)
    return CASES[name]()
