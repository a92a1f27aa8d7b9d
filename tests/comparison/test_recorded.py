"""Two recordings: runs, folders of layer files, values in memory; complete, cut off, damaged or unlike."""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.corpus.planted_models import build
from torch import nn

import torchtap as tt


@pytest.fixture(scope="module")
def models() -> tuple[nn.Module, nn.Module, tuple[Any, ...]]:
    reference, inputs = build("GPT")
    target: Any = copy.deepcopy(reference)
    with torch.no_grad():
        target.blocks[3].attn.qkv.weight[5, 5] += 0.1
    return reference, target, inputs


def recorded(model: nn.Module, inputs: Any, folder: Path, *taps: Any, steps: int = 1) -> Path:
    chosen = taps or (tt.tap("*:output", keep=tt.Full()), tt.tap("*:input", keep=tt.Full()))
    with tt.watch(model, folder, list(chosen)) as watch, torch.no_grad():
        for _ in range(steps):
            with watch.step():
                model(*inputs)
    return folder


def trained(folder: Path, *, fault_at: int | None = None, steps: int = 5, keep: Any = None) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    taps = [tt.tap("*:output", keep=keep or tt.Stats()), tt.tap("*:param_grad"), tt.tap("*:param")]
    with tt.watch(model, folder, taps) as watch:
        for step in range(steps):
            if step == fault_at:
                with torch.no_grad():
                    model[2].weight[0, 0] += 0.1  # type: ignore[operator, index]
            x = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
            with watch.step(10 + step):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    return folder


def test_two_runs_name_the_first_module_and_where(models: Any, tmp_path: Path) -> None:
    reference, target, inputs = models
    result = tt.compare(recorded(reference, inputs, tmp_path / "a"), recorded(target, inputs, tmp_path / "b"))
    assert result.first is not None
    assert result.first.site == "blocks.3.attn.qkv:output"
    assert result.first.origin == "local"
    assert "its inputs agree" in result.verdict
    assert "channel 5 of 144" in result.verdict
    assert "default for float32" in result.basis


def test_opened_runs_are_taken_as_well_as_paths(models: Any, tmp_path: Path) -> None:
    reference, _, inputs = models
    a, b = recorded(reference, inputs, tmp_path / "a"), recorded(reference, inputs, tmp_path / "b")
    result = tt.compare(tt.open(a), tt.open(b))
    assert result.first is None
    assert {row.status for row in result.rows} == {"equal"}


def test_a_residual_dropped_in_the_middle_is_the_blocks_also_from_recordings(
    models: Any, tmp_path: Path
) -> None:
    from tests.corpus.planted_faults import dropped_residual

    reference, _, inputs = models
    target = copy.deepcopy(reference)
    dropped_residual(target, "blocks.2")
    first = tt.compare(
        recorded(reference, inputs, tmp_path / "a"), recorded(target, inputs, tmp_path / "b")
    ).first
    assert first is not None
    assert first.module == "blocks.2"


def test_a_repeat_raises_the_floor_where_the_reference_does_not_repeat_itself(tmp_path: Path) -> None:
    base = {"a:output": torch.randn(100), "b:output": torch.randn(100)}
    noisy = {name: value * (1 + 1e-3 * torch.randn(100)) for name, value in base.items()}
    target = {name: value * (1 + 1e-3 * torch.randn(100)) for name, value in base.items()}
    assert tt.compare(base, target).first is not None
    result = tt.compare(base, target, repeat=noisy)
    assert result.first is None
    assert result.basis == "repeat"
    wrong = {**target, "b:output": target["b:output"] * 1.5}
    assert tt.compare(base, wrong, repeat=noisy).first.site == "b:output"  # type: ignore[union-attr]


def test_a_golden_recording_makes_the_comparison_three_way() -> None:
    golden = {"a:output": torch.randn(1000, dtype=torch.float64)}
    reference = {"a:output": golden["a:output"].bfloat16()}
    target = {"a:output": golden["a:output"].half()}
    result = tt.compare(reference, target, golden=golden)
    assert result.first is None
    assert result.basis == "golden"


def test_slow_growth_of_rounding_is_not_a_divergence_but_a_jump_is() -> None:
    generator = torch.Generator().manual_seed(0)
    layers = [torch.randn(2000, generator=generator) for _ in range(40)]
    drifting = [
        x * (1 + 1e-7 * 1.2**n * torch.randn(2000, generator=generator)) for n, x in enumerate(layers)
    ]
    assert tt.compare(layers, drifting).first is None
    jumped = [x if n < 25 else x * 1.01 for n, x in enumerate(drifting)]
    assert tt.compare(layers, jumped).first.site == "layer_25:output"  # type: ignore[union-attr]


