"""Reductions: what is kept of a tensor. Pure folds; they know no hooks, no steps and no files."""

from __future__ import annotations

from torchtap.reduce.base import AnyReduction, Reduction, Result
from torchtap.reduce.entropy import Entropy
from torchtap.reduce.fingerprint import Fingerprint
from torchtap.reduce.full import Full
from torchtap.reduce.gram import Gram
from torchtap.reduce.histogram import Histogram
from torchtap.reduce.metric import Metric
from torchtap.reduce.quantiles import Quantiles
from torchtap.reduce.registry import reduction_from_spec
from torchtap.reduce.sample import Sample
from torchtap.reduce.sample_spread import SampleSpread
from torchtap.reduce.stats import Stats
from torchtap.reduce.stats_block import StatsBlock
from torchtap.reduce.top_k import TopK
from torchtap.reduce.units import Units

__all__ = [
    "AnyReduction",
    "Entropy",
    "Fingerprint",
    "Full",
    "Gram",
    "Histogram",
    "Metric",
    "Quantiles",
    "Reduction",
    "Result",
    "Sample",
    "SampleSpread",
    "Stats",
    "StatsBlock",
    "TopK",
    "Units",
    "reduction_from_spec",
]
