"""What a session does without is not loaded before somebody asks for it: starting is felt."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torchtap

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(torchtap.__file__).parents[1])}

# A watch with statistics of outputs, in one process, without a run folder, uses none of these packages.
NOT_NEEDED = [
    "assistant",
    "cli",
    "comparison",
    "diagnosis",
    "editing",
    "integrations",
    "monitors",
    "ranks",
    "sinks",
    "viewer",
]
MOST_MODULES = 70

PLAIN_WATCH = """
import sys, torch, torchtap
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
with torchtap.watch(model, None, "*:output") as watch, watch.step():
    model(torch.zeros(1, 2)).sum().backward()
assert watch.latest("0:output", "count") == 2
print(*(name.removeprefix("torchtap.") for name in sys.modules if name.startswith("torchtap.")))
"""

COMPILED_LATER = """
import sys, torch, torchtap
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
batch = torch.ones(3, 4)
kept = torchtap.MemorySink()
kinds = ["*:output", "*:input", "*:grad_output"]
with torchtap.watch(model, None, kinds, sinks=[kept]) as watch:
    with watch.step():
        model(batch).sum().backward()
    assert "torchtap.forms.op.op" not in sys.modules
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with watch.step():
        compiled(batch).sum().backward()
    assert "torchtap.forms.op.op" in sys.modules
before, after = (record.scalars[0] for record in kept.records)
assert set(before.sites) == set(after.sites), set(before.sites) ^ set(after.sites)
for site, row in zip(before.sites, before.values):
    assert (row == after.values[after.sites.index(site)]).all(), site
"""


def ran(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_plain_watch_loads_few_modules_and_no_outer_package() -> None:
    loaded = ran(PLAIN_WATCH).split()
    assert not [name for name in loaded if name.split(".")[0] in NOT_NEEDED]
    assert "forms.op.op" not in loaded  # what emits into graphs
    assert len(loaded) <= MOST_MODULES, sorted(loaded)


def test_a_session_from_before_the_first_compilation_goes_on_getting_its_values() -> None:
    ran(COMPILED_LATER)
