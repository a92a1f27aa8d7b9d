"""Each kind of site, on each model, against hand-written hooks and autograd."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from tests.models import CASES, CNN, GPT, Case, make, tensors_of
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.checkpoint import checkpoint

import torchtap as tt
from torchtap.hooks.leaves import map_leaves

ALL = sorted(CASES)


class ByHand:
    """What a user would write: hooks that keep clones of inputs and outputs, and the outputs themselves."""

    def __init__(self, model: nn.Module) -> None:
        self.inputs: dict[str, list[list[Tensor]]] = {}
        self.outputs: dict[str, list[list[Tensor]]] = {}
        self.raw: dict[str, list[list[Tensor]]] = {}
        self.handles = []
        for path, module in model.named_modules():
            self.handles.append(module.register_forward_pre_hook(self._pre(path), with_kwargs=True))
            self.handles.append(module.register_forward_hook(self._post(path)))

    def _pre(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.inputs.setdefault(path, []).append([t.detach().clone() for t in tensors_of([*args, kwargs])])

        return hook

    def _post(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            found = tensors_of(output)
            self.raw.setdefault(path, []).append(found)
            self.outputs.setdefault(path, []).append([t.detach().clone() for t in found])

        return hook

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


def captured(seen: tt.Seen, path: str, kind: str) -> list[list[Tensor]]:
    """What torchtap has of one module, call by call, leaves in order."""
    calls: dict[int, list[Tensor]] = {}
    for name in seen:
        site = tt.Site.parse(name)
        if site.path == path and site.kind == kind:
            calls.setdefault(site.call, []).append(seen[name])
    return [calls[call] for call in sorted(calls)]


@pytest.mark.parametrize("name", ALL)
def test_inputs_and_outputs_equal_those_of_hand_written_hooks(name: str) -> None:
    case = make(name)
    by_hand = ByHand(case.model)
    case.loss()
    by_hand.remove()
    case = make(name)  # afresh: running a batch norm changes it
    with tt.capture(case.model, "*:output", "*:input") as seen:
        case.loss()
    for kind, expected in (("input", by_hand.inputs), ("output", by_hand.outputs)):
        for path, calls in expected.items():
            calls = [leaves for leaves in calls if leaves]
            got = captured(seen, path, kind)
            assert len(got) == len(calls), (path, kind)
            for got_leaves, leaves in zip(got, calls, strict=True):
                assert len(got_leaves) == len(leaves), (path, kind)
                assert all(torch.equal(a, b) for a, b in zip(got_leaves, leaves, strict=True)), (path, kind)


@pytest.mark.parametrize("name", ALL)
def test_gradients_of_outputs_equal_autograds(name: str) -> None:
    case = make(name)
    by_hand = ByHand(case.model)
    loss = case.loss()
    by_hand.remove()
    expected = {}
    for path, calls in by_hand.raw.items():
        for call, leaves in enumerate(calls):
            wanted = [t for t in leaves if t.requires_grad]
            if wanted:
                found = torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True)
                expected[path, call] = [g for g in found if g is not None]
    case = make(name)
    with tt.capture(case.model, "*:grad_output") as seen:
        case.loss().backward()
    for (path, call), gradients in expected.items():
        if not gradients:
            continue
        got = captured(seen, path, "grad_output")[call]
        assert len(got) == len(gradients), path
        assert all(torch.equal(a, b) for a, b in zip(got, gradients, strict=True)), path


@pytest.mark.parametrize("name", ALL)
def test_parameters_their_gradients_and_buffers_equal_the_models_own(name: str) -> None:
    case = make(name)
    taps = ["*:param", "*:param_grad"]
    if list(case.model.buffers()):
        taps.append("*:buffer")
    with tt.capture(case.model, *taps) as seen:
        case.loss().backward()
    names = {id(t): 0 for t in case.model.parameters()}
    for path, parameter in case.model.named_parameters(remove_duplicate=False):
        module, _, leaf = path.rpartition(".")
        assert torch.equal(seen[f"{module}:param.{leaf}"], parameter)
        if parameter.grad is not None:
            assert torch.equal(seen[f"{module}:param_grad.{leaf}"], parameter.grad)
        names[id(parameter)] += 1
    for path, buffer in case.model.named_buffers():
        module, _, leaf = path.rpartition(".")
        assert torch.equal(seen[f"{module}:buffer.{leaf}"], buffer)
    assert sum(":param." in name for name in seen) == len(names)  # a tied parameter has one site


@pytest.mark.parametrize("name", ALL)
def test_statistics_of_all_outputs_equal_those_of_the_tensors(name: str) -> None:
    case = make(name)
    with tt.capture(case.model, tt.tap("*:output"), tt.tap("*:output", tt.Full())) as seen:
        case.loss()
    assert len(seen)
    for site in seen:
        kept = seen[site]
        value = kept["full"].double()
        assert kept["stats"]["count"] == value.numel()
        assert kept["stats"]["mean"] == pytest.approx(value.mean().item(), rel=1e-6, abs=1e-7)
        if value.numel() > 1:
            assert kept["stats"]["std"] == pytest.approx(value.std().item(), rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("name", ALL)
def test_taps_change_neither_outputs_nor_gradients_nor_buffers(name: str) -> None:
    plain, tapped = make(name), make(name)
    plain_loss = plain.loss()
    plain_loss.backward()
    with tt.capture(tapped.model, "*:*", keep=tt.Stats()):
        tapped_loss = tapped.loss()
        tapped_loss.backward()
    assert torch.equal(plain_loss, tapped_loss)
    for a, b in zip(plain.model.parameters(), tapped.model.parameters(), strict=True):
        assert (a.grad is None and b.grad is None) or torch.equal(a.grad, b.grad)  # type: ignore[arg-type]
    for a, b in zip(plain.model.buffers(), tapped.model.buffers(), strict=True):
        assert torch.equal(a, b)


def test_grad_input_is_the_gradient_of_the_value_that_came_in() -> None:
    case = make("gpt")
    by_hand: dict[str, Tensor] = {}
    kept = []

    def keep(path: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            kept.append((path, args[0]))

        return hook

    handles = [m.register_forward_pre_hook(keep(p)) for p, m in case.model.named_modules() if "blocks." in p]
    loss = case.loss()
    for handle in handles:
        handle.remove()
    for path, value in kept:
        by_hand[path] = torch.autograd.grad(loss, value, retain_graph=True)[0]
    case = make("gpt")
    with tt.capture(case.model, "blocks.**:grad_input") as seen:
        case.loss().backward()
    assert len(seen) == len(by_hand)
    for path, gradient in by_hand.items():
        assert torch.equal(seen[f"{path}:grad_input"], gradient)


@pytest.mark.parametrize("build", [lambda inplace: CNN(inplace), lambda inplace: GPT()], ids=["cnn", "gpt"])
def test_an_in_place_op_after_a_module_changes_neither_value_nor_gradient(build: Any) -> None:
    def run(inplace: bool) -> dict[str, Tensor]:
        torch.manual_seed(3)
        model = build(inplace)
        if isinstance(model, GPT):
            for block in model.blocks:
                block.mlp[1] = nn.ReLU(inplace=inplace)
        x = torch.randint(0, 11, (2, 6)) if isinstance(model, GPT) else torch.randn(2, 3, 6, 6)
        with tt.capture(model, "*:output", "*:grad_output") as seen:
            model(x).pow(2).mean().backward()
        return dict(seen)

    plain, changed = run(False), run(True)
    assert plain.keys() == changed.keys()
    assert all(torch.equal(plain[site], changed[site]) for site in plain)


@pytest.mark.parametrize("how", ["reentrant", "non-reentrant"])
def test_a_checkpointed_value_is_taken_once_and_its_gradient_too(how: str) -> None:
    def run(checkpointed: str | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
        torch.manual_seed(5)
        model = GPT(checkpointed=checkpointed).train()
        tokens = torch.randint(0, 11, (2, 6))
        with tt.capture(model, "*:output", "*:grad_output", "*:grad_input") as seen:
            model(tokens).pow(2).mean().backward()
        with tt.capture(model, "*:output", "*:attention", "*:grad_input", keep=tt.Stats()) as counted:
            model(tokens).pow(2).mean().backward()
        return dict(seen), dict(counted)

    plain, plain_counts = run(None)
    again, again_counts = run(how)
    assert plain.keys() == again.keys()
    assert all(torch.allclose(plain[site], again[site], atol=1e-7) for site in plain)
    assert plain_counts.keys() == again_counts.keys()
    assert all(plain_counts[site]["count"] == again_counts[site]["count"] for site in plain_counts)


def test_a_value_that_passes_through_a_checkpoint_has_its_gradient_taken_once() -> None:
    class Biased(nn.Module):
        def forward(self, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
            return (x + bias).relu(), bias

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.block = nn.Linear(3, 3), Biased()

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            x, bias = checkpoint(self.block, x, x.mean(0, keepdim=True), use_reentrant=False)
            return x + bias

    with tt.capture(model := Net(), "block:grad_output", "block:grad_input") as seen:
        model(torch.randn(4, 3)).sum().backward()
    assert seen["block:grad_output.1"].shape == seen["block:grad_input.bias"].shape == (1, 3)
    assert seen["block:grad_input.x"].shape == (4, 3)


def test_values_under_autocast_have_the_dtype_that_the_model_gave_them() -> None:
    case = make("gpt")
    with tt.capture(case.model, "attn:output", "ln1:output") as seen, torch.autocast("cpu", torch.bfloat16):
        case.loss()
    assert seen["blocks.0.attn:output"].dtype == torch.bfloat16
    assert seen["blocks.0.ln1:output"].dtype == torch.float32


def test_a_frozen_parameter_has_no_gradient_and_the_coverage_says_so() -> None:
    case = make("mlp")
    case.model[0].weight.requires_grad_(False)  # type: ignore[index,union-attr]
    with tt.capture(case.model, "*:param_grad") as seen:
        case.loss().backward()
    assert "0:param_grad.weight" not in seen
    assert "2:param_grad.weight" in seen
    [missing] = seen.coverage()
    assert missing.site == "0:param_grad.weight"
    assert "frozen" in missing.reason


def test_requires_grad_switched_on_midway_is_followed() -> None:
    case = make("mlp")
    case.model.requires_grad_(False)
    watch = tt.watch(case.model, None, [tt.tap("*:grad_output"), tt.tap("*:param_grad")])
    with watch.step():
        case.model(*case.args)
    assert {missing.site for missing in watch.coverage()} >= {"0:grad_output", "0:param_grad.weight"}
    case.model.requires_grad_(True)
    with watch.step():
        case.loss().backward()
    watch.close()
    assert watch.coverage() == []


def test_a_case_really_needs_gradients() -> None:
    """The reference tests above would be empty if no loss depended on any parameter."""
    for name in ALL:
        case: Case = make(name)
        case.loss().backward()
        assert any(p.grad is not None for p in case.model.parameters()), name


def test_a_watched_model_can_be_traced_and_the_pass_that_traces_it_is_no_part_of_the_step() -> None:
    model, x, sink = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), torch.randn(2, 3), tt.MemorySink()
    with tt.watch(model, None, ["*:output", "*:grad_output"], sinks=[sink]) as watch, watch.step():
        traced = torch.jit.trace(model, torch.randn(5, 3), check_trace=False)
        model(x).sum().backward()
        torch.jit.trace(model, torch.randn(5, 3), check_trace=False)
    assert not watch.lost
    assert sink.series("0:output", "count").values.tolist() == [6]
    assert torch.equal(traced(x), model(x))


def test_a_packed_sequence_is_seen_and_can_be_built_again() -> None:
    rnn = nn.LSTM(3, 4)
    packed = pack_sequence([torch.randn(3, 3), torch.randn(2, 3)])
    with tt.capture(nn.Sequential(rnn), "0:output", "0:input") as seen:
        output, _ = rnn(packed)
    assert torch.equal(seen["0:output.0.data"], output.data)
    assert torch.equal(seen["0:input.input.data"], packed.data)
    rebuilt = map_leaves(output, lambda _, tensor: tensor + 1)
    assert torch.equal(rebuilt.data, output.data + 1)
    assert type(rebuilt) is type(output)


def test_a_structure_that_refuses_to_be_built_again_does_not_stop_the_model() -> None:
    class Strict(list[Tensor]):
        def __init__(self, first: Tensor, second: Tensor) -> None:
            super().__init__((first, second))

    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Strict:
            return Strict(x, x + 1)

    with tt.capture(model := Odd()) as seen:
        model(torch.zeros(2))
    assert seen[":output.1"].tolist() == [1, 1]


def test_a_gradient_is_what_comes_to_the_value_whatever_hooks_later_code_puts_on_it() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x)
            if y.requires_grad:
                y.register_hook(lambda gradient: gradient * 10)
            return y * 2

    model = Scaled()
    for shape in ((2, 3), (2, 2, 3)):  # the second is a view
        with tt.capture(model, "inner:grad_output") as seen:
            x = torch.ones(shape, requires_grad=True)
            model(x).sum().backward()
        assert torch.equal(seen["inner:grad_output"], torch.full(shape, 2.0))
        assert x.grad is not None
        torch.testing.assert_close(x.grad, (torch.full(shape, 20.0) @ model.inner.weight).detach())


def test_asking_for_a_gradient_holds_nothing_afterwards() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    alive = weakref.ref(model[0])
    with tt.capture(model, "*:grad_output") as seen:
        model(torch.ones(2, 3)).sum().backward()
    assert len(seen) == 3
    del model, seen
    gc.collect()
    assert alive() is None
