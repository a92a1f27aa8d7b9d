"""`torchtap run train.py …`: record an unchanged script. Set two environment variables and become the script.

``TORCHTAP`` holds the settings. ``PYTHONPATH`` begins with the folder whose ``sitecustomize`` starts the recording in
every Python process that inherits it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace

import click

from torchtap.cli.console import say_json
from torchtap.errors import PlanError
from torchtap.integrations.inject import injected_path
from torchtap.integrations.zero_code.settings import Settings, read_plan_file

__all__ = ["command"]


@click.command("run", context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False})
@click.option("--out", metavar="RUN", help="The run folder; default: runs/<script>-<time>.")
@click.option("--plan", "plan_file", metavar="FILE", help="A TOML file with what to record.")
@click.option(
    "--tap", "taps", multiple=True, metavar="SELECTOR", help="Record statistics of these sites instead."
)
@click.option("--every", type=int, help="Steps between two records; default: 10.")
@click.option("--share", type=float, help="At most this share of the training's time; default: 0.02.")
@click.option(
    "--model", metavar="NAME", help="The script's variable, or package.module:name, that holds the model."
)
@click.option(
    "--sink", "sinks", multiple=True, metavar="SPEC", help="Send numbers there too, e.g. tensorboard:logs."
)
@click.option("--doctor", is_flag=True, help="Record what rules need, and say what is wrong while it trains.")
@click.option(
    "--dry-run",
    is_flag=True,
    help="State memory, disk and time of the recording, and end the script after its model's first call.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="First print the run folder and the command, as a line of JSON."
)
@click.option("-m", "module", metavar="MODULE", help="Run a module, as in `python -m MODULE`.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def command(
    out: str | None,
    plan_file: str | None,
    taps: tuple[str, ...],
    every: int | None,
    share: float | None,
    model: str | None,
    sinks: tuple[str, ...],
    doctor: bool,
    dry_run: bool,
    as_json: bool,
    module: str | None,
    words: tuple[str, ...],
) -> None:
    """Run an unchanged training script and record the inside of its model.

    WORDS are the script with its arguments, or a command that starts one: `torchtap run train.py --lr 1e-3`,
    `torchtap run -m package.train`, `torchtap run torchrun --nproc-per-node 2 train.py`. Everything after the script
    belongs to it. For a launcher that starts processes elsewhere, see `torchtap inject`.
    """
    planned = read_plan_file(plan_file) if plan_file is not None else Settings()
    tap = tuple({"select": each, "every": every or planned.every} for each in taps)
    settings = _with_options(
        planned,
        out=out,
        every=every,
        share=share,
        model=model,
        sinks=sinks or None,
        doctor=doctor or None,
        dry_run=dry_run or None,
        tap=tap or None,
    )
    line = command_line(module, words)
    if settings.out is None:
        # Decided here, so that all processes of a launcher write into the same run.
        settings = replace(settings, out=default_folder(module, words))
    if as_json:
        say_json({"run": settings.out, "command": line}, line=True)
    # A launcher trains nothing itself; of a script it is worth telling that no model was seen in it.
    script = str(os.getpid()) if line[0] == sys.executable else "none"
    flag = flag_that_prevents_recording(line)
    if flag is not None:
        reason = f"Python's {flag} keeps sitecustomize from running"
        click.echo(f"torchtap: this training is not recorded: {reason}", err=True)
    become(
        line,
        {
            **os.environ,
            "TORCHTAP": settings.to_environment(),
            "TORCHTAP_SCRIPT": script,
            "PYTHONPATH": injected_path(os.environ.get("PYTHONPATH")),
        },
    )


def command_line(module: str | None, words: tuple[str, ...]) -> list[str]:
    """Return the command to start: Python with a script or module, or the command itself."""
    if module is not None:
        return [sys.executable, "-m", module, *words]
    if not words:
        raise click.UsageError("what is to be run? e.g. torchtap run train.py")
    first = words[0]
    if first.endswith(".py") or (os.path.isfile(first) and not os.access(first, os.X_OK)):
        return [sys.executable, *words]
    found = shutil.which(first)
    if found is None:
        raise PlanError(f"{first!r} is neither a Python script nor a command that can be found")
    return [found, *words[1:]]


def flag_that_prevents_recording(line: list[str]) -> str | None:
    """Return the flag of a Python command that keeps `sitecustomize` from being imported: -E, -I or -S."""
    if not os.path.basename(line[0]).startswith(("python", "pypy")):
        return None
    words = iter(line[1:])
    for word in words:
        if not word.startswith("-") or word[1:2] in ("", "-", "c", "m"):
            return None  # the script, a long option, a program or a module
        if word[1] in "WX":
            if len(word) == 2:
                next(words, None)  # its value
            continue
        found = [letter for letter in word[1:] if letter in "EIS"]
        if found:
            return f"-{found[0]}"
    return None


def default_folder(module: str | None, words: tuple[str, ...]) -> str:
    """``runs/<script>-<time>``; the script is the first word that looks like one."""
    import time

    scripts = [os.path.basename(each)[:-3] for each in words if each.endswith(".py")]
    name = module or (scripts[0] if scripts else os.path.basename(words[0]))
    return os.path.join("runs", f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")


def become(line: list[str], environment: dict[str, str]) -> None:
    """Replace this process by the command; where that cannot be done, wait for it and end as it did."""
    sys.stdout.flush()
    sys.stderr.flush()
    if os.name == "posix":
        os.execve(line[0], line, environment)
    sys.exit(subprocess.call(line, env=environment))


def _with_options(settings: Settings, **options: object) -> Settings:
    """Return the plan file's settings, replaced by those of the command line."""
    given = {name: value for name, value in options.items() if value is not None}
    return Settings.of({**settings.as_dict(), **given}, "torchtap run")
