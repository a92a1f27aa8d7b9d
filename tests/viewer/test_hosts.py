"""Which Host headers a viewer answers to, and pictures that need three different axes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from torchtap.store.record import StepRecord, TensorItem
from torchtap.store.write.writer import RunWriter
from torchtap.viewer.run_index import Catalog
from torchtap.viewer.server import Policy, answer


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8080", "127.0.0.1", "127.0.0.1:1", "[::1]", "[::1]:65535"]
)
def test_its_own_names_are_answered(host: str) -> None:
    assert Policy.of("127.0.0.1").knows(host)


@pytest.mark.parametrize(
    "host",
    [
        "[localhost]evil.com", "localhost:evil.com", "[::1]evil.com", "[::1]:evil", "localhost:", "localhost:80:80",
        "localhost@evil.com", "evil.com", "", "localhost.evil.com", "[::1", "127.0.0.1:999999", "localhost\r\nx",
    ],
)  # fmt: skip
def test_whatever_only_looks_like_them_is_refused(host: str) -> None:
    assert not Policy.of("127.0.0.1").knows(host)


@pytest.mark.parametrize(
    "axes", [{"stack": "0", "down": "0", "across": "1"}, {"stack": "1", "down": "0", "across": "1"}]
)
def test_a_stack_along_an_axis_of_the_picture_is_refused(tmp_path: Path, axes: dict[str, str]) -> None:
    item = TensorItem("x:output", "value", "full", np.ones((2, 3, 4), np.float32))  # type: ignore[arg-type]
    with RunWriter(tmp_path / "run", manifest={}) as writer:
        writer.write(StepRecord(0, None, None, "train", 0.0, (), (item,)))
    catalog = Catalog.open([tmp_path / "run"])
    with pytest.raises(Exception, match="different axes"):
        answer(catalog, "slice", {"run": "", "site": "x:output", "step": "0", **axes})
