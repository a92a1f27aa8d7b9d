"""`torchtap inject`: print the PYTHONPATH that records scripts which another launcher starts."""

from __future__ import annotations

import os

import click

from torchtap.integrations.inject import injected_path

__all__ = ["command"]


@click.command("inject")
def command() -> None:
    """Print the PYTHONPATH with which any launcher's Python processes are recorded.

    `PYTHONPATH=$(torchtap inject) TORCHTAP=plan.toml accelerate launch train.py` records as `torchtap run` does.
    TORCHTAP is a plan file, or 1 for the default plan. Without TORCHTAP, or with 0, nothing is recorded.
    """
    click.echo(injected_path(os.environ.get("PYTHONPATH")))
