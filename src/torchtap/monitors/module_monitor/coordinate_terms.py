"""What the refined coordinate check says of one module, and under which keys.

``output`` is W_t x_t, ``between`` W_0 x_t and ``start`` W_0 x_0. Each term is the mean of its rows' norms; here it is
the sum over rows, with their number, so that micro-batches add up. Keys are made once and used in every step.

Most values go past Python: native code finds them and leaves their sums in the module's cells of a table
(`coordinate_cells`). What it cannot read is cut, summed and listed here.

Not here: where the values come from (`rcc`, `replay`), the arithmetic (`reduce.row_norms`).
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchtap.hooks.arguments import Args
from torchtap.hooks.leaves import leaves
from torchtap.monitors.module_monitor.coordinate_cells import Cells, Columns
from torchtap.monitors.module_monitor.naming import leaf_name
from torchtap.monitors.module_monitor.part_of_rows import Cutter
from torchtap.monitors.module_monitor.reference import Call, opened
from torchtap.reduce import row_norms
from torchtap.reduce.row_norms import RowNorms, of_change, of_steps, row_count

__all__ = ["Measured", "Terms"]

# Keys, what takes each one's number from among the norms, the norms, over how many rows these are summed up, and the
# width of a row.
Measured = tuple[tuple[str, ...], Callable[[Any], tuple[float, ...]], RowNorms, int, int]

_FIRST, _SECOND, _BOTH = itemgetter(slice(0, 1)), itemgetter(slice(1, 2)), itemgetter(slice(0, 2))
_OF_WEIGHT = (0, 1, 2, 3, 4, 1)
_WITHOUT_BIAS = (0, 1, 2, 3, 0, 1)

_OUTPUT, _INPUT, _ALL = 1, 2, 3  # what `rows_into` has done

_OWN, _INHERITED = "RCC (W_t-W_0)x_t/{}/l2norm", "RCC W_0(x_t-x_0)/{}/l2norm"


@final
class Terms:
    """The terms of one module and its reference, of the call that was taken last."""

    def __init__(self, name: str, module: nn.Module, reference: nn.Module, cells: Cells) -> None:
        self._name = name
        self._module: Any = module
        self._reference: Any = reference
        self._is_embedding = isinstance(module, nn.Embedding)
        self._is_norm = isinstance(module, nn.LayerNorm)
        self._has_weight = isinstance(module, (nn.Linear, nn.LayerNorm))
        self._has_projections = isinstance(module, nn.MultiheadAttention) and isinstance(
            reference, nn.MultiheadAttention
        )
        self._steps: dict[str, tuple[str, ...]] = {}  # by leaf of the output
        weight = f"{name}.weight"
        self._weight = (
            *self._steps_of(""),
            f"RCC (W_t-W_0)x_t/{weight}/W_t x_t/l2norm",
            f"RCC W_0(x_t-x_0)/{weight}/W_0 x_0/l2norm",
            _OWN.format(weight),
            _INHERITED.format(weight),
        )
        self._input = (f"RCC x_t/{name}/l2norm", f"RCC (x_t-x_0)/{name}/l2norm")
        self._normalised = (
            f"RCC (W_t-W_0)x_t/{weight}/x_t/l2norm",
            f"RCC W_0(x_t-x_0)/{weight}/x_t-x_0/l2norm",
        )
        self._cells, output, given = cells.add()
        keys, sums = (self._weight, _WITHOUT_BIAS) if self._has_weight else (self._steps_of(""), (0, 1))
        of_input = Columns(given, self._input, (0, 1))
        self._columns = _choices(Columns(output, keys, sums), of_input)
        self._biased_columns = _choices(Columns(output, self._weight, _OF_WEIGHT), of_input)
        self.filled: tuple[Columns, ...] = ()  # the cells that hold the last call's terms
        self.listed: list[Measured] = []  # its terms that are in no cells

    def take(self, inputs: Args, output: object, between: object, call: Call, cutter: Cutter | None) -> None:
        """All terms of one call, beside the reference's. With a cutter the values may be longer than there."""
        start_inputs, _, start = call
        into, at, cut = row_norms.rows_into, self._cells, cutter is not None
        given, start_given = inputs[0] if inputs else None, start_inputs[0] if start_inputs else None
        bias = _bias_of(self._module) if self._has_weight else None
        columns = self._columns if bias is None else self._biased_columns
        if self._is_embedding:
            done = 0
        elif bias is None:
            done = into(at, cut, given, start_given, output, between, start)
        else:
            start_bias = _bias_of(self._reference)
            done = into(at, cut, given, start_given, output, between, start, bias, start_bias)
        self.filled = columns[done]
        self.listed = []
        if done < _ALL or self._is_norm or self._has_projections:
            start_inputs, start = opened(start_inputs), opened(start)
            with torch.no_grad():
                if cutter is not None:
                    inputs, _ = cutter.call_like(inputs, {}, call)
                    output, between = cutter.like(output, start), cutter.like(between, start)
                # What native code has not put into cells.
                if not done & _OUTPUT:
                    self.listed += self._of_output(output, between, start)
                self.listed += self._of_inputs(inputs, start_inputs, bool(done & _INPUT))

    def _of_inputs(self, inputs: Args, start_inputs: Args, is_filled: bool) -> list[Measured]:
        if self._is_embedding:
            return []  # its input is an index
        found: list[Measured] = []
        first = inputs[0] if inputs else None
        if isinstance(first, Tensor) and first.is_floating_point() and first.dim():
            found += self._of_input(first, start_inputs[0] if start_inputs else None, is_filled)
        if self._has_projections:
            found += self._of_projections(inputs, start_inputs)
        return found

    def _of_input(self, first: Tensor, other: object, is_filled: bool) -> list[Measured]:
        """An input and its change since the start, where it can be told."""
        rows, width = row_count(first), first.shape[-1]
        if not isinstance(other, Tensor) or other.shape != first.shape:
            return [(self._input[:1], _FIRST, of_change(first, first), rows, width)]
        found: list[Measured] = []
        if not is_filled:
            found.append((self._input, _BOTH, of_change(first, other), rows, width))
        if self._is_norm:
            found.append((self._normalised, _BOTH, self._of_normalised(first, other), rows, width))
        return found

    def _of_output(self, output: Any, between: Any, start: Any) -> list[Measured]:
        if isinstance(output, Tensor):
            if not self._has_weight:
                return [self._of_leaf("", output, between, start)]
            # The same terms without the bias, too: those of the weight alone.
            bias = self._module.bias
            if bias is None:
                wanted, norms = itemgetter(*_WITHOUT_BIAS), of_steps(output, between, start)
            else:
                wanted, norms = (
                    itemgetter(*_OF_WEIGHT),
                    of_steps(output, between, start, (bias, self._reference.bias)),
                )
            return [(self._weight, wanted, norms, row_count(output), output.shape[-1])]
        betweens, starts = dict(leaves(between)), dict(leaves(start))
        return [
            self._of_leaf(leaf, value, betweens[leaf], starts[leaf])
            for leaf, value in leaves(output)
            if leaf in betweens and leaf in starts and value.shape == starts[leaf].shape
        ]

    def _of_leaf(self, leaf: str, output: Tensor, between: Tensor, start: Tensor) -> Measured:
        keys, rows = self._steps_of(leaf), row_count(output)
        width = output.shape[-1] if output.dim() else 1
        if self._is_embedding:
            return keys[:1], _SECOND, of_change(output, between), rows, width
        return keys, _BOTH, of_steps(output, between, start), rows, width

    def _steps_of(self, leaf: str) -> tuple[str, ...]:
        known = self._steps.get(leaf)
        if known is None:
            place = leaf_name(self._name, leaf)
            known = self._steps[leaf] = (_OWN.format(place), _INHERITED.format(place))
        return known

    def _of_normalised(self, first: Tensor, other: Tensor) -> RowNorms:
        """What a layer norm's weight is multiplied with: its normalised input."""
        shape, epsilon = self._module.normalized_shape, self._module.eps
        now = functional.layer_norm(first, shape, None, None, epsilon)
        return of_change(now, functional.layer_norm(other, shape, None, None, epsilon))

    def _of_projections(self, inputs: Args, start_inputs: Args) -> list[Measured]:
        """The projections of query, key and value, which are no modules of their own."""
        found: list[Measured] = []
        for index, part in enumerate(("q", "k", "v")):
            if index >= len(inputs) or not isinstance(inputs[index], Tensor):
                continue
            now, before = _projection(self._module, part, index), _projection(self._reference, part, index)
            value = functional.linear(inputs[index], now)
            between = functional.linear(inputs[index], before)
            start = functional.linear(start_inputs[index], before)
            place = f"{self._name}.{part}_proj.weight"
            keys = (_OWN.format(place), _INHERITED.format(place))
            found.append((keys, _BOTH, of_steps(value, between, start), row_count(value), value.shape[-1]))
        return found


def _choices(output: Columns, given: Columns) -> tuple[tuple[Columns, ...], ...]:
    """What is filled, by what `rows_into` says."""
    return (), (output,), (given,), (output, given)


def _bias_of(module: Any) -> Tensor | None:
    """What ``module.bias`` says, past nn.Module's own search for it. (A parametrized bias is no parameter.)"""
    own: dict[str, Tensor | None] = module._parameters
    if "bias" in own:
        return own["bias"]
    bias: Tensor | None = module.bias
    return bias


def _projection(module: nn.MultiheadAttention, part: str, index: int) -> Tensor:
    packed: Tensor | None = module._parameters["in_proj_weight"]
    if packed is None:
        own: Tensor = getattr(module, f"{part}_proj_weight")
        return own
    return packed[index * module.embed_dim : (index + 1) * module.embed_dim]
