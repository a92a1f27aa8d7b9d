"""Model files that a stranger made: loading them runs none of their code, unless the caller says so."""

from __future__ import annotations

import io
import json
import pickle
import sys
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.torch_version import TorchVersion

import torchtap as tt
from torchtap._torch import TORCH_VERSION
from torchtap.cli import main
from torchtap.forms.instrument.program_gate import check_program, check_tree


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, x: torch.Tensor, *, shift: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.layer(x) * self.scale + shift
        return {"y": y.softmax(dim=-1, dtype=torch.float64), "rows": x.new_ones(2 * x.shape[0] + 1)}


ARGUMENTS = (torch.ones(3, 4),), {"shift": torch.ones(4)}


class Touch:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("good") / "model.pt2"
    shapes = {"x": {0: torch.export.Dim("rows", min=2, max=64)}, "shift": None}
    torch.export.save(torch.export.export(Block(), *ARGUMENTS, dynamic_shapes=shapes), path)
    return path


def rewritten(good: Path, target: Path, change: Callable[[dict[str, bytes]], None]) -> Path:
    """The archive with its members changed, by their name without the folder."""
    with zipfile.ZipFile(good) as archive:
        members = {name.split("/", 1)[1]: archive.read(name) for name in archive.namelist()}
    change(members)
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for name, content in members.items():
            archive.writestr(f"model/{name}", content)
    return target


def in_json(member: str, edit: Callable[[Any], None]) -> Callable[[dict[str, bytes]], None]:
    def change(members: dict[str, bytes]) -> None:
        described = json.loads(members[member])
        edit(described)
        members[member] = json.dumps(described).encode()

    return change


def in_program(edit: Callable[[Any], None]) -> Callable[[dict[str, bytes]], None]:
    return in_json("models/model.json", edit)


def pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def spread(value: Any, old: str, new: str) -> Any:
    """The same JSON with one text replaced everywhere, also where it is a key."""
    if isinstance(value, dict):
        return {spread(key, old, new): spread(each, old, new) for key, each in value.items()}
    if isinstance(value, list):
        return [spread(each, old, new) for each in value]
    return new if value == old else value


