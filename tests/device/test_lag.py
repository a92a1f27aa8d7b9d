"""The test device itself: it forgives nothing, and its results do not depend on delays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.device import lag
from tests.device.campaign import Program, nothing


def on_device(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="lag")


def test_a_host_read_of_device_memory_is_a_fault() -> None:
    value = on_device(1000)
    lag.settle()
    lag.read_early(value)
    assert lag.counts()["faults"] == 1


def test_a_copy_cannot_be_read_before_the_host_has_seen_an_event_after_it() -> None:
    value = on_device(1000)
    host = torch.empty(1000, pin_memory=True).copy_(value, non_blocking=True)
    event = torch.accelerator.current_stream(value.device).record_event()
    lag.read_early(host)
    assert lag.counts()["faults"] == 1  # though the copy may well have been made
    event.synchronize()
    lag.read_early(host)
    assert lag.counts()["faults"] == 1
    assert lag.counts()["waits"] == 1
    assert torch.equal(host, value.cpu())


def test_streams_without_an_event_between_them_are_a_race() -> None:
    value, side = on_device(10), torch.Stream("lag")
    with side:
        value.clone()
    assert lag.counts()["races"] == 1
    side.wait_stream(torch.accelerator.current_stream(value.device))
    with side:
        value.clone()
    assert lag.counts()["races"] == 1


def test_freed_memory_is_reused_on_its_stream_and_holds_nan() -> None:
    value = on_device(100)
    address = value.data_ptr()
    del value
    again = torch.empty(100, device="lag")
    assert again.data_ptr() == address
    assert again.cpu().isnan().all()


def test_memory_that_another_stream_reads_is_not_reused_before_that_is_over() -> None:
    value, side = on_device(100), torch.Stream("lag")
    wanted = value.cpu()
    side.wait_stream(torch.accelerator.current_stream(value.device))
    with lag.held():
        with side:
            copy = value + 0
        value.record_stream(side)
        address = value.data_ptr()
        del value
        assert torch.empty(100, device="lag").data_ptr() != address
    torch.accelerator.current_stream(copy.device).wait_stream(side)
    assert torch.equal(copy.cpu(), wanted)
    assert lag.counts()["races"] == 0


def test_launches_do_not_wait_and_reads_do() -> None:
    with lag.held():
        value = on_device(10) * 2 + 1
        found = lag.counts()
        assert (found["launches"], found["waits"]) == (3, 0)
    value.sum().item()
    assert lag.counts()["waits"] == 1
    value.cpu()
    assert lag.counts()["waits"] == 2
    torch.nonzero(value)  # its size is known to the device alone
    assert lag.counts()["fetched"] == 1


@pytest.mark.parametrize("changes", [{}, {"autocast": True}, {"beside": True}, {"own_stream": True}])
def test_a_training_has_the_same_losses_whatever_the_delays(changes: dict[str, Any]) -> None:
    losses = []
    for seed, mean in ((1, 0.0), (2, 100.0), (3, 1000.0)):
        program = Program(5)
        vars(program).update(changes, device=torch.device("lag", seed % 2), mean=mean, dropout=0.1)
        trained = program.train(program.model().to(program.device), nothing, nothing)
        losses.append(torch.stack(trained.losses))
        assert trained.counts["waits"] == lag.counts()["races"] == lag.counts()["faults"] == 0
    assert torch.equal(losses[0], losses[1])
    assert torch.equal(losses[0], losses[2])


def test_losses_are_those_of_the_cpu() -> None:
    program = Program(5)
    vars(program).update(dropout=0.0, autocast=False)
    made = torch.stack(program.train(program.model().to(program.device), nothing, nothing).losses)
    vars(program).update(device=torch.device("cpu"), own_stream=False)
    model = program.model()
    optimizer = (torch.optim.AdamW if program.adam else torch.optim.SGD)(model.parameters(), lr=0.05)
    wanted = []
    for parts in program.inputs():
        for ids, aim in parts:
            loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), aim.flatten())
            loss.backward()
            wanted.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(made, torch.stack(wanted), rtol=1e-5, atol=1e-6)


def test_a_compiled_model_runs_on_it() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).to("lag")
    compiled, value = torch.compile(model, backend="aot_eager"), on_device(3, 4)
    torch.testing.assert_close(compiled(value).cpu(), model(value).cpu())
    compiled(value).sum().backward()
    assert model[0].weight.grad is not None
    assert lag.counts()["races"] == 0