def test_two_trainings_part_at_a_step_and_a_site(tmp_path: Path) -> None:
    result = tt.compare(trained(tmp_path / "a"), trained(tmp_path / "b", fault_at=3))
    assert result.first is not None
    assert (result.first.step, result.first.site) == (12, "2:param.weight")
    assert "From step 12 on the update of 1 of 4 parameters, first `2.weight`" in result.verdict
    assert result.steps[-4:] == (10, 11, 12, 13)
    kinds = {row.kind for row in result.rows if row.status == "diverged"}
    assert {"param", "param_grad"} <= kinds
    assert tt.compare(tmp_path / "a", tmp_path / "b", steps=[11, 12]).first is None


def test_gradients_pass_in_reverse(tmp_path: Path) -> None:
    result = tt.compare(trained(tmp_path / "a"), trained(tmp_path / "b"))
    kinds = [row.kind for row in result.rows]
    assert kinds == sorted(kinds, key=["param", "output", "param_grad"].index)
    assert result.first is None
    assert all(row.status == "within" for row in result.rows if "statistics" in row.note)


def test_missing_steps_are_noted_and_the_common_ones_compared(tmp_path: Path) -> None:
    result = tt.compare(trained(tmp_path / "a", steps=5), trained(tmp_path / "b", steps=3))
    assert result.steps[-3:] == (10, 11, 12)
    assert any("2 steps are not in the other" in problem for problem in result.problems)
    with pytest.raises(tt.CompareError, match="step 14 is not in both"):
        tt.compare(tmp_path / "a", tmp_path / "b", steps=[14])


def test_different_models_are_an_error_that_suggests_a_rule(tmp_path: Path) -> None:
    a = {"encoder.x:output": torch.zeros(3), "encoder.y:output": torch.zeros(4)}
    with pytest.raises(tt.CompareError, match=r"A rule such as"):
        tt.compare(a, {"vision.p:output": torch.zeros(5, 5), "vision.q:output": torch.zeros(2)})


def test_what_was_not_compared_is_listed_and_never_equal() -> None:
    a = {"x:output": torch.ones(3), "y:output": torch.ones(4)}
    result = tt.compare(a, {"x:output": torch.ones(3), "y:output": torch.ones(5)})
    assert result.row("y:output").status == "other shape"
    assert result.outcome == "differs"
    assert result.first is not None
    assert result.first.site == "y:output"
    only = tt.compare({**a}, {"x:output": torch.ones(3)})
    assert [u.site for u in only.unaligned] == ["y:output"]
    assert only.outcome == "cannot tell"
    assert "1 of 2 sites" in only.verdict


def test_nan_everywhere_is_no_agreement() -> None:
    nothing = {"x:output": torch.full((3,), math.nan)}
    result = tt.compare(nothing, {"x:output": nothing["x:output"].clone()})
    assert result.outcome == "cannot tell"
    assert "0 of 1 sites" in result.verdict
    assert "NaN" in result.verdict


def test_a_rule_brings_padded_and_permuted_values_together() -> None:
    heads = torch.randn(2, 5, 4, 8)
    padded = torch.cat([heads.permute(0, 2, 1, 3), torch.zeros(2, 4, 3, 8)], 2)
    rule = "attn:output=attn:output; target.slice=:,:,:5; target.permute=0,2,1,3"
    result = tt.compare({"attn:output": heads}, {"attn:output": padded}, rules=[rule])
    assert result.row("attn:output").status == "equal"
    first_two = tt.compare(
        {"attn:output": heads}, {"attn:output": heads[:1]}, rules=["*=*; reference.slice=:1"]
    )
    assert first_two.row("attn:output").status == "equal"


def test_an_empty_run_is_an_error(models: Any, tmp_path: Path) -> None:
    reference, _, inputs = models
    recorded(reference, inputs, tmp_path / "a")
    with tt.watch(reference, tmp_path / "empty", ["*:output"]):
        pass
    with pytest.raises(tt.CompareError, match=r"no recorded steps"):
        tt.compare(tmp_path / "a", tmp_path / "empty")


def test_a_run_cut_off_by_a_crash_is_compared_as_far_as_it_goes(models: Any, tmp_path: Path) -> None:
    reference, _, inputs = models
    full = recorded(reference, inputs, tmp_path / "a", steps=3)
    watch = tt.watch(
        reference, tmp_path / "b", [tt.tap("*:output", keep=tt.Full()), tt.tap("*:input", keep=tt.Full())]
    )
    with torch.no_grad():
        for _ in range(2):
            with watch.step():
                reference(*inputs)
        watch.flush()
        result = tt.compare(full, tmp_path / "b")
    assert result.first is None
    assert result.steps == (0, 1)
    assert result.problems
    watch.close()


@pytest.mark.parametrize("sites", ["x", 7, [None, 3, "a"], [{"name": 5}], [{"no": "name"}], {"name": "a"}])
def test_events_that_are_no_lists_of_sites_do_not_stop_a_comparison(tmp_path: Path, sites: Any) -> None:
    folders = [trained(tmp_path / name, steps=2) for name in "ab"]
    for folder in folders:
        (events,) = folder.rglob("events*.jsonl")
        with events.open("a") as file:
            file.write(json.dumps({"kind": "sites", "time": 0.0, "sites": sites}) + "\n")
    result = tt.compare(*folders)
    assert result.first is None
    assert result.compared > 0


