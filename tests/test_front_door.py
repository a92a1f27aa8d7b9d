"""The front door, held: what is listed is there, and importing it does nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import torchtap

SOURCE = Path(torchtap.__file__)


def test_every_listed_name_can_be_had() -> None:
    for name in torchtap.__all__:
        assert getattr(torchtap, name) is not None


def test_the_listed_names_are_those_that_type_checkers_see() -> None:
    tree = ast.parse(SOURCE.read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        (alias.asname, node.module)
        for node in guarded.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == set(torchtap._HOME.items())
    assert set(torchtap.__all__) == {*torchtap._HOME, "__version__"}


def test_no_public_name_is_also_a_submodule() -> None:
    submodules = {path.stem for path in SOURCE.parent.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert not submodules & set(torchtap.__all__)


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
import torchtap.session, torchtap.taps.eager.eager, torchtap.reduce
assert before == touchable(), "importing patched something"
assert not logging.getLogger().handlers, "a handler on the root logger"
optional = "tensorboard wandb h5py captum pandas pyarrow matplotlib starlette onnx transformers".split()
assert not set(optional) & set(sys.modules), set(optional) & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
