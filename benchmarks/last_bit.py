"""``python -m benchmarks.last_bit``: when does a training with two threads end with another loss?

A small model with layer norms is trained for nine steps with one thread and with two. That gives two losses, since the
backward of layer norm adds up the gradients of its weights thread by thread. Then it is trained with two threads asked
for, in fresh processes, under each of the conditions below, and counted which of the two losses comes out. Have the
machine busy meanwhile: what depends on the load shows only then.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

__all__ = ["CONDITIONS", "train"]

_WIDTH, _ROWS, _STEPS = 256, 512, 9


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.mix, self.out = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + self.second(self.out(torch.tanh(self.mix(self.first(value)))))


def train(watched: bool = False, moved: bool = False) -> str:
    """The ninth loss, exactly."""
    import torchtap as tt

    torch.manual_seed(0)
    # Other tensors come to lie elsewhere when some are held and some were let go.
    held = [torch.empty(1 + int.from_bytes(os.urandom(2), "little")) for _ in range(40 * moved)][::2]
    model = nn.Sequential(
        nn.Embedding(1024, _WIDTH), _Block(), _Block(), nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 1024)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(0, 1024, (_ROWS,))
    loss = torch.tensor(0.0)
    with tempfile.TemporaryDirectory() as folder:
        kinds = ["*:output", "*:grad_output", "*:param", "*:param_grad"]
        watch = tt.watch(model, Path(folder) / "run", kinds).follow(optimizer) if watched else None
        for _ in range(_STEPS):
            loss = nn.functional.cross_entropy(model(tokens[:-1]), tokens[1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if watch is not None:
            watch.close()
    del held
    return loss.item().hex()


def _in_a_thread(action: Callable[[], str]) -> str:
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(action()))
    thread.start()
    thread.join()
    return found[0]


def _after_another_thread_asked_for_one() -> str:
    _in_a_thread(lambda: str(torch.set_num_threads(1)))  # as the thread that pins a DataLoader's memory does
    return _in_a_thread(train)


# Threads that wait sleep: on a busy machine those that spin keep each other from working. No number depends on it.
_QUIET = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}

# Name, what is in the environment, what is done.
CONDITIONS: dict[str, tuple[dict[str, str], Callable[[], str]]] = {
    "as it is": ({}, train),
    "memory elsewhere each time": ({}, lambda: train(moved=True)),
    "watched, into a run": ({}, lambda: train(watched=True)),
    "in a thread of its own": ({}, lambda: _in_a_thread(train)),
    "in a new thread, after another called set_num_threads(1)": ({}, _after_another_thread_asked_for_one),
    "MKL_DYNAMIC=TRUE": ({"MKL_DYNAMIC": "TRUE"}, train),
    "OMP_DYNAMIC=TRUE": ({"OMP_DYNAMIC": "TRUE"}, train),
    "OMP_THREAD_LIMIT=1": ({"OMP_THREAD_LIMIT": "1"}, train),
}


def _one(condition: str) -> None:
    torch.set_num_threads(2)
    print(CONDITIONS[condition][1]())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=5, help="fresh processes for each condition")
    parser.add_argument("--condition", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.condition:
        _one(asked.condition)
        return
    named = {}
    for threads in (1, 2):
        torch.set_num_threads(threads)
        named[train()] = f"that of {threads}"
    print(f"losses of one and of two threads: {', '.join(str(float.fromhex(loss)) for loss in named)}")
    print("| two threads asked for | ninth loss | load |\n| --- | --- | --- |")
    for condition, (variables, _) in CONDITIONS.items():
        seen: Counter[str] = Counter()
        for _ in range(asked.processes):
            command = [sys.executable, "-m", "benchmarks.last_bit", "--condition", condition]
            done = subprocess.run(command, env=_QUIET | variables, capture_output=True, text=True, check=True)
            seen[named.get(done.stdout.strip(), "another")] += 1
        told = ", ".join(f"{count} times {what}" for what, count in seen.items())
        print(f"| {condition} | {told} | {os.getloadavg()[0]:.0f} |", flush=True)


if __name__ == "__main__":
    main()
