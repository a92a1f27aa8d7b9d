from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from tests.viewer.wire import unpack

from torchtap.viewer.arrays import encode_json, pack


def test_arrays_and_facts_come_back_as_they_went() -> None:
    arrays = {
        "a": np.arange(7, dtype=np.float32).reshape(1, 7),
        "b": np.array([2.0**60, np.nan]),
        "c": np.array([1, 2, 3], dtype=np.uint8),
        "d": np.array([-1], dtype=np.int32),
    }
    facts, back = unpack(pack({"x": 1, "y": "ä"}, arrays))
    assert facts == {"x": 1, "y": "ä"}
    for name, array in arrays.items():
        np.testing.assert_array_equal(back[name], array)
        assert back[name].dtype == array.dtype


def test_every_array_lies_where_a_browser_can_view_it() -> None:
    body = pack({"name": "odd"}, {"a": np.zeros(3, np.uint8), "b": np.zeros(3), "c": np.zeros(1, np.float32)})
    (length,) = struct.unpack_from("<I", body)
    header = json.loads(body[4 : 4 + length])
    assert all((4 + length + entry["offset"]) % 8 == 0 for entry in header["arrays"])


def test_numbers_that_json_does_not_know_become_null() -> None:
    said = encode_json(
        {"a": float("nan"), "b": [float("inf"), 1.5], "c": np.float64("-inf"), "d": np.int64(3)}
    )
    assert json.loads(said) == {"a": None, "b": [None, 1.5], "c": None, "d": 3}


def test_a_lone_surrogate_in_a_name_does_not_stop_the_answer() -> None:
    assert b"\\ud800" in encode_json({"name": "\ud800"})


def test_an_array_the_page_cannot_read_is_refused() -> None:
    with pytest.raises(TypeError, match="int64"):
        pack({}, {"a": np.zeros(1, np.int64)})
