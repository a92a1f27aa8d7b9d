"""``torchtap harvest``: store the activations of a model over data, or shuffle such a folder as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from torchtap.cli.console import say, say_json
from torchtap.cli.import_path import find_named
from torchtap.errors import PlanError, needing

__all__ = ["command"]


@click.command("harvest")
@click.argument("model")
@click.argument("data", required=False)
@click.option("--out", required=True, help="The folder to write, or an address such as s3://bucket/acts.")
@click.option(
    "--sites", multiple=True, help="Sites to store, as in `torchtap sites` (may be given several times)."
)
@click.option("--rows", default="token", show_default=True, help="token, sample or patch.")
@click.option("--tokenizer", help="For texts: a folder or name for transformers, or module:function.")
@click.option("--dtype", help="float32, bfloat16, float16, int8 or fp8; as computed if not given.")
@click.option("--context", default=512, show_default=True, help="Tokens of a document at most.")
@click.option("--batch-size", default=8, show_default=True, help="Documents of one call of the model.")
@click.option("--window", type=int, help="Documents of a shard, within which rows are shuffled.")
@click.option("--seed", default=0, show_default=True, help="Seed of the order of rows.")
@click.option("--no-shuffle", is_flag=True, help="Keep the order of the documents.")
@click.option("--covariance", is_flag=True, help="Also sum the outer products of rows.")
@click.option("--engine", type=click.Choice(["here", "processes", "ray", "dask"]), help="Who runs the model.")
@click.option("--workers", default=1, show_default=True, help="Processes or actors.")
@click.option(
    "--reshuffle",
    is_flag=True,
    help="MODEL is a harvested folder: write its rows to --out in a random order.",
)
@click.option("--quiet", is_flag=True, help="Print no progress.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    model: str, data: str | None, out: str, reshuffle: bool, quiet: bool, as_json: bool, **options: Any
) -> None:
    """Store the values at some sites of MODEL over DATA, one row per token, in a folder for training on them.

    MODEL is `package.module:factory`, `script.py:factory`, or a folder or name that transformers loads. DATA is a
    folder of texts, or `module:function` for anything else that tt.harvest takes. The same command resumes after an
    interruption.

    With --reshuffle, MODEL is a folder that was harvested: `torchtap harvest acts --reshuffle --out shuffled`.
    """
    if reshuffle:
        from torchtap import reshuffle as shuffle_all

        acts = shuffle_all(model, out, seed=options["seed"])
    else:
        from torchtap import harvest

        if data is None or not options["sites"]:
            raise click.UsageError("DATA and --sites are needed, unless --reshuffle is given")
        options["shuffle"] = not options.pop("no_shuffle")
        options["tokenizer"] = _tokenizer(options["tokenizer"])
        options["sites"] = list(options["sites"])
        acts = harvest(_model(model), _data(data), out=out, progress=not quiet, **options)
    if as_json:
        sites = list(acts.sites)
        say_json({"path": str(acts.path), "rows": len(acts), "sites": sites, "bytes": acts.nbytes})
        return
    say(f"{acts.path}: {len(acts):,} rows, {len(acts.sites)} sites, {acts.nbytes / 1e9:.3g} GB")


def _model(text: str) -> Any:
    if ":" in text and not Path(text).exists():
        from torchtap.cli.sites import load_model

        return load_model(text)
    with needing("transformers", "transformers", who=f"the model {text!r}"):
        from transformers import AutoModel
    return AutoModel.from_pretrained(text)


def _tokenizer(text: str | None) -> Any:
    if text is None:
        return None
    if ":" in text and not Path(text).exists():
        return find_named(text, "names no tokenizer: write package.module:function")[1]
    with needing("transformers", "transformers", who=f"the tokenizer {text!r}"):
        from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(text)


def _data(text: str) -> Any:
    if Path(text).exists():
        return text
    if ":" not in text:
        raise PlanError(
            f"there is no folder of texts at {text}; other data are given as package.module:function"
        )
    _, made = find_named(text, "names no data: write a folder of texts, or package.module:function")
    return made() if callable(made) else made
