"""Runs in remote folders: in fsspec's memory, and in an object store that speaks S3."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.optional import need
from tests.store.object_store import served_bucket
from tests.store.records import SITES, image, number, record

from torchtap.errors import MissingExtraError, RecordingLostError, RunCorruptError, RunNotFoundError
from torchtap.store.read.reader import is_run, open_run
from torchtap.store.write.writer import RunWriter

need("fsspec")


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """The address of an empty bucket on a server of our own."""
    with served_bucket() as bucket:
        yield bucket


@pytest.fixture(params=["memory", "s3"])
def url(request: pytest.FixtureRequest) -> str:
    root = request.getfixturevalue("s3") if request.param == "s3" else "memory://runs"
    return f"{root}/{uuid.uuid4().hex}"


def test_a_remote_run_is_written_followed_and_read_back(url: str) -> None:
    with RunWriter(url, manifest={"model": {"name": "toy"}}) as writer:
        for step in range(6):
            writer.write(record(step, tensors=1))
            if step == 2:
                writer.event("tick")
                writer.flush()
                live = open_run(url)
                assert live.steps().tolist() == [0, 1, 2]
                assert not live.closed
    live.refresh()
    assert live.steps().tolist() == list(range(6))
    run = open_run(url)
    assert is_run(url)
    assert run.closed
    assert run.problems == []
    assert run.model_tree == {"name": "toy"}
    assert run.series(SITES[1], "std").values.tolist() == [number(step, 1, 1) for step in range(6)]
    assert np.array_equal(run.array(SITES[0], 4), image(4))
    assert list(run.follow(poll=0.01)) == list(range(6))
    assert len(run.events("tick")) == 1


def test_a_large_tensor_goes_through(url: str) -> None:
    with RunWriter(url, manifest={}) as writer:
        writer.write(record(0, tensors=1, size=2**19))  # past the size at which a local segment is streamed
    assert np.array_equal(open_run(url).array(SITES[0]), image(0, 2**19))


def test_a_remote_folder_again_is_a_further_attempt(url: str) -> None:
    for steps in (range(4), range(2, 6)):
        with RunWriter(url, manifest={}) as writer:
            for step in steps:
                writer.write(record(step))
    run = open_run(url)
    assert run.attempts == [0, 1]
    assert run.series(SITES[0], "mean").steps.tolist() == list(range(6))


def test_small_remote_segments_are_merged(url: str) -> None:
    with RunWriter(url, manifest={}) as writer:
        for step in range(5):
            writer.write(record(step, tensors=1))
            writer.flush()
    import fsspec

    system, path = fsspec.core.url_to_fs(url)
    system.invalidate_cache()
    names = [name for name in system.find(path) if "scalars-" in name or "tensors-" in name]
    assert len(names) == 2
    assert len(open_run(url).tensors()) == 5


def test_a_remote_place_without_a_run_is_said_to_be_none(url: str) -> None:
    with pytest.raises(RunNotFoundError):
        open_run(url)
    assert not is_run(url)


def test_a_damaged_remote_tensor_is_an_error(url: str) -> None:
    with RunWriter(url, manifest={}) as writer:
        writer.write(record(0, tensors=1))
    import fsspec

    system, path = fsspec.core.url_to_fs(url)
    (name,) = [name for name in system.find(path) if "tensors-" in name]
    content = bytearray(system.cat_file(name))
    content[-1] ^= 1
    system.pipe_file(name, bytes(content))
    with pytest.raises(RunCorruptError, match="checksum"):
        open_run(url).array(SITES[0])


def test_a_remote_store_that_fails_does_not_stop_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    class ServiceError(Exception):
        """Not an OSError, as with the clients of most services."""

    def refuse(*_: Any, **__: Any) -> None:
        raise ServiceError("slow down")

    url = f"memory://runs/{uuid.uuid4().hex}"
    with pytest.warns(RuntimeWarning, match="slow down"), RunWriter(url, manifest={}) as writer:
        writer.write(record(0, tensors=1))
        writer.flush()
        with monkeypatch.context() as patch:
            patch.setattr(MemoryFileSystem, "pipe_file", refuse)
            writer.write(record(1, tensors=1))
            writer.flush()
        writer.write(record(2, tensors=1))
    run = open_run(url)
    assert run.steps().tolist() == [0, 1, 2]
    assert [ref.step for ref in run.tensors()] == [0, 2]
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", refuse)
    with pytest.raises(RecordingLostError, match="slow down"):
        RunWriter(f"memory://runs/{uuid.uuid4().hex}", manifest={}, strict=True)


def test_an_unknown_protocol_is_an_error_that_names_what_is_missing() -> None:
    with pytest.raises(MissingExtraError, match="remote"), pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "fsspec", None)
        open_run("s3://bucket/run")


def test_local_runs_do_not_import_fsspec(tmp_path: Any) -> None:
    code = """
import sys
from torchtap.store.read.reader import open_run
from torchtap.store.write.writer import RunWriter
RunWriter(sys.argv[1], manifest={}).close()
open_run(sys.argv[1])
assert "fsspec" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
