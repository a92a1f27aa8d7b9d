"""Select the rows of a site's value: one for each token, sample or image patch, or what a function returns.

A row is an actual value of the model: nothing is averaged. Each row is identified by its document, its position in the
document and its token. It guarantees:

- padding and excluded tokens give no row; positions count the document's own tokens, whatever side is padded;
- all sites of a batch have the same rows in the same order, or the harvest stops.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from math import isqrt
from typing import Any, final

import torch
from torch import Tensor

from torchtap.datasets.documents import Inputs, batch_size_of
from torchtap.errors import PlanError
from torchtap.spi import Name

__all__ = ["KINDS", "RowFunction", "RowSelector", "Rows"]

KINDS = ("token", "sample", "patch")
# value, inputs -> [documents, rows, width], or (rows [n, width], document of each [n], position of each [n])
RowFunction = Callable[[Tensor, Inputs], Any]


@final
@dataclass(frozen=True, slots=True)
class Rows:
    """Identities of a batch's rows. ``index`` picks them from [documents × positions]; None takes all."""

    document: Tensor  # number within the batch
    position: Tensor
    token: Tensor  # -1 if there is none
    index: Tensor | None
    length: int  # positions of each document
    side: str = ""  # "decoder_" for rows of a decoder's tokens


@final
class RowSelector:
    """Cut the values of one batch after another into rows."""

    def __init__(
        self,
        rows: str | RowFunction,
        exclude: Collection[int] | Callable[[Inputs], Tensor] | None,
        patch_size: Any = None,
    ) -> None:
        if isinstance(rows, str) and rows not in KINDS:
            raise PlanError(f"rows={rows!r}: {', '.join(map(repr, KINDS))} or a function of (value, inputs)")
        self._rows = rows
        self._exclude = exclude
        self._patch_size = patch_size

    def select(self, values: dict[str, Tensor], inputs: Inputs) -> tuple[Rows, dict[str, Tensor]]:
        """Return the identities of the rows of a batch, and for each site its rows ``[n, width]``."""
        first: Rows | None = None
        cut: dict[str, Tensor] = {}
        for site, value in values.items():
            rows, cut[site] = self._cut(site, value, inputs, first)
            if first is not None and not _same(first, rows):
                raise PlanError(
                    f"{site!r} has other rows than {next(iter(values))!r}: all sites of a harvest must have the same "
                    "rows in the same order. Harvest them into two folders"
                )
            first = rows
        if first is None:
            raise PlanError("none of the sites produced a value")
        return first, cut

    def _cut(self, site: str, value: Tensor, inputs: Inputs, known: Rows | None) -> tuple[Rows, Tensor]:
        count = batch_size_of(inputs)
        if callable(self._rows):
            return _from_function(self._rows(value, inputs), count, site)
        if self._rows == "sample" and value.dim() != 3:
            if value.dim() < 2 or len(value) != count:
                raise _no_rows(site, value, "a row for each sample")
            return _plain(torch.arange(count), torch.zeros(count, dtype=torch.int64), 1), value.flatten(1)
        if self._rows == "patch":
            return self._patches(site, value, inputs, count)
        return self._tokens(site, value, inputs, count, known)

    def _tokens(
        self, site: str, value: Tensor, inputs: Inputs, count: int, known: Rows | None
    ) -> tuple[Rows, Tensor]:
        side = "decoder_" if "decoder_input_ids" in inputs and "decoder" in _components(site) else ""
        tokens, mask = inputs.get(f"{side}input_ids"), inputs.get(f"{side}attention_mask")
        length = tokens.shape[1] if isinstance(tokens, Tensor) else None
        if value.dim() == 2 and length and len(value) == count * length:
            value = value.view(count, length, -1)  # tokens of all documents in one dimension, as in routers
        if value.dim() < 3 or len(value) != count or length not in (None, value.shape[1]):
            raise _no_rows(site, value, "a row for each token")
        if length is None and self._rows == "sample":
            raise _no_rows(site, value, "one row for each sample")
        if known is not None and (known.length, known.side) == (value.shape[1], side):
            return known, _pick(value, known.index)
        if isinstance(mask, Tensor) and tuple(mask.shape) != tuple(value.shape[:2]):
            if length is None:  # a mask of something else: frames of audio before they are merged
                mask = None
            else:
                raise _no_rows(site, value, f"the shape of its mask {tuple(mask.shape)}")
        rows = replace(self._token_rows(value.shape[:2], tokens, mask, inputs), side=side)
        return rows, _pick(value, rows.index)

    def _token_rows(
        self, shape: torch.Size, tokens: Tensor | None, mask: Tensor | None, inputs: Inputs
    ) -> Rows:
        present = torch.ones(shape, dtype=torch.bool) if mask is None else mask.bool().cpu()
        keep = present.clone()
        special = inputs.get("special_tokens_mask")
        if isinstance(special, Tensor) and special.shape == keep.shape:
            keep &= ~special.bool().cpu()
        if callable(self._exclude):
            excluded = self._exclude(inputs)
            if not isinstance(excluded, Tensor) or excluded.shape != keep.shape:
                raise PlanError(f"exclude must return a tensor of bools of shape {tuple(keep.shape)}")
            keep &= ~excluded.bool().cpu()
        elif self._exclude and tokens is not None:
            keep &= ~torch.isin(tokens.cpu(), torch.tensor(sorted(self._exclude)))
        positions = present.cumsum(1) - 1
        if self._rows == "sample":  # the last token that is kept
            last = torch.where(keep, torch.arange(shape[1]), -1).amax(1)
            keep = (torch.arange(shape[1]) == last[:, None]) & keep
        document, place = keep.nonzero(as_tuple=True)
        token = tokens.cpu()[document, place] if tokens is not None else torch.full_like(document, -1)
        index = None if bool(keep.all()) else document * shape[1] + place
        return Rows(document, positions[document, place], token, index, shape[1])

    def _patches(self, site: str, value: Tensor, inputs: Inputs, count: int) -> tuple[Rows, Tensor]:
        if value.dim() == 4 and len(value) == count:  # channels, height, width
            value = value.flatten(2).transpose(1, 2)
        if value.dim() != 3 or len(value) != count:
            raise _no_rows(site, value, "a row for each patch")
        patches = self._patch_count(value.shape[1], inputs)
        if patches is None:
            raise PlanError(
                f"{site!r} has {value.shape[1]} positions, and the number of patches is not known: use rows='token' "
                "for all positions, or a function"
            )
        value = value[:, value.shape[1] - patches :]  # class and register tokens come first
        document = torch.arange(count).repeat_interleave(patches)
        return _plain(document, torch.arange(patches).repeat(count), patches), value.flatten(0, 1)

    def _patch_count(self, length: int, inputs: Inputs) -> int | None:
        images = next((v for v in inputs.values() if isinstance(v, Tensor) and v.dim() == 4), None)
        size = self._patch_size
        if size is not None and images is not None:
            height, width = (size, size) if isinstance(size, int) else size
            patches = (images.shape[2] // height) * (images.shape[3] // width)
            if patches <= length:
                return patches
        return next(
            (length - extra for extra in (0, 1) if isqrt(length - extra) ** 2 == length - extra), None
        )


def _components(site: str) -> tuple[str, ...]:
    return tuple(Name.read(site).module.parts)


def _pick(value: Tensor, index: Tensor | None) -> Tensor:
    flat = value.flatten(2).flatten(0, 1)
    return flat if index is None else flat[index]


def _plain(document: Tensor, position: Tensor, length: int) -> Rows:
    return Rows(document, position, torch.full_like(document, -1), None, length)


def _from_function(made: Any, count: int, site: str) -> tuple[Rows, Tensor]:
    if isinstance(made, Tensor):
        if made.dim() < 2 or len(made) != count:
            raise _no_rows(
                site, made, f"{count} documents: the function must return [documents, rows, width]"
            )
        made = made if made.dim() > 2 else made[:, None]
        each = made.shape[1]
        document = torch.arange(count).repeat_interleave(each)
        return _plain(document, torch.arange(each).repeat(count), each), made.flatten(2).flatten(0, 1)
    rows, document, position = made
    return _plain(torch.as_tensor(document), torch.as_tensor(position), -1), rows


def _same(first: Rows, other: Rows) -> bool:
    if first is other:
        return True
    return all(
        torch.equal(getattr(first, name), getattr(other, name)) for name in ("document", "position", "token")
    )


def _no_rows(site: str, value: Tensor, wanted: str) -> PlanError:
    return PlanError(
        f"{site!r} has the shape {tuple(value.shape)}, which does not have {wanted}. Select another site (of several "
        "outputs one has its number, as in 'block:output.0'), or give rows=, a function of (value, inputs)"
    )
