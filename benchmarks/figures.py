"""``python -m benchmarks.figures [folder]``: the figures of ``docs/architecture.md``, counted over the source.

The folder is the root of a checkout, this one by default; so two commits are counted by one script. Nothing is timed.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

__all__ = ["figures"]

BRANCHES = (
    *(ast.If, ast.For, ast.While, ast.ExceptHandler, ast.IfExp, ast.comprehension, ast.Assert),
    ast.match_case,
)
HOOKS = {"register_forward_hook", "register_forward_pre_hook", "register_module_forward_hook"}

# The way from a hook to a record: what one step of a watch loads of these, so without arithmetic and without files.
CORE = re.compile(
    r"(session/)?(hooks/|receive/|plan/|clock|steps|tapping|watching|store/record|record\.py"
    r"|block|lull|newest|partial_record|told_sites)"  # parts of a watch and of its steps
)
WATCH = """
import sys, torch, torchtap
model = torch.nn.Linear(2, 2)
with torchtap.watch(model, None, [torchtap.tap("*:output", keep=torchtap.Stats())]) as watch, watch.step():
    model(torch.zeros(1, 2)).sum().backward()
for name, module in sys.modules.items():
    if name.startswith("torchtap."):
        print(module.__file__)
"""


def complexity(function: ast.AST) -> int:
    """McCabe's number: one, and one more for each way that the code can part."""
    found = 1
    for node in ast.walk(function):
        found += isinstance(node, BRANCHES)
        found += len(node.values) - 1 if isinstance(node, ast.BoolOp) else 0
    return found


def calls(tree: ast.AST, names: set[str]) -> bool:
    """Whether a method with one of these names is called on a module. A manager of hooks has one of them, too."""
    return any(
        isinstance(node, ast.Attribute)
        and node.attr in names
        and not ast.unparse(node.value).endswith("hooks")
        for node in ast.walk(tree)
    )


def core_path(root: Path) -> list[Path]:
    """The files that one step of a watch loads."""
    environment = {"PYTHONPATH": str(root / "src")}
    done = subprocess.run(
        [sys.executable, "-c", WATCH], capture_output=True, text=True, env=environment, check=True
    )
    loaded = [path for path in map(Path, done.stdout.split()) if path.suffix == ".py"]
    source = root / "src" / "torchtap"
    return [path for path in loaded if CORE.match(str(path.relative_to(source))) and lines_of([path]) > 1]


def lines_of(paths: list[Path]) -> int:
    """All lines of these files."""
    return sum(path.read_text().count("\n") for path in paths)


def figures(root: Path) -> dict[str, str]:
    """What is counted, and the count."""
    source = root / "src" / "torchtap"
    paths = sorted(source.rglob("*.py"))
    trees = {path: ast.parse(path.read_text()) for path in paths}
    lines = lines_of(paths)
    functions = [
        node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
    ]
    anys = sum(len(re.findall(r"\bAny\b", path.read_text())) for path in paths)
    core = core_path(root)
    monitors = [path for path in paths if "monitors" in path.parts]
    return {
        "lines, files": f"{lines / 1000:.1f} k, {len(paths)}",
        "from a hook to a record: files, lines": f"{len(core)}, {lines_of(core) / 1000:.1f} k",
        "`monitors/`, lines": f"{lines_of(monitors) / 1000:.1f} k",
        "functions with a complexity over 10": str(sum(complexity(each) > 10 for each in functions)),
        "`Any` per thousand lines": f"{1000 * anys / lines:.0f}",
        "files that register forward hooks": str(sum(calls(tree, HOOKS) for tree in trees.values())),
        "files that ask a tensor's version": str(
            sum(bool(re.search(r"\._version\b", path.read_text())) for path in paths)
        ),
        "files over 500 lines": str(sum(lines_of([path]) > 500 for path in paths)),
    }


def main() -> None:
    """Print a row for each figure."""
    for name, found in figures(Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()).items():
        print(f"| {name} | {found} |")


if __name__ == "__main__":
    main()
