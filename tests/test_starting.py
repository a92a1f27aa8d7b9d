"""What a session does without is not loaded before somebody asks for it: starting is felt."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torchtap

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(torchtap.__file__).parents[1])}

# What a watch with statistics of outputs has no use for, in one process, without a run folder, with blocks as steps.
NOT_NEEDED = {
    "other forms of models": "forms.compiled forms.graph forms.script forms.instrument forms.match",
    "what emits into graphs": "forms.op.op forms.op.carrier forms.op.branches forms.op.fused forms.op.forms",
    "other ways to put taps on": "hooks.wrap hooks.visit",
    "attention, values from inside": "receive.attention receive.active receive.own_inputs",
    "gradients, values by name": "receive.asking receive.by_name",
    "copies of the model, its mode": "hooks.cleaning hooks.modes",
    "structures, stand-ins": "hooks.structure hooks.stand_ins",
    "parameters": "receive.state receive.held",
    "optimizers": "receive.backward",
    "several processes": "receive.mesh receive.placing placement _torch_distributed",
    "several models": "session.staged",
    "whole tensors": "reduce.full ",
    "other reductions": "reduce.metric reduce.quantiles reduce.histogram reduce.sample reduce.registry",
    "other schedules, budgets, plans as text": "schedule.rules plan.budget session.spending plan.plan_text",
    "run folders": "store.files store.read store.write.writer store.format.payload session.manifest sinks",
    "what is missing": "session.coverage",
    "pictures and other rooms": "display registry viewer comparison diagnosis editing monitors integrations",
}

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


def test_a_plain_watch_loads_nothing_that_it_has_no_use_for() -> None:
    loaded = ran(PLAIN_WATCH).split()
    assert "session.watching" in loaded
    for what, modules in NOT_NEEDED.items():
        for module in modules.split():
            found = [name for name in loaded if name == module or name.startswith(f"{module}.")]
            assert not found, f"{what}: {found}"


def test_what_is_named_as_not_needed_exists() -> None:
    source = Path(torchtap.__file__).parent
    for module in " ".join(NOT_NEEDED.values()).split():
        path = source.joinpath(*module.split("."))
        assert path.is_dir() or path.with_suffix(".py").is_file(), module


def test_a_session_from_before_the_first_compilation_goes_on_getting_its_values() -> None:
    ran(COMPILED_LATER)
