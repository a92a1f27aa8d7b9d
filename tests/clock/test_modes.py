"""Who hears that a model goes to evaluation and back: everybody who listens, and the user's own ``train`` stays."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn

import torchtap as tt
from torchtap.hooks.replace import ModeHook
from torchtap.monitors.trainer import TrainingClock


def keep_frozen(frozen: nn.Module, whole: nn.Module, mode: bool = True) -> nn.Module:
    """The ``train`` of who fine-tunes: one part stays in evaluation."""
    nn.Module.train(whole, mode)
    frozen.eval()
    return whole


def model_with_own_train() -> nn.Sequential:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    model.train = partial(keep_frozen, model[0], model)  # type: ignore[method-assign]
    return model


class Nobody:
    """Is told of epochs and does not care."""

    def epoch_begins(self) -> None: ...
    def batch_begins(self, index: int) -> None: ...
    def epoch_ends(self) -> None: ...
    def epoch_was_none(self) -> None: ...


@pytest.mark.parametrize("first_goes", [True, False])
def test_two_listeners_of_one_model_are_both_told(first_goes: bool) -> None:
    model, heard = nn.Linear(2, 2), {"first": [], "second": []}
    hooks = [ModeHook(model, heard[name].append) for name in heard]
    for hook in hooks:
        hook.put_on()
    model.eval()
    assert heard == {"first": [False], "second": [False]}
    hooks.pop(0 if first_goes else 1).take_off()
    model.train()
    stays, gone = ("second", "first") if first_goes else ("first", "second")
    assert (heard[stays], heard[gone]) == ([False, True], [False])
    hooks.pop().take_off()
    assert not {"train", "__getstate__"} & set(model.__dict__)


def test_a_hook_that_is_taken_off_twice_or_was_never_on_takes_nothing_else_off() -> None:
    model, heard = nn.Linear(2, 2), []
    stays, goes = ModeHook(model, heard.append), ModeHook(model, heard.append)
    stays.put_on()
    goes.take_off()
    model.eval()
    assert heard == [False]
    stays.take_off()
    stays.take_off()
    assert "train" not in model.__dict__


def test_a_train_of_the_users_own_is_called_and_stays() -> None:
    model = model_with_own_train()
    own = model.__dict__["train"]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with tt.watch(model, None, "*:output") as watch:
        watch.follow(optimizer)
        for _ in range(2):
            model.train()
            assert (model[0].training, model[1].training) == (False, True)
            model(torch.randn(4, 3)).sum().backward()
            optimizer.step()
            model.eval()
            model(torch.randn(4, 3))
    assert model.__dict__["train"] is own
    model.train()
    assert not model[0].training


def test_copies_of_a_followed_model_have_the_users_train_and_not_torchtaps() -> None:
    model = nn.Linear(2, 2)
    model.train = partial(nn.Module.train, model)  # type: ignore[method-assign]
    hook = ModeHook(model, [].append)
    hook.put_on()
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(again.__dict__["train"]) is partial
        assert again.__dict__["train"].args[0] is again
    hook.take_off()


def test_a_train_that_the_user_puts_on_meanwhile_stays() -> None:
    model, heard = nn.Linear(2, 2), []
    hook = ModeHook(model, heard.append)
    hook.put_on()
    inner = model.train
    later = model.train = lambda mode=True: inner(mode)  # type: ignore[method-assign,misc]
    model.eval()
    assert heard == [False]
    hook.take_off()
    assert model.__dict__["train"] is later
    assert model.train().training
    assert heard == [False]


def test_a_trainers_clock_takes_no_other_listener_off() -> None:
    model, heard = nn.Linear(2, 2).eval(), []
    hook = ModeHook(model, heard.append)
    hook.put_on()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(4, 2)), batch_size=2)
    with TrainingClock(model, Nobody()) as clock:
        for _ in loader:  # begins in evaluation, which the first batch changes
            model.train()
            model(torch.randn(2, 2))
        assert clock.batches == 2
    model.eval()
    assert heard == [True, True, False]
    hook.take_off()
    assert "train" not in model.__dict__
