"""Write activations in the layouts of other tools: Parquet, Hugging Face datasets, SAELens, speculators."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchtap.datasets.shard import IDENTITY
from torchtap.errors import PlanError, needing

if TYPE_CHECKING:
    from torchtap.datasets.reader import Activations, Document

Path = str | os.PathLike[str]
Sites = str | Sequence[str] | None

__all__ = ["to_hf", "to_parquet", "to_saelens", "to_speculators"]


def to_parquet(acts: Activations, folder: Path, sites: Sites = None) -> list[str]:
    """Write one Parquet file for each shard and return their paths. bfloat16 becomes float32, exactly."""
    sites = acts.columns(sites)
    with needing("pyarrow", "arrow", who="to_parquet"):
        import pyarrow as pa
        import pyarrow.parquet as pq

    os.makedirs(folder, exist_ok=True)
    paths = []
    for (start, rows, _), name in zip(acts.spans(), acts.shards, strict=True):
        path = os.path.join(folder, f"{name.removesuffix('.safetensors')}.parquet")
        paths.append(path)
        if os.path.exists(path) or not rows:
            continue
        found = acts.gather([(start, start + rows)], [*IDENTITY, *sites])
        columns = {name: pa.array(found[name].numpy()) for name in IDENTITY}
        for site in sites:
            values = found[site].float() if found[site].dtype is torch.bfloat16 else found[site]
            columns[site] = pa.FixedSizeListArray.from_arrays(
                pa.array(values.reshape(-1).numpy()), values.shape[1]
            )
        pq.write_table(pa.table(columns), f"{path}.part", compression="none")
        os.replace(f"{path}.part", path)
    return [path for path in paths if os.path.exists(path)]


def to_hf(acts: Activations, folder: Path, sites: Sites = None) -> Any:
    """Return a Hugging Face dataset over Parquet files in ``folder``, which are written if they are missing."""
    with needing("datasets", "datasets", who="to_hf"):
        datasets: Any = import_module("datasets")
    return datasets.Dataset.from_parquet(
        to_parquet(acts, folder, sites), cache_dir=os.path.join(folder, "cache")
    )


def to_saelens(acts: Activations, folder: Path, site: str, context: int, hook_name: str | None = None) -> Any:
    """Write the dataset that SAELens reads as cached activations: documents cut into ``context`` rows each.

    Rows of a document beyond a multiple of ``context`` are left out, as SAELens' own runner does.
    """
    with needing("datasets", "datasets", who="to_saelens"):
        hf: Any = import_module("datasets")
    name = hook_name or site

    def examples() -> Iterator[dict[str, Any]]:
        for document in acts.iter_documents(site):
            values = document.values[site].float()
            for start in range(0, len(values) - context + 1, context):
                tokens = document.tokens[start : start + context]
                yield {name: values[start : start + context].numpy(), "token_ids": tokens.numpy()}

    first = next(examples(), None)
    if first is None:
        raise PlanError(f"no document has {context} rows: give a smaller context")
    shape = first[name].shape
    tokens_of = hf.Sequence(hf.Value("int32"), length=context)
    features = hf.Features({name: hf.Array2D(shape, "float32"), "token_ids": tokens_of})
    made = hf.Dataset.from_generator(examples, features=features, cache_dir=os.path.join(folder, "cache"))
    made.save_to_disk(os.path.join(folder, "data"))
    return made


def to_speculators(
    acts: Activations,
    folder: Path,
    sites: Sites = None,
    loss_mask: Callable[[Document], Tensor] | None = None,
) -> int:
    """Write ``hs_<document>.safetensors`` with ``hidden_states`` [tokens, sites, width], and ``token_ids``."""
    from safetensors.torch import save_file

    sites = acts.columns(sites)
    os.makedirs(folder, exist_ok=True)
    count = 0
    for document in acts.iter_documents(sites):
        path = os.path.join(folder, f"hs_{document.number}.safetensors")
        count += 1
        if os.path.exists(path):
            continue
        mask = (
            torch.ones(len(document.tokens), dtype=torch.bool) if loss_mask is None else loss_mask(document)
        )
        tensors = {
            "hidden_states": torch.stack([document.values[site] for site in sites], 1).contiguous(),
            "token_ids": document.tokens.long(),
            "loss_mask": mask.to(torch.int64),
        }
        save_file(tensors, f"{path}.part")
        os.replace(f"{path}.part", path)
    return count
