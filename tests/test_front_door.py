"""The front door, held: what is listed is there, and importing it does nothing."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import torchtap

SOURCE = Path(torchtap.__file__)


def test_every_listed_name_can_be_had() -> None:
    for name in torchtap.__all__:
        assert getattr(torchtap, name) is not None


def test_what_can_be_had_is_what_type_checkers_see() -> None:
    tree = ast.parse(SOURCE.read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        (alias.asname, node.module)
        for node in guarded.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    modules = {(name, "torchtap") for name in torchtap._MODULES}
    assert seen == {*torchtap._HOME.items(), *modules}
    assert set(torchtap.__all__) <= {*torchtap._HOME, *torchtap._MODULES, "__version__"}


def test_the_door_is_narrow() -> None:
    assert len(set(torchtap.__all__) - {*torchtap._MODULES, "__version__"}) <= 42


RESULTS = {
    *("Birth", "Bisection", "Comparison", "Doctor", "Edit", "ExtraOutputs", "Features"),
    *("Finding", "Findings", "FlightRecorder", "Invariants", "Missing", "Rule", "Run", "Seen"),
    *("Selector", "Site", "Tap", "Verification", "Watch", "make_plan"),
}


def test_every_other_name_is_listed_in_a_module_of_its_own_or_is_the_type_of_a_result() -> None:
    elsewhere = {name for module in torchtap._MODULES for name in getattr(torchtap, module).__all__}
    assert set(torchtap._HOME) - set(torchtap.__all__) <= elsewhere | RESULTS


@pytest.mark.parametrize("name", torchtap._MODULES)
def test_the_named_modules_have_what_they_list(name: str) -> None:
    module = getattr(torchtap, name)
    for each in module.__all__:
        assert getattr(module, each) is not None


def test_every_listed_name_stands_on_a_page() -> None:
    root = SOURCE.parents[2]
    pages = " ".join(path.read_text() for path in (root / "README.md", *(root / "docs").rglob("*.md")))
    words = set(re.findall(r"\w+", pages))
    listed = {*torchtap.__all__} - {"__version__"}
    for module in torchtap._MODULES:
        listed |= set(getattr(torchtap, module).__all__)
    assert listed - words == set()


def test_the_page_of_names_has_every_name() -> None:
    page = (SOURCE.parents[2] / "docs" / "names.md").read_text()
    assert [name for name in torchtap.__all__ if name != "__version__" and f"`tt.{name}`" not in page] == []
    for module in torchtap._MODULES:
        assert [name for name in getattr(torchtap, module).__all__ if f"`{name}`" not in page] == [], module


def test_no_public_name_is_also_a_submodule() -> None:
    submodules = {path.stem for path in SOURCE.parent.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert submodules & set(torchtap.__all__) == set(torchtap._MODULES)


def test_importing_is_quiet() -> None:
    program = """
import logging, sys
import torchtap
assert "torch" not in sys.modules, "import torchtap brought torch in"
import torch

def touchable():
    functional = torch.nn.functional
    return torch.nn.Module.__call__, torch.Tensor.backward, sys.excepthook, functional.scaled_dot_product_attention

before = touchable()
import torchtap.session.capture, torchtap.receive.eager, torchtap.reduce
assert before == touchable(), "importing patched something"
assert not logging.getLogger().handlers, "a handler on the root logger"
optional = "tensorboard wandb h5py captum pandas pyarrow matplotlib starlette onnx transformers".split()
assert not set(optional) & set(sys.modules), set(optional) & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
