"""The architecture, held: each file imports only from its own layer and those above it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "torchtap"

# From the ground up. A file may import from its own layer and from those before it.
LAYERS = [
    ["foreign_text"],
    ["errors", "_torch"],
    ["names"],
    ["registry"],
    ["sites"],
    ["schedule"],
    ["reduce"],
    ["budget"],
    ["plan"],
    ["store.record"],
    ["taps", "op"],
    ["coverage", "model_tree", "clock"],
    ["store"],
    ["spending"],
    ["sinks"],
    ["matching", "seen", "summary", "watching", "session", "verification"],
    ["editing"],
    ["comparison"],
    ["diagnosis"],
    ["monitors"],
    ["integrations"],
    ["viewer"],
    ["testing"],
    ["cli", "__main__"],
]


def layer_of(module: str) -> int:
    """The layer of a module by its longest known prefix."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        prefix = ".".join(parts[:length])
        for number, layer in enumerate(LAYERS):
            if prefix in layer:
                return number
    raise AssertionError(f"{module} is in no layer; add it to LAYERS")


def files() -> list[Path]:
    return sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def lazily_allowed(tree: ast.AST) -> set[int]:
    """Imports inside functions and under TYPE_CHECKING may look down: nothing runs them at import."""
    allowed: set[int] = set()
    for node in ast.walk(tree):
        guarded = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if guarded or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            allowed.update(id(inner) for inner in ast.walk(node))
    return allowed


@pytest.mark.parametrize("path", files(), ids=module_name)
def test_a_file_imports_only_from_its_own_layer_and_those_above(path: Path) -> None:
    own = layer_of(module_name(path))
    tree = ast.parse(path.read_text())
    allowed = lazily_allowed(tree)
    for node in ast.walk(tree):
        if id(node) in allowed:
            continue
        names = []
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("torchtap"):
            names = [node.module]
            if node.module == "torchtap":
                names = [f"torchtap.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("torchtap")]
        for name in names:
            below = name.removeprefix("torchtap").removeprefix(".")
            assert layer_of(below) <= own, f"{module_name(path)} imports {name}, which is below it"


@pytest.mark.parametrize("path", files(), ids=module_name)
def test_every_file_says_its_job(path: Path) -> None:
    text = path.read_text().strip()
    if text:
        assert ast.get_docstring(ast.parse(text)), f"{module_name(path)} has no docstring"


# -- one place for each job -----------------------------------------------------------------------------------

CUTS = {"partition", "rpartition", "split", "rsplit", "find", "rfind", "index", "rindex"}
# Text that is not a site's name is cut elsewhere too.
OTHER_TEXT = {
    "cli/rcc.py": "file.py:function",
    "cli/sites.py": "file.py:model",
    "comparison/align/rules.py": "the little language of rules",
    "diagnosis/checks.py": "a class's dotted name",
    "monitors/torch_module_monitor/__init__.py": "a module's dotted name",
    "reduce/full.py": "a slice",
    "registry.py": "module:attribute of an entry point",
    "sinks/registry.py": "sink:place on a command line",
    "store/export/front.py": "module:attribute",
    "taps/graph/skeleton.py": "a class's dotted name",
    "taps/travel/program_gate.py": "an operator's dotted name",
    "viewer/security.py": "host:port",
}


def cuts_of(tree: ast.AST) -> list[int]:
    """Lines where text is cut at a character that site names are made of."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in CUTS
        and node.args
        and isinstance(node.args[0], ast.Constant)
        and node.args[0].value in (":", "#", ".")
    ]


def test_site_names_are_cut_in_one_file() -> None:
    cutting = {str(path.relative_to(SOURCE)) for path in files() if cuts_of(ast.parse(path.read_text()))}
    assert cutting - set(OTHER_TEXT) == {"names.py"}


def test_the_names_of_wrappers_are_listed_in_one_file() -> None:
    naming = {
        str(path.relative_to(SOURCE))
        for path in files()
        if any(
            isinstance(node, ast.Constant) and node.value in ("_fsdp_wrapped_module", "_forward_module")
            for node in ast.walk(ast.parse(path.read_text()))
        )
    }
    assert naming == {"names.py"}


REGISTERING = {
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
    "register_module_forward_hook",
    "register_module_forward_pre_hook",
}


def registers_hooks(tree: ast.AST) -> bool:
    """Whether forward hooks are put on modules here. A `HooksManager` has a method of the same name."""
    return any(
        isinstance(node, ast.Attribute)
        and node.attr in REGISTERING
        and not ast.unparse(node.value).endswith("hooks")
        for node in ast.walk(tree)
    )


def test_forward_hooks_are_registered_in_one_file() -> None:
    registering = {
        str(path.relative_to(SOURCE)) for path in files() if registers_hooks(ast.parse(path.read_text()))
    }
    assert registering == {"taps/walk/ways.py"}


def test_a_tensor_s_version_is_asked_in_one_file() -> None:
    asking = {
        str(path.relative_to(SOURCE))
        for path in files()
        if any(
            isinstance(node, ast.Attribute) and node.attr == "_version"
            for node in ast.walk(ast.parse(path.read_text()))
        )
    }
    assert asking == {"_torch.py"}


def test_reading_names_needs_no_torch() -> None:
    code = "import sys, torchtap.names; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
