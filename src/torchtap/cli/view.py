"""`torchtap view RUN_OR_FOLDER...`: the web viewer."""

from __future__ import annotations

import webbrowser

import click

from torchtap.sanitize import JSON_LIMIT, read_file

__all__ = ["command"]


@click.command("view")
@click.argument("runs", nargs=-1, required=True, metavar="RUN_OR_FOLDER...")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    show_default="6070, or the next free one",
    help="Port; 0 for any free one.",
)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address; a token guards any address but this machine's own.",
)
@click.option(
    "--token",
    envvar="TORCHTAP_TOKEN",
    help="The required token, so that links outlive a restart; default: a new one each time.",
)
@click.option(
    "--allow-host", multiple=True, metavar="NAME", help="A further host name that the viewer accepts."
)
@click.option(
    "--comparison",
    type=click.Path(exists=True, dir_okay=False),
    help="A comparison saved as JSON, to show beside the runs.",
)
@click.option(
    "--manage",
    is_flag=True,
    help="Let the page rename, tag, archive and delete the runs inside FOLDER.",
)
@click.option("--no-browser", is_flag=True, help="Only print the address.")
@click.option("--json", "as_json", is_flag=True, help="Print the address and the runs as a line of JSON.")
def command(
    runs: tuple[str, ...],
    port: int | None,
    host: str,
    token: str | None,
    allow_host: tuple[str, ...],
    comparison: str | None,
    manage: bool,
    no_browser: bool,
    as_json: bool,
) -> None:
    """Show runs in the browser, live while they are still written.

    A folder shows every run in it, also later ones. Several runs can be laid over each other. Ctrl-C
    ends it.
    """
    from torchtap.cli.console import say_json
    from torchtap.store.format.checksum import load_json
    from torchtap.viewer.run_index import Catalog
    from torchtap.viewer.server import ViewerServer

    try:
        result = load_json(read_file(comparison, JSON_LIMIT)) if comparison else None
        if result is not None and not isinstance(result, dict):
            raise click.ClickException(
                f"{comparison} is no comparison: write one with torchtap compare --json"
            )
        catalog = Catalog.open(runs, result)
        server = ViewerServer(catalog, host=host, port=port, names=allow_host, token=token, manage=manage)
    except OSError as problem:
        raise click.ClickException(f"cannot use {host}:{port}: {problem}") from problem
    if as_json:
        say_json({"address": server.address, "runs": list(runs)}, line=True)
    else:
        click.echo(server.address)
    click.echo("Ctrl-C ends the viewer.", err=True)
    if not no_browser:
        webbrowser.open(server.address)
    server.serve()
