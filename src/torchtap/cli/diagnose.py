"""`torchtap diagnose RUN`: what looks wrong in a run, and what to do. Imports no torch."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from torchtap.diagnosis.finding import Findings

__all__ = ["command"]


@click.command("diagnose")
@click.argument("run")
@click.option("--json", "as_json", is_flag=True, help="A list of findings, for programs.")
@click.option(
    "--rules", "every_rule", is_flag=True, help="Say of each rule that could not judge what it needs."
)
@click.option("--against", help="A file of `torchtap learn`: also say what of it no longer holds.")
def command(run: str, as_json: bool, every_rule: bool, against: str | None) -> None:
    """Say what looks wrong in RUN: where it begins, since when, and what to look at.

    Exit code 1 where a finding is an error, 0 otherwise.
    """
    from torchtap.cli.console import say_json
    from torchtap.diagnosis.diagnose import diagnose

    findings = diagnose(run, against=against)
    if as_json:
        say_json([each.to_dict() for each in findings])
    else:
        _say_findings(findings, every_rule)
    sys.exit(1 if any(each.severity == "error" for each in findings) else 0)


def _say_findings(findings: Findings, every_rule: bool) -> None:
    from torchtap.cli.console import say

    for each in findings:
        say(f"{each.severity}: {each.kind}: {each.message}")
        for number in each.evidence:
            at = "" if number.step is None else f" at step {number.step}"
            say(f"    {number.name}: {number.value:.4g}{at}")
        for cause in each.causes[:3]:
            say(f"    perhaps: {cause}")
        say(f"    {each.advice}")
    if not findings:
        say("nothing looks wrong")
    if every_rule:
        for missing in findings.unjudged:
            say(f"not judged: {missing}")
    elif findings.unjudged:
        say(f"{len(findings.unjudged)} rules could not judge: --rules says why and what to record")
