"""Models of a sample project, written as people write them. Commits of the campaign change this file."""

import json
import math
import os

import torch
import torch.nn.functional as F
from torch import nn

HERE = os.path.dirname(os.path.abspath(__file__))


# -- gpt ------------------------------------------------------------------------------------------------------


class SelfAttention(nn.Module):
    def __init__(self, width, heads, index):
        super().__init__()
        self.heads, self.index = heads, index
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.proj = nn.Linear(width, width)

    def split(self, x):
        batch, length, width = x.shape
        return x.view(batch, length, self.heads, width // self.heads).transpose(1, 2)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        scores = scores.masked_fill(~mask, float("-inf"))
        y = F.softmax(scores, dim=-1) @ v
        return self.proj(y.transpose(1, 2).reshape(batch, length, width))


class FeedForward(nn.Module):
    def __init__(self, width, index):
        super().__init__()
        self.index = index
        self.up = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class GPTBlock(nn.Module):
    def __init__(self, width, heads, index, eps):
        super().__init__()
        self.index = index
        self.norm1 = nn.LayerNorm(width, eps=eps)
        self.attn = SelfAttention(width, heads, index)
        self.norm2 = nn.LayerNorm(width, eps=eps)
        self.mlp = FeedForward(width, index)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x


class GPT(nn.Module):
    def __init__(self, vocabulary, width, heads, layers, length, eps, dropout=0.0):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList([GPTBlock(width, heads, i, eps) for i in range(layers)])
        self.norm = nn.LayerNorm(width, eps=eps)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids):
        places = torch.arange(ids.size(1))
        x = self.drop(self.tokens(ids) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x)


# -- llama ----------------------------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (x.float() * scale).to(x.dtype)


class Rotary(nn.Module):
    def __init__(self, width, theta):
        super().__init__()
        self.theta = theta
        self.register_buffer("rates", theta ** (-torch.arange(0, width, 2).float() / width), persistent=False)

    def forward(self, positions):
        angles = positions[:, None].float() * self.rates[None, :]
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos(), angles.sin()


def rotate(x, cos, sin):
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cos + turned * sin


class GroupedAttention(nn.Module):
    def __init__(self, width, heads, groups, index):
        super().__init__()
        self.heads, self.groups, self.index = heads, groups, index
        self.size = width // heads
        self.q_proj = nn.Linear(width, heads * self.size, bias=False)
        self.k_proj = nn.Linear(width, groups * self.size, bias=False)
        self.v_proj = nn.Linear(width, groups * self.size, bias=False)
        self.o_proj = nn.Linear(heads * self.size, width, bias=False)

    def forward(self, x, cos, sin, mask):
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, self.heads, self.size).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, self.groups, self.size).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, self.groups, self.size).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k = k.repeat_interleave(self.heads // self.groups, dim=1)
        v = v.repeat_interleave(self.heads // self.groups, dim=1)
        scores = q @ k.transpose(2, 3) * self.size**-0.5 + mask
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        out = (weights @ v).transpose(1, 2).reshape(batch, length, -1)
        return self.o_proj(out)


class SwiGLU(nn.Module):
    def __init__(self, width, inner, index):
        super().__init__()
        self.index = index
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class LlamaLayer(nn.Module):
    def __init__(self, width, heads, groups, inner, eps, index):
        super().__init__()
        self.index = index
        self.input_norm = RMSNorm(width, eps)
        self.attention = GroupedAttention(width, heads, groups, index)
        self.post_norm = RMSNorm(width, eps)
        self.mlp = SwiGLU(width, inner, index)

    def forward(self, x, cos, sin, mask):
        x = x + self.attention(self.input_norm(x), cos, sin, mask)
        return x + self.mlp(self.post_norm(x))


class Llama(nn.Module):
    def __init__(self, vocabulary, width, heads, groups, inner, layers, eps, theta):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.rotary = Rotary(width // heads, theta)
        self.layers = nn.ModuleList([LlamaLayer(width, heads, groups, inner, eps, i) for i in range(layers)])
        self.norm = RMSNorm(width, eps)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids):
        length = ids.shape[1]
        x = self.embed(ids)
        cos, sin = self.rotary(torch.arange(length))
        mask = torch.full((length, length), float("-inf")).triu(1)
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        return {"logits": self.lm_head(self.norm(x))}


# -- resnet ---------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self, inside, outside, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Identity()
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return self.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, channels, classes):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, channels, 3, 1, 1, bias=False), nn.BatchNorm2d(channels), nn.ReLU())
        self.pool = nn.MaxPool2d(2)
        self.stage1 = Residual(channels, channels, 1)
        self.stage2 = Residual(channels, 2 * channels, 2)
        self.stage3 = Residual(2 * channels, 4 * channels, 2)
        self.fc = nn.Linear(4 * channels, classes)

    def forward(self, images):
        x = self.pool(self.stem(images))
        x = self.stage3(self.stage2(self.stage1(x)))
        x = x.mean(dim=(2, 3))
        return self.fc(x)


