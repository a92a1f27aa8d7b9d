"""The documentation, held: each Python block runs, each link leads somewhere, each command exists."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("README*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
# Pages whose Python blocks, one after the other, form a program.
PROGRAMS = [
    ROOT / "README.md",
    ROOT / "docs" / "compare.md",
    ROOT / "docs" / "diagnosis.md",
    ROOT / "docs" / "editing.md",
    ROOT / "docs" / "flight.md",
    ROOT / "docs" / "forms.md",
    ROOT / "docs" / "module-monitor.md",
    ROOT / "docs" / "monitor.md",
    ROOT / "docs" / "reductions.md",
    ROOT / "docs" / "viewer.md",
]


# Short pages, each a program: those of one group run in one process, one after the other.
GROUPS = {
    "guide": [ROOT / "docs" / f"{name}.md" for name in ("index", "reading", "sinks", "sites", "watching")],
    "howto": sorted((ROOT / "docs" / "howto").glob("*.md")),
    "from": sorted((ROOT / "docs" / "from").glob("*.md")),
}
CHINESE = sorted((ROOT / "docs" / "zh").rglob("*.md"))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PROGRAMS, ids=lambda page: page.name)
def test_the_python_blocks_of_a_page_run(page: Path, tmp_path: Path) -> None:
    program = "\n".join(blocks(page, "python"))
    assert program
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("group", GROUPS)
def test_the_python_blocks_of_short_pages_run(group: str, tmp_path: Path) -> None:
    programs = [(page.stem, "\n".join(blocks(page, "python"))) for page in GROUPS[group]]
    runner = (
        "import json, os, sys\n"
        "for name, program in json.load(open('programs.json')):\n"
        "    os.makedirs(name); os.chdir(name)\n"
        "    print(name, file=sys.stderr)\n"
        "    exec(compile(program, name, 'exec'), {'__name__': name})\n"
        "    os.chdir('..')\n"
    )
    (tmp_path / "programs.json").write_text(json.dumps(programs))
    done = subprocess.run([sys.executable, "-c", runner], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def shape_of(page: Path) -> tuple[list[str], list[int]]:
    """A page's code blocks, and the levels of its headings."""
    text = page.read_text()
    fences = re.findall(r"^```.*?^```$", text, re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return fences, [len(marks) for marks in re.findall(r"^(#+) ", prose, re.MULTILINE)]


@pytest.mark.parametrize("page", CHINESE, ids=lambda page: page.stem)
def test_a_chinese_page_has_the_code_and_the_headings_of_the_english_one(page: Path) -> None:
    english = ROOT / "docs" / page.relative_to(ROOT / "docs" / "zh")
    assert shape_of(page) == shape_of(english)


def test_the_chinese_readme_has_the_code_and_the_headings_of_the_english_one() -> None:
    assert shape_of(ROOT / "README.zh.md") == shape_of(ROOT / "README.md")


def test_the_built_page_is_of_its_sources() -> None:
    check = subprocess.run([sys.executable, ROOT / "packaging" / "fingerprint.py", "--check"])
    assert check.returncode == 0, "the viewer's page was not built after its sources changed: make frontend"


def test_the_page_of_commands_is_what_the_commands_say_of_themselves() -> None:
    maker = runpy.run_path(str(ROOT / "packaging" / "make_reference.py"))
    page = (ROOT / "docs" / "reference" / "commands.md").read_text()
    assert page == maker["commands_page"](), "python packaging/make_reference.py"


def test_the_pages_that_a_beginner_needs_are_there_in_chinese_too() -> None:
    names = ("index", "install", "which", "watching", "reading", "sites", "viewer", "runs")
    wanted = [*(ROOT / "docs" / f"{name}.md" for name in names), *GROUPS["howto"], *GROUPS["from"]]
    assert {page.relative_to(ROOT / "docs") for page in wanted} == {
        page.relative_to(ROOT / "docs" / "zh") for page in CHINESE
    }


@pytest.mark.parametrize(("site", "folder"), [("mkdocs.yml", "docs"), ("mkdocs.zh.yml", "docs/zh")])
def test_every_page_is_in_the_navigation_of_the_site(site: str, folder: str) -> None:
    listed = set(re.findall(r": (\S+\.md)$", (ROOT / site).read_text(), re.MULTILINE))
    pages = {str(page.relative_to(ROOT / folder)) for page in (ROOT / folder).rglob("*.md")}
    assert {page for page in pages if not page.startswith("zh/")} == listed


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
