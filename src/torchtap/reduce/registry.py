"""Reductions by name: from a spec back to the reduction, the built-in ones and those of installed packages.

A package adds its own by an entry point in the group ``torchtap.reductions`` whose name is the reduction's
name and whose value is its class. A class is made from a spec by its keyword parameters, or by a classmethod
``from_spec(parameters)`` if it has one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchtap.errors import ReductionError
from torchtap.reduce.base import AnyReduction, Reduction
from torchtap.registry import Registry

__all__ = ["REDUCTIONS", "reduction_class", "reduction_from_spec"]

REDUCTIONS = Registry(
    what="reduction",
    group="torchtap.reductions",
    built_in={
        "entropy": "torchtap.reduce.entropy:Entropy",
        "fingerprint": "torchtap.reduce.fingerprint:Fingerprint",
        "full": "torchtap.reduce.full:Full",
        "gram": "torchtap.reduce.gram:Gram",
        "histogram": "torchtap.reduce.histogram:Histogram",
        "metric": "torchtap.reduce.metric:Metric",
        "quantiles": "torchtap.reduce.quantiles:Quantiles",
        "sample": "torchtap.reduce.sample:Sample",
        "sample_spread": "torchtap.reduce.sample_spread:SampleSpread",
        "stats": "torchtap.reduce.stats:Stats",
        "topk": "torchtap.reduce.top_k:TopK",
        "units": "torchtap.reduce.units:Units",
    },
    error=ReductionError,
)


def reduction_class(name: str) -> type[AnyReduction]:
    """The class that goes by ``name``."""
    found = REDUCTIONS.load(name)
    if not (isinstance(found, type) and issubclass(found, Reduction)):
        raise ReductionError(
            f"the entry point {name!r} in {REDUCTIONS.group!r} is {found!r}, which is no Reduction"
        )
    return found


def reduction_from_spec(spec: Mapping[str, Any]) -> AnyReduction:
    """The reduction that ``spec()`` described."""
    parameters = dict(spec)
    name = parameters.pop("reduction", None)
    if not isinstance(name, str):
        raise ReductionError(f"{dict(spec)!r} describes no reduction: it has no name under 'reduction'")
    made_by = reduction_class(name)
    from_spec = getattr(made_by, "from_spec", None)
    try:
        made = from_spec(parameters) if from_spec is not None else made_by(**parameters)
    except TypeError as error:
        raise ReductionError(f"the reduction {name!r} cannot be made from {parameters!r}: {error}") from error
    if not isinstance(made, Reduction):
        raise ReductionError(f"from_spec of the reduction {name!r} gave {made!r}, which is no Reduction")
    return made
