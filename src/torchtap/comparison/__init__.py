"""Compare two recordings or two models: how far apart, since where, and whose fault it is.

`torchtap.compare` is the front of it; what is needed more seldom is named here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchtap.lazy import names_from

if TYPE_CHECKING:
    from torchtap.comparison.bisection import Bisection as Bisection
    from torchtap.comparison.bisection import bisect as bisect
    from torchtap.comparison.forms import compare_forms as compare_forms
    from torchtap.comparison.recordings import layer_changes as layer_changes
    from torchtap.comparison.result import Comparison as Comparison

_HOME = {
    "Bisection": "bisection",
    "Comparison": "judge.result",
    "bisect": "bisection",
    "compare_forms": "forms",
    "layer_changes": "adjacent",
}
__all__ = list(_HOME)
__getattr__ = names_from(__name__, _HOME)


def __dir__() -> list[str]:
    return __all__
