"""Where a model is while it is being traced: the module whose forward runs, for values made in its code.

In an eager call the Python stack tells. A tracer has none to look at, so carriers on every module keep the way
here while a tracer follows them; Dynamo reads and writes the list like any other Python.
"""

from __future__ import annotations

__all__ = ["busy", "paths"]

# Addresses of the modules that are being traced, the innermost last. Empty outside of tracing.
paths: list[str] = []
# Whether an attention function that was wrapped is being traced: one entry point calls another.
busy: list[bool] = []
