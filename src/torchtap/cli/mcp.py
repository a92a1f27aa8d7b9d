"""`torchtap mcp RUN_OR_FOLDER...`: runs for assistants, over standard input and output. Only reads."""

from __future__ import annotations

import click

__all__ = ["command"]


@click.command("mcp")
@click.argument("runs", nargs=-1, required=True, metavar="RUN_OR_FOLDER...")
@click.option(
    "--json", "as_json", is_flag=True, help="Print the tools with their parameters as JSON, and end."
)
def command(runs: tuple[str, ...], as_json: bool) -> None:
    """Serve runs to an assistant over the Model Context Protocol (stdio).

    The assistant starts this command itself and can read the runs, their findings, sites, series and coverage,
    and compare two of them. It sees the runs that are named here and nothing else of the machine. Needs the extra
    `mcp`.
    """
    from torchtap.assistant.server import make_server
    from torchtap.viewer.run_index import Catalog

    server = make_server(Catalog.open(runs))
    if not as_json:
        server.run("stdio")
        return
    import asyncio

    from torchtap.cli.console import say_json

    tools = asyncio.run(server.list_tools())
    say_json([tool.model_dump(by_alias=True, exclude_none=True) for tool in tools])
