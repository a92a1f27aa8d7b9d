"""Reductions: what is kept of a tensor. Pure folds; they know no hooks, no steps and no files."""

from __future__ import annotations

from torchtap.reduce.base import Reduction, Result
from torchtap.reduce.full import Full
from torchtap.reduce.registry import reduction_from_spec
from torchtap.reduce.stats import Stats
from torchtap.reduce.stats_block import StatsBlock

__all__ = ["Full", "Reduction", "Result", "Stats", "StatsBlock", "reduction_from_spec"]
