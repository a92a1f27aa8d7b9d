"""Write the page of commands from the code: every command with its help.

python packaging/make_reference.py
"""

from __future__ import annotations

from pathlib import Path

import click

from torchtap.cli import COMMANDS
from torchtap.cli import torchtap as group

PAGES = Path(__file__).parents[1] / "docs" / "reference"


def commands_page() -> str:
    """Every command with its help, as the terminal shows it."""
    lines = ["# Commands", ""]
    # The parent passes its help options (-h, --help) on, as it does on the command line.
    parent = click.Context(
        group, info_name="torchtap", max_content_width=100, help_option_names=["-h", "--help"]
    )
    for name in sorted(COMMANDS):
        command = group.get_command(parent, name)
        assert command is not None
        vars(command)["_help_option"] = None  # click caches it, and a command that was called alone has no -h
        context = click.Context(command, parent, info_name=name)
        lines += [f"## torchtap {name}", "", "```text", command.get_help(context), "```", ""]
        for inner, each in command.commands.items() if isinstance(command, click.Group) else ():
            own = click.Context(each, context, info_name=inner)
            lines += [f"### torchtap {name} {inner}", "", "```text", each.get_help(own), "```", ""]
    return "\n".join(lines)


def main() -> None:
    """Write the page."""
    PAGES.mkdir(exist_ok=True)
    (PAGES / "commands.md").write_text(commands_page())


if __name__ == "__main__":
    main()
