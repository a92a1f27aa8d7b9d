"""The architecture, held: each file imports only from its own layer and those above it."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "torchtap"

# From the ground up. A file may import from its own layer and from those before it.
LAYERS = [
    ["sanitize", "lazy", "spi"],
    ["errors", "torchscript", "terminal", "progress"],
    ["_torch"],
    ["placement"],
    ["_torch_distributed", "rank_identity"],
    ["plan.names"],
    ["registry"],
    ["display"],
    ["plan.sites"],
    ["schedule"],
    ["plan.next_live"],
    ["reduce"],
    ["plan.budget"],
    ["plan.tap"],
    ["plan"],
    ["store.record"],
    # how a value leaves a running model
    ["hooks"],
    ["receive"],
    ["forms.stand_ins", "forms.copy_model"],
    ["forms.op", "op"],
    ["forms.match"],
    ["forms.graph"],
    ["forms.script"],
    ["forms.compiled"],
    ["forms.attach"],
    ["forms.instrument", "forms"],
    ["session.coverage", "untouched"],
    # the run folder
    ["store.files"],
    ["store.format"],
    ["store.shared_folder"],
    ["store.write"],
    ["store.read", "ranks"],
    ["store"],
    ["session.spending", "session.consumers"],
    ["native_check"],
    ["sinks"],
    ["session"],
    ["verification"],
    ["editing"],
    ["datasets"],
    ["serving"],
    # two recordings, what they share, how far they are apart, and whose fault it is
    [
        "comparison._distance",
        "comparison.values",
        "comparison.rules",
        "comparison.align",
        "comparison.measures",
    ],
    ["comparison.floor", "comparison.explain"],
    ["comparison.result", "comparison.words", "comparison.table", "comparison.page"],
    ["comparison.judge"],
    ["comparison.roles", "comparison.passes", "comparison.floors", "comparison.match", "comparison.causes"],
    ["comparison.live"],
    [
        "comparison.recordings",
        "comparison.rows",
        "comparison.workers",
        "comparison.training",
        "comparison.ranks",
    ],
    ["comparison", "serving.token_compare"],
    ["golden"],
    ["diagnosis"],
    ["monitors", "serving.layer_files"],
    ["integrations"],
    ["viewer"],
    ["assistant"],
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


# Imports that look down, and why they have to.
DOWNWARD = {
    (
        "forms.op.carrier",
        "forms.script.source",
    ): "torch.jit.script asks a model with carriers for its source",
}


def for_types_only(tree: ast.AST) -> set[int]:
    """What stands under TYPE_CHECKING: nothing ever runs it."""
    return {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }


def _is_module(name: str) -> bool:
    """Return False for a public name, which any package may import from the front door."""
    return (SOURCE / name).is_dir() or (SOURCE / f"{name}.py").exists()


def imports_of(tree: ast.AST) -> set[str]:
    """The modules of torchtap that a file imports, also inside functions."""
    passed_over = for_types_only(tree)
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in passed_over:
            continue
        if isinstance(node, ast.ImportFrom) and node.module == "torchtap":
            found.update(alias.name for alias in node.names if _is_module(alias.name))
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("torchtap."):
            found.add(node.module.removeprefix("torchtap."))
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("torchtap.")]
            found.update(name.removeprefix("torchtap.") for name in names)
    return found


@pytest.mark.parametrize("path", files(), ids=module_name)
def test_a_file_imports_only_from_its_own_layer_and_those_above_also_in_its_functions(path: Path) -> None:
    own = module_name(path)
    for name in imports_of(ast.parse(path.read_text())):
        if (own, name) not in DOWNWARD:
            assert layer_of(name) <= layer_of(own), f"{own} imports {name}, which is below it"


def test_an_import_in_a_function_is_noticed() -> None:
    hidden = "def f():\n    from torchtap.viewer.figures import plot\n    from torchtap import cli\n"
    assert imports_of(ast.parse(hidden)) == {"viewer.figures", "cli"}


@pytest.mark.parametrize("path", files(), ids=module_name)
def test_every_file_says_its_job(path: Path) -> None:
    text = path.read_text().strip()
    if text:
        assert ast.get_docstring(ast.parse(text)), f"{module_name(path)} has no docstring"


def identifiers(path: Path) -> set[str]:
    """Every name that a file uses, also those in short strings, such as an attribute's."""
    found = set(path.relative_to(SOURCE).with_suffix("").parts)
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type == tokenize.NAME or (token.type == tokenize.STRING and len(token.string) < 60):
                found.update(re.findall(r"\w+", token.string))
    return found


def test_a_docstring_names_only_what_there_is() -> None:
    """A file that was moved or renamed is not spoken of under its old name."""
    known = set().union(*map(identifiers, files()))
    for native in (*SOURCE.rglob("*.c"), *SOURCE.rglob("*.h")):
        known.update(re.findall(r"\w+", native.read_text()))
    stale = []
    for path in files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                named = re.findall(r"(?<!`)`([a-z_]\w*)`(?!`)", ast.get_docstring(node) or "")
                stale += [f"{path}: {name}" for name in named if name not in known]
    assert not stale


# -- one place for each job -----------------------------------------------------------------------------------

CUTS = {"partition", "rpartition", "split", "rsplit", "find", "rfind", "index", "rindex"}
# Text that is not a site's name is cut elsewhere too.
OTHER_TEXT = {
    "cli/import_path.py": "file.py:function, package.module:function",
    "comparison/rules.py": "side.action of a rule",
    "integrations/pytest_golden.py": "mode:name of an option",
    "monitors/torch_module_monitor.py": "a module's dotted name",
    "reduce/elements.py": "a slice",
    "registry.py": "module:attribute of an entry point",
    "sinks/selection.py": "sink:place on a command line",
    "forms/stand_ins.py": "a class's dotted name",
    "diagnosis/rules/every_step.py": "optimizer.group of a column of the pulse",
    "forms/instrument/program_gate.py": "an operator's dotted name",
    "viewer/server.py": "host:port",
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
    assert cutting - set(OTHER_TEXT) == {"plan/names.py"}


def test_the_names_of_wrappers_are_listed_in_one_file() -> None:
    naming = {
        str(path.relative_to(SOURCE))
        for path in files()
        if any(
            isinstance(node, ast.Constant) and node.value in ("_fsdp_wrapped_module", "_forward_module")
            for node in ast.walk(ast.parse(path.read_text()))
        )
    }
    assert naming == {"plan/names.py"}


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
    assert registering == {"hooks/hooks.py"}


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
    code = "import sys, torchtap.plan.names; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
