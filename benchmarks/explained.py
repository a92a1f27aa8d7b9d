"""Whether the coverage of a form explains a site that is not there, and whether what it says is true.

Explanations are not believed: the eager model is run again to see whether a module really handed on what it was given,
and whether a tensor is really used by nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, final
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.leaves import leaves_of, with_leaf
from torchtap.plan.names import read_name, site_name
from torchtap.receive import reasons
from torchtap.session.coverage import Missing

__all__ = ["Truth", "is_explained"]


def is_explained(
    site: str, at_home: bool, coverage: Iterable[Missing], truth: Truth, traced_before: bool = False
) -> bool:
    """Whether the coverage tells, truly, why a site is not there.

    ``at_home``: the value came under a name of the same module. ``traced_before``: the form was made from a form.
    """
    told = {missing.site: missing.reason for missing in coverage}
    name = read_name(site)
    port = site_name(name.path, name.kind)
    names = (site, site_name(name.path, name.kind, name.leaf), port)
    reason = next((told[each] for each in names if each in told), "")
    if at_home and (not reason or _is(reasons.UNPLACED, reason)):
        return True  # the module's own name finds it, or its numbers are listed
    if not reason or _is(reasons.UNPLACED, reason):  # of this very tensor nothing is said
        general = any(_is(reasons.FORGOTTEN, each) for each in told.values())
        return general and (traced_before or truth.left_nothing(site))
    if reason in (reasons.NO_OPERATION, reasons.NO_EQUAL):
        return truth.left_nothing(site)
    if reason == reasons.UNMARKED:  # it is an eager site, so it was called
        return traced_before or truth.is_in_a_branch(site)
    return reasons.is_known(reason)


def _is(reason: str, text: str) -> bool:
    return text.startswith(reason.partition("{")[0])


@final
class Truth:
    """Runs of the eager model that show what a module did."""

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        expected: Mapping[str, Tensor],
    ) -> None:
        self._model, self._args, self._kwargs = model, args, kwargs
        self._returned = [value for site, value in expected.items() if not read_name(site).path]

    def left_nothing(self, site: str) -> bool:
        """Whether a module handed on what it was given, is in a branch, or nothing uses what it returned here."""
        return self._is_handed_on(site) or self._is_unused(site) or self.is_in_a_branch(site)

    def is_in_a_branch(self, site: str) -> bool:
        """Whether a module is called by ``torch.cond``, for which a plain branch of Python stands in."""
        found: list[bool] = []
        depth = [0]

        def cond(chosen: Any, yes: Any, no: Any, operands: Any = ()) -> Any:
            depth[0] += 1
            try:
                return (yes if chosen else no)(*operands)
            finally:
                depth[0] -= 1

        def look(_given: Any, output: Any) -> Any:
            found.append(depth[0] > 0)
            return output

        compiling = mock.patch.object(torch.compiler, "is_compiling", return_value=True)
        with (
            mock.patch.object(torch, "cond", cond),
            compiling,
        ):  # some models have branches for compilers only
            self._run(site, look)
        return found == [True]

    def _is_handed_on(self, site: str) -> bool:
        found: list[bool] = []

        def look(given: Any, output: Any) -> Any:
            tensor = dict(leaves_of(output))[read_name(site).leaf]
            found.append(any(tensor is each for _, each in leaves_of(given)))
            return output

        self._run(site, look)
        return found == [True]

    def _is_unused(self, site: str) -> bool:
        def spoil(_given: Any, output: Any) -> Any:
            place = read_name(site).leaf
            tensor = dict(leaves_of(output))[place]
            return with_leaf(output, place, _spoilt(tensor))

        returned = [value for _, value in leaves_of(self._run(site, spoil))]
        return len(returned) == len(self._returned) and all(
            torch.equal(one, other) for one, other in zip(returned, self._returned, strict=True)
        )

    def _run(self, site: str, change: Any) -> Any:
        """Run the model, with one call of one module changed."""
        name = read_name(site)
        inner = self._model.module if isinstance(self._model, nn.DataParallel) else self._model
        calls = [0]

        def hook(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            calls[0] += 1
            return change((args, kwargs), output) if calls[0] == name.call + 1 else None

        handle = inner.get_submodule(name.path).register_forward_hook(hook, with_kwargs=True)
        try:
            return self._model(*self._args, **self._kwargs)
        finally:
            handle.remove()


def _spoilt(tensor: Tensor) -> Tensor:
    """Another tensor of the same kind, which shows wherever it is used."""
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.full_like(tensor, float("nan"))
    if tensor.is_quantized:
        return torch.zeros_like(tensor)
    return ~tensor if tensor.dtype is torch.bool else tensor + 1
