"""`torchtap diagnose RUN`: what looks wrong in a run, and what to do. Imports no torch."""

from __future__ import annotations

import sys

import click

__all__ = ["command"]


@click.command("diagnose")
@click.argument("run")
@click.option("--json", "as_json", is_flag=True, help="A list of findings, for programs.")
def command(run: str, as_json: bool) -> None:
    """Say what looks wrong in RUN: where it begins, since when, and what to look at.

    Exit code 1 where a finding is an error, 0 otherwise.
    """
    from torchtap.cli.console import say, say_json
    from torchtap.diagnosis.run import diagnose

    findings = diagnose(run)
    if as_json:
        say_json([each.to_dict() for each in findings])
    elif not findings:
        say("nothing looks wrong")
    else:
        for each in findings:
            say(str(each))
            say(f"    {each.advice}")
    sys.exit(1 if any(each.severity == "error" for each in findings) else 0)
