"""Reductions: pure folds that keep something small of tensors. They know no hooks, steps or files.

Each name is imported at its first use; most sessions need one or two reductions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchtap.lazy import names_from

if TYPE_CHECKING:
    from torchtap.reduce.elements import Fingerprint as Fingerprint
    from torchtap.reduce.elements import Full as Full
    from torchtap.reduce.elements import Sample as Sample
    from torchtap.reduce.elements import TopK as TopK
    from torchtap.reduce.histogram import Histogram as Histogram
    from torchtap.reduce.histogram import Quantiles as Quantiles
    from torchtap.reduce.metric import Metric as Metric
    from torchtap.reduce.per_feature import Entropy as Entropy
    from torchtap.reduce.per_feature import Gram as Gram
    from torchtap.reduce.per_feature import SampleSpread as SampleSpread
    from torchtap.reduce.per_feature import Units as Units
    from torchtap.reduce.reduction import AnyReduction as AnyReduction
    from torchtap.reduce.reduction import Reduction as Reduction
    from torchtap.reduce.reduction import Result as Result
    from torchtap.reduce.reduction import reduction_from_spec as reduction_from_spec
    from torchtap.reduce.stats import Stats as Stats
    from torchtap.reduce.stats import StatsBlock as StatsBlock

_MODULES = {
    "reduction": ("AnyReduction", "Reduction", "Result", "reduction_from_spec"),
    "elements": ("Fingerprint", "Full", "Sample", "TopK"),
    "histogram": ("Histogram", "Quantiles"),
    "metric": ("Metric",),
    "per_feature": ("Entropy", "Gram", "SampleSpread", "Units"),
    "stats": ("Stats", "StatsBlock"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}
__all__ = list(_HOME)
__getattr__ = names_from(__name__, _HOME)
