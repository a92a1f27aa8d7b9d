"""SAELens trains on harvested rows, by its trainer and from the folder that it reads by itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.datasets.models import tiny
from tests.optional import need
from torch import Tensor

import torchtap as tt

pytestmark = pytest.mark.filterwarnings("ignore")


def train(provider: Iterator[Tensor], width: int, rows: int) -> tuple[Any, list[float]]:
    """Train a TopK SAE with SAELens' own trainer; return it and the reconstruction losses."""
    sae_lens = need("sae_lens")
    config = need("sae_lens.config")
    sae = sae_lens.TopKTrainingSAE(
        sae_lens.TopKTrainingSAEConfig(d_in=width, d_sae=64, k=8, normalize_activations="none")
    )
    settings = config.SAETrainerConfig(
        total_training_samples=rows,
        train_batch_size_samples=256,
        lr=3e-3,
        lr_end=3e-4,
        logger=config.LoggingConfig(log_to_wandb=False),
    )
    losses: list[float] = []
    trainer = sae_lens.SAETrainer(cfg=settings, sae=sae, data_provider=provider)
    step = trainer._train_step

    def noted(*args: Any, **kwargs: Any) -> Any:
        output = step(*args, **kwargs)
        losses.append(float(output.losses["mse_loss"]))
        return output

    trainer._train_step = noted
    trainer.fit()
    return sae, losses


def harvested(folder: Path) -> Any:
    data = [{"input_ids": torch.randint(1, 50, (16,))} for _ in range(400)]
    return tt.harvest(tiny(), data, "first:output", folder)


def test_the_trainer_of_saelens_takes_batches(tmp_path: Path) -> None:
    need("sae_lens")
    acts = harvested(tmp_path / "acts")
    factor = acts.statistics["first:output"].norm_factor

    def forever() -> Iterator[Tensor]:
        stream = acts.batches(256, "first:output", drop_last=True)
        while True:
            for batch in stream:
                yield batch["first:output"] * factor

    _, losses = train(forever(), 16, 60_000)
    assert losses[-1] < 0.3 * losses[0]


def test_the_store_of_saelens_reads_the_folder_that_is_made_for_it(tmp_path: Path) -> None:
    sae_lens = need("sae_lens")
    acts = harvested(tmp_path / "acts")
    acts.to_saelens(tmp_path / "cached", "first:output", 16, hook_name="blocks.0.hook_resid_post")
    store = sae_lens.ActivationsStore(
        model=None, dataset=None, streaming=False, hook_name="blocks.0.hook_resid_post", hook_head_index=None,
        context_size=16, d_in=16, n_batches_in_buffer=64, total_training_tokens=6400, store_batch_size_prompts=32,
        train_batch_size_tokens=256, prepend_bos=False, normalize_activations="none", device=torch.device("cpu"),
        dtype="float32", cached_activations_path=str(tmp_path / "cached" / "data"),
    )  # fmt: skip
    # In the store's own order, the rows are those of the documents.
    rows, tokens = store.get_raw_llm_batch()
    expected = [document for document, _ in zip(acts.iter_documents(), range(32), strict=False)]
    assert torch.equal(rows, torch.cat([document.values["first:output"] for document in expected]))
    assert tokens.long().tolist() == torch.cat([document.tokens for document in expected]).tolist()
    _, losses = train(iter(store), 16, 60_000)
    assert losses[-1] < 0.5 * losses[0]


def test_a_hugging_face_dataset_has_the_same_rows(tmp_path: Path) -> None:
    need("datasets")
    acts = harvested(tmp_path / "acts")
    made = acts.to_hf(tmp_path / "hf").with_format("torch")
    assert torch.equal(made[:50]["first:output"], acts.read("first:output", 0, 50))
    again = tt.harvest(tiny(), need("datasets").Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5]]}), "first:output",
                       tmp_path / "again", shuffle=False)  # fmt: skip
    assert again.read("token").tolist() == [1, 2, 3, 4, 5]
