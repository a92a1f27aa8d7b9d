"""``torchtap selftest``: versions and parts in one screen, then what can be proved on this machine."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product

import click

from torchtap.cli.console import say, say_json

__all__ = ["command"]


@click.command("selftest")
@click.option("--json", "as_json", is_flag=True, help="The same for programs.")
@click.option(
    "--device", "asked", multiple=True, help="Only this device, e.g. cuda; default: all that are there."
)
def command(asked: tuple[str, ...], as_json: bool) -> None:
    """Say what this installation is made of, and prove that it works here. Paste the output into a bug report.

    Exit code: 0 everything held, 1 something did not.
    """
    from torchtap.cli.proving import PROOFS, devices, facts

    tell: Callable[[str], object] = (lambda line: None) if as_json else say
    parts = dict(facts())
    for name, fact in parts.items():
        tell(f"{name + ':':<17} {fact}")
    results = []
    for device, (name, proof) in product(devices(asked), PROOFS.items()):
        results.append(_tried(device, name, proof))
        tell(results[-1].line())
    failed = sum(not result.held for result in results)
    if as_json:
        say_json({"facts": parts, "proofs": [asdict(result) for result in results], "held": not failed})
    tell("everything held" if not failed else f"{failed} did not hold")
    raise SystemExit(1 if failed else 0)


@dataclass(frozen=True)
class Result:
    """What came of one proof."""

    device: str
    name: str
    held: bool
    seconds: float
    seen: str

    def line(self) -> str:
        """For a person."""
        verdict = "held" if self.held else "DID NOT HOLD"
        return f"{self.device:<8} {self.name:<10} {verdict:<6} {self.seconds:5.1f} s  {self.seen}"


def _tried(device: str, name: str, proof: Callable[[str], str]) -> Result:
    started = time.monotonic()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            seen, held = proof(device), True
    except Exception as error:  # whatever goes wrong on this machine is what the report is for
        seen, held = f"{type(error).__name__}: {error}", False
    return Result(device, name, held, time.monotonic() - started, seen)
