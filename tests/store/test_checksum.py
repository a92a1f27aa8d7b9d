"""Checksums: the fast one is zlib's, in pieces or whole."""

from __future__ import annotations

import zlib
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from torchtap.errors import RunCorruptError
from torchtap.store.format.checksum import checksum, parse_checksums, verify


@given(st.binary(max_size=1000), st.integers(0, 2**32 - 1))
@example(bytes(range(256)) * 300, 0)  # past the size at which the interpreter lock is let go
@example(b"", 0)
@example(b"x" * 64, 0)
def test_the_fast_checksum_is_that_of_zlib(data: bytes, value: int) -> None:
    assert checksum(data) == zlib.crc32(data)
    assert checksum(memoryview(data), value) == zlib.crc32(data, value)


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"crc32": 5},
        {"crc32": ["0"], "chunk": 4},
        {"crc32": ["0", "0", "0"], "chunk": 0},
        {"crc32": ["0", "0"], "chunk": True},
        {"crc32": ["0", "0"]},
    ],
)
def test_checksums_that_do_not_fit_are_refused(facts: dict[str, Any]) -> None:
    with pytest.raises(RunCorruptError, match="checksums"):
        parse_checksums(facts, 10)


def test_bytes_that_changed_are_noticed() -> None:
    verify(memoryview(b"abc"), f"{zlib.crc32(b'abc'):08x}")
    with pytest.raises(RunCorruptError, match="checksum differs"):
        verify(memoryview(b"abd"), f"{zlib.crc32(b'abc'):08x}")