def attacks(proof: Path) -> dict[str, Callable[[dict[str, bytes]], None]]:
    run = f"__import__('pathlib').Path({str(proof)!r}).touch()"
    escaped = run.replace('"', '\\"')

    def weight(members: dict[str, bytes]) -> None:
        in_json(
            "data/weights/model_weights_config.json",
            lambda listed: listed["config"]["layer.bias"].update(use_pickle=True),
        )(members)
        members["data/weights/weight_1"] = pickled(Touch(proof))

    def inputs(members: dict[str, bytes]) -> None:
        members["data/sample_inputs/model.pt"] = pickled((Touch(proof),))

    def constant(members: dict[str, bytes], path_name: str = "opaque_obj_0") -> None:
        meta = {"path_name": path_name, "is_param": False, "use_pickle": True, "tensor_meta": None}
        members["data/constants/model_constants_config.json"] = json.dumps({"config": {"c": meta}}).encode()
        content = pickle.dumps(Touch(proof)) if path_name.startswith("opaque") else pickled(Touch(proof))
        members[f"data/constants/{path_name}"] = content

    def old_weights(members: dict[str, bytes]) -> None:
        members["data/weights/model.pt"] = pickled({"layer.bias": Touch(proof)})

    def names(old: str, new: str) -> Callable[[dict[str, bytes]], None]:
        def change(members: dict[str, bytes]) -> None:
            program = json.loads(members["models/model.json"])
            members["models/model.json"] = json.dumps(spread(program, old, new)).encode()

        return change

    def expression(program: Any) -> None:
        text = f"Symbol('s77', positive=True, integer=True) + 0*({run} or 0)"
        for facts in program["graph_module"]["graph"]["tensor_values"].values():
            for size in facts["sizes"]:
                if "as_expr" in size:
                    size["as_expr"]["expr_str"] = text

    def tree(context: Any, kind: str = "builtins.dict") -> Callable[[Any], None]:
        def edit(program: Any) -> None:
            leaf = {"type": None, "context": None, "children_spec": []}
            text = json.dumps([1, {"type": kind, "context": context, "children_spec": [leaf, leaf]}])
            program["graph_module"]["module_call_graph"][0]["signature"]["out_spec"] = text

        return edit

    imported = json.dumps([{"__enum__": True, "fqn": "evil_module:E", "name": "A"}, "b"])
    factory = {
        "default_factory_module": "evil_module",
        "default_factory_name": "E",
        "dict_context": ["a", "b"],
    }
    return {
        "a weight marked as a pickle": weight,
        "sample inputs": inputs,
        "an opaque constant": constant,
        "a tensor constant that is a pickle": lambda members: constant(members, "tensor_0"),
        "a bound object": lambda members: constant(members, "custom_obj_0"),
        "weights of the older format": old_weights,
        "an expression": in_program(expression),
        "a guard": in_program(lambda program: program.update(guards_code=[f"{run} is None"])),
        "a value's name": names("linear", f"x = 1\n\n{run}\n#"),
        "an argument's name": names("dtype", f"dtype=None)\n{run}\ndef g(): (f"),
        "a parameter's name": names("layer.weight", f'w")\n{escaped}\n#'),
        "a keyword in the tree": in_program(
            lambda program: program["graph_module"]["module_call_graph"][0]["signature"].update(
                in_spec=program["graph_module"]["module_call_graph"][0]["signature"]["in_spec"].replace(
                    "shift", f"s'] + {run} #"
                )
            )
        ),
        "an enum to import": in_program(tree(imported)),
        "a factory to import": in_program(tree(factory, "collections.defaultdict")),
        "a function of torch": names("torch.ops.aten.linear.default", "torch.os.system"),
        "a function beside the operators": names("torch.ops.aten.linear.default", "torch.ops.load_library"),
        "an operator on files": names("torch.ops.aten.linear.default", "torch.ops.aten.from_file.default"),
        "a caller of methods": names("torch.ops.aten.linear.default", "_operator.methodcaller"),
    }


ATTACKS = list(attacks(Path()))
# These run while torch.export.load reads the file: the attack itself is seen to work.
RUN_AT_ONCE = {
    "a weight marked as a pickle", "sample inputs", "an opaque constant", "a tensor constant that is a pickle",
    "an expression", "an enum to import", "a factory to import",
}  # fmt: skip
if TorchVersion(TORCH_VERSION) < "2.13":  # there were no such constants yet: torch does not look at them
    RUN_AT_ONCE.remove("an opaque constant")


