"""Goldens: the same function passes however it is written, a fault is named by its module, bad input has a message."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchtap import golden
from torchtap.errors import CompareError
from torchtap.golden import store


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).transpose(1, 2) / 4
        out: Tensor = self.o(scores.softmax(-1) @ self.v(x))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(16), Attention()
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        out: Tensor = x + self.mlp(x)
        return out


class Model(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(16, 20)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


IDS = torch.arange(24).view(3, 8) * 7 % 19


def made() -> Model:
    torch.manual_seed(0)
    return Model().eval()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("golden")
    golden.record("model", made(), (IDS,), root=folder)
    return folder


def check(model: Any, root: Path, inputs: Any = (IDS,)) -> golden.Verdict:
    return golden.check("model", model, inputs, root=root)


def test_the_same_model_is_the_same_and_is_left_unchanged(root: Path) -> None:
    model = made()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    assert check(model, root).same
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@torch.no_grad()
def _one_weight(model: Model) -> None:
    model.blocks[1].mlp[0].weight[3, 4] += 0.02  # type: ignore[index, operator]


@torch.no_grad()
def _unused_row(model: Model) -> None:
    model.tokens.weight[19] += 1.0


def _scaled(model: Model) -> None:
    inner = model.blocks[0].attn.forward
    model.blocks[0].attn.forward = lambda x: inner(x) * 1.25  # type: ignore[operator, union-attr, assignment]


def _eps(model: Model) -> None:
    model.blocks[1].norm.eps = 1e-6  # type: ignore[union-attr, assignment]


def _half(model: Model) -> None:
    model.bfloat16()


FAULTS = {
    "one weight": (_one_weight, "blocks.1.mlp.0", "weights changed: blocks.1.mlp.0:param.weight"),
    "unused row": (_unused_row, "tokens", "these inputs do not use it"),
    "scaled": (_scaled, "blocks.0.attn", "about 1.25 × the golden's values"),
    "eps": (_eps, "blocks.1.norm", "settings: eps=1e-05 became eps=1e-06"),
    "bfloat16": (_half, "tokens", "float32 became bfloat16"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_by_its_module_and_its_cause(root: Path, name: str) -> None:
    change, layer, cause = FAULTS[name]
    model = made()
    change(model)
    verdict = check(model, root)
    assert verdict.layer == layer
    assert cause in verdict.cause
    assert cause in str(verdict)


class Renamed(nn.Module):
    """The same function with other names and one projection for query, key and value."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.embedding, self.layers, self.logits = model.tokens, model.blocks, model.head
        for block in model.blocks:
            old: Any = block.attn
            new = nn.Linear(16, 48)
            with torch.no_grad():
                new.weight.copy_(torch.cat([old.q.weight, old.k.weight, old.v.weight]))
                new.bias.copy_(torch.cat([old.q.bias, old.k.bias, old.v.bias]))
            block.attn = Fused(new, old.o)

    def forward(self, ids: Tensor) -> tuple[Tensor]:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return (self.logits(x),)


class Fused(nn.Module):
    def __init__(self, qkv: nn.Linear, out: nn.Linear) -> None:
        super().__init__()
        self.qkv, self.out = qkv, out

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        out: Tensor = self.out(nn.functional.scaled_dot_product_attention(q, k, v))
        return out


def test_renamed_modules_fused_projections_and_another_kernel_are_the_same(root: Path) -> None:
    verdict = check(Renamed(made()), root)
    assert verdict.same
    assert "sites are not there" in str(verdict)


def test_a_reordered_batch_is_the_same(root: Path) -> None:
    verdict = check(made(), root, (IDS.flip(0),))
    assert verdict.same
    assert "another order" in str(verdict)


def test_other_inputs_are_named_as_inputs(root: Path) -> None:
    assert check(made(), root, (IDS + 1,)).layer == "(inputs)"


def test_a_compiled_model_is_the_same(root: Path) -> None:
    assert check(torch.compile(made(), backend="aot_eager"), root).same


