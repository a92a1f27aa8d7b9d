"""A copy or a file of a watched model has no trace of the watch, whenever it is made."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.clock.truth import evaluating
from torch import nn

import torchtap as tt
from torchtap.monitors.monitor import Monitor

SAFE = [nn.Sequential, nn.Linear, nn.ReLU]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 2)))


def saved(model: nn.Module) -> bytes:
    file = io.BytesIO()
    torch.save(model, file)
    return file.getvalue()


def check(model: nn.Module) -> None:
    whole = saved(model)
    inside = zipfile.ZipFile(io.BytesIO(whole))
    assert not any(b"torchtap" in inside.read(name) for name in inside.namelist())
    assert b"torchtap" not in pickle.dumps(model)
    with torch.serialization.safe_globals(SAFE):
        loaded = torch.load(io.BytesIO(whole), weights_only=True)
    for other in (loaded, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for one, module in zip(model.modules(), other.modules(), strict=True):
            assert not module._forward_hooks
            assert not module._forward_pre_hooks
            assert not {"forward", "train", "__getstate__"} & set(module.__dict__)
            assert type(one).__name__ == type(module).__name__
        assert torch.equal(other(torch.ones(1, 3)), model(torch.ones(1, 3)))


@pytest.mark.parametrize("way", ["hook", "forward", "wrap"])
@pytest.mark.parametrize("every", [1, 2])
def test_a_model_can_be_saved_at_any_moment_of_a_watch(way: Any, every: int) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    taps = tt.tap(["*:output", "*:input", "*:grad_output", "*:param_grad", "*:update"], every=every)
    with tt.watch(model, None, taps, way=way) as watch:
        with evaluating(model):
            check(model)
        watch.follow(optimizer)
        watch.log(started=1)
        for _ in range(4):
            with watch.paused():
                check(model)
            loss = model(torch.randn(2, 3)).sum()
            loss.backward()
            optimizer.step()
            watch.log(loss=loss)
            with evaluating(model):
                check(model)
    check(model)


def test_a_model_under_a_monitor_can_be_saved(tmp_path: Path) -> None:
    model = mlp()
    with Monitor(model, ["0"], [0], tmp_path, [0]) as monitor:
        monitor.set_epoch(0)
        monitor.set_batch_idx(0)
        model(torch.randn(2, 3))
        assert b"torchtap" not in pickle.dumps(model)


def test_hooks_of_the_users_own_are_saved_and_stay_removable() -> None:
    model = mlp()
    own = model[0].register_forward_hook(print_nothing)  # type: ignore[index]
    with tt.watch(model, None, "*:output") as watch, watch.step():
        other = pickle.loads(pickle.dumps(model))
        assert list(other[0]._forward_hooks.values()) == [print_nothing]
        own.remove()
        model(torch.ones(1, 3))
    assert not model[0]._forward_hooks  # type: ignore[index]


def print_nothing(*_: Any) -> None:
    """A hook that a user may have."""


def test_a_class_with_a_state_of_its_own_keeps_it() -> None:
    model = Counting()
    with tt.watch(model, None, "*:output") as watch, watch.step():
        model(torch.ones(1, 2))
        state = model.__getstate__()
        assert state["saved"] is True
        assert not state["_forward_hooks"]
        assert "__getstate__" not in state
    assert "__getstate__" not in model.__dict__


class Counting(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "saved": True}


def test_a_saved_model_loads_where_torchtap_is_not_installed(tmp_path: Path) -> None:
    model = mlp()
    with tt.watch(model, None, "*:output") as watch, watch.step():
        model(torch.ones(1, 3))
        torch.save(model, tmp_path / "model.pt")
    program = f"""
import sys
sys.modules["torchtap"] = None
import torch
model = torch.load({str(tmp_path / "model.pt")!r}, weights_only=False)
print(tuple(model(torch.ones(1, 3)).shape))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "(1, 2)", done.stderr
