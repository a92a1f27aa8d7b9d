"""The coordinate check over widths: exponents that theory knows, the picture, the command."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from torchtap.cli import torchtap
from torchtap.errors import FormError
from torchtap.monitors.widths import Setup, WidthCheck, check_widths

PNG = b"\x89PNG"


def test_exponents_are_those_of_the_sizes() -> None:
    check = WidthCheck(
        "x", (2, 4, 8), 1, {"(W_t-W_0)x_t": {"up": (1, 4, 16), "flat": (3, 3, 3), "none": (0, 0, 0)}}
    )
    found = check.exponents()
    assert found["up"] == pytest.approx(2)
    assert found["flat"] == pytest.approx(0)
    assert math.isnan(found["none"])
    assert check.worst()[0] == "up"


def linear(width: int) -> Setup:
    """One wide layer between fixed ones, all inputs ones: each Adam step moves every weight by the rate."""
    model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, width), nn.Linear(width, 3))
    with torch.no_grad():
        model[0].weight.fill_(0.25)
        model[0].bias.zero_()
    batch = (torch.ones(2, 4), torch.tensor([0, 1]))
    return Setup(model, torch.optim.Adam(model[1].parameters(), lr=1e-3), [batch] * 3)


def test_adam_moves_a_layer_in_proportion_to_its_width() -> None:
    check = check_widths(linear, [16, 64, 256], steps=1)
    # (W_1-W_0)x has width terms of ±rate, plus the bias.
    assert check.sizes["(W_t-W_0)x_t"]["1"] == pytest.approx(
        [1e-3 * (w + 1) for w in (16, 64, 256)], rel=1e-3
    )
    assert check.exponents()["1"] == pytest.approx(1, abs=0.05)
    assert check.sizes["(W_t-W_0)x_t"]["0"] == (0, 0, 0)


def test_the_command_tells_the_two_parametrisations_apart(tmp_path: Path) -> None:
    picture = tmp_path / "rcc.png"
    done = CliRunner().invoke(torchtap, ["rcc", "--widths", "64,128,256", "-o", str(picture), "--json", "-"])
    assert done.exit_code == 0, done.output
    standard, mup = json.loads(done.output)
    for layer in ("hidden1", "hidden2", "last"):
        assert standard["exponents"]["(W_t-W_0)x_t"][layer] > 0.45
        assert abs(mup["exponents"]["(W_t-W_0)x_t"][layer]) < 0.3
    assert picture.read_bytes().startswith(PNG)


def test_the_command_takes_functions_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom torch import nn\n"
        "from torchtap.monitors.widths import Setup\n"
        "def build(width):\n"
        "    model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 2))\n"
        "    batches = [(torch.ones(2, 3), torch.tensor([0, 1]))] * 3\n"
        "    return Setup(model, torch.optim.SGD(model.parameters(), lr=0.1), batches)\n"
    )
    words = [
        "rcc",
        f"{tmp_path / 'mine.py'}:build",
        "--widths",
        "4,8",
        "--steps",
        "2",
        "-o",
        str(tmp_path / "x.png"),
    ]
    done = CliRunner().invoke(torchtap, words)
    assert done.exit_code == 0, done.output
    assert "build: exponents of the width after 2 steps" in done.output
    for wrong in (f"{tmp_path / 'mine.py'}:nothing", "no_such.py:build", "build"):
        refused = CliRunner().invoke(torchtap, ["rcc", wrong]).exception
        assert isinstance(refused, FormError), refused  # which the program ends with 2 for


def test_what_cannot_be_checked_is_refused() -> None:
    with pytest.raises(ValueError, match="two different widths"):
        check_widths(linear, [16])
    with pytest.raises(ValueError, match="nothing has changed yet"):
        check_widths(linear, [16, 32], steps=0)
    with pytest.raises(ValueError, match="batches ended after 3; 6 are needed"):
        check_widths(linear, [16, 32], steps=5)
