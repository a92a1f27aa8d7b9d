"""Numerical regression tests: a small recording of a right run, and a verdict for every later one.

`record` writes a golden, a folder with sketches of every value inside a model. `check` runs the model again and names
the first module that differs. The pytest fixture is in `torchtap.integrations`.
"""

from __future__ import annotations

from torchtap.golden.front import check, record
from torchtap.golden.judge import Verdict

__all__ = ["Verdict", "check", "record"]
