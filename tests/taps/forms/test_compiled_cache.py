"""A compilation with taps is kept by Inductor, and taken from its cache in the next process, like any other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

PROGRAM = """
import json, sys
import torch, torchtap as tt
from torch import nn
from torch._dynamo.utils import counters

torch.manual_seed(0)
plain = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.GELU())
x = torch.randn(4, 6)
# What else a process does first does not change the names in the graph.
others = [nn.Sequential(nn.ReLU()) for _ in range(int(sys.argv[1]))]
for other in others:
    with tt.capture(torch.jit.script(other)) as ignored:
        other(x)
model = torch.compile(plain, fullgraph=True)
with tt.capture(model, "*:output", "*:grad_output") as seen:
    model(x).square().sum().backward()
with tt.capture(plain, "*:output", "*:grad_output") as eager:
    plain(x).square().sum().backward()
sites = dict(eager.items())
assert dict(seen.items()).keys() == sites.keys()
away = max((seen[site] - sites[site]).abs().max().item() for site in sites)
print(json.dumps([dict(counters["inductor"]), dict(counters["aot_autograd"]), len(sites), away]))
"""


def run(folder: Path, others: int) -> Any:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(others)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_second_process_takes_forward_and_backward_from_the_cache(tmp_path: Path) -> None:
    inductor, autograd, sites, away = run(tmp_path, others=0)
    assert (inductor["fxgraph_cache_miss"], autograd["autograd_cache_saved"], sites) == (2, 1, 8)
    assert away < 1e-5
    inductor, autograd, sites, away = run(tmp_path, others=2)
    assert (inductor["fxgraph_cache_hit"], autograd["autograd_cache_hit"], sites) == (2, 1, 8)
    assert "fxgraph_cache_miss" not in inductor
    assert away < 1e-5