def test_a_corrupt_tensor_is_not_compared_and_not_called_equal(models: Any, tmp_path: Path) -> None:
    reference, _, inputs = models
    a, b = recorded(reference, inputs, tmp_path / "a"), recorded(reference, inputs, tmp_path / "b")
    segment = next(path for path in b.rglob("tensors-*") if path.is_file())
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 0xFF
    segment.write_bytes(bytes(data))
    result = tt.compare(a, b)
    assert result.outcome == "cannot tell"
    assert [row.site for row in result.rows if row.status == "unreadable"] or result.problems
    assert "Cannot tell" in result.verdict


def _large_run(folder: Path, value: torch.Tensor) -> Path:
    from torchtap.store.record import StepRecord, TensorItem
    from torchtap.store.write.writer import RunWriter

    with RunWriter(folder, manifest={"sites": []}) as writer:
        item = TensorItem("layer:output", "value", "full", value)
        writer.write(StepRecord(0, None, None, "eval", 0.0, (), (item,)))
    return folder


def test_damage_in_a_large_tensor_is_noticed_though_it_is_read_in_pieces(tmp_path: Path) -> None:
    value = torch.randn(2 << 20)
    a, b = _large_run(tmp_path / "a", value), _large_run(tmp_path / "b", value)
    assert tt.compare(a, b).row("layer:output").status == "equal"
    segment = next(path for path in b.rglob("tensors-*") if path.is_file())
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 0x01
    segment.write_bytes(bytes(data))
    result = tt.compare(a, b)
    assert result.outcome == "cannot tell"
    assert "checksum" in result.row("layer:output").note


def test_comparing_large_recordings_takes_little_memory(tmp_path: Path) -> None:
    value = torch.randn(24 << 20)  # 96 MiB a side
    a, b = _large_run(tmp_path / "a", value), _large_run(tmp_path / "b", value * 1.0000001)
    program = f"""
import resource, torch, torchtap as tt
tt.compare({{"x:output": torch.ones(2)}}, {{"x:output": torch.ones(2)}})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
result = tt.compare({str(a)!r}, {str(b)!r})
assert result.row("layer:output").status == "within", result
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 32 * 1024


def test_layer_files_are_mapped_and_not_copied(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        torch.save(torch.ones(24 << 20), tmp_path / name / "layer_1_output.pt")
    program = f"""
import threading, torch, torchtap as tt
def resident():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
tt.compare({{"x:output": torch.ones(2)}}, {{"x:output": torch.ones(2)}})
start, peak, done = resident(), [0], threading.Event()
def look():
    while not done.wait(0.002):
        peak[0] = max(peak[0], resident())
thread = threading.Thread(target=look)
thread.start()
assert tt.compare({str(tmp_path / "a")!r}, {str(tmp_path / "b")!r}).first is None
done.set()
thread.join()
print((peak[0] - start) // 1024)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 64 * 1024


def test_a_layer_file_that_is_damaged_is_named(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for n in range(1, 4):
            torch.save(torch.ones(3) * n, tmp_path / name / f"layer_{n}_output.pt")
    (tmp_path / "b" / "layer_2_output.pt").write_bytes(b"PK\x03\x04 not a tensor")
    result = tt.compare(tmp_path / "a", tmp_path / "b")
    assert result.row("layer_2:output").status == "unreadable"
    assert result.outcome == "cannot tell"
    assert "layer_2_output.pt" in result.row("layer_2:output").note
    assert result.row("layer_3:output").status == "equal"
    assert any("layer 0" in problem for problem in result.problems)


def test_a_layer_file_cannot_run_code(tmp_path: Path) -> None:
    import pickle

    class Trap:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "sprung",)

    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        torch.save(torch.ones(3), tmp_path / name / "layer_1_output.pt")
    (tmp_path / "b" / "layer_2_output.pt").write_bytes(pickle.dumps(Trap()))
    torch.save(torch.ones(3), tmp_path / "a" / "layer_2_output.pt")
    result = tt.compare(tmp_path / "a", tmp_path / "b")
    assert result.row("layer_2:output").status == "unreadable"
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("what", [42, "no/such/place", {"a": 1}, []])
def test_what_cannot_be_compared_says_what_can(what: Any) -> None:
    with pytest.raises(tt.TorchtapError):
        tt.compare(what, {"x:output": torch.ones(2)})


def test_a_difference_that_stays_inside_a_module_is_said_to(tmp_path: Path) -> None:
    from tests.corpus.planted_faults import folded_norm

    reference, inputs = build("CNN")
    target = copy.deepcopy(reference)
    folded_norm(target, "blocks.2")
    result = tt.compare(recorded(reference, inputs, tmp_path / "a"), recorded(target, inputs, tmp_path / "b"))
    assert result.first is not None
    assert result.first.contained == "blocks.2"
    assert "does not leave `blocks.2`" in result.verdict