def test_a_compiler_s_fault_is_named_as_one(root: Path) -> None:
    def wrong(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        return lambda *args: tuple(each * 1.001 for each in graph(*args))

    verdict = check(torch.compile(made(), backend=wrong), root)
    assert not verdict.same
    assert "run eagerly it agrees" in verdict.cause


def test_the_noise_of_this_machine_is_measured_if_the_recorded_one_is_too_small(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A golden from a machine without any noise, and a run whose values are a few units away.
    model = made()
    with torch.no_grad():
        model.head.weight.mul_(1 + 2e-7)
    loaded = store.load(root, "model")
    loaded.floors = dict.fromkeys(loaded.floors, 0.0)
    monkeypatch.setattr("torchtap.golden.front.load", lambda *_: loaded)
    verdict = check(model, root)
    assert verdict.same
    assert "moved by one ULP" in verdict.basis or "recorded" in verdict.basis


def test_a_golden_of_the_size_of_gpt2_has_less_than_a_megabyte(tmp_path: Path) -> None:
    torch.manual_seed(0)
    folder = golden.record("deep", Model(layers=16).eval(), (IDS,), root=tmp_path)  # as many sites as GPT-2
    assert len(store.load(tmp_path, "deep").sites) > 320
    assert sum(path.stat().st_size for path in folder.iterdir()) < 1e6


def test_the_manifest_has_one_line_for_each_weight_and_site(root: Path) -> None:
    lines = (root / "model" / "manifest.json").read_text().splitlines()
    assert sum("blocks.1.mlp.0:param.weight" in line for line in lines) == 1
    assert sum('"blocks.1.mlp.0:output"' in line for line in lines) == 1


class Masked(nn.Module):
    def __init__(self, part: int) -> None:
        super().__init__()
        self.part, self.layers = (
            part,
            nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.0) for _ in range(2)),
        )
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x, src_mask=None if self.part == number else mask)
            x = self.norms[0 if self.part == 2 else number](x)
        return x


@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_module_that_is_called_otherwise_than_before_is_its_caller_s_fault(
    part: int, tmp_path: Path
) -> None:
    inputs = (torch.linspace(-1, 1, 96).sin().view(4, 3, 8), torch.ones(4, 4, dtype=torch.bool).triu(1))
    for number in (9, part):
        torch.manual_seed(0)
        model = Masked(number).train()
        for index, norm in enumerate(model.norms):
            nn.init.constant_(norm.weight, 1.0 + index)  # type: ignore[arg-type]
        if number == 9:
            golden.record("masked", model, inputs, root=tmp_path)
    verdict = golden.check("masked", model, inputs, root=tmp_path)
    assert verdict.layer == ""


# -- trainings ------------------------------------------------------------------------------------------------


def training(
    rate: float = 1e-2, scale: float = 1.0, clip: float = 10.0, cut: bool = False
) -> Callable[[], Any]:
    def make() -> Any:
        model = made().train()
        if cut:
            model.blocks[0].mlp[1] = Detached()  # type: ignore[operator, union-attr]
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)

        def step(number: int) -> Tensor:
            optimizer.zero_grad()
            loss = (
                nn.functional.cross_entropy(model(IDS).flatten(0, 1), IDS.roll(number, 1).flatten()) * scale
            )
            loss.backward()
            nn.utils.clip_grad_value_(model.parameters(), clip)
            optimizer.step()
            return loss

        return model, step

    return make


class Detached(nn.GELU):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("training")
    golden.record("model", training(), steps=2, root=folder)
    return folder


def halves() -> Any:
    """The same training with the batch in three parts, whose gradients add up."""
    model = made().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(number: int) -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        for ids, wanted in zip(IDS.split(1), IDS.roll(number, 1).split(1), strict=True):
            loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), wanted.flatten()) / 3
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_value_(model.parameters(), 10.0)
        optimizer.step()
        return total

    return model, step


@pytest.mark.parametrize(
    ("make", "layer"),
    [
        (training(), None),
        (halves, None),
        (training(rate=2e-2), "(optimizer)"),
        (training(scale=1.01), "(loss)"),
        (training(clip=1e-3), "(step)"),
        (training(cut=True), "blocks.0.mlp"),
    ],
    ids=["same", "in parts", "rate", "loss", "clipping", "cut"],
)
def test_a_training_is_compared_by_loss_gradients_and_updates(
    trained: Path, make: Any, layer: str | None
) -> None:
    verdict = golden.check("model", make, steps=2, root=trained)
    assert verdict.layer == layer or (layer == "blocks.0.mlp" and verdict.layer == "blocks.0.mlp.1")


