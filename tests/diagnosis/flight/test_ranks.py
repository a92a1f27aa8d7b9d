"""Two ranks: each writes its part of the same step, nobody waits for the other, and the losses stay what they were."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import torchtap as tt

SCRIPT = """
import json, os, sys, warnings
import torch
import torch.distributed as dist
from torch import nn
import torchtap as tt

warnings.simplefilter("ignore")
dist.init_process_group("gloo")
rank = dist.get_rank()

def train(recorded):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 3))
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
    torch.manual_seed(100 + rank)
    replay = True if sys.argv[1] == "replay" else None
    recorder = tt.flight_recorder(wrapped, optimizer, "flights", replay=replay) if recorded else None
    losses = []
    for step in range(8):
        x = torch.randn(4, 6)
        if step == 5 and rank == 1:
            x[0] = float("nan")
        loss = nn.functional.cross_entropy(wrapped(x), torch.randint(3, (4,)))
        loss.backward()
        if step == 5:
            optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(repr(loss.item()))
    if recorder is not None:
        recorder.close()
        return losses, [each.to_dict() for each in recorder.outcomes]
    return losses, []

plain, _ = train(False)
losses, outcomes = train(True)
with open(f"rank-{rank}.json", "w") as file:
    json.dump({"same": plain == losses, "outcomes": outcomes}, file)
dist.destroy_process_group()
# A thread of gloo lets go of the last backward's context when it likes; where Python has begun to end by then, torch
# aborts (DDP alone does so too).
os._exit(0)
"""


@pytest.mark.parametrize("replay", ["", "replay"])
def test_every_rank_has_its_part_of_the_same_step(replay: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "train.py",
        replay,
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    told = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert [each["same"] for each in told] == [True, True]
    steps = [[outcome["step"] for outcome in each["outcomes"]] for each in told]
    assert steps == [[5], [5]]
    assert [each["outcomes"][0]["trigger"] for each in told] == ["rank", "nonfinite"]
    assert told[1]["outcomes"][0]["replayed"] == bool(replay)
    if replay:
        assert told[1]["outcomes"][0]["reproduced"]
        assert told[1]["outcomes"][0]["birth"]["site"] == ":input"
    run = tt.open(tmp_path / "flights" / "step-00000005")
    assert len(run.ranks) == 2
