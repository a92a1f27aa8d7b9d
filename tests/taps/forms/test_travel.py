"""Files and other processes: artefacts report where they are loaded, and run where torchtap is not.

Each process is started once and told everything it is to try; starting torch takes seconds.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.taps.forms.structures import UsesTensor
from torch import nn
from torch.package import PackageExporter

import torchtap as tt

ROOT = Path(__file__).parents[3]
SITES = ("*:output", "*:input")

WITH_TORCHTAP = """
import json, sys, warnings
warnings.simplefilter("ignore")
import torch
import torchtap as tt
folder = sys.argv[1]
x = torch.load(f"{folder}/x.pt")
found = {}
def look(name, model, like=None):
    with tt.capture(model, "*:output", "*:input", like=like) as seen:
        output = model(x)
    found[name] = {site: value.tolist() for site, value in seen.items()}
    found[name]["returned"] = output.tolist()
    with tt.capture(model) as seen:      # without selectors: a session decides what it wants
        model(x)
look("plain script", tt.load(f"{folder}/plain.pt"))
look("plain program", tt.load(f"{folder}/plain.pt2"), like=f"{folder}/plain.sites.json")
look("tapped script", tt.load(f"{folder}/tapped.pt"))
look("tapped program", tt.load(f"{folder}/tapped.pt2"))
look("frozen", tt.load(f"{folder}/frozen.pt"))
look("package", torch.package.PackageImporter(f"{folder}/package.pt").load_pickle("model", "model.pkl"))
look("pickle", __import__("pickle").load(open(f"{folder}/model.pkl", "rb")))
assert "tests.taps.forms.making" not in sys.modules
print(json.dumps(found))
"""

WITHOUT_TORCHTAP = """
import json, pickle, sys, warnings
warnings.simplefilter("ignore")
sys.modules["torchtap"] = None           # as if it were not installed
import torch
folder = sys.argv[1]
x = torch.load(f"{folder}/x.pt")
found = {}
loaded = pickle.load(open(f"{folder}/model.pkl", "rb"))
found["pickle"] = loaded(x).tolist()
found["pickled again"] = pickle.loads(pickle.dumps(loaded))(x).tolist()
found["package"] = torch.package.PackageImporter(f"{folder}/package.pt").load_pickle("model", "model.pkl")(x).tolist()
found["saved"] = torch.load(f"{folder}/saved.pt", weights_only=False)(x).tolist()
for name, load in (
    ("script", lambda: torch.jit.load(f"{folder}/tapped.pt")),
    ("program", lambda: torch.export.load(f"{folder}/tapped.pt2")),
):
    try:
        load()
        found[name] = "loaded"
    except Exception as error:
        found[name] = str(error)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in every kind of file."""
    place = tmp_path_factory.mktemp("files")
    torch.manual_seed(0)
    model = UsesTensor().eval()
    x = torch.randn(3, 4)
    torch.save(x, place / "x.pt")
    tapped = tt.instrument(model, *SITES)
    torch.jit.save(torch.jit.script(model), place / "plain.pt")
    torch.jit.save(torch.jit.script(tapped), place / "tapped.pt")
    torch.jit.save(torch.jit.freeze(torch.jit.trace(tapped, x)), place / "frozen.pt")
    program = torch.export.export(model, (x,))
    torch.export.save(program, place / "plain.pt2")
    tt.match(program, model, (x,)).save(place / "plain.sites.json")
    torch.export.save(torch.export.export(tapped, (x,)), place / "tapped.pt2")
    torch.save(tapped, place / "saved.pt")
    (place / "model.pkl").write_bytes(pickle.dumps(tapped))
    with PackageExporter(place / "package.pt") as exporter:
        exporter.intern("tests.**")
        exporter.extern(["torch.**", "torch", "typing"])
        exporter.save_pickle("model", "model.pkl", tapped)
    return place


def eager(folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    model = UsesTensor().eval()
    x = torch.load(folder / "x.pt")
    with tt.capture(model, *SITES) as seen:
        output = model(x)
    return {**{site: value.tolist() for site, value in seen.items()}, "returned": output.tolist()}


def told(program: str, *arguments: str) -> dict[str, Any]:
    paths = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, env=paths, timeout=300
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    answer["said"] = done.stderr
    return answer


def test_every_file_gives_the_eager_sites_and_values_in_a_fresh_process(folder: Path) -> None:
    expected = eager(folder)
    found = told(WITH_TORCHTAP, str(folder))
    found.pop("said")
    for name, sites in found.items():
        if name == "frozen":  # freezing folds the normalisation into the layer before it
            for folded in ("made.linear:output", "made.norm:input"):
                sites[folded] = expected[folded]
        assert sites.keys() == expected.keys(), name
        for site, value in expected.items():
            torch.testing.assert_close(torch.tensor(sites[site]), torch.tensor(value), msg=f"{name} {site}")
            assert sites[site] == value or name == "frozen", (name, site)


def test_without_torchtap_pickles_and_packages_run_and_graphs_name_what_is_missing(folder: Path) -> None:
    expected = eager(folder)["returned"]
    found = told(WITHOUT_TORCHTAP, str(folder))
    for name in ("pickle", "pickled again", "package", "saved"):
        assert found[name] == expected, name
    assert "torchtap::emit" in found["script"]
    assert found["program"] != "loaded"
    assert "torchtap.emit" in found["said"]  # torch.export says it in its log


def test_a_file_with_taps_runs_where_torchtap_is_not_installed(tmp_path: Path) -> None:
    """The block of docs/forms.md is all that torch needs."""
    page = (Path(__file__).parents[3] / "docs" / "forms.md").read_text()
    block = page.split("```python no-run\n")[1].split("```")[0].rpartition("model = ")[0]
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), torch.randn(2, 4)
    tapped = tt.instrument(model, "*:input", "*:output", "*:grad_output")
    torch.jit.save(torch.jit.script(tapped), tmp_path / "script.pt")
    torch.jit.save(torch.jit.trace(tapped, x), tmp_path / "trace.pt")
    torch.export.save(torch.export.export(tapped, (x,)), tmp_path / "export.pt2")
    torch.save((x, model(x)), tmp_path / "values")
    program = f"""{block}
import sys
x, expected = torch.load("values")
for model in (torch.jit.load("script.pt"), torch.jit.load("trace.pt"), torch.export.load("export.pt2").module()):
    assert torch.equal(model(x), expected)
assert not any(name.partition(".")[0] == "torchtap" for name in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