# -- bad input ------------------------------------------------------------------------------------------------


def test_without_a_golden_the_message_lists_those_that_exist(root: Path) -> None:
    with pytest.raises(CompareError, match=r"no golden 'other' in .* \(there are: model\); record it first"):
        golden.check("other", made(), (IDS,), root=root)


def _cut(folder: Path) -> None:
    path = folder / "values.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def _flip(folder: Path) -> None:
    path = folder / "values.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-100] ^= 1
    path.write_bytes(bytes(raw))


def _newer(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 7'))


def _no_site(folder: Path) -> None:
    path = folder / "manifest.json"
    text = json.loads(path.read_text())
    path.write_text(json.dumps({**text, "sites": text["sites"][1:]}))


DAMAGE = {
    "cut": (_cut, "is not the file that its manifest names"),
    "bit": (_flip, "is not the file that its manifest names"),
    "gone": (lambda folder: (folder / "values.safetensors").unlink(), "FileNotFoundError"),
    "no JSON": (lambda folder: (folder / "manifest.json").write_text("<<<<<<< HEAD"), "not JSON"),
    "newer": (_newer, "format 7"),
    "no site": (_no_site, "is damaged"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_golden_is_refused_with_the_way_out(root: Path, tmp_path: Path, name: str) -> None:
    damage, message = DAMAGE[name]
    store.save(store.load(root, "model"), tmp_path)
    damage(tmp_path / "model")
    with pytest.raises(CompareError, match=message) as error:
        check(made(), tmp_path)
    assert "Restore" in str(error.value)


def test_another_class_is_refused(root: Path) -> None:
    other = nn.Sequential(nn.Embedding(20, 4), nn.Linear(4, 9))
    with pytest.raises(CompareError, match=r"recorded from another class, Model; .* this Sequential"):
        check(other, root)


def test_a_run_with_nan_results_is_no_reference(tmp_path: Path) -> None:
    model = made()
    with torch.no_grad():
        model.blocks[1].norm.bias[0] = float("nan")  # type: ignore[index, union-attr]
    with pytest.raises(CompareError, match=r"results are NaN, first at blocks.1.norm:output"):
        golden.record("model", model, (IDS,), root=tmp_path)
    assert not (tmp_path / "model").exists()


def test_nan_results_of_a_check_are_named(root: Path) -> None:
    model = made()
    with torch.no_grad():
        model.blocks[1].norm.bias[0] = float("nan")  # type: ignore[index, union-attr]
    verdict = check(model, root)
    assert verdict.layer == "blocks.1.norm"
    assert "values are NaN or infinite" in verdict.cause


class Unsteady(nn.Linear):
    numbers = itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.01 * next(self.numbers)


def test_a_model_that_is_not_deterministic_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Unsteady(4, 4))
    with pytest.raises(CompareError, match=r"not deterministic: two runs with the same seed .* at 1:output"):
        golden.record("model", model, (torch.ones(2, 4),), root=tmp_path)


def test_a_model_that_became_random_is_named_as_such(root: Path) -> None:
    model = made()
    model.blocks[1].mlp[2].__class__ = Unsteady  # type: ignore[index, union-attr, assignment]
    verdict = check(model, root)
    assert verdict.layer == "blocks.1.mlp.2"
    assert "not deterministic" in verdict.cause


def test_dropout_is_seeded(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train()
    golden.record("dropout", model, (torch.ones(8, 4),), root=tmp_path)
    torch.rand(3)
    assert golden.check("dropout", model, (torch.ones(8, 4),), root=tmp_path).same


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CompareError, match=r"needs an nn.Module and inputs"):
        golden.record("x", len, (1,), root=tmp_path)  # type: ignore[arg-type]
    with pytest.raises(CompareError, match=r"\(model, step\)"):
        golden.record("x", made, steps=1, root=tmp_path)
    with pytest.raises(CompareError, match="cannot name a golden"):
        golden.record("../x", made(), (IDS,), root=tmp_path)
