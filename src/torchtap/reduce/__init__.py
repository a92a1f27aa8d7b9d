"""Reductions: what is kept of a tensor. Pure folds; they know no hooks, no steps and no files.

A door with names only: each reduction is loaded when it is asked for. Most sessions keep one or two of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchtap.lazy import names_from

if TYPE_CHECKING:
    from torchtap.reduce.base import AnyReduction as AnyReduction
    from torchtap.reduce.base import Reduction as Reduction
    from torchtap.reduce.base import Result as Result
    from torchtap.reduce.entropy import Entropy as Entropy
    from torchtap.reduce.fingerprint import Fingerprint as Fingerprint
    from torchtap.reduce.full import Full as Full
    from torchtap.reduce.gram import Gram as Gram
    from torchtap.reduce.histogram import Histogram as Histogram
    from torchtap.reduce.metric import Metric as Metric
    from torchtap.reduce.quantiles import Quantiles as Quantiles
    from torchtap.reduce.registry import reduction_from_spec as reduction_from_spec
    from torchtap.reduce.sample import Sample as Sample
    from torchtap.reduce.sample_spread import SampleSpread as SampleSpread
    from torchtap.reduce.stats import Stats as Stats
    from torchtap.reduce.stats_block import StatsBlock as StatsBlock
    from torchtap.reduce.top_k import TopK as TopK
    from torchtap.reduce.units import Units as Units

_HOME = {
    "AnyReduction": "base",
    "Entropy": "entropy",
    "Fingerprint": "fingerprint",
    "Full": "full",
    "Gram": "gram",
    "Histogram": "histogram",
    "Metric": "metric",
    "Quantiles": "quantiles",
    "Reduction": "base",
    "Result": "base",
    "Sample": "sample",
    "SampleSpread": "sample_spread",
    "Stats": "stats",
    "StatsBlock": "stats_block",
    "TopK": "top_k",
    "Units": "units",
    "reduction_from_spec": "registry",
}
__all__ = list(_HOME)
__getattr__ = names_from(__name__, _HOME)
