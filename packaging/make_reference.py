"""Write the reference pages from the code: every public name with its docstring's place, every command with its help.

    python packaging/make_reference.py
"""

from __future__ import annotations

import inspect
from pathlib import Path

import click

import torchtap
from torchtap.cli import COMMANDS
from torchtap.cli import torchtap as group

PAGES = Path(__file__).parents[1] / "docs" / "reference"
MODULES = ("errors", "schedule", "sinks", "monitors", "testing")


def names_page() -> str:
    """Every public name, by the module that has it."""
    lines = ["# Names", "", "Everything that `import torchtap as tt` gives, in alphabetical order.", ""]
    for name in sorted(torchtap.__all__, key=str.lower):
        value = getattr(torchtap, name)
        if name.startswith("_"):
            continue
        if inspect.ismodule(value):
            lines += [f"### tt.{name}", "", (inspect.getdoc(value) or "").partition("\n")[0], ""]
            continue
        home = getattr(value, "__module__", None)
        if home is None or not home.startswith("torchtap"):
            lines += [f"### tt.{name}", "", f"`{value!r}`", ""]
            continue
        lines += [f"::: {home}.{getattr(value, '__qualname__', name)}", ""]
    return "\n".join(lines)


def commands_page() -> str:
    """Every command with its help, as the terminal shows it."""
    lines = ["# Commands", ""]
    for name in sorted(COMMANDS):
        command = group.get_command(click.Context(group), name)
        assert command is not None
        context = click.Context(command, info_name=f"torchtap {name}", max_content_width=100)
        lines += [f"## torchtap {name}", "", "```text", command.get_help(context), "```", ""]
    return "\n".join(lines)


def main() -> None:
    """Write both pages."""
    PAGES.mkdir(exist_ok=True)
    (PAGES / "names.md").write_text(names_page())
    (PAGES / "commands.md").write_text(commands_page())


if __name__ == "__main__":
    main()
