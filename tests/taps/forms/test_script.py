"""TorchScript, made here and only loaded: right names, late taps, switching on and off."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from tests.taps.forms.making import saved_script
from tests.taps.forms.structures import UsesKeywords, UsesTensor
from torch import Tensor, nn

import torchtap as tt
from torchtap.forms.attach import tree_of
from torchtap.plan.sites import places
from torchtap.store.write.manifest import source_of


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Steered(nn.Module):
    """Two instances of one class, in a loop and in a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.looped = Cell()
        self.chosen = Cell()

    def forward(self, x: Tensor, times: int = 2) -> Tensor:
        for _ in range(times):
            x = self.looped(x)
        if bool(x.sum() > 1000):
            x = x + 1
        else:
            x = self.chosen(x)
        return x


def test_instances_of_one_class_in_loops_and_branches_keep_their_names() -> None:
    model, x = Steered(), torch.randn(2, 4)
    with tt.capture(model, "*:output", "*:input", "*:grad_output") as eager:
        model(x, 3).sum().backward()
    loaded = saved_script(torch.jit.script(model))
    with tt.capture(loaded, "*:output", "*:input", "*:grad_output") as seen:
        loaded(x, 3).sum().backward()
    assert set(seen) == set(eager)
    assert "looped.linear:output#2" in seen
    for name in eager:
        assert torch.equal(seen[name], eager[name]), name


def test_taps_that_come_after_many_runs_are_not_ignored() -> None:
    model = torch.jit.script(Steered())
    x = torch.randn(2, 4)
    for _ in range(4):
        model(x)
    with tt.capture(model, "*:output") as seen:
        output = model(x)
    assert torch.equal(seen[":output"], output)


def test_leaving_the_block_leaves_the_scripted_model_as_it_was() -> None:
    model = torch.jit.script(Steered())
    before = dict(model.__dict__)
    code = model.code
    with pytest.raises(ZeroDivisionError), tt.capture(model, "*:output"):
        raise ZeroDivisionError
    assert model.__dict__.keys() == before.keys()
    assert model.code == code


def test_training_through_a_tapped_copy_trains_the_model_itself() -> None:
    model = torch.jit.script(UsesTensor())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = model.head.weight.detach().clone()
    with tt.capture(model, "*:output", "*:param_grad") as seen:
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
    assert not torch.equal(model.head.weight, before)
    assert "head:param_grad.weight" in seen
    assert int(model.made.norm.num_batches_tracked) == 1


class Counting(nn.Module):
    """Keeps state in attributes that its forward assigns to."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.calls = 0
        self.register_buffer("latest", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.latest = x.sum().reshape(1)
        return self.dropout(x)


def test_attributes_and_the_training_mode_stay_the_same_in_the_model_and_its_tapped_copy() -> None:
    model, x = torch.jit.script(Counting()), torch.ones(3, 4)
    model(x)
    watch = tt.watch(model, None, "*:output")
    with watch.step():
        model(x)
    model.eval()
    with watch.step():
        assert torch.equal(model(2 * x), 2 * x)  # no dropout
    watch.close()
    assert model.calls == 3
    assert float(model.latest) == 24


def test_a_saved_artefact_is_switched_on_and_off_without_scripting_again() -> None:
    model, x = UsesKeywords(), torch.randn(3, 4)
    artefact = saved_script(torch.jit.script(tt.instrument(model, "made:output", "made:input")))
    expected = model(x)
    assert torch.equal(artefact(x), expected)
    for _ in range(2):
        with tt.capture(artefact, "made:*") as seen:
            artefact(x)
        assert set(seen) == {
            "made:input.x", "made:input.others.0", "made:input.others.1", "made:input.mask", "made:output",
        }  # fmt: skip
        assert torch.equal(artefact(x), expected)


def test_a_frozen_file_made_elsewhere_says_that_its_modules_are_gone() -> None:
    frozen = saved_script(torch.jit.freeze(torch.jit.script(Steered().eval())))
    assert tt.list_sites(frozen, "output") == [":output"]
    with pytest.raises(tt.SelectionError):
        tt.capture(frozen, "looped:output")


def test_a_second_session_on_one_scripted_model_is_refused_in_words() -> None:
    model = torch.jit.script(Steered())
    with tt.capture(model, "*:output"), pytest.raises(tt.SessionError, match="one session"):
        tt.capture(model, "*:input").__enter__()
    with tt.capture(model, "*:output") as seen:
        model(torch.randn(2, 4))
    assert ":output" in seen


def test_two_threads_with_two_models_of_one_file_do_not_mix() -> None:
    x = torch.randn(2, 4)
    models = [torch.jit.script(Steered()) for _ in range(2)]
    wrong: list[Any] = []

    def work(model: Any) -> None:
        for _ in range(10):
            with tt.capture(model, "*:output") as seen:
                output = model(x)
            if not torch.equal(seen[":output"], output) or len(seen) != 7:
                wrong.append(list(seen))

    threads = [threading.Thread(target=work, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("form", ["script", "export"])
def test_a_site_knows_its_source_in_a_file_that_was_only_loaded(form: str) -> None:
    from tests.taps.forms.making import saved_program

    model, x = UsesTensor(), torch.randn(3, 4)
    if form == "script":
        loaded = saved_script(torch.jit.script(model))
    else:
        loaded = saved_program(torch.export.export(model, (x,))).module()
    sources = {place.path: source_of(place.module) or "" for place in places(tree_of(loaded))}
    assert "structures.py:" in sources["made"]
    assert "linear.py:" in sources["head"]


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.linear(x)
        return {"made": y, "count": 3, "all": [y, y + 1], "named": {"sum": y.sum()}, "pair": (y * 2, y * 3)}


def test_a_scripted_dictionary_of_mixed_values_gives_its_tensors() -> None:
    scripted, x = torch.jit.script(Mixed()), torch.randn(3, 4)
    with tt.capture(scripted) as seen:
        output = scripted(x)
    assert not seen.coverage()
    assert torch.equal(seen[":output.made"], output["made"])
    assert torch.equal(seen[":output.all.1"], output["all"][1])
    assert torch.equal(seen[":output.named.sum"], output["named"]["sum"])
    assert torch.equal(seen[":output.pair.1"], output["pair"][1])


def test_a_trace_that_calls_python_says_that_it_cannot_be_tapped() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return gradients[0] * 2

    class Uses(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Double.apply(x)  # type: ignore[no-any-return, no-untyped-call]

    traced = torch.jit.trace(Uses(), torch.randn(3))
    with pytest.raises(tt.FormError, match="calls Python"):
        tt.capture(traced)
