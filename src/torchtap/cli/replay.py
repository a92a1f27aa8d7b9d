"""``torchtap replay``: run the step that a flight recorder kept once more, offline."""

from __future__ import annotations

import pdb
import sys
from typing import TYPE_CHECKING, Any

import click

from torchtap.cli.console import say, say_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from torchtap.diagnosis.birth import Event
    from torchtap.diagnosis.flight.step import StepSnapshot

__all__ = ["command"]


@click.command("replay")
@click.argument("run")
@click.option(
    "--model",
    "names",
    multiple=True,
    required=True,
    help="Who makes the model: `package.module:factory`, `script.py:factory`, a .pt file. `name=…` for one of several.",
)
@click.option("--rank", default=0, show_default=True, help="Whose part of the dump.")
@click.option("--out", help="Write every value of the step into this run folder.")
@click.option("--pdb", "debug", is_flag=True, help="Stop in the debugger where the first bad value is born.")
@click.option("--unsafe", is_flag=True, help="Load a pickled --model file, running the code in it.")
@click.option("--json", "as_json", is_flag=True, help="The outcome as JSON.")
def command(
    run: str, names: tuple[str, ...], rank: int, out: str | None, debug: bool, unsafe: bool, as_json: bool
) -> None:
    """Run the step that a flight recorder kept in RUN again: same batch, weights and random numbers.

    It reports if the values are the same, and where the first NaN or infinity was born. Exit code 1 where
    values differ from those in RUN.
    """
    from torchtap.diagnosis.flight.dump import offline
    from torchtap.diagnosis.flight.step import StepSnapshot

    moment = StepSnapshot.load(run, rank)
    models = _models(names, moment, unsafe)
    outcome = offline(run, moment, models, out=out, on_birth=_stop_there if debug else None)
    if as_json:
        say_json(outcome.to_dict())
    else:
        _tell(outcome, moment)
    if debug and outcome.error is not None:
        pdb.post_mortem(outcome.error.__traceback__)
    sys.exit(1 if outcome.differing else 0)


def _models(names: tuple[str, ...], moment: StepSnapshot, unsafe: bool) -> Mapping[str, nn.Module]:
    from torchtap.cli.sites import load_model

    models: dict[str, Any] = {}
    for each in names:
        name, equals, text = each.partition("=")
        models[name if equals else ""] = load_model(text if equals else each, unsafe=unsafe)
    if set(models) != set(moment.weights):
        wanted = " ".join(f"--model {name}=…" if name else "--model …" for name in moment.weights) or "none"
        raise click.UsageError(f"the kept step has the models {wanted}")
    return models


def _tell(outcome: Any, moment: StepSnapshot) -> None:
    say(f"step {moment.step}: {moment.reason}")
    say(f"passes: {len(moment.passes)}; values compared with the dump: {outcome.compared}")
    if outcome.differing:
        say(f"{len(outcome.differing)} differ, the first at {outcome.differing[0]}")
    elif outcome.compared:
        say("all of them are the same, bit for bit")
    if outcome.error is not None:
        say(f"the step raised {type(outcome.error).__name__}: {outcome.error}")
    say(str(outcome.birth) if outcome.birth is not None else "every value is a finite number")
    for note in moment.notes:
        say(f"note: {note}")


def _stop_there(event: Event) -> None:
    """The debugger in the frame of the user's code that called the operator."""
    frame: Any = sys._getframe()
    place = event.line
    while frame is not None and place and f"{frame.f_code.co_filename}:{frame.f_lineno} " not in place:
        frame = frame.f_back
    say(f"torchtap: {event.kind} from {event.op} in {event.path or 'the model itself'}", err=True)
    debugger = pdb.Pdb(nosigint=True)
    debugger.reset()
    debugger.interaction(frame, None)  # a look at the place itself, not at what is called next
