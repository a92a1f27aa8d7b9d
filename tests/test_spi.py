"""The one door into the core: few names, each documented, and a falling number of imports that go past it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchtap import spi

SOURCE = Path(__file__).parents[1] / "src" / "torchtap"
CORE = frozenset({"plan", "hooks", "reduce", "receive", "session", "store"})
# Public modules of the core, which users import too.
PUBLIC = frozenset({"torchtap.schedule"})
# Names that an outer package still imports from inside the core. A ceiling may only fall; at zero its line stays.
CEILINGS = {
    "assistant": 0,
    "cli": 12,
    "comparison": 40,
    "datasets": 0,
    "diagnosis": 36,
    "editing": 9,
    "forms": 28,
    "golden": 0,
    "integrations": 7,
    "monitors": 17,
    "ranks": 26,
    "serving": 0,
    "sinks": 2,
    "viewer": 5,
}


def core_imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield ``(module, name)`` for each name imported from inside the core, also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and _is_core(node.module):
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "torchtap":
            yield from (("torchtap", alias.name) for alias in node.names if alias.name in CORE)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if _is_core(alias.name))


def _is_core(module: str) -> bool:
    package, *inner = module.split(".")
    return package == "torchtap" and bool(inner) and inner[0] in CORE and module not in PUBLIC


def imports_of_package(package: str) -> set[tuple[str, str]]:
    trees = (ast.parse(path.read_text()) for path in (SOURCE / package).rglob("*.py"))
    return {found for tree in trees for found in core_imports(tree)}


@pytest.mark.parametrize("package", sorted(CEILINGS))
def test_an_outer_package_imports_no_more_names_from_inside_the_core_than_before(package: str) -> None:
    found = imports_of_package(package)
    assert len(found) <= CEILINGS[package], (
        f"{package} imports {len(found)} names from inside the core, {CEILINGS[package]} before; use torchtap.spi or "
        f"the public names of torchtap: {sorted(found)}"
    )


def test_every_outer_package_has_a_ceiling() -> None:
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert packages - CORE - {"schedule"} == set(CEILINGS)


def test_imports_inside_functions_and_of_whole_modules_are_counted() -> None:
    code = (
        "import torchtap.plan.names\nfrom torchtap import receive, spi, tap\nfrom torchtap.schedule import Every\n"
        "def f():\n    from torchtap.hooks.leaves import leaves\n"
    )
    assert set(core_imports(ast.parse(code))) == {
        ("torchtap.plan.names", ""),
        ("torchtap", "receive"),
        ("torchtap.hooks.leaves", "leaves"),
    }


def test_it_has_at_most_thirty_one_names_each_with_a_docstring() -> None:
    assert len(spi.__all__) <= 31
    undocumented = [name for name in spi.__all__ if not (getattr(spi, name).__doc__ or "").strip()]
    assert not undocumented


def test_its_docstring_lists_every_name() -> None:
    assert spi.__doc__ is not None
    assert [name for name in spi.__all__ if f"`{name}`" not in spi.__doc__] == []


def test_what_type_checkers_see_is_what_is_imported() -> None:
    tree = ast.parse((SOURCE / "spi.py").read_text())
    seen = {
        alias.asname: node.module
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == spi._HOME


def test_importing_it_loads_neither_torch_nor_any_part_of_the_core() -> None:
    code = (
        "import sys, torchtap.spi\n"
        "loaded = [m for m in sys.modules if m == 'torch' or m.startswith('torchtap.')]\n"
        "sys.exit(loaded != ['torchtap.spi'])"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Walker'"):
        _ = spi.Walker  # type: ignore[attr-defined]
