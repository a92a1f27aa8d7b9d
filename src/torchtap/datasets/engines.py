"""Drive units through workers: in this process, in several, on Ray or with Dask.

An engine takes units in order, hands them to workers and yields what each worker committed. It decides nothing about
the content: the same shards come out of every engine. If a worker dies, the committed shards stay.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from hashlib import blake2b
from importlib import import_module
from itertools import islice
from multiprocessing import get_context
from typing import Any

import torch

from torchtap.datasets.documents import Unit
from torchtap.datasets.worker import Job, Worker
from torchtap.errors import PlanError, SessionError, TorchtapError, needing

__all__ = ["ENGINES", "drive"]

Result = dict[str, Any]
_RESTARTS = 3  # of one Ray actor, and of one unit on it
_ROUND = 8  # units of one Dask computation for each worker


def drive(engine: str, workers: int, job: Job, units: Iterable[Unit]) -> Generator[Result]:
    """Yield what was committed, unit by unit, in the order in which it was."""
    run = ENGINES.get(engine)
    if run is None:
        raise PlanError(f"engine={engine!r} is not known; {', '.join(map(repr, ENGINES))} are")
    return run(job, units, workers)


def _here(job: Job, units: Iterable[Unit], workers: int) -> Generator[Result]:
    """Compute in this thread and write in another: at most one unit waits."""
    threads = torch.get_num_threads()
    worker = Worker(job)
    try:
        with ThreadPoolExecutor(
            1, initializer=torch.set_num_threads, initargs=(job.settings["threads"],)
        ) as writer:
            writing: Future[Result] | None = None
            for unit in units:
                content = worker.compute(unit)
                if writing is not None:
                    yield writing.result()
                writing = writer.submit(worker.commit, content)
                del content
            if writing is not None:
                yield writing.result()
    finally:
        torch.set_num_threads(threads)


_packed = b""
_worker: tuple[bytes, Worker] | None = None


def _start(packed: bytes) -> None:
    """Give this process its job. The worker is made at the first unit, where its errors are reported."""
    global _packed
    _packed = packed


def _run(unit: Unit, packed: bytes | None = None) -> Result:
    global _worker
    packed = _packed if packed is None else packed
    key = blake2b(packed, digest_size=16).digest()
    if _worker is None or _worker[0] != key:
        _worker = key, Worker(pickle.loads(packed))
    return _worker[1].run(unit)


def _processes(job: Job, units: Iterable[Unit], workers: int) -> Generator[Result]:
    """Several processes on this machine, each with a model."""
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start, (job.packed(),))
    waiting: set[Future[Result]] = set()
    remaining = iter(units)
    try:
        while True:
            for unit in islice(remaining, 2 * workers - len(waiting)):
                waiting.add(pool.submit(_run, unit))
            if not waiting:
                return
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for each in done:
                yield each.result()
    except BrokenProcessPool:
        raise SessionError(
            "a worker process died (killed, out of memory, or its model could not be made; its own message stands "
            "above). The committed shards are safe; harvest again to go on"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


class RayWorker:
    """The actor of Ray Data: holds the model, gets packed units, returns what it committed."""

    def __init__(self, packed: bytes) -> None:
        self._packed = packed

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        # An error of ours is an answer: Ray would retry it, and wrap it beyond recognition.
        try:
            answers: list[Any] = [_run(pickle.loads(unit), self._packed) for unit in batch["unit"]]
        except TorchtapError as error:
            answers = [error]
        return {"answer": [pickle.dumps(each) for each in answers]}


def _ray(job: Job, units: Iterable[Unit], workers: int) -> Generator[Result]:
    """Ray Data: ``map_batches`` over actors that hold the model."""
    with needing("ray", "ray", who="engine='ray'"):
        import ray
        import ray.data
        import ray.exceptions

    items = [{"unit": pickle.dumps(unit)} for unit in units]
    if not items:
        return
    dataset = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
        RayWorker,
        fn_constructor_args=(job.packed(),),
        batch_size=1,
        concurrency=workers,
        num_cpus=1,
        max_restarts=_RESTARTS,
        max_task_retries=_RESTARTS,
    )
    try:
        for row in dataset.iter_rows():
            answer = pickle.loads(row["answer"])
            if isinstance(answer, Exception):
                raise answer
            yield answer
    except ray.exceptions.RayError as error:
        raise SessionError(
            f"a Ray worker failed: {type(error).__name__}: {error}. The committed shards are safe; harvest again to "
            "go on"
        ) from error


def _dask(job: Job, units: Iterable[Unit], workers: int) -> Generator[Result]:
    """Dask: the scheduler that is set, or processes of this machine."""
    with needing("dask", "dask", who="engine='dask'"):
        dask: Any = import_module("dask")

    remaining = iter(units)
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        chosen: dict[str, Any] = {}
        if dask.config.get("scheduler", None) is None:
            chosen = {"scheduler": "processes", "pool": pool, "num_workers": workers}
        task = dask.delayed(_run, pure=False)
        packed = dask.delayed(job.packed(), traverse=False)
        while batch := list(islice(remaining, _ROUND * workers)):
            try:
                yield from dask.compute(
                    *(task(dask.delayed(unit, traverse=False), packed) for unit in batch), **chosen
                )
            except BrokenProcessPool:
                raise SessionError(
                    "a Dask worker died. The committed shards are safe; harvest again to go on"
                ) from None


ENGINES: dict[str, Callable[[Job, Iterable[Unit], int], Generator[Result]]] = {
    "here": _here,
    "processes": _processes,
    "ray": _ray,
    "dask": _dask,
}
