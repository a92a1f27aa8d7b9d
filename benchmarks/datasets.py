"""Harvesting activations and reading them back: beside the forward pass alone, `read()`, a loop by hand, and SAELens.

``python -m benchmarks.datasets large FOLDER GB SITES THREADS MINUTES`` harvests and reads a large folder and prints
the share of the forward alone, of `read()`, of the disk, peak memory, and the order of rows. After MINUTES it stops;
the same command goes on. Every case runs in a process of its own.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torchtap as tt

__all__ = ["run"]

_LENGTH, _BATCH = 128, 16


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], self.heads, -1)
        q, k, v = (each.view(shape).transpose(1, 2) for each in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, width: int = 256, depth: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, width)
        self.blocks = nn.ModuleList(Block(width, width // 64) for _ in range(depth))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return x


def model(depth: int = 12) -> Model:
    torch.manual_seed(0)
    return Model(depth=depth).eval()


class Tokens(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Documents of random tokens, made when they are asked for."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index >= self.count:
            raise IndexError(index)
        return {"input_ids": torch.randint(1000, (_LENGTH,), generator=torch.Generator().manual_seed(index))}


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@torch.no_grad()
def _forward(net: Model, documents: Tokens, batches: int) -> float:
    """Return the seconds of forward passes alone."""
    inputs = [
        torch.stack([documents[i * _BATCH + j]["input_ids"] for j in range(_BATCH)]) for i in range(batches)
    ]
    began = time.perf_counter()
    for each in inputs:
        net(each)
    return time.perf_counter() - began


class OutOfTime(Exception):
    """The harvest is to go on in the next call."""


def large(folder: str, gigabytes: float = 20.0, sites: int = 1, minutes: float = 60) -> dict[str, Any]:
    """Harvest, read, and describe a large folder. The forward alone is measured between parts of the harvest.

    One site a block has 1.5 kFLOP for each byte that is stored, five have 0.3; GPT-2 and one site have 81.
    """
    net = model()
    row = 12 * 256 * 4 * sites
    chosen = ["blocks.*:output", *(f"blocks.*.{name}:output" for name in ("mlp", "out", "norm1", "norm2"))][
        :sites
    ]
    documents = Tokens(int(gigabytes * 1e9 / row / _LENGTH) // 64 * 64)
    forward: list[float] = []
    harvest: list[float] = []
    disk: list[float] = []
    memory = [_peak()]
    cpu = [0.0, 0.0]
    start = began = time.perf_counter()
    used = time.process_time()

    def between(progress: Any) -> None:
        nonlocal began, used
        harvest.append((time.perf_counter() - began) / (64 * _LENGTH))
        cpu[0] += time.process_time() - used
        if progress.documents // 64 % 8 == 1:  # every eighth shard
            used = time.process_time()
            forward.append(_forward(net, documents, 4) / (4 * _BATCH * _LENGTH))
            cpu[1] += time.process_time() - used
            disk.append(_disk(folder + ".disk", row * 64 * _LENGTH) / (64 * _LENGTH))
        memory.append(_peak())
        if progress.documents // 64 % 20 == 0:
            print(progress, f"{memory[-1]:.0f} MB", flush=True)
        if time.perf_counter() - start > 60 * minutes:
            raise OutOfTime
        began, used = time.perf_counter(), time.process_time()

    options: dict[str, Any] = {"window": 64, "batch_size": _BATCH, "progress": between}
    try:
        tt.harvest(net, documents, chosen, folder, **options)
    except OutOfTime:
        print("to be continued", flush=True)
    acts = tt.open_activations(folder)
    figures: dict[str, Any] = {"GB": acts.nbytes / 1e9, "rows": len(acts), "shards": len(acts.shards)}
    if len(forward) > 1:
        share = (cpu[1] / len(forward)) / (cpu[0] / len(harvest))
        figures |= {
            "rows/s": 1 / (sum(harvest) / len(harvest)),
            "share of forward alone": _median(forward) / _median(harvest),
            "share of forward alone, by means": _mean(forward) / _mean(harvest),
            "CPU time of the forward over that of the harvest": share,
            "time of the disk over that of the forward": _median(disk) / _median(forward),
            "peak MB": memory[-1],
            "MB before": memory[0],
            "largest shard MB": max(each.stat().st_size for each in Path(folder).glob("shard*")) / 1e6,
        }
    return {**figures, **_reading(acts), **_order(acts)} if acts.complete else figures


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _disk(path: str, size: int) -> float:
    """Return the seconds to write and sync as many bytes as a shard has."""
    part = memoryview(os.urandom(1 << 20))
    began = time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        for _ in range(size >> 20):
            file.write(part)
        os.fsync(file.fileno())
    seconds = time.perf_counter() - began
    os.unlink(path)
    return seconds


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _reading(acts: Any) -> dict[str, Any]:
    """Read the same files in turn by ``read()`` and as shuffled batches."""
    shards = [Path(acts.path, name) for name in acts.shards]
    times: dict[str, list[float]] = {"read()": [], "readinto() used memory": [], "batches": []}
    size = 8192 * len(acts.sites) * 256 * 4
    stream, used = iter(acts.batches(8192, seed=1)), bytearray(size)
    batch: Any = None
    for number in range(min(60, len(acts) // 8192)):
        with shards[number % len(shards)].open("rb", buffering=0) as file:
            began = time.perf_counter()
            whole = file.read(size)
            times["read()"].append((time.perf_counter() - began) / len(whole))
            del whole
            file.seek(0)
            began = time.perf_counter()
            times["readinto() used memory"].append(
                (file.readinto(used), time.perf_counter() - began)[1] / size
            )
        began = time.perf_counter()
        batch = None  # as a training that is done with it
        batch = next(stream)
        times["batches"].append((time.perf_counter() - began) / size)
    del batch
    speeds = {name: 1e-9 / _median(found) for name, found in times.items()}
    return {**{f"{name} GB/s": speed for name, speed in speeds.items()},
            "share of read()": speeds["batches"] / speeds["read()"],
            "share of readinto()": speeds["batches"] / speeds["readinto() used memory"]}  # fmt: skip


def _order(acts: Any) -> dict[str, Any]:
    """Return the share of neighbours of one document over that of a random order of the shard, and the correlation."""
    documents = acts.read("document", 0, 200_000)
    same = float((documents[1:] == documents[:-1]).double().mean())
    values = acts.read(acts.sites[-1], 0, 50_000).double()
    values = (values - values.mean(0)) / values.std(0)
    return {"neighbours of one document": same, "expected of 64": 1 / 64,
            "neighbour correlation": float((values[1:] * values[:-1]).mean()),
            "distant correlation": float((values[25_000:] * values[:-25_000]).mean())}  # fmt: skip


# -- beside others, each in a process of its own --------------------------------------------------------------


def _ours(folder: str, count: int) -> Iterator[Tensor]:
    acts = tt.harvest(model(4), Tokens(count), "blocks.2:output", folder, window=64, batch_size=_BATCH)
    yield from (batch["blocks.2:output"] for batch in acts.batches(2048, "blocks.2:output"))


def _ours_online(folder: str, count: int) -> Iterator[Tensor]:
    import threading

    out = folder + "/acts"
    job = threading.Thread(target=lambda: list(_ours(out, count)))
    job.start()
    while not os.path.exists(out + "/activations.json"):
        time.sleep(0.01)
    yield from (batch["blocks.2:output"] for batch in tt.open_activations(out).follow(2048, poll=0.05))
    job.join()


@torch.no_grad()
def _by_hand(folder: str, count: int) -> Iterator[Tensor]:
    """What people write: a hook, a file for each few batches, all files in memory for the shuffle."""
    net, documents, kept = model(4), Tokens(count), []
    handle = net.blocks[2].register_forward_hook(
        lambda m, a, output: kept.append(output.flatten(0, 1).clone())
    )
    os.makedirs(folder, exist_ok=True)
    for start in range(0, count, 64):
        for first in range(start, min(start + 64, count), _BATCH):
            net(torch.stack([documents[i]["input_ids"] for i in range(first, min(first + _BATCH, count))]))
        torch.save(torch.cat(kept), f"{folder}/{start}.pt")
        kept.clear()
    handle.remove()
    everything = torch.cat([torch.load(path) for path in sorted(Path(folder).glob("*.pt"))])
    everything = everything[torch.randperm(len(everything))]
    yield from everything.split(2048)


def _saelens(folder: str, count: int) -> Iterator[Tensor]:
    """SAELens' store over a model of the same size: runs the model and mixes in memory; nothing is kept."""
    from sae_lens import ActivationsStore
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    from datasets import Dataset

    torch.manual_seed(0)
    config = HookedTransformerConfig(
        n_layers=4, d_model=256, n_ctx=_LENGTH, d_head=64, n_heads=4, d_mlp=1024, d_vocab=1000, act_fn="gelu"
    )
    documents = Tokens(count)
    data = Dataset.from_dict({"tokens": [documents[i]["input_ids"].tolist() for i in range(count)]})
    store = ActivationsStore(
        model=HookedTransformer(config), dataset=data, streaming=False, hook_name="blocks.2.hook_resid_post",
        hook_head_index=None, context_size=_LENGTH, d_in=256, n_batches_in_buffer=64, total_training_tokens=1,
        store_batch_size_prompts=_BATCH, train_batch_size_tokens=2048, prepend_bos=False,
        normalize_activations="none", device=torch.device("cpu"), dtype="float32",
    )  # fmt: skip
    rows = 0
    for batch in store:
        rows += len(batch)
        if rows > count * _LENGTH:
            return
        yield batch


