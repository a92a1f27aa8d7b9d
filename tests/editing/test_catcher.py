"""A `Catcher` runs a model as far as one place, and no further."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.models import GPT, Structured
from torch import Tensor, nn

import torchtap as tt


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    return GPT()


def test_it_keeps_the_first_block_s_inputs_and_runs_nothing_after(model: GPT) -> None:
    batches = [torch.randint(0, 11, (2, 6)) for _ in range(3)]
    with tt.capture(model, "*:output") as seen, tt.Catcher(model, "blocks.0:input") as caught:
        results = [model(batch) for batch in batches]
    assert results == [None, None, None]
    assert {site.partition(":")[0] for site in seen} == {"embedding"}
    assert len(caught) == 3
    for (args, kwargs), batch in zip(caught.calls, batches, strict=True):
        assert torch.equal(args[0], model.embedding(batch))
        assert kwargs == {}
        x = model.blocks[1](model.blocks[0](*args, **kwargs))
        assert torch.equal(model.head(model.norm(x)), model(batch))


def test_keywords_are_kept_and_values_are_copies() -> None:
    model = Structured()
    batch = {"x": torch.randn(4, 6), "mask": torch.ones(4, 6)}
    with tt.Catcher(model, "inner") as caught:
        model(batch, scale=torch.tensor(2.0))
    batch["mask"].zero_()
    (call,) = caught.calls
    assert list(call.kwargs) == ["mask", "scale"]
    assert call.kwargs["mask"].all()
    assert not call.args[0].requires_grad


def test_the_model_is_as_before_afterwards_also_when_the_body_raised(model: GPT) -> None:
    tokens = torch.randint(0, 11, (2, 6))
    expected = model(tokens)
    with pytest.raises(KeyError), tt.Catcher(model, "blocks.0:input"):
        model(tokens)
        raise KeyError
    assert torch.equal(model(tokens), expected)
    assert "forward" not in vars(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_model_s_own_handlers_let_it_pass() -> None:
    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Any:
            try:
                return self.fc(x)
            except Exception:
                return "handled"

    with tt.Catcher(Careful(), "fc:input") as caught:
        assert caught._model(torch.zeros(1, 2)) is None


def test_it_can_let_the_model_go_on_and_stop_after_a_number(model: GPT) -> None:
    tokens = torch.randint(0, 11, (2, 6))
    with tt.Catcher(model, "blocks.0:output", stop=False) as caught:
        assert model(tokens) is not None
    assert caught.outputs[0].shape == (2, 6, 16)
    with tt.Catcher(model, "blocks.0:input", limit=2) as caught:
        results = [model(tokens) for _ in range(4)]
    assert len(caught) == 2
    assert [result is None for result in results] == [True, True, False, False]


def test_the_model_s_own_input_and_output_are_places_too(model: GPT) -> None:
    tokens = torch.randint(0, 11, (2, 6))
    with tt.Catcher(model, ":input") as caught:
        assert model(tokens) is None
    assert torch.equal(caught.calls[0].args[0], tokens)
    with tt.Catcher(model, ":output", stop=False) as caught:
        assert torch.equal(model(tokens), caught.outputs[0])


def test_a_compiled_model_is_stopped_too(model: GPT) -> None:
    tokens = torch.randint(0, 11, (2, 6))
    compiled = torch.compile(model, backend="eager")
    expected = compiled(tokens)
    with tt.Catcher(compiled, "blocks.1:input") as caught:
        assert compiled(tokens) is None
    assert torch.equal(caught.calls[0].args[0], model.blocks[0](model.embedding(tokens)))
    assert torch.equal(compiled(tokens), expected)
    torch._dynamo.reset()


def test_it_waits_at_one_place_only(model: GPT) -> None:
    with pytest.raises(ValueError, match=r"a Catcher waits at one module's input or output.* blocks.1:input"):
        tt.Catcher(model, "blocks.*:input")
    with pytest.raises(ValueError, match=r"picks norm:param\.weight"):
        tt.Catcher(model, "norm:param.weight")