@pytest.mark.parametrize("what", ATTACKS)
def test_an_exported_program_with_foreign_code_is_refused_and_nothing_runs(
    good: Path, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    proof = tmp_path / "proof"
    (tmp_path / "evil_module.py").write_text(
        f"import enum, pathlib\npathlib.Path({str(proof)!r}).touch()\nclass E(enum.Enum):\n    A = 1\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "evil_module", raising=False)
    path = rewritten(good, tmp_path / "model.pt2", attacks(proof)[what])
    with pytest.raises(tt.FormError):
        tt.load(path)
    assert not proof.exists()
    with pytest.raises(SystemExit, match="2"):
        main(["sites", str(path)])
    assert not proof.exists()
    if what in RUN_AT_ONCE:
        with suppress(Exception):  # what torch makes of the rest of such a file is its own affair
            tt.load(path, unsafe=True)
        assert proof.exists(), "the attack itself does not work"


def test_an_honest_exported_program_is_read_and_gives_the_same_values(good: Path) -> None:
    loaded = tt.load(good)
    torch.testing.assert_close(
        loaded(*ARGUMENTS[0], **ARGUMENTS[1]), torch.export.load(good).module()(*ARGUMENTS[0], **ARGUMENTS[1])
    )
    with pytest.raises(SystemExit, match="0"):
        main(["sites", str(good), "--plain"])


def test_loading_leaves_the_environment_as_it_was(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    tt.load(good)
    assert os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] == "1"
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ


def test_a_compiled_package_is_refused_and_the_refusal_says_what_would_run(
    good: Path, tmp_path: Path
) -> None:
    path = rewritten(
        good,
        tmp_path / "model.pt2",
        lambda members: members.update({"data/aotinductor/model/m.so": b"\x7fELF"}),
    )
    with pytest.raises(tt.FormError, match=r"machine code.*unsafe=True"):
        tt.load(path)


def test_a_program_in_the_first_format_is_refused(tmp_path: Path) -> None:
    path, proof = tmp_path / "model.pt2", tmp_path / "proof"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("version", "8.2")
        archive.writestr("serialized_exported_program.json", "{}")
        archive.writestr("serialized_state_dict.pt", pickled(Touch(proof)))
    with pytest.raises(tt.FormError, match="first format"):
        tt.load(path)
    assert not proof.exists()


def test_a_pickled_model_is_loaded_only_when_trusted(tmp_path: Path) -> None:
    torch.save(Block(), tmp_path / "model.pt")
    with pytest.raises(tt.FormError, match="unsafe=True"):
        tt.load(tmp_path / "model.pt")
    assert isinstance(tt.load(tmp_path / "model.pt", unsafe=True), Block)
    torch.save(Block().state_dict(), tmp_path / "weights.pt")
    with pytest.raises(tt.FormError, match="holds weights"):
        tt.load(tmp_path / "weights.pt", unsafe=True)


def test_a_script_whose_code_runs_at_loading_is_refused(tmp_path: Path) -> None:
    class Writes(nn.Module):
        @torch.jit.export
        def __getstate__(self) -> tuple[torch.Tensor, bool]:
            return torch.ones(1), self.training

        @torch.jit.export
        def __setstate__(self, state: tuple[torch.Tensor, bool]) -> None:
            self.training = state[1]
            torch.save([torch.ones(1)], "proof")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    torch.jit.save(torch.jit.script(Writes()), tmp_path / "model.pt")
    with pytest.raises(tt.FormError, match="__setstate__"):
        tt.load(tmp_path / "model.pt")


@pytest.mark.parametrize(
    "content", [b"", b"PK\x03\x04", b"PK\x03\x04" + bytes(100), b"\x80\x04.", bytes(4096)]
)
def test_a_damaged_file_is_a_clear_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.pt2"
    path.write_bytes(content)
    for unsafe in (False, True):
        with pytest.raises(tt.FormError):
            tt.load(path, unsafe=unsafe)


def test_any_damage_of_a_program_is_a_clear_error_or_harmless(good: Path, tmp_path: Path) -> None:
    import random

    content, chance = good.read_bytes(), random.Random(0)
    path, refused = tmp_path / "model.pt2", 0
    for _ in range(15):
        damaged = bytearray(content)
        for _ in range(8):
            damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        try:
            tt.load(path)
        except tt.FormError:
            refused += 1
    assert refused


@pytest.mark.parametrize(
    "text", ["[", '[1, {"type": "x", "context": "{\\"__enum__\\": 1}"}]', '["a\\nb"]', '["\\"]"', "[" * 5000]
)
def test_a_tree_that_says_more_than_a_tree_is_refused(text: str) -> None:
    with pytest.raises(tt.FormError):
        check_tree(text)


@pytest.mark.parametrize(
    "expression",
    [
        "().__class__", "lambda: 0", "[x for x in y]", "f'{x}'", "x if y else z", "eval('1')", "Symbol('a\\'b')",
        "9**9**9", "9**99999", "s0\n", "open('x')", "sympify('1')", "Symbol(__name__)", "(s0 := 1)", "*s0",
    ],
)  # fmt: skip
def test_an_expression_that_is_more_than_arithmetic_is_refused(expression: str) -> None:
    with pytest.raises(tt.FormError):
        check_program(json.dumps({"expr_str": expression}).encode())


@pytest.mark.parametrize(
    "expression",
    [
        "s0",
        "2*s77 + 1",
        "Symbol('s77', positive=True, integer=True)",
        "Mod(s0, 8)",
        "u0 <= 7",
        "Max(1, s0**2)",
        "-s1",
    ],
)
def test_arithmetic_passes(expression: str) -> None:
    check_program(json.dumps({"expr_str": expression}).encode())
