"""`torchtap inject`: print the PYTHONPATH that records scripts which another launcher starts."""

from __future__ import annotations

import os

import click

from torchtap.cli.console import say_json
from torchtap.integrations.inject import injected_path

__all__ = ["command"]


@click.command("inject")
@click.option("--json", "as_json", is_flag=True, help="Print the variable as JSON.")
def command(as_json: bool) -> None:
    """Print the PYTHONPATH with which any launcher's Python processes are recorded.

    `PYTHONPATH=$(torchtap inject) TORCHTAP=plan.toml accelerate launch train.py` records as `torchtap run` does.
    TORCHTAP is a plan file, or 1 for the default plan. Without TORCHTAP, or with 0, nothing is recorded.
    """
    path = injected_path(os.environ.get("PYTHONPATH"))
    if as_json:
        say_json({"PYTHONPATH": path})
    else:
        click.echo(path)
