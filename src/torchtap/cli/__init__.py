"""The command line: parse, call the library, print.

A command is loaded when it is called, so that listing and querying runs imports no torch. Errors come without
tracebacks; ``--debug`` shows them.
"""

from __future__ import annotations

import io
import sys
import traceback
from importlib import import_module

import click

from torchtap.errors import TorchtapError
from torchtap.sanitize import say

__all__ = ["main", "torchtap"]

# Name, and the one line of help: known without importing the command's module, `torchtap.cli.<name>`.
COMMANDS = {
    "compare": "Compare two recordings and name the first site that differs.",
    "demo": "Train a small GPT and look inside it.",
    "diagnose": "Say what looks wrong in a run, and what to do.",
    "export": "Write a run in another format: parquet, hdf5, pt, npz, csv, jsonl.",
    "inject": "Print the PYTHONPATH with which any launcher's Python processes are recorded.",
    "learn": "Keep what held in good runs, for `diagnose --against`.",
    "mcp": "Serve runs to an assistant over the Model Context Protocol.",
    "rcc": "Refined coordinate check over model widths.",
    "replay": "Run the step that a flight recorder kept once more, and say where it went wrong.",
    "report": "Write one self-contained page about a run.",
    "run": "Run a training script as it is, and record the inside of its model.",
    "selftest": "Say what this installation is made of, and prove that it works here.",
    "show": "Show a run: its sites, numbers, tensors and coverage.",
    "sites": "List the sites of a model.",
    "tail": "Follow a training in the terminal while it writes.",
    "view": "Look at runs in the browser.",
}


class LazyGroup(click.Group):
    """A group whose commands are imported one by one, when they are asked for."""

    def list_commands(self, context: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command = import_module(f"torchtap.cli.{name}").command
        assert isinstance(command, click.Command)
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
    try:
        code = torchtap.main(words, prog_name="torchtap", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        say("stopped")
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has left: nothing to say, and nobody to say it to
        sys.exit(0)
    except Exception as error:
        _tell(error, debug="--debug" in words)
        sys.exit(2)


def _spell_what_cannot_be_encoded() -> None:
    """Print ``\\xdf`` if the terminal's encoding has no ß, instead of failing. UTF-8 has everything."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower() not in ("utf-8", "utf8"):
            stream.reconfigure(errors="backslashreplace")


def _tell(error: Exception, *, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    expected = isinstance(error, (TorchtapError, OSError))
    what = str(error) if expected else f"{type(error).__name__}: {error}"
    say(f"torchtap: {what}")
    if not expected and not debug:
        say("This was not expected; `torchtap --debug …` shows where it came from.")