# -- mixture of experts ---------------------------------------------------------------------------------------


class Expert(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.w1 = nn.Linear(width, inner)
        self.w2 = nn.Linear(inner, width)

    def forward(self, x):
        return self.w2(F.relu(self.w1(x)))


class Mixture(nn.Module):
    def __init__(self, width, inner, experts, chosen):
        super().__init__()
        self.chosen = chosen
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList([Expert(width, inner) for _ in range(experts)])

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        gates = F.softmax(self.router(flat), dim=-1)
        weights, picked = gates.topk(self.chosen, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, slots = (picked == number).nonzero(as_tuple=True)
            if rows.numel():
                out.index_add_(0, rows, weights[rows, slots, None] * expert(flat[rows]))
        return out.view_as(x)


class MoE(nn.Module):
    def __init__(self, features, width, inner, experts, chosen, layers, outputs):
        super().__init__()
        self.inlet = nn.Linear(features, width)
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(layers)])
        self.mixtures = nn.ModuleList([Mixture(width, inner, experts, chosen) for _ in range(layers)])
        self.outlet = nn.Linear(width, outputs)

    def forward(self, x):
        x = torch.tanh(self.inlet(x))
        for norm, mixture in zip(self.norms, self.mixtures):
            x = x + mixture(norm(x))
        return self.outlet(x)


# -- tagger ---------------------------------------------------------------------------------------------------


class Tagger(nn.Module):
    def __init__(self, vocabulary, width, hidden, tags):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=0)
        self.lstm = nn.LSTM(width, hidden, num_layers=2, batch_first=True, bidirectional=True)
        self.project = nn.Sequential(nn.Linear(2 * hidden, hidden), nn.Tanh(), nn.Linear(hidden, tags))

    def forward(self, ids):
        x = self.embedding(ids)
        states, _ = self.lstm(x)
        scores = self.project(states)
        return F.log_softmax(scores, dim=-1)


# -- vision transformer ---------------------------------------------------------------------------------------