CASES = {"harvest, then batches": _ours, "harvest, batches at once": _ours_online, "a loop by hand": _by_hand,
         "SAELens' store": _saelens}  # fmt: skip


def _case(name: str, count: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        rows, first = 0, 0.0
        for batch in CASES[name](folder, count):
            first = first or time.perf_counter() - began
            rows += len(batch)
        seconds = time.perf_counter() - began
    return {"rows": rows, "rows/s": rows / seconds, "first batch": first, "peak": _peak()}


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Rows for the tables."""
    count = 512 if quick else 4096
    found = []
    for name in CASES:
        words = [sys.executable, "-m", "benchmarks.datasets", "case", name, str(count)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = done.stderr.strip().splitlines()[-1][:80] if done.stderr.strip() else "failed"
            found.append({"case": name, "rows/s": "–", "first batch, s": "–", "peak, MB": reason})
            continue
        figures = json.loads(done.stdout.strip().splitlines()[-1])
        found.append(
            {
                "case": name,
                "rows/s": f"{figures['rows/s']:,.0f}",
                "first batch, s": f"{figures['first batch']:.2f}",
                "peak, MB": f"{figures['peak']:.0f}",
            }
        )
    with tempfile.TemporaryDirectory() as folder:
        figures = large(folder + "/acts", 0.3 if quick else 3.0)
    for name, bar in (
        ("share of forward alone", 0.9),
        ("share of read()", 0.8),
        ("share of readinto()", 0.8),
    ):
        holds = "yes" if figures[name] >= bar else "no"
        case = f"{name}, 12 × 256: {figures[name]:.2f}, bar {bar}: {holds}"
        found.append(
            {"case": case, "rows/s": "", "first batch, s": "", "peak, MB": f"{figures['peak MB']:.0f}"}
        )
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "case":
        print(json.dumps(_case(sys.argv[2], int(sys.argv[3]))))
    else:
        _, _, place, size, number, threads, most = sys.argv
        torch.set_num_threads(int(threads))
        for key, value in large(place, float(size), int(number), float(most)).items():
            print(f"{key}: {value:,.4g}" if isinstance(value, float) else f"{key}: {value:,}")
        if (Path(place) / "index.json").exists():
            shutil.rmtree(place)
