"""``torchtap selftest`` names the parts and proves them; a proof that fails is told and changes the exit code."""

from __future__ import annotations

import pytest

from torchtap.cli import main
from torchtap.cli import selftest as proving


def test_the_parts_are_named_and_what_holds_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(proving.PROOFS, "forms")  # compiling takes long; the forms have tests of their own
    with pytest.raises(SystemExit, match="0"):
        main(["selftest", "--device", "cpu"])
    said = capsys.readouterr().out
    for part in ("torch:", "compiled parts:", "page:", "limits:", "cpu      kernels", "everything held"):
        assert part in said


def test_a_proof_that_fails_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(device: str) -> str:
        raise AssertionError("mean of float32 is wrong")

    for name in list(proving.PROOFS):
        monkeypatch.delitem(proving.PROOFS, name)
    monkeypatch.setitem(proving.PROOFS, "kernels", fails)
    with pytest.raises(SystemExit, match="1"):
        main(["selftest", "--device", "cpu"])
    assert "DID NOT HOLD" in capsys.readouterr().out