class ViT(nn.Module):
    def __init__(self, size, patch, width, heads, layers, classes):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.zeros(1, (size // patch) ** 2 + 1, width))
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.classify = nn.Linear(width, classes)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1) + self.places
        x = self.encoder(x)
        return self.classify(self.norm(x)[:, 0])


# -- denoiser -------------------------------------------------------------------------------------------------


class Down(nn.Module):
    def __init__(self, inside, outside, steps):
        super().__init__()
        self.norm = nn.GroupNorm(4, inside)
        self.conv = nn.Conv2d(inside, outside, 3, 2, 1)
        self.time = nn.Linear(steps, outside)

    def forward(self, x, t):
        x = self.conv(F.silu(self.norm(x)))
        return x + self.time(t)[:, :, None, None]


class Up(nn.Module):
    def __init__(self, inside, outside, steps):
        super().__init__()
        self.norm = nn.GroupNorm(4, inside)
        self.conv = nn.Conv2d(inside, outside, 3, 1, 1)
        self.time = nn.Linear(steps, outside)

    def forward(self, x, t):
        x = F.interpolate(self.norm(x), scale_factor=2, mode="nearest")
        return F.silu(self.conv(x) + self.time(t)[:, :, None, None])


class Denoiser(nn.Module):
    def __init__(self, channels, steps):
        super().__init__()
        self.steps = steps
        self.enter = nn.Conv2d(3, channels, 3, 1, 1)
        self.down1 = Down(channels, 2 * channels, steps)
        self.down2 = Down(2 * channels, 4 * channels, steps)
        self.up1 = Up(4 * channels, 2 * channels, steps)
        self.up2 = Up(4 * channels, channels, steps)
        self.leave = nn.Conv2d(2 * channels, 3, 1)

    def times(self, t):
        rates = torch.exp(-math.log(1000.0) * torch.arange(self.steps // 2).float() / (self.steps // 2))
        angles = t[:, None].float() * rates[None]
        return torch.cat([angles.sin(), angles.cos()], dim=-1)

    def forward(self, noisy, t):
        time = self.times(t)
        first = self.enter(noisy)
        second = self.down1(first, time)
        third = self.down2(second, time)
        x = self.up1(third, time)
        x = self.up2(torch.cat([x, second], dim=1), time)
        return self.leave(torch.cat([x, first], dim=1))


# -- translator -----------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x, memory, hidden=None):
        batch, length, width = x.shape
        q = self.q(x).view(batch, length, self.heads, -1).transpose(1, 2)
        k, v = self.kv(memory).view(batch, memory.shape[1], 2, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) * (width // self.heads) ** -0.5
        if hidden is not None:
            scores = scores.masked_fill(hidden, float("-inf"))
        y = scores.softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class EncoderLayer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.feed = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))

    def forward(self, x, padding):
        y = self.norm1(x)
        x = x + self.attention(y, y, padding)
        return x + self.feed(self.norm2(x))


class DecoderLayer(nn.Module):
    def __init__(self, width, heads, index):
        super().__init__()
        self.index = index
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.cross = Attention(width, heads)
        self.feed = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))

    def forward(self, x, memory, future, padding):
        y = self.norm1(x)
        x = x + self.attention(y, y, future)
        x = x + self.cross(self.norm2(x), memory, padding)
        return x + self.feed(self.norm3(x))


class Translator(nn.Module):
    def __init__(self, vocabulary, width, heads, layers, length):
        super().__init__()
        self.scale = width**-0.5
        self.embedding = nn.Embedding(vocabulary, width)
        self.register_buffer("places", torch.zeros(length, width))
        self.encoder = nn.ModuleList([EncoderLayer(width, heads) for _ in range(layers)])
        self.decoder = nn.ModuleList([DecoderLayer(width, heads, i) for i in range(layers)])
        self.norm = nn.LayerNorm(width)

    def forward(self, source, target, padding):
        padding = padding[:, None, None, :]
        memory = self.embedding(source) + self.places[: source.shape[1]]
        for layer in self.encoder:
            memory = layer(memory, padding)
        x = self.embedding(target) + self.places[: target.shape[1]]
        future = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
        for layer in self.decoder:
            x = layer(x, memory, future, padding)
        return {"logits": self.norm(x) @ self.embedding.weight.t() * self.scale, "memory": memory}


# -- loading --------------------------------------------------------------------------------------------------

CLASSES = {"gpt": GPT, "llama": Llama, "resnet": ResNet, "moe": MoE, "tagger": Tagger, "vit": ViT, "denoiser": Denoiser}
CLASSES["translator"] = Translator


def config(name):
    with open(os.path.join(HERE, "config", f"{name}.json")) as file:
        return json.load(file)


def adapt(name, state):
    return state


def load(name):
    model = CLASSES[name](**config(name))
    model.load_state_dict(adapt(name, torch.load(os.path.join(HERE, "weights", f"{name}.pt"))))
    return model.eval()


def inputs(name):
    generator = torch.Generator().manual_seed(3)
    if name in ("gpt", "llama"):
        return (torch.randint(0, 90, (4, 24), generator=generator),)
    if name == "tagger":
        return (torch.randint(1, 60, (4, 20), generator=generator),)
    if name == "moe":
        return (torch.randn(4, 16, 12, generator=generator),)
    if name == "denoiser":
        return (torch.randn(4, 3, 16, 16, generator=generator), torch.tensor([1, 40, 300, 999]))
    if name == "translator":
        source, target = (torch.randint(1, 50, (3, length), generator=generator) for length in (14, 11))
        return {"source": source, "target": target, "padding": torch.arange(14) >= torch.tensor([[14], [9], [11]])}
    return (torch.rand(4, 3, 32, 32, generator=generator) * 2 - 1,)
