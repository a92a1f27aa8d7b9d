"""The documentation, held: each Python block runs, each link leads somewhere, each command exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Pages whose Python blocks, one after the other, form a program.
PROGRAMS = [
    ROOT / "README.md",
    ROOT / "docs" / "compare.md",
    ROOT / "docs" / "editing.md",
    ROOT / "docs" / "forms.md",
    ROOT / "docs" / "module-monitor.md",
    ROOT / "docs" / "monitor.md",
    ROOT / "docs" / "reductions.md",
    ROOT / "docs" / "viewer.md",
]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PROGRAMS, ids=lambda page: page.name)
def test_the_python_blocks_of_a_page_run(page: Path, tmp_path: Path) -> None:
    program = "\n".join(blocks(page, "python"))
    assert program
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_to_a_file_leads_to_one(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_command_in_the_readme_exists_and_every_command_has_help() -> None:
    from click.testing import CliRunner

    from torchtap.cli import COMMANDS, torchtap

    used = {
        word for block in blocks(ROOT / "README.md", "sh") for word in re.findall(r"torchtap (\w+)", block)
    }
    assert used <= set(COMMANDS)
    for name in COMMANDS:
        result = CliRunner().invoke(torchtap, [name, "--help"])
        assert result.exit_code == 0, (name, result.output)
        assert len(result.output.splitlines()) > 4
