"""Why a site that was asked for has no value: every reason there is, each provoked by a test.

``{…}`` is filled in where the reason is given.
"""

from __future__ import annotations

__all__ = ["FOLDED", "NOT_IN_A_GRAPH", "NO_EQUAL", "NO_OPERATION", "UNCERTAIN_CALL", "UNPLACED"]

FOLDED = "folded into its parent when the model was frozen"
NO_EQUAL = (
    "no value of this form is equal to it, or near: nothing used it, or the form computes something else"
)
NO_OPERATION = (
    "no operation of its own is left in the graph: it handed on what it was given, was not called, or nothing used "
    "what it made; `like=` the eager model tells"
)
NOT_IN_A_GRAPH = "a graph gives no {kind}: capture it before the model is traced"
UNCERTAIN_CALL = (
    "an earlier call of the module has no value in this form, so the number of this one is not certain"
)
UNPLACED = (
    "it came, numbered ({names}): this form does not tell where in the module's return these tensors stand; "
    "`like=` the eager model tells"
)
