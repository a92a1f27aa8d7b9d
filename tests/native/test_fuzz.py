"""The fuzzer's calls, without a sanitizer and few of them: `make sanitize` has the rest."""

from __future__ import annotations

from tests.native.fuzz import Fuzzer


def test_calls_of_any_kind_give_numpys_answers() -> None:
    Fuzzer(7).run(1500)
