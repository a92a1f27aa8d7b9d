"""A GPT as people train it: evaluation first and in between, accumulation, clipping, compile, a checkpoint."""

import argparse
import os
import tempfile

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--compile", action="store_true")
args = parser.parse_args()
torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self, width=16, heads=2):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), up, nn.GELU(), down)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.proj(y.transpose(1, 2).flatten(2)))
        return x + self.drop(self.mlp(x))


class GPT(nn.Module):
    def __init__(self, vocabulary=32, width=16):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids, targets=None):
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch():
    ids = torch.randint(0, 32, (4, 9))
    return ids[:, :-1], ids[:, 1:]


model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
raw = model
if args.compile:
    model = torch.compile(model, backend="aot_eager")


@torch.no_grad()
def evaluate():
    model.eval()
    losses = [model(*batch())[1].item() for _ in range(3)]
    model.train()
    return sum(losses) / len(losses)


for step in range(args.steps):
    if step % 3 == 0:
        print("eval", step, evaluate().hex())
        torch.save(raw.state_dict(), os.path.join(tempfile.mkdtemp(), "checkpoint.pt"))
    total = 0.0
    for _ in range(2):
        _, loss = model(*batch())
        (loss / 2).backward()
        total += (loss / 2).item()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print("loss", step, total)
