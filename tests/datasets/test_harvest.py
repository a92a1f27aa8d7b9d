"""What is stored: data of every kind, rows of every kind, identities, dtypes, statistics, refusals."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.datasets.models import SITES, TinyLM, documents, tiny
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import torchtap as tt
from torchtap.errors import OutputError, PlanError, SessionError


def table(acts: Any) -> dict[tuple[int, int], dict[str, Any]]:
    """Return rows by (document, position); each may be there once."""
    found = {}
    for row in acts.__getitems__(range(len(acts))):
        key = row["document"], row["position"]
        assert key not in found
        found[key] = row
    return found


def test_every_token_of_every_document_is_there_once_with_its_token(tmp_path: Path) -> None:
    data = documents(50)
    acts = tt.harvest(tiny(), data, SITES, tmp_path / "acts", window=8, batch_size=3)
    rows = table(acts)
    wanted = {
        (number, position): token
        for number, each in enumerate(data)
        for position, token in enumerate(each["input_ids"].tolist())
    }
    assert {key: row["token"] for key, row in rows.items()} == wanted
    assert acts.documents == 50
    assert acts.complete
    assert acts.verify() == acts.nbytes


class Words:
    """A tokenizer: one token a word, 1 at the beginning and 2 at the end of each text."""

    all_special_ids = (1, 2)
    pad_token_id = 0

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [1, *(3 + len(word) for word in text.split()), 2]}


class Texts(Dataset[dict[str, Any]]):
    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"text": self.texts[index], "label": index}


TEXTS = ["to be or not", "that is the question", "whether it is nobler in the mind to suffer", "so"]


@pytest.mark.parametrize("kind", ["list", "generator", "dataset", "folder"])
def test_texts_come_from_lists_generators_datasets_and_folders(kind: str, tmp_path: Path) -> None:
    data: Any = {"list": TEXTS, "generator": (text for text in TEXTS), "dataset": Texts(TEXTS)}.get(kind)
    if kind == "folder":
        data = tmp_path / "texts"
        data.mkdir()
        for number, text in enumerate(TEXTS):
            (data / f"{number}.txt").write_text(text)
    acts = tt.harvest(
        tiny(), data, "first:output", tmp_path / "acts", tokenizer=Words(), shuffle=False, context=64
    )
    tokens = [3 + len(word) for text in TEXTS for word in text.split()]  # special tokens have no row
    assert acts.read("token").tolist() == tokens
    assert int(acts.read("position").min()) == 1
    assert torch.equal(acts.token_counts, torch.bincount(torch.tensor(tokens)))
    if kind == "folder":
        assert [each.name for each in acts.iter_documents()] == [f"{number}.txt@0" for number in range(4)]


def test_a_long_text_becomes_several_documents(tmp_path: Path) -> None:
    acts = tt.harvest(
        tiny(), [" ".join(["word"] * 20)], "first:output", tmp_path / "a", tokenizer=Words(), context=8
    )
    # 22 tokens: 8, 8 and 6, of which the first begins and the last ends with a special token
    assert [len(each.tokens) for each in acts.iter_documents()] == [7, 8, 5]


def test_a_loader_s_batches_are_run_as_they_are_and_padding_has_no_row(tmp_path: Path) -> None:
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]])
    batches = [
        {"input_ids": torch.randint(1, 50, (3, 4)) * mask, "attention_mask": mask, "text": ["a", "b", "c"]}
        for _ in range(3)
    ]
    loader: Any = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    model = tiny()
    acts = tt.harvest(model, loader, "first:output", tmp_path / "acts", window=4)
    rows = table(acts)
    assert len(rows) == 27
    with torch.no_grad():
        for number, batch in enumerate(batches):
            x = model.embed(batch["input_ids"])
            value = model.first(x + torch.cumsum(x, 1))
            for document in range(3):
                real = mask[document].nonzero().flatten().tolist()
                for position, place in enumerate(real):  # positions count the document's own tokens
                    row = rows[3 * number + document, position]
                    assert torch.equal(row["first:output"], value[document, place])
                    assert row["token"] == int(batch["input_ids"][document, place])


def test_tuples_of_a_loader_need_a_function_that_makes_inputs(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.ReLU())
    pairs = [(torch.randn(3, 2, 2), number) for number in range(20)]
    loader: Any = DataLoader(pairs, batch_size=4)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="inputs="):
        tt.harvest(model, loader, "1:output", tmp_path / "one", "sample")
    acts = tt.harvest(model, loader, "1:output", tmp_path / "two", "sample", inputs=lambda pair: pair[0])
    expected = model[1](torch.stack([image for image, _ in pairs]).flatten(1)).detach()
    order = torch.argsort(acts.read("document"))
    torch.testing.assert_close(acts.read("1:output")[order], expected)


def test_sample_rows_of_a_sequence_are_the_last_kept_token(tmp_path: Path) -> None:
    data = documents(10)
    last = [each["input_ids"][-1].item() for each in data]
    acts = tt.harvest(tiny(), data, "first:output", tmp_path / "acts", "sample", shuffle=False)
    assert acts.read("token").tolist() == last
    assert acts.read("position").tolist() == [len(each["input_ids"]) - 1 for each in data]


def test_patches_of_a_convolution_and_rows_of_a_function(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 4, stride=4))
    images = torch.randn(4, 3, 8, 8)
    acts = tt.harvest(model, [images], "0:output", tmp_path / "patch", "patch", shuffle=False)
    assert torch.equal(acts.read("0:output"), model(images).detach().flatten(2).transpose(1, 2).flatten(0, 1))
    assert acts.read("position").tolist() == [0, 1, 2, 3] * 4

    def brightest(value: Tensor, inputs: Any) -> Any:
        flat = value.flatten(2)
        best = flat.sum(1).argmax(1)
        return flat[torch.arange(len(flat)), :, best], torch.arange(len(flat)), best

    acts = tt.harvest(model, [images], "0:output", tmp_path / "best", brightest, shuffle=False)
    best = model(images).detach().flatten(2).sum(1).argmax(1)
    assert acts.read("position").tolist() == best.tolist()


def test_tokens_are_left_out_by_number_or_by_a_function(tmp_path: Path) -> None:
    data = documents(20)
    acts = tt.harvest(tiny(), data, "first:output", tmp_path / "ids", exclude=[3, 4, 5])
    assert not torch.isin(acts.read("token"), torch.tensor([3, 4, 5])).any()
    assert len(acts) == sum(
        int((~torch.isin(each["input_ids"], torch.tensor([3, 4, 5]))).sum()) for each in data
    )
    acts = tt.harvest(
        tiny(), data, "first:output", tmp_path / "odd", exclude=lambda inputs: inputs["input_ids"] % 2 == 1
    )
    assert not (acts.read("token") % 2).any()


def test_the_same_document_is_stored_once_whatever_batch_it_is_in(tmp_path: Path) -> None:
    data = documents(30)
    repeated = [*data, *data[:10], *data[5:25]]
    acts = tt.harvest(tiny(), repeated, SITES, tmp_path / "acts", window=7)
    assert sorted({key[0] for key in table(acts)}) == list(range(30))
    assert acts.documents == 30
    # The same document with padding on the other side, in a batch.
    ids = data[0]["input_ids"]
    pad = torch.zeros(3, dtype=torch.int64)
    batch = {
        "input_ids": torch.stack([torch.cat([ids, pad]), torch.cat([pad, ids])]),
        "attention_mask": torch.stack([torch.cat([ids * 0 + 1, pad]), torch.cat([pad, ids * 0 + 1])]),
    }
    assert len(tt.harvest(tiny(), [batch], "embed:output", tmp_path / "two")) == len(ids)


# Largest error relative to the norm of all rows: half a unit in the last place for casts, measured for the others.
@pytest.mark.parametrize(
    ("dtype", "bound"),
    [("float32", 0.0), ("bfloat16", 2**-8), ("float16", 2**-11), ("int8", 0.01), ("fp8", 0.04)],
)
def test_the_error_of_a_dtype_is_measured_and_stored(dtype: str, bound: float, tmp_path: Path) -> None:
    data = documents(40)
    exact = tt.harvest(tiny(), data, SITES, tmp_path / "exact")
    acts = tt.harvest(tiny(), data, SITES, tmp_path / dtype, dtype=dtype)
    assert acts.read("document").tolist() == exact.read("document").tolist()
    for site in SITES:
        original, stored = exact.read(site).double(), acts.read(site).double()
        error = acts.statistics[site].error
        assert error.relative == pytest.approx(float((original - stored).norm() / original.norm()), rel=1e-6)
        assert error.largest == pytest.approx(float((original - stored).abs().max()), rel=1e-6)
        assert error.relative <= bound
        assert torch.equal(acts.read(site, 3, 9), acts.read(site)[3:9])
    assert (acts.nbytes < 0.8 * exact.nbytes) == (dtype != "float32")


def test_bfloat16_values_stay_as_they_are(tmp_path: Path) -> None:
    model = tiny().to(torch.bfloat16)
    acts = tt.harvest(model, documents(5), "first:output", tmp_path / "acts")
    assert acts.read("first:output").dtype is torch.bfloat16
    assert acts.statistics["first:output"].error.relative == 0


def test_statistics_are_those_of_all_rows_in_float64(tmp_path: Path) -> None:
    acts = tt.harvest(
        tiny(), documents(60), SITES, tmp_path / "acts", window=7, covariance=True, dtype="bfloat16"
    )
    exact = tt.harvest(tiny(), documents(60), SITES, tmp_path / "exact", window=60)
    for site in SITES:
        values, found = exact.read(site).double(), acts.statistics[site]
        assert found.rows == len(values)
        torch.testing.assert_close(found.mean, values.mean(0), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found.variance, values.var(0, correction=0), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(found.covariance, torch.cov(values.T, correction=0), rtol=1e-4, atol=1e-6)
        norms = values.norm(dim=1)
        assert found.mean_norm == pytest.approx(float(norms.mean()))
        assert found.rms_norm == pytest.approx(float(norms.square().mean().sqrt()))
        assert found.largest_norm == pytest.approx(float(norms.max()))
        assert found.norm_factor == pytest.approx(values.shape[1] ** 0.5 / float(norms.mean()))
    with pytest.raises(PlanError, match="covariance=True"):
        _ = exact.statistics[SITES[0]].covariance


def test_rows_with_nan_are_counted_and_kept_out_of_the_sums(tmp_path: Path) -> None:
    model = tiny()
    model.embed.weight.data[7] = float("nan")
    data = [{"input_ids": torch.tensor([1, 2])}, {"input_ids": torch.tensor([7])}]
    acts = tt.harvest(model, data, "embed:output", tmp_path / "acts")
    found = acts.statistics["embed:output"]
    assert (found.rows, found.nonfinite) == (2, 1)
    assert bool(torch.isfinite(found.mean).all())


def test_the_model_keeps_its_mode_and_has_no_hooks(tmp_path: Path) -> None:
    model = TinyLM().train()
    model.first.eval()
    threads = torch.get_num_threads()
    tt.harvest(model, documents(3), SITES, tmp_path / "acts")
    assert (model.training, model.first.training, model.second.training) == (True, False, True)
    assert not any(module._forward_hooks for module in model.modules())
    assert torch.get_num_threads() == threads


def test_other_settings_another_model_and_other_data_are_refused(tmp_path: Path) -> None:
    data = documents(30)
    out = tmp_path / "acts"

    def interrupted(number: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tt.harvest(tiny(), data, SITES, out, window=8, progress=interrupted)
    before = sorted(out.iterdir())
    with pytest.raises(SessionError, match="seed was 0, now 5"):
        tt.harvest(tiny(), data, SITES, out, window=8, seed=5)
    other = tiny()
    other.second.bias.data += 1
    with pytest.raises(SessionError, match="another model"):
        tt.harvest(other, data, SITES, out, window=8)
    with pytest.raises(SessionError, match="document 0 is not the one"):
        tt.harvest(tiny(), [*data[1:], data[0]], SITES, out, window=8)
    with pytest.raises(SessionError, match="document 3 is not the one"):
        tt.harvest(tiny(), iter([*data[:3], *data[4:], data[3]]), SITES, out, window=8)
    assert sorted(out.iterdir()) == before
    assert tt.harvest(tiny(), data, SITES, out, window=8).complete


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match=r"notes\.txt"):
        tt.harvest(tiny(), documents(3), SITES, tmp_path)
    assert os.listdir(tmp_path) == ["notes.txt"] or set(os.listdir(tmp_path)) <= {"notes.txt", ".lock"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rows": "word"}, "'token'"),
        ({"dtype": "int4"}, "int8"),
        ({"engine": "spark"}, "'ray'"),
        ({"batch_size": 0}, "from 1 on"),
        ({"sites": "layers.9:output"}, "layers.9"),
        ({"data": []}, "empty"),
        ({"data": ["a text"]}, "tokenizer"),
        ({"data": 5}, "iterable"),
        ({"data": [{"audio": torch.zeros(3)}]}, "none of"),
    ],
)
def test_an_argument_that_does_not_fit_is_an_error_that_says_what_does(
    options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    given = {"data": documents(3), "sites": SITES, "rows": "token", **options}
    with pytest.raises((PlanError, LookupError), match=words):
        tt.harvest(
            tiny(), given.pop("data"), given.pop("sites"), tmp_path / "acts", given.pop("rows"), **given
        )


def test_progress_reports_rows_bytes_and_time_left(tmp_path: Path) -> None:
    seen: list[Any] = []
    acts = tt.harvest(tiny(), documents(30), SITES, tmp_path / "acts", window=8, progress=seen.append)
    assert [each.documents for each in seen] == [8, 16, 24, 30]
    assert (seen[-1].rows, seen[-1].bytes, seen[-1].seconds_left) == (len(acts), acts.nbytes, 0)
    assert "30 of 30 documents" in str(seen[-1])
    assert "rows/s" in str(seen[-1])


def test_a_complete_folder_is_left_alone(tmp_path: Path) -> None:
    tt.harvest(tiny(), documents(10), SITES, tmp_path / "acts")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "acts").iterdir() if path.name != ".lock"}
    again = tt.harvest(tiny(), documents(10), SITES, tmp_path / "acts")
    assert {
        path: path.stat().st_mtime_ns for path in (tmp_path / "acts").iterdir() if path.name != ".lock"
    } == before
    assert len(again) == len(tt.open_activations(tmp_path / "acts"))


def test_two_writers_of_one_folder_are_refused(tmp_path: Path) -> None:
    program = (
        "import sys, torchtap as tt\n"
        "from tests.datasets.models import SITES, documents, tiny\n"
        "try:\n    tt.harvest(tiny(), documents(30), SITES, sys.argv[1], window=8)\n"
        "except tt.OutputError as error:\n    print(error)\n"
    )
    answers = []

    def second(progress: Any) -> None:
        if not answers:
            done = subprocess.run(
                [sys.executable, "-c", program, str(tmp_path / "acts")],
                capture_output=True,
                text=True,
                cwd=ROOT,
            )
            answers.append(done.stdout + done.stderr)

    acts = tt.harvest(tiny(), documents(30), SITES, tmp_path / "acts", window=8, progress=second)
    assert "another process is writing" in answers[0]
    assert len(table(acts)) == sum(len(each["input_ids"]) for each in documents(30))


ROOT = Path(__file__).parents[2]


def test_a_full_disk_is_an_error_that_loses_nothing_and_the_harvest_goes_on(tmp_path: Path) -> None:
    """A limit of the process on the size of its files: a real failure of ``write``, in the middle of a shard."""
    program = (
        "import resource, signal, sys, torchtap as tt\n"
        "from tests.datasets.models import SITES, documents, tiny\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "data = documents(64, 4)[:16] + documents(64, 40)\n"
        "def limit(progress):\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))\n"
        "try:\n    tt.harvest(tiny(), data, SITES, sys.argv[1], window=16, progress=limit)\n"
        "except tt.OutputError as error:\n    print(error)\n"
    )
    out = tmp_path / "acts"
    done = subprocess.run([sys.executable, "-c", program, str(out)], capture_output=True, text=True, cwd=ROOT)
    assert "could not be written" in done.stdout, done.stderr
    assert "start again to go on" in done.stdout
    safe = tt.open_activations(out)
    assert not safe.complete
    assert safe.verify()
    data = documents(64, 4)[:16] + documents(64, 40)
    acts = tt.harvest(tiny(), data, SITES, out, window=16)
    plain = tt.harvest(tiny(), data, SITES, tmp_path / "plain", window=16)
    assert not list(out.glob(".partial*"))
    assert [(out / name).read_bytes() for name in acts.shards] == [
        (tmp_path / "plain" / name).read_bytes() for name in plain.shards
    ]
