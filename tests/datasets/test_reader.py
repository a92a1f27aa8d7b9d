"""Readers: rows, batches, workers, epochs, resume, growing folders, damage, object stores, other layouts, reshuffle."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.datasets.kills import digests
from tests.datasets.models import SITES, documents, tiny
from tests.optional import need
from tests.store.object_store import served_bucket
from torch.utils.data import DataLoader

import torchtap as tt
from torchtap.errors import PlanError, RunCorruptError, RunNotFoundError, SelectionError, SessionError


@pytest.fixture(scope="module")
def acts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """About 15,000 rows in 20 shards, of several blocks each."""
    torch.manual_seed(0)
    model = torch.nn.Embedding(50, 512)
    data = documents(320, 90)
    out = tmp_path_factory.mktemp("acts") / "acts"
    return tt.harvest(model, [{"input": each["input_ids"]} for each in data], ":output", out, "token", window=16,
                      batch_size=1, batched=False)  # fmt: skip


def keys(batch: dict[str, torch.Tensor]) -> list[tuple[int, int]]:
    return list(zip(batch["document"].tolist(), batch["position"].tolist(), strict=True))


def test_an_epoch_has_each_row_once_and_the_next_one_another_order(acts: Any) -> None:
    stream = acts.batches(1000, seed=3)
    first = list(stream)
    second = list(stream)
    assert [len(batch["token"]) for batch in first[:-1]] == [1000] * (len(first) - 1)
    assert len(first) == len(stream)
    for epoch in (first, second):
        counts = Counter(key for batch in epoch for key in keys(batch))
        assert len(counts) == len(acts)
        assert set(counts.values()) == {1}
    assert [keys(batch) for batch in first] != [keys(batch) for batch in second]
    assert [keys(batch) for batch in acts.batches(1000, seed=3)] == [keys(batch) for batch in first]
    assert len(list(acts.batches(1000, drop_last=True))) == len(acts) // 1000


def test_values_of_a_batch_belong_to_its_tokens(acts: Any) -> None:
    torch.manual_seed(0)
    weight = torch.nn.Embedding(50, 512).weight.detach()
    tokens = {number: each["input_ids"] for number, each in enumerate(documents(320, 90))}
    for batch in acts.batches(777, seed=1):
        document, position = batch["document"].tolist(), batch["position"].tolist()
        expected = torch.stack([tokens[d][p] for d, p in zip(document, position, strict=True)])
        assert torch.equal(batch[":output"], weight[expected])


@pytest.mark.parametrize("done", [0, 1, 7])
def test_resume_in_the_middle_of_an_epoch_gives_the_same_batches(acts: Any, done: int) -> None:
    whole = acts.batches(500, seed=5)
    list(whole)  # the first epoch
    expected = [keys(batch) for batch in whole]
    stream = acts.batches(500, seed=5)
    list(stream)
    iterator = iter(stream)
    for _ in range(done):
        next(iterator)
    state = stream.state_dict()
    again = acts.batches(500, seed=5)
    again.load_state_dict(state)
    assert [keys(batch) for batch in again] == expected[done:]
    assert [keys(batch) for batch in again] != expected  # and then the next epoch


@pytest.mark.parametrize("start", [0, 3])
def test_a_loader_with_workers_gives_the_batches_of_one_process(acts: Any, start: int) -> None:
    stream = acts.batches(1500, seed=2)
    expected = [keys(batch) for batch in stream][start:]
    stream.load_state_dict({"epoch": 0, "batch": start})
    loader: Any = DataLoader(stream, batch_size=None, num_workers=2)
    assert [keys(batch) for batch in loader] == expected


def test_map_style_rows_by_number_and_a_shuffling_loader(acts: Any) -> None:
    chosen = [5, 15_000 % len(acts), 5, -1, 300]
    rows = acts.rows(chosen)
    for at, index in enumerate(chosen):
        assert acts[index]["token"] == int(rows["token"][at])
        assert torch.equal(acts[index][":output"], acts.read(":output")[index])
    loader: Any = DataLoader(acts, batch_size=512, shuffle=True)
    assert sum(len(batch["token"]) for batch in loader) == len(acts)
    with pytest.raises(IndexError):
        acts[len(acts)]
    with pytest.raises(SelectionError, match=":output"):
        acts.read("mlp:output")


def test_arrays_are_memory_maps_of_the_same_values(acts: Any) -> None:
    arrays = acts.arrays(":output")
    assert all(isinstance(array, np.memmap) for array in arrays)
    assert np.array_equal(np.concatenate(arrays), acts.read(":output").numpy())


def correlation(documents: torch.Tensor) -> float:
    """Share of neighbours of the same document, over what a random order of all rows has: 1 if it is random."""
    counts = torch.bincount(documents).double()
    expected = float((counts / counts.sum()).square().sum())
    return float((documents[1:] == documents[:-1]).double().mean()) / expected


def test_shuffling_on_write_breaks_documents_up_and_reshuffling_mixes_all(acts: Any, tmp_path: Path) -> None:
    plain = tt.harvest(torch.nn.Embedding(50, 8), [{"input": each["input_ids"]} for each in documents(320, 90)],
                       ":output", tmp_path / "plain", batched=False, shuffle=False)  # fmt: skip
    assert correlation(plain.read("document")) > 200  # neighbours are of one document
    # In a window of 16 of the 320 documents, neighbours share one as often as 16 documents allow.
    assert 10 < correlation(acts.read("document")) < 30
    mixed = tt.reshuffle(acts.path, tmp_path / "mixed", seed=4)
    assert 0.6 < correlation(mixed.read("document")) < 1.5
    assert sorted(keys(mixed.rows(range(len(mixed))))) == sorted(keys(acts.rows(range(len(acts)))))
    assert mixed.verify()
    assert mixed.statistics[":output"].rows == len(acts)
    with pytest.raises(SessionError, match="shuffled as a whole"):
        next(mixed.iter_documents())
    # An interrupted pass goes on and has the same bytes.
    wanted = digests(tmp_path / "mixed")
    for name in ("index.json", "shard-000004.safetensors"):
        (tmp_path / "mixed" / name).unlink()
    tt.reshuffle(acts.path, tmp_path / "mixed", seed=4)
    assert digests(tmp_path / "mixed") == wanted
    with pytest.raises(SessionError, match="shuffle=False"):
        tt.reshuffle(plain.path, tmp_path / "other")


def test_positions_and_values_have_no_correlation_with_their_neighbours(tmp_path: Path) -> None:
    """Rows that drift along a document are uncorrelated with their neighbours after shuffling."""
    acts = tt.harvest(tiny(), documents(200, 60), "first:output", tmp_path / "acts", window=50)
    values = acts.read("first:output").double()
    values = (values - values.mean(0)) / values.std(0)
    neighbours = float((values[1:] * values[:-1]).mean())
    assert abs(neighbours) < 4 / len(values) ** 0.5 + 1 / 50


def test_a_folder_is_read_while_it_is_written(tmp_path: Path) -> None:
    out, data = tmp_path / "acts", documents(80)
    began = threading.Event()

    def write() -> None:
        tt.harvest(tiny(), data, SITES, out, window=8, progress=lambda _: began.set())

    writer = threading.Thread(target=write)
    writer.start()
    assert began.wait(60)
    live = tt.open_activations(out)
    seen = [key for batch in live.follow(20, poll=0.01) for key in keys(batch)]
    writer.join()
    assert live.complete
    assert len(seen) == len(set(seen)) == sum(len(each["input_ids"]) for each in data)
    assert live.progress == 1.0
    assert live.statistics[SITES[0]].rows == len(live)


def test_following_a_folder_without_a_writer_ends_with_an_error(tmp_path: Path) -> None:
    tt.harvest(tiny(), documents(20), SITES, tmp_path / "acts", window=8)
    (tmp_path / "acts" / "index.json").unlink()
    live = tt.open_activations(tmp_path / "acts")
    assert (live.complete, live.writing, live.progress) == (False, False, 1.0)
    with pytest.raises(SessionError, match="still running"):
        list(live.follow(1000, poll=0.01, timeout=0.05))


@pytest.mark.parametrize("where", [20, 300, -300, -5])
def test_a_flipped_bit_is_an_error_and_never_a_wrong_value(where: int, tmp_path: Path) -> None:
    tt.harvest(tiny(), documents(20), SITES, tmp_path / "acts")
    path = tmp_path / "acts" / "shard-000000.safetensors"
    raw = bytearray(path.read_bytes())
    raw[where] ^= 1
    path.write_bytes(raw)
    with pytest.raises(RunCorruptError, match="damaged"):
        tt.open_activations(tmp_path / "acts").verify()


def test_a_shard_is_a_plain_safetensors_file(acts: Any) -> None:
    from safetensors.torch import load_file

    found = load_file(f"{acts.path}/{acts.shards[0]}")
    assert torch.equal(found[":output"], acts.read(":output", 0, len(found["document"])))


def test_a_folder_that_is_none_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunNotFoundError, match="no activations at"):
        tt.open_activations(tmp_path)
    with pytest.raises(RunNotFoundError, match="no activations at"):
        tt.open_activations(tmp_path / "missing")


def test_an_object_store_has_the_same_files_and_resumes(tmp_path: Path) -> None:
    fsspec = need("fsspec")
    with served_bucket() as bucket:
        data = documents(40)

        def stop(progress: Any) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            tt.harvest(tiny(), data, SITES, f"{bucket}/acts", window=8, progress=stop)
        remote = tt.harvest(tiny(), data, SITES, f"{bucket}/acts", window=8)
        local = tt.harvest(tiny(), data, SITES, tmp_path / "acts", window=8)
        store = fsspec.filesystem("s3")
        for name in (*local.shards, "index.json", "activations.json"):
            assert store.cat_file(f"{bucket}/acts/{name}") == (tmp_path / "acts" / name).read_bytes()
        assert torch.equal(remote.read(SITES[0]), local.read(SITES[0]))
        assert [keys(b) for b in remote.batches(64, seed=1)] == [keys(b) for b in local.batches(64, seed=1)]
        with pytest.raises(PlanError, match="not on this machine"):
            remote.arrays(SITES[0])


def test_parquet_has_the_same_values(acts: Any, tmp_path: Path) -> None:
    pq = need("pyarrow.parquet")
    paths = acts.to_parquet(tmp_path / "parquet")
    table = pq.read_table(paths[0])
    first = acts.spans()[0][1]
    assert table["document"].to_pylist() == acts.read("document", 0, first).tolist()
    values = np.stack(table[":output"].to_numpy(zero_copy_only=False))
    assert np.array_equal(values, acts.read(":output", 0, first).numpy())


def test_the_layout_of_speculators_has_a_file_for_each_document(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    data = documents(12)
    acts = tt.harvest(tiny(), data, ["embed:output", "first:output"], tmp_path / "acts", batch_size=1)
    assert acts.to_speculators(tmp_path / "hidden") == 12
    for number, each in enumerate(data):
        found = load_file(tmp_path / "hidden" / f"hs_{number}.safetensors")
        assert torch.equal(found["token_ids"], each["input_ids"])
        assert found["hidden_states"].shape == (len(each["input_ids"]), 2, 16)
        with torch.no_grad():
            assert torch.equal(found["hidden_states"][:, 0], tiny().embed(each["input_ids"]))
