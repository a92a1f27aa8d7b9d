"""What leaves with a model: pickles with names only, packages with plain files, and no hook of ours in a script."""

from __future__ import annotations

import copy
import io
import json
import pickle
import pickletools
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.torch_limits import EXPORT_OF_KEPT_TENSORS
from torch import Tensor, nn
from torch.package import PackageExporter, PackageImporter

import torchtap as tt


def make() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2))).eval(), torch.randn(3, 4)


def found_in(model: Any, x: Tensor) -> dict[str, Tensor]:
    with tt.capture(model, "*:output", "*:input") as seen:
        model(x)
    return dict(seen.items())


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for site, value in expected.items():
        assert torch.equal(found[site], value), site


def named_in(pickled: bytes) -> set[str]:
    """Everything that a pickle would import."""
    found, texts = set(), [""]
    for opcode, argument, _ in pickletools.genops(pickled):
        if "UNICODE" in opcode.name:
            texts.append(str(argument))
        elif opcode.name == "GLOBAL":
            found.add(str(argument).replace(" ", "."))
        elif opcode.name == "STACK_GLOBAL":
            found.add(".".join(texts[-2:]))
    return found


TRANSFORMS: dict[str, Callable[[Any, Tensor], Any]] = {
    "export": lambda model, x: torch.export.export(model, (x,)).module(),
    "trace": lambda model, x: torch.jit.trace(model, (x,)),
    "script": lambda model, x: torch.jit.script(model),
}


def test_a_pickle_names_nothing_of_ours_and_nothing_that_runs_code() -> None:
    model, x = make()
    pickled = pickle.dumps(tt.instrument(model, "*:output", "*:input"))
    assert named_in(pickled) == named_in(pickle.dumps(model))
    assert b"torchtap." not in pickled
    assert torch.equal(pickle.loads(pickled)(x), model(x))


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_the_sites_of_a_pickled_model_are_put_on_again(transform: str, tmp_path: Path) -> None:
    model, x = make()
    tapped = tt.instrument(model, "*:output", "1:input")
    torch.save(tapped, tmp_path / "model.pt")
    loaded = tt.instrument(pickle.loads(pickle.dumps(tapped)))
    again = tt.load(tmp_path / "model.pt", unsafe=True)
    for each in (tapped, copy.deepcopy(copy.deepcopy(tapped)), loaded, again):
        made = TRANSFORMS[transform](each, x)
        with tt.capture(made, "*:output", "1:input") as seen:
            made(x)
        assert_same(dict(seen.items()), {site: found_in(model, x)[site] for site in dict(seen.items())})
        assert len(dict(seen.items())) == 6


def test_a_package_has_its_hooks_in_plain_files() -> None:
    model, x = make()
    tapped = tt.instrument(model, "*:output", "*:input")
    buffer = io.BytesIO()
    with PackageExporter(buffer) as exporter:
        exporter.extern(["torch.**", "torch"])
        exporter.save_pickle("model", "model.pkl", tapped)
        exporter.save_pickle("model", "second.pkl", {"model": copy.deepcopy(tapped)})
    with zipfile.ZipFile(buffer) as archive:
        files = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    assert b"torch.ops.torchtap.emit" in files["torchtap_hooks/__init__.py"]
    assert json.loads(files["torchtap_hooks/sites1.json"])["1.0"] == ["input", "output"]
    assert "builtins.eval" not in named_in(files["model/model.pkl"])
    buffer.seek(0)
    importer = PackageImporter(buffer)
    expected = found_in(model, x)
    for loaded in (
        importer.load_pickle("model", "model.pkl"),
        importer.load_pickle("model", "second.pkl")["model"],
    ):
        assert_same(found_in(loaded, x), expected)
        assert_same(found_in(torch.export.export(loaded, (x,)).module(), x), expected)


class Exporting(nn.Module):
    """Has a method that TorchScript compiles even while it only traces."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).relu()  # type: ignore[no-any-return]

    @torch.jit.export
    def twice(self, x: Tensor) -> Tensor:
        return x * 2


@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_is_scripted_traced_and_pickled_in_a_live_step_as_at_any_time(compiled: bool) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Exporting(), nn.Linear(4, 2)).eval(), torch.randn(3, 4)
    subject: Any = torch.compile(model, backend="eager") if compiled else model
    own: list[Any] = []
    model[1].register_forward_hook(lambda *given: own.append(given))
    with tt.capture(subject, "*:output") as seen:
        subject(x)
        script = torch.jit.script(model[0])
        trace = torch.jit.trace(model[0], (x,))
        pickled = pickle.dumps(model[0])
    # Tracing calls the model, so there are further calls; these four are the first.
    assert {"0.fc:output", "0:output", "1:output", ":output"} <= set(dict(seen.items()))
    assert own
    assert not [name for name in named_in(pickled) if "torchtap" in name or "builtins" in name]
    for made in (script, trace):
        assert torch.equal(made(x), model[0](x))
    assert not script._forward_hooks
    assert not model[0]._forward_hooks


def test_an_instrumented_model_with_exported_methods_is_traced() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Exporting(), nn.Linear(4, 2)).eval(), torch.randn(3, 4)
    assert_same(
        found_in(torch.jit.trace(tt.instrument(model, "*:output", "*:input"), (x,)), x), found_in(model, x)
    )


class Keeping(nn.Module):
    """Leaves tensors of an autograd graph on itself, which torch refuses to copy."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.last, self.all = nn.Linear(4, 4), None, {"of": []}

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.fc(x)  # type: ignore[assignment]
        self.all["of"] = [self.last]
        return self.last.relu()  # type: ignore[no-any-return, attr-defined]


@EXPORT_OF_KEPT_TENSORS.skip
def test_a_model_that_keeps_values_on_itself_is_instrumented_after_a_call() -> None:
    torch.manual_seed(0)
    model, x = Keeping(), torch.randn(3, 4)
    model(x)
    program = torch.export.export(tt.instrument(model, "*:output", "*:input"), (x,), strict=False).module()
    assert_same(found_in(program, x), found_in(model, x))
