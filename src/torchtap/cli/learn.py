"""`torchtap learn GOOD_RUN... -o FILE`: what held in good runs, for `diagnose --against`. Imports no torch."""

from __future__ import annotations

import click

__all__ = ["command"]


@click.command("learn")
@click.argument("good_runs", nargs=-1, required=True)
@click.option("-o", "--out", required=True, help="The file to write, as JSON that people can read.")
@click.option("--json", "as_json", is_flag=True, help="Say what was learned as JSON, for programs.")
def command(good_runs: tuple[str, ...], out: str, as_json: bool) -> None:
    """Keep what held in all GOOD_RUNs: the same training, best with three or more seeds.

    `torchtap diagnose RUN --against FILE` then reports what no longer holds.
    """
    from torchtap.cli.console import say, say_json
    from torchtap.diagnosis.learned import learn

    learned = learn(good_runs)
    learned.write(out)
    sites = {phase: len(habits) for phase, habits in learned.phases.items()}
    if as_json:
        say_json({"path": out, "runs": learned.runs, "last_step": learned.last_step, "sites": sites})
        return
    counted = ", ".join(f"{count} sites in {phase}" for phase, count in sites.items())
    say(f"learned from {len(good_runs)} runs, up to step {learned.last_step}: {counted}; kept in {out}")
    if len(good_runs) < 3:
        say("three or more runs tell better what is usual; with fewer the margins are wide", err=True)
