"""Compare two recordings or two models: their distance, the first difference, and its cause.

`torchtap.compare` is the entry point. Less common names are exported here.
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
    "Comparison": "result",
    "bisect": "bisection",
    "compare_forms": "forms",
    "layer_changes": "recordings",
}
__all__ = list(_HOME)
__getattr__ = names_from(__name__, _HOME)


def __dir__() -> list[str]:
    return __all__
