"""A server with concurrent requests: ``python -m tests.taps.served 10000`` captures in that many requests.

A real server (uvicorn, starlette) and a real client (httpx). Three of four requests capture the inside of one shared
model: in an asyncio handler with awaits inside the block, in a handler that runs in the thread pool, or in an asyncio
handler that waits for a thread. The reference is computed from the weights, without the model and without hooks.
"""

from __future__ import annotations

import asyncio
import random
import sys
import threading
import time
from typing import Any

import torch
from torch import Tensor, nn

import torchtap as tt

__all__ = ["serve_requests"]


class Served(nn.Module):
    """Two layers, one of them called twice, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.again(self.again(hidden)) + hidden


def expected(model: Served, x: Tensor) -> dict[str, Tensor]:
    """Compute the value of every site by plain functions."""
    first = nn.functional.linear(x, model.first.weight, model.first.bias)
    hidden = torch.tanh(first)
    one = nn.functional.linear(hidden, model.again.weight, model.again.bias)
    two = nn.functional.linear(one, model.again.weight, model.again.bias)
    return {"first:output": first, "again:output": one, "again:output#1": two, ":output": two + hidden}


def _wrong(seen: Any, model: Served, x: Tensor) -> int:
    with torch.no_grad():
        true = expected(model, x)
    return sum(not torch.equal(seen[name], value) for name, value in true.items()) + (set(seen) != set(true))


def application(model: Served) -> Any:
    """Return a starlette application with one route for each way to serve a model."""
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    def inputs(request: Request) -> Tensor:
        return torch.full((1, 8), float(request.query_params["x"]))

    async def awaiting(request: Request) -> JSONResponse:
        x = inputs(request)
        with tt.capture(model, "*:output") as seen:
            await asyncio.sleep(random.random() / 1000)
            with torch.no_grad():
                model(x)
            await asyncio.sleep(random.random() / 1000)
        return JSONResponse({"wrong": _wrong(seen, model, x)})

    def pooled(request: Request) -> JSONResponse:
        x = inputs(request)
        with torch.no_grad(), tt.capture(model, "*:output") as seen:
            model(x)
        return JSONResponse({"wrong": _wrong(seen, model, x)})

    async def handed(request: Request) -> JSONResponse:
        x = inputs(request)
        with tt.capture(model, "*:output") as seen:
            await run_in_threadpool(model, x)
        return JSONResponse({"wrong": _wrong(seen, model, x)})

    async def plain(request: Request) -> JSONResponse:
        await run_in_threadpool(model, inputs(request))
        return JSONResponse({"wrong": 0})

    return Starlette(
        routes=[
            Route("/awaiting", awaiting),
            Route("/pooled", pooled),
            Route("/handed", handed),
            Route("/plain", plain),
        ]
    )


def serve_requests(count: int, at_once: int = 50) -> tuple[int, int]:
    """Serve requests of all sorts. Return the number of captures, and of wrong values and hooks that are left."""
    import httpx
    import uvicorn

    torch.manual_seed(0)
    model = Served()
    server = uvicorn.Server(uvicorn.Config(application(model), port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]

    async def ask() -> list[int]:
        room = asyncio.Semaphore(at_once)
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False
        ) as client:

            async def one(number: int) -> int:
                way = ("awaiting", "pooled", "handed", "plain")[number % 4]
                async with room:
                    answer = await client.get(f"/{way}", params={"x": number})
                return int(answer.raise_for_status().json()["wrong"])

            return await asyncio.gather(*map(one, range(count)))

    try:
        wrong = asyncio.run(ask())
    finally:
        server.should_exit = True
        thread.join()
    left = sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules())
    return count - count // 4, sum(wrong) + left


if __name__ == "__main__":
    made, wrong = serve_requests(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
    print(f"{made:,} captures, {wrong} wrong values or hooks left")
    sys.exit(bool(wrong))
