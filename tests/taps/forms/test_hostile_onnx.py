"""ONNX files of strangers: weights elsewhere on the disk, damaged bytes and damaged notes are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.optional import need

import torchtap as tt
from torchtap.errors import FormError

onnx = need("onnx")
need("onnxruntime")


def adding(path: Path, *, location: str = "", note: str | None = None) -> Path:
    """A file that adds a weight to its input; the weight lies inside, or in another file."""
    weight: Any = onnx.numpy_helper.from_array(torch.ones(4).numpy(), "w")
    if location:
        weight = onnx.TensorProto(name="w", data_type=1, dims=[4], data_location=onnx.TensorProto.EXTERNAL)
        for key, value in (("location", location), ("offset", "0"), ("length", "16")):
            weight.external_data.add(key=key, value=value)
    value = onnx.helper.make_tensor_value_info
    add = onnx.helper.make_node("Add", ["x", "w"], ["y"])
    graph = onnx.helper.make_graph([add], "g", [value("x", 1, [4])], [value("y", 1, [4])], [weight])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)
    if note is not None:
        onnx.helper.set_model_props(model, {"torchtap": note})
    path.write_bytes(model.SerializeToString())
    return path


def test_a_plain_file_runs(tmp_path: Path) -> None:
    call = tt.load(adding(tmp_path / "m.onnx"))
    assert torch.equal(call(torch.zeros(4)), torch.ones(4))


@pytest.mark.parametrize("location", ["../secret.bin", "{}/secret.bin", "missing.bin"])
def test_weights_outside_of_the_folder_are_not_read(tmp_path: Path, location: str) -> None:
    (tmp_path / "secret.bin").write_bytes(torch.arange(4.0).numpy().tobytes())
    (tmp_path / "folder").mkdir()
    with pytest.raises(FormError, match="onnxruntime"):
        tt.load(adding(tmp_path / "folder" / "m.onnx", location=location.format(tmp_path)))


@pytest.mark.parametrize("cut", [0, 1, 30, 80])
def test_a_cut_file_is_refused(tmp_path: Path, cut: int) -> None:
    path = adding(tmp_path / "m.onnx")
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(FormError):
        tt.load(path)


@pytest.mark.parametrize(
    "note",
    [
        "{",
        "[]",
        "3",
        '{"sites": 3}',
        '{"sites": [1]}',
        '{"spec": "[1, 2"}',
        '{"spec": "[9, {}]"}',
        '{"spec": 4}',
        '{"constants": []}',
        '{"constants": {"a": 1}}',
        '{"spec": "' + "[" * 5000 + '"}',
    ],
)
def test_a_damaged_note_is_refused(tmp_path: Path, note: str) -> None:
    with pytest.raises(FormError):
        tt.load(adding(tmp_path / "m.onnx", note=note))
