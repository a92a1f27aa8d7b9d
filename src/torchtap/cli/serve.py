"""``torchtap serve vllm``: start vLLM's server with taps in its model."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

import click

from torchtap.cli.console import say_json
from torchtap.errors import MissingExtraError

__all__ = ["command"]


@click.command("serve", context_settings={"ignore_unknown_options": True})
@click.argument("engine", type=click.Choice(["vllm"]))
@click.argument("model")
@click.option(
    "--tap",
    "sites",
    multiple=True,
    help="Sites that requests may record (several times); all layers if not given.",
)
@click.option(
    "--out", required=True, type=click.Path(file_okay=False), help="The folder of recorded requests."
)
@click.option(
    "--every", default=0, show_default=True, help="Keep statistics of every n-th request; 0 for none."
)
@click.option("--budget", default=4096, show_default=True, help="Tokens recorded of one request at most.")
@click.option(
    "--json", "as_json", is_flag=True, help="First print the folder and the command, as a line of JSON."
)
@click.argument("rest", nargs=-1, type=click.UNPROCESSED)
def command(
    engine: str,
    model: str,
    sites: tuple[str, ...],
    out: str,
    every: int,
    budget: int,
    as_json: bool,
    rest: tuple[str, ...],
) -> None:
    """Serve MODEL with vLLM, and record chosen requests. All other options go to vLLM.

    A request asks with extra_body={"torchtap": {"sites": [...], "rows": 500}}. Read the folder with
    torchtap.serving.open_run, or ask the server: GET /torchtap/requests/<id>.
    """
    from torchtap.serving.server import arguments

    if find_spec("vllm") is None:
        raise MissingExtraError(
            "torchtap serve vllm needs vLLM in this environment: pip install vllm==0.32.*"
        )
    words, environment = arguments(model, sites or ("**.layers.*:output",), out, every=every, budget=budget)
    start = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words, *rest]
    if as_json:
        say_json({"folder": out, "command": start}, line=True)
    os.execve(sys.executable, start, {**os.environ, **environment})
