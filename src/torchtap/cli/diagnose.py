"""`torchtap diagnose RUN`: report what looks wrong in a run and what to do. Imports no torch, except for --probe."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from torchtap.diagnosis.finding import Findings

__all__ = ["command"]

NOT_JUDGED = 3  # exit code


@click.command("diagnose")
@click.argument("run")
@click.option("--json", "as_json", is_flag=True, help="A list of findings, for programs.")
@click.option(
    "--rules", "every_rule", is_flag=True, help="List each rule that could not judge, and what it needs."
)
@click.option("--against", help="A file of `torchtap learn`: also report what of it no longer holds.")
@click.option(
    "--probe", help="First run this training script under a doctor with experiments; RUN is then written."
)
def command(run: str, as_json: bool, every_rule: bool, against: str | None, probe: str | None) -> None:
    """Report what looks wrong in RUN: where it begins, since when, and what to look at.

    Exit code 1 if a finding is an error, 3 if too little was recorded to judge, 0 otherwise.
    """
    from torchtap.cli.console import say_json
    from torchtap.diagnosis.diagnose import diagnose

    if probe is not None:
        words = [sys.executable, "-m", "torchtap", "run", "--doctor", "--out", run, probe]
        subprocess.run(words, env={**os.environ, "TORCHTAP_PROBE": "1"}, check=False)
    findings = diagnose(run, against=against)
    if as_json:
        say_json([each.to_dict() for each in findings])
    else:
        _say_findings(findings, every_rule)
    if any(each.severity == "error" for each in findings):
        sys.exit(1)
    sys.exit(NOT_JUDGED if findings.verdict == "not judged" else 0)


def _say_findings(findings: Findings, every_rule: bool) -> None:
    from torchtap.cli.console import say

    for each in findings:
        say(f"{each.severity}: {each.kind}: {each.message}")
        for number in each.evidence:
            at = "" if number.step is None else f" at step {number.step}"
            say(f"    {number.name}: {number.value:.4g}{at}")
        for cause in each.causes[:3]:
            say(f"    perhaps: {cause}")
        for symptom in each.symptoms:
            say(f"    also: {symptom}")
        say(f"    {each.advice}")
    say(findings.summary())
    if every_rule:
        for missing in findings.unjudged:
            say(f"not judged: {missing}")
    elif findings.unjudged:
        say("--rules lists what to record for the rules that could not judge")
