"""The command line: parse, call the library, print.

A command is imported when it is called, so that listing and querying runs imports no torch. Every error is one line on
standard error that begins with ``torchtap:``; ``--debug`` shows its traceback.
"""

from __future__ import annotations

import difflib
import io
import sys
import traceback
from importlib import import_module

import click

from torchtap.errors import TorchtapError
from torchtap.progress import Bar, showing
from torchtap.sanitize import say

__all__ = ["SuggestingGroup", "main", "torchtap"]

# Name, and the one line of help: known without importing the command's module, `torchtap.cli.<name>`.
COMMANDS = {
    "bisect-commits": "Find the commit that changed a layer, by git bisect.",
    "compare": "Compare two recordings and name the first site that differs.",
    "demo": "Train a small GPT and look inside it.",
    "diagnose": "Report what looks wrong in a run, and what to do.",
    "export": "Write a run in another format: parquet, hdf5, pt, npz, csv, jsonl.",
    "golden": "Record a right run in the repository, and check later runs against it.",
    "harvest": "Store the activations of a model over data, for training on them.",
    "inject": "Print the PYTHONPATH with which any launcher's Python processes are recorded.",
    "learn": "Keep what held in good runs, for `diagnose --against`.",
    "mcp": "Serve runs to an assistant over the Model Context Protocol.",
    "rcc": "Refined coordinate check over model widths.",
    "replay": "Run the step that a flight recorder kept once more, and name the first bad value.",
    "report": "Write one self-contained page about a run.",
    "run": "Run an unchanged training script and record the inside of its model.",
    "runs": "List, tag, rename, prune, delete, copy and merge runs.",
    "selftest": "List the parts of this installation and prove that they work on this machine.",
    "serve": "Start a serving engine with taps, and record chosen requests.",
    "show": "Show a run: its sites, numbers, tensors and coverage.",
    "sites": "List the sites of a model.",
    "tail": "Follow a training in the terminal while it writes.",
    "view": "Look at runs in the browser.",
}


# Commands that may take longer than two seconds: they show a bar on a terminal, unless --quiet.
SHOW_PROGRESS = ("compare", "diagnose", "export", "learn", "rcc", "replay", "report", "runs", "selftest")


class SuggestingGroup(click.Group):
    """A group that suggests the nearest name for a misspelled command."""

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, known = args[0] if args else "", self.list_commands(context)
        if name and not name.startswith("-") and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            advice = (
                f"did you mean '{near[0]}'?"
                if near
                else f"`{context.command_path} --help` lists the commands"
            )
            raise click.UsageError(f"there is no command '{name}'; {advice}", context)
        return super().resolve_command(context, args)


class LazyGroup(SuggestingGroup):
    """A group that imports each command at its first use."""

    def list_commands(self, context: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command = import_module(f"torchtap.cli.{name.replace('-', '_')}").command
        assert isinstance(command, click.Command)
        if name in SHOW_PROGRESS:
            for each in command.commands.values() if isinstance(command, click.Group) else [command]:
                if not any(option.name == "quiet" for option in each.params):
                    option = click.Option(
                        ["--quiet"], is_flag=True, expose_value=False, help="Show no progress."
                    )
                    each.params.append(option)
        return command

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="torchtap", prog_name="torchtap")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def torchtap(debug: bool) -> None:
    """See every value inside a running PyTorch model."""


def main(arguments: list[str] | None = None) -> None:
    """The entry point. Exit codes: 0 done, 1 a negative answer, 2 an error."""
    words = sys.argv[1:] if arguments is None else arguments
    _spell_what_cannot_be_encoded()
    bar = Bar() if words and words[0] in SHOW_PROGRESS and "--quiet" not in words else None
    try:
        with showing(bar):
            code = torchtap.main(words, prog_name="torchtap", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except (click.Abort, KeyboardInterrupt):
        done = "" if bar is None else str(bar)
        _print_error(f"stopped while {done}" if done else "stopped")
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output is gone; an error message would raise again
        sys.exit(0)
    except Exception as error:
        if "--debug" in words:
            traceback.print_exc()
        _report(error, debug="--debug" in words)
        sys.exit(2)


def _spell_what_cannot_be_encoded() -> None:
    """Print ``\\xdf`` if the terminal's encoding has no ß, instead of failing. UTF-8 has everything."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower() not in ("utf-8", "utf8"):
            stream.reconfigure(errors="backslashreplace")


def _report(error: Exception, *, debug: bool) -> None:
    """Print an error: expected ones as their message, others with their type and how to see the traceback."""
    if isinstance(error, click.ClickException):
        if isinstance(error, click.UsageError) and error.ctx is not None:
            say(error.ctx.get_usage())
        _print_error(error.format_message())
    elif isinstance(error, (TorchtapError, OSError)):
        _print_error(str(error))
    else:
        hint = "" if debug else "\nThis is a bug in torchtap; `torchtap --debug …` shows the traceback."
        _print_error(f"{type(error).__name__}: {error}{hint}")


def _print_error(text: str) -> None:
    say(f"torchtap: {text}")
