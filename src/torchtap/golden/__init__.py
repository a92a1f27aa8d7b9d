"""Numerical regression tests: a small recording of a right run, and a verdict for every later one.

`record` writes a golden, a folder with sketches of every value inside a model. `check` runs the model again and names
the first module that differs. The pytest fixture is in `torchtap.integrations`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchtap.lazy import names_from

if TYPE_CHECKING:
    from torchtap.golden.front import check as check
    from torchtap.golden.front import record as record
    from torchtap.golden.judge import Verdict as Verdict

__all__ = ["Verdict", "check", "record"]
__getattr__ = names_from(__name__, {"Verdict": "judge", "check": "front", "record": "front"})
