"""What held in good runs: no finding on another healthy seed, and a planted fault told where and when it begins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchtap as tt
from torchtap.cli import main

STEPS = 40
TAPS = ["*:input", "*:output", "*:param", "*:param_grad", "*:update"]


class Reader(nn.Module):
    """Tied embeddings, dropout, norms, a batch norm, a branch that is frozen, and a parameter that begins at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(32, 24)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(24, 2, 48, batch_first=True) for _ in range(3))
        self.norm = nn.BatchNorm1d(24)
        self.fixed = nn.Linear(24, 24).requires_grad_(False)
        self.gate = nn.Parameter(torch.zeros(24))
        self.head = nn.Linear(24, 32, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.words(x)
        for block in self.blocks:
            h = block(h)
        h = self.norm(h.transpose(1, 2)).transpose(1, 2)
        return self.head(h + self.gate * self.fixed(h))


def train(folder: Path, seed: int, fault: str = "", at: int = 0, steps: int = STEPS) -> Path:
    torch.manual_seed(seed)
    model = Reader()
    if fault == "init":
        with torch.no_grad():
            model.blocks[1].linear1.weight.mul_(3)
    if fault == "frozen":
        model.blocks[2].linear2.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with tt.watch(model, folder, TAPS) as watch:
        watch.follow(optimizer)
        for step in range(steps):
            if fault == "rate" and step == at:
                optimizer.param_groups[0]["lr"] *= 30
            if fault == "stuck" and step == at:
                model.blocks[0].norm1.requires_grad_(False)
                model.blocks[0].norm1.zero_grad()
            if step % 10 == 9:
                model.eval()
                with torch.no_grad():
                    model(torch.randint(32, (16, 12)))
                model.train()
            x = torch.randint(32, (16, 12))
            loss = nn.functional.cross_entropy(model(x).flatten(0, 1), ((x * 5 + 3) % 32).flatten())
            optimizer.zero_grad()
            loss.backward()
            watch.log(loss=loss.item())
            optimizer.step()
    return folder


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("good")
    runs = [str(train(root / str(seed), seed)) for seed in range(3)]
    with pytest.raises(SystemExit) as ended:
        main(["learn", *runs, "-o", str(root / "good.json"), "--json"])
    assert ended.value.code in (0, None)
    return root / "good.json"


def of_learned(run: Path, learned: Path | tt.Invariants) -> list[tt.Finding]:
    return [each for each in tt.diagnose(run, against=learned) if each.kind.startswith("learned")]


@pytest.mark.parametrize("seed", [3, 4, 5])
def test_another_healthy_seed_has_no_finding(tmp_path: Path, learned: Path, seed: int) -> None:
    assert of_learned(train(tmp_path / "run", seed), learned) == []


def test_a_healthy_run_that_is_shorter_or_longer_has_no_finding(tmp_path: Path, learned: Path) -> None:
    assert of_learned(train(tmp_path / "short", 6, steps=11), learned) == []
    assert of_learned(train(tmp_path / "long", 7, steps=70), learned) == []


def test_an_initialisation_three_times_too_large_is_told_at_its_weight_and_step_zero(
    tmp_path: Path, learned: Path
) -> None:
    found = of_learned(train(tmp_path / "run", 3, "init"), learned)
    first = found[0]
    assert (first.kind, first.site, first.step) == ("learned-range", "blocks.1.linear1:param.weight", 0)
    assert first.evidence[0].site == first.site
    values = tt.open(tmp_path / "run").series(first.site, first.evidence[0].statistic)
    assert first.evidence[0].value == values.values[0]


def test_a_frozen_layer_is_told_at_its_parameters(tmp_path: Path, learned: Path) -> None:
    found = {each.kind: each for each in of_learned(train(tmp_path / "run", 3, "frozen"), learned)}
    assert set(found["learned-moves"].sites) == {
        "blocks.2.linear2:param.weight",
        "blocks.2.linear2:param.bias",
    }
    assert found["learned-moves"].step == 1
    assert "blocks.2.linear2:param_grad.weight" in found["learned-missing"].sites
    assert all(site.startswith("blocks.2.linear2") for site in found["learned-missing"].sites)


def test_a_layer_that_stops_learning_is_told_with_the_step(tmp_path: Path, learned: Path) -> None:
    found = {each.kind: each for each in of_learned(train(tmp_path / "run", 3, "stuck", at=20), learned)}
    assert found["learned-moves"].site.startswith("blocks.0.norm1:param.")
    assert 20 <= (found["learned-moves"].step or 0) <= 21
    assert found["learned-missing"].step == 20


def test_a_rate_thirty_times_too_large_is_told_at_the_updates_of_that_step(
    tmp_path: Path, learned: Path
) -> None:
    first = of_learned(train(tmp_path / "run", 3, "rate", at=12), learned)[0]
    assert (first.kind, first.step) == ("learned-range", 12)
    assert ":update." in first.site


def train_twins(folder: Path, seed: int, *, apart_at: int | None = None) -> Path:
    """Two layers that begin equal and get the same gradients, as two copies of a weight that are kept equal do."""
    torch.manual_seed(seed)
    model = nn.ModuleDict({"one": nn.Linear(6, 6), "other": nn.Linear(6, 6)})
    model["other"].load_state_dict(model["one"].state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with tt.watch(model, folder, ["*:param", "*:param_grad"]) as watch:
        watch.follow(optimizer)
        for step in range(12):
            x = torch.randn(8, 6)
            halves = [model["one"](x), model["other"](x)]
            optimizer.zero_grad()
            (halves[0] + halves[1] - x).square().mean().backward()
            if step == apart_at:
                model["other"].weight.grad *= 1.01
            optimizer.step()
    return folder


def test_weights_that_were_always_equal_and_no_longer_are_told(tmp_path: Path) -> None:
    learned = tt.learn([train_twins(tmp_path / str(seed), seed) for seed in range(3)])
    assert ["one:param.weight", "other:param.weight"] in [sorted(group) for group in learned.equal]
    assert of_learned(train_twins(tmp_path / "good", 3), learned) == []
    found = {each.kind: each for each in of_learned(train_twins(tmp_path / "bad", 3, apart_at=5), learned)}
    assert found["learned-equal"].step in (5, 6)
    assert {site.rpartition(".")[2] for site in found["learned-equal"].sites} >= {"weight"}


def test_the_file_has_what_was_constant_and_what_moves(learned: Path) -> None:
    kept = json.loads(learned.read_text())
    assert kept["torchtap_invariants"] == 1
    assert kept["falls"] == [":value.loss"]
    training = kept["phases"]["train"]
    assert training["fixed:param.weight"]["moves"] is False
    assert training["blocks.0.linear1:param.weight"]["moves"] is True
    assert training["blocks.0:output"]["constant"]["nans"] == 0
    assert set(kept["phases"]) == {"train", "eval"}


def test_a_kind_that_was_not_recorded_is_unjudged_and_no_finding(tmp_path: Path, learned: Path) -> None:
    model = Reader()
    with tt.watch(model, tmp_path / "run", ["blocks.0:output"]) as watch, watch.step():
        model(torch.randint(32, (16, 12)))
    reasons = [each.reason for each in tt.diagnose(tmp_path / "run", against=learned).unjudged]
    assert any("*:param_grad" in reason for reason in reasons)


def damaged(text: str) -> list[Any]:
    whole = json.loads(text)
    site = next(iter(whole["phases"]["train"]))
    changes: list[Any] = [b"", b"\xff\xfe", b"[" * 100_000, b"[]", text[: len(text) // 2].encode(), b"NaN"]
    for path, value in [
        (("torchtap_invariants",), 2), (("runs",), 3), (("phases",), []), (("phases", "train"), [1]),
        (("phases", "train", site), None), (("phases", "train", site, "moves"), "yes"),
        (("phases", "train", site, "ranges"), {"rms": [[0, 1, 2]]}),
        (("phases", "train", site, "ranges"), {"rms": [[0, 10**400, 0.0, 1.0]]}),
        (("phases", "train", site, "ranges"), {"rms": [[0, 1, 10**400, 1.0]]}),
        (("phases", "train", site, "constant"), {"nans": "0"}),
        (("equal",), [1]), (("falls",), "x"), (("last_step",), 1.5),
    ]:  # fmt: skip
        changed = json.loads(text)
        place = changed
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] = value
        changes.append(json.dumps(changed).encode())
    return changes


def test_a_damaged_or_hostile_file_is_an_error_of_torchtap(tmp_path: Path, learned: Path) -> None:
    run = train(tmp_path / "run", 3, steps=2)
    for raw in damaged(learned.read_text()):
        (tmp_path / "bad.json").write_bytes(raw)
        with pytest.raises(tt.errors.DiagnosisError, match=r"bad\.json"):
            tt.diagnose(run, against=tmp_path / "bad.json")
    with pytest.raises(tt.errors.DiagnosisError, match=r"none\.json"):
        tt.diagnose(run, against=tmp_path / "none.json")


def test_nothing_to_learn_from_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(tt.errors.DiagnosisError, match="at least one run"):
        tt.learn([])
    with pytest.raises(tt.errors.RunNotFoundError):
        tt.learn([tmp_path / "none"])


def test_the_command_takes_the_file(
    tmp_path: Path, learned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(tmp_path / "run", 3, "init")
    with pytest.raises(SystemExit):
        main(["diagnose", str(run), "--against", str(learned), "--json"])
    assert "learned-range" in {each["kind"] for each in json.loads(capsys.readouterr().out)}
