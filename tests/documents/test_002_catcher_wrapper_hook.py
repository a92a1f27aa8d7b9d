"""The article on catchers, wrappers, hooks and their like, in its order: each by hand, and its counterpart."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.optional import need
from torch import Tensor, nn

import torchtap as tt

ROOT = Path(__file__).parents[2]


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 5), nn.ReLU())


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(1, 10)


class SimpleModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear1 = nn.Linear(10, 5)
        self.relu = nn.ReLU()
        self.linear2 = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear2(self.relu(self.linear1(x)))


def test_a_catcher_around_a_layer(model: nn.Sequential, x: Tensor) -> None:
    class HandMade(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer
            self.seen: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            self.seen.append(x)
            output = self.layer(x)
            self.seen.append(output)
            return output

    layer = model[0]
    keys = list(model.state_dict())
    model[0] = HandMade(model[0])
    expected = model(x)
    by_hand = model[0].seen
    model[0] = layer
    with tt.capture(model, "0:input", "0:output", way="wrap") as seen:
        assert list(model.state_dict()) == keys  # the hand-made one renames them
        assert torch.equal(model(x), expected)
    assert torch.equal(seen["0:input"], by_hand[0])
    assert torch.equal(seen["0:output"], by_hand[1])
    assert model[0] is layer


def test_a_catcher_takes_a_layer_s_place(model: nn.Sequential, x: Tensor) -> None:
    Catcher = tt.Catcher
    layer, expected = model[0], model(x)
    model[0] = Catcher(model[0])
    output = model(x)
    assert torch.equal(output, expected)
    assert isinstance(model[0], nn.Module)
    assert torch.equal(model[0].calls[0].args[0], x)
    assert torch.equal(model[0].outputs[0], layer(x))
    assert model[0].in_features == 10  # what the catcher does not have is the layer's
    model[0] = model[0].layer
    assert model[0] is layer


def test_a_catcher_in_a_layer_s_place_keeps_keywords_and_stops() -> None:
    class Block(nn.Module):
        def forward(self, x: Tensor, *, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
            return x * scale

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(2))
            self.reached = 0

        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks[0](x, mask=x > 0, scale=0.5)
            self.reached += 1
            return self.blocks[1](x)

    model = Model()
    model.blocks[0] = tt.Catcher(model.blocks[0], stop=True, limit=2)
    batches = [torch.randn(2, 3) for _ in range(3)]
    for batch in batches[:2]:
        with pytest.raises(ValueError):  # which calibration code everywhere passes over
            model(batch)
    assert model.reached == 0
    args, kwargs = model.blocks[0].calls[1]
    assert torch.equal(args[0], batches[1])
    assert torch.equal(kwargs["mask"], batches[1] > 0)
    assert kwargs["scale"] == 0.5
    assert torch.equal(model(batches[2]), batches[2] * 0.5)  # it has its two calls and lets all others pass
    assert len(model.blocks[0].calls) == 2


def test_a_wrapper_that_accumulates_products_of_inputs() -> None:
    class Accumulating(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.wrapped_layer, self.total = layer, torch.zeros(10, 10, dtype=torch.float64)

        def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            rows = input.flatten(0, -2).double()
            self.total += rows.T @ rows
            return self.wrapped_layer(input, *args, **kwargs)

    torch.manual_seed(0)
    model, batches = SimpleModel(), [torch.randn(4, 3, 10) for _ in range(5)]
    original = model.linear1
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if child is original:
                setattr(module, name, Accumulating(child))
    for batch in batches:
        model(batch)
    total = model.linear1.total
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Accumulating):
                setattr(module, name, child.wrapped_layer)
    assert model.linear1 is original

    with tt.capture(model, "linear1:input", keep=tt.Gram(), way="wrap") as seen:
        assert model.linear1 is not original
        assert isinstance(model.linear1, nn.Linear)
        for batch in batches:
            model(batch)
    assert model.linear1 is original
    torch.testing.assert_close(seen["linear1:input"]["gram"], total)


def test_handlers_of_ones_own_are_wrapped_around_layers_and_taken_off() -> None:
    class AQEngine:
        """Accumulates XTX of what its layer is given."""

        def __init__(self, layer: nn.Linear) -> None:
            self.layer, self.XTX, self.nsamples = layer, torch.zeros(layer.in_features, layer.in_features), 0

        def add_batch(self, inputs: Tensor) -> None:
            rows = inputs.flatten(0, -2)
            self.XTX += rows.T @ rows
            self.nsamples += len(rows)

    class GPTQ(AQEngine):
        def add_batch(self, inputs: Tensor, outputs: Tensor) -> None:  # type: ignore[override]
            assert torch.equal(self.layer(inputs), outputs)
            super().add_batch(inputs)

    class _LayerWrapperThatAccumulatesXTX(nn.Module):
        def __init__(self, layer: nn.Module, aq_handler: AQEngine) -> None:
            super().__init__()
            self.wrapped_layer, self.aq_handler = layer, aq_handler

        def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            self.aq_handler.add_batch(input)
            return self.wrapped_layer(input, *args, **kwargs)

    torch.manual_seed(0)
    layer, batches = SimpleModel(), [torch.randn(4, 3, 10) for _ in range(5)]
    aq_handlers = {name: AQEngine(getattr(layer, name)) for name in ("linear1", "linear2")}
    wrapped_layer_to_hander = {aq_handler.layer: aq_handler for aq_handler in aq_handlers.values()}
    for module in list(layer.modules()):
        for child_name, child in list(module.named_children()):
            if child in wrapped_layer_to_hander:
                setattr(
                    module, child_name, _LayerWrapperThatAccumulatesXTX(child, wrapped_layer_to_hander[child])
                )
    for batch in batches:
        layer(batch)
    for module in list(layer.modules()):
        for child_name, child in list(module.named_children()):
            if isinstance(child, _LayerWrapperThatAccumulatesXTX):
                setattr(module, child_name, child.wrapped_layer)

    ours = {"linear1": AQEngine(layer.linear1), layer.linear2: GPTQ(layer.linear2)}
    keys, before = list(layer.state_dict()), list(layer.modules())
    handed = tt.hand_over(layer, ours)
    for batch in batches:
        layer(batch)
        assert list(layer.state_dict()) == keys
    handed.remove()
    layer(batches[0])
    assert list(layer.modules()) == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in layer.modules())
    for mine, theirs in zip(ours.values(), aq_handlers.values(), strict=True):
        assert torch.equal(mine.XTX, theirs.XTX)
        assert mine.nsamples == theirs.nsamples == 60


def test_a_handler_s_mistakes_are_told(model: nn.Sequential) -> None:
    with pytest.raises(ValueError, match="hand_over: '7' is no layer of this model; its layers are '0', '1'"):
        tt.hand_over(model, {"7": print})
    with pytest.raises(ValueError, match=r"3 has no add_batch\(inputs, outputs\)"):
        tt.hand_over(model, {"0": 3})  # type: ignore[dict-item]
    seen: list[int] = []
    with tt.hand_over(model, {"0": lambda inputs, outputs: seen.append(len(inputs))}):
        with pytest.raises(RuntimeError):
            model(torch.zeros(1, 3))  # does not fit
        model(torch.zeros(2, 10))
    assert seen == [2]


def test_a_forward_hook(model: nn.Sequential, x: Tensor) -> None:
    by_hand: list[Any] = []

    def forward_hook(module: nn.Module, input: Any, output: Any) -> None:
        by_hand.append((input[0], output))

    handle = model[0].register_forward_hook(forward_hook)
    with tt.capture(model, "0:input", "0:output") as seen:
        model(x)
    handle.remove()
    assert torch.equal(seen["0:input"], by_hand[0][0])
    assert torch.equal(seen["0:output"], by_hand[0][1])
    assert not model[0]._forward_hooks


def test_a_forward_of_ones_own(x: Tensor) -> None:
    class Custom(SimpleModel):
        def forward(self, x: Tensor) -> Tensor:
            x = self.relu(self.linear1(x))
            x = torch.sigmoid(x)
            return self.linear2(x)

    torch.manual_seed(0)
    model = SimpleModel()
    custom = Custom()
    custom.load_state_dict(model.state_dict())
    with tt.edit(model, {"relu:output": torch.sigmoid}):
        assert torch.equal(model(x), custom(x))
    expected = model(x)
    with tt.capture(model, "*:output", way="forward") as seen:
        assert torch.equal(model.forward(x), expected)
    assert len(seen) == 4


def test_intermediate_outputs_returned_beside_the_output(x: Tensor) -> None:
    class Intermediate(SimpleModel):
        def forward(self, x: Tensor) -> Any:
            intermediate_output = self.relu(self.linear1(x))
            return self.linear2(intermediate_output), intermediate_output

    torch.manual_seed(0)
    model = SimpleModel()
    by_hand = Intermediate()
    by_hand.load_state_dict(model.state_dict())
    final_output, values = tt.features(model, ["relu:output"])(x)
    expected_final, expected_intermediate = by_hand(x)
    assert torch.equal(final_output, expected_final)
    assert torch.equal(values["relu:output"], expected_intermediate)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_with_a_graph_and_a_loss(tmp_path: Path, x: Tensor) -> None:
    need("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    torch.manual_seed(0)
    model = SimpleModel()
    sink = tt.TensorBoardSink(tmp_path / "simple_model")
    sink.add_graph(model, x)
    losses = []
    with tt.watch(model, None, "linear1:output", sinks=[sink]) as watch:
        for epoch in range(20):
            with watch.step(epoch=epoch):
                loss = model(x + epoch).sum()
                watch.log("Loss", loss)
                losses.append(loss.item())
    events = EventAccumulator(str(tmp_path / "simple_model")).Reload()
    assert [each.value for each in events.Scalars("value/Loss")] == pytest.approx(losses)
    assert "linear1" in str(events.Graph())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_with_the_writer_that_the_training_has(tmp_path: Path, x: Tensor) -> None:
    need("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path / "runs/simple_model"))
    model = SimpleModel()
    writer.add_graph(model, x)
    with tt.watch(model, None, "linear1:output", sinks=[tt.TensorBoardSink(writer)]) as watch:
        losses, deviations = [], []
        for epoch in range(10):
            with watch.step(epoch):
                output = model(x + epoch)
                loss = torch.sum(output)
            writer.add_scalar("Loss", loss.item(), epoch)
            losses.append(loss.item())
            deviations.append(model.linear1(x + epoch).std().item())
    writer.add_scalar("Loss", 0.0, 10)  # it is still the training's
    writer.close()
    events = EventAccumulator(str(tmp_path / "runs/simple_model")).Reload()
    assert [each.value for each in events.Scalars("Loss")] == pytest.approx([*losses, 0.0])
    assert [each.value for each in events.Scalars("output.std/linear1")] == pytest.approx(
        deviations, rel=1e-4
    )
    assert "linear1" in str(events.Graph())


def test_captum_on_a_trained_model(x: Tensor) -> None:
    attr = need("captum.attr")
    torch.manual_seed(0)
    model = SimpleModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    output = model(x)
    nn.MSELoss()(output, torch.randn_like(output)).backward()
    optimizer.step()
    expected = attr.IntegratedGradients(model).attribute(x.clone().requires_grad_(), target=0)
    found = tt.attribute(model, ":input", method="IntegratedGradients", inputs=x, target=0)
    torch.testing.assert_close(found, expected, check_dtype=False)


def test_calibration_beats_rounding_in_the_quantization_example(capsys: pytest.CaptureFixture[str]) -> None:
    result = runpy.run_path(str(ROOT / "examples" / "gptq_calibration.py"))["main"]()
    assert result["worst layer"] < 1
    assert result["calibrated"] < result["rounded"] / 2
    assert result["one layer rounded"] > 0
    assert "blocks.1.down" in capsys.readouterr().out
