"""``torchtap selftest``: versions and parts in one screen, then what can be proved on this machine."""

from __future__ import annotations

import time
import warnings

import click

from torchtap.cli.console import say

__all__ = ["command"]


@click.command("selftest")
@click.option(
    "--device", "asked", multiple=True, help="Only this device, e.g. cuda; default: all that are there."
)
def command(asked: tuple[str, ...]) -> None:
    """Say what this installation is made of, and prove that it works here. Paste the output into a bug report.

    Exit code: 0 everything held, 1 something did not.
    """
    from torchtap.cli.proving import PROOFS, devices, facts

    for name, fact in facts():
        say(f"{name + ':':<17} {fact}")
    failed = 0
    for device in devices(asked):
        for name, proof in PROOFS.items():
            started = time.monotonic()
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    seen, verdict = proof(device), "held"
            except Exception as error:  # whatever goes wrong on this machine is what the report is for
                seen, verdict, failed = f"{type(error).__name__}: {error}", "DID NOT HOLD", failed + 1
            say(f"{device:<8} {name:<10} {verdict:<6} {time.monotonic() - started:5.1f} s  {seen}")
    say("everything held" if not failed else f"{failed} did not hold")
    raise SystemExit(1 if failed else 0)
