"""Threads and asyncio tasks call one model at the same time: each capture has the values of its own calls."""

from __future__ import annotations

import asyncio
import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tests.optional import need
from tests.taps.served import serve_requests
from torch import Tensor, nn

import torchtap as tt


class Shared(nn.Module):
    """A layer that is used twice, one that returns a dict, and one that some inputs leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.rare = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.twice(self.twice(x))
        return {"y": self.rare(y) if x[0, 0] % 2 else y, "x": x * 2}


def truth(model: Shared, x: Tensor) -> dict[str, Tensor]:
    """Compute every site's value without hooks."""
    with torch.no_grad():
        first = nn.functional.linear(x, model.twice.weight, model.twice.bias)
        second = nn.functional.linear(first, model.twice.weight, model.twice.bias)
        found = {"twice:output": first, "twice:output#1": second, ":output.x": x * 2, ":output.y": second}
        if x[0, 0] % 2:
            found["rare:output"] = found[":output.y"] = nn.functional.linear(
                second, model.rare.weight, model.rare.bias
            )
    return found


def check(seen: Any, model: Shared, x: Tensor) -> int:
    """Return how many values of a capture are not those of this input."""
    expected = truth(model, x)
    return sum(not torch.equal(seen[name], value) for name, value in expected.items()) + (
        set(seen) != set(expected)
    )


def inputs(number: int) -> Tensor:
    return torch.full((2, 4), float(number))


def test_a_capture_in_an_asyncio_task_has_the_values_of_that_task() -> None:
    model = Shared().eval()

    async def request(number: int) -> int:
        with tt.capture(model, "*:output") as seen:
            await asyncio.sleep(0)
            with torch.no_grad():  # not around an await: tasks of a thread share the mode
                model(inputs(number))
            await asyncio.sleep(0)
        return check(seen, model, inputs(number))

    async def serve() -> list[int]:
        return await asyncio.gather(*map(request, range(40)))

    assert sum(asyncio.run(serve())) == 0


def test_a_capture_in_a_task_has_the_values_of_a_thread_that_it_waits_for() -> None:
    model = Shared().eval()

    async def request(number: int) -> int:
        with tt.capture(model, "*:output") as seen:
            await asyncio.to_thread(model, inputs(number))
        return check(seen, model, inputs(number))

    async def serve() -> list[int]:
        return await asyncio.gather(*map(request, range(40)))

    assert sum(asyncio.run(serve())) == 0


def test_captures_in_a_thread_pool_have_the_values_of_their_own_thread() -> None:
    model = Shared().eval()

    def request(number: int) -> int:
        with torch.no_grad(), tt.capture(model, "*:output") as seen:
            model(inputs(number))
        return check(seen, model, inputs(number))

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(request, range(200))) == 0


def test_one_capture_of_all_threads_keeps_their_calls_apart() -> None:
    torch.manual_seed(0)
    model = Shared().eval()
    numbers = [1.0 + 2 * k for k in range(24)]  # odd: every layer is used
    with torch.no_grad(), tt.capture(model, "*:output", all_threads=True) as seen:
        started = [threading.Thread(target=model, args=(inputs(int(n)),)) for n in numbers]
        for each in started:
            each.start()
        for each in started:
            each.join()
    assert len([name for name in seen if name.startswith("twice:output")]) == 2 * len(numbers)
    met = []
    for call in range(len(numbers)):
        x = seen[":output.x" + (f"#{call}" if call else "")] / 2
        expected = truth(model, x)
        twice = [seen["twice:output" + (f"#{2 * call + k}" if 2 * call + k else "")] for k in range(2)]
        assert torch.equal(twice[0], expected["twice:output"])
        assert torch.equal(twice[1], expected["twice:output#1"])
        assert torch.equal(seen["rare:output" + (f"#{call}" if call else "")], expected["rare:output"])
        met.append(float(x[0, 0]))
    assert sorted(met) == numbers


@pytest.mark.parametrize("keep", [tt.Stats(), tt.Histogram(), [tt.Full(), tt.Stats()]], ids=str)
def test_statistics_of_all_threads_are_those_of_all_calls_one_by_one(keep: Any) -> None:
    torch.manual_seed(0)
    model = Shared().eval()
    numbers = [1 + 2 * k for k in range(12)]
    with torch.no_grad(), tt.capture(model, "*:output", keep=keep, all_threads=True) as together:
        started = [threading.Thread(target=model, args=(inputs(n),)) for n in numbers]
        for each in started:
            each.start()
        for each in started:
            each.join()
    with torch.no_grad(), tt.capture(model, "*:output", keep=keep) as alone:
        for number in numbers:
            model(inputs(number))
    assert set(together) == set(alone)
    for name in ("twice:output", "rare:output", ":output.x"):
        found, expected = together[name], alone[name]
        if isinstance(keep, list):
            found, expected = found["stats"], expected["stats"]
        for statistic, value in expected.items():
            assert torch.allclose(torch.as_tensor(found[statistic]), torch.as_tensor(value), rtol=1e-9), (
                statistic
            )


def test_gradients_of_concurrent_calls_are_kept_apart() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    values = [torch.full((1, 3), float(n), requires_grad=True) for n in range(8)]

    def run(x: Tensor) -> None:
        (model(x) * x.detach()[0, 0]).sum().backward()

    with tt.capture(model, "1:output", "1:grad_output", all_threads=True) as seen:
        started = [threading.Thread(target=run, args=(x,)) for x in values]
        for each in started:
            each.start()
        for each in started:
            each.join()
    for call in range(8):
        mark = f"#{call}" if call else ""
        factor = seen["1:grad_output" + mark][0, 0]
        with torch.no_grad():
            assert torch.equal(seen["1:output" + mark], model(torch.full((1, 3), float(factor))))


def test_calls_of_other_tasks_are_left_out_and_reported() -> None:
    model = nn.Linear(2, 2)

    async def other() -> None:
        model(torch.ones(1, 2))

    async def main() -> None:
        task = asyncio.ensure_future(other())
        with tt.capture(model, "*:output") as seen:
            model(torch.zeros(1, 2))
            await task
        assert list(seen) == [":output"]
        assert torch.equal(seen[":output"], model.bias.unsqueeze(0))

    with pytest.warns(RuntimeWarning, match="other threads or asyncio tasks"):
        asyncio.run(main())


def test_a_capture_that_was_entered_and_never_left_hides_no_calls_of_others() -> None:
    model = nn.Linear(2, 2)

    async def forgotten() -> None:
        tt.capture(nn.Linear(2, 2)).__enter__()

    async def other() -> None:
        model(torch.ones(1, 2))

    async def main() -> None:
        await forgotten()  # in this context
        gc.collect()
        task = asyncio.ensure_future(other())
        with tt.capture(model, "*:output"):
            model(torch.zeros(1, 2))
            await task

    with pytest.warns(RuntimeWarning, match="other threads or asyncio tasks"):
        asyncio.run(main())


@pytest.mark.filterwarnings("ignore:torchtap. other threads")  # requests without a capture call the model too
def test_a_server_with_fifty_requests_at_once_captures_each_ones_own_values() -> None:
    for name in ("starlette", "uvicorn", "httpx"):
        need(name)
    captures, wrong = serve_requests(240)
    assert (captures, wrong) == (180, 0)
