"""Why a site that was asked for has no value: every reason there is, each provoked by a test.

``{…}`` is filled in where the reason is given. `is_known` says whether a text is one of these reasons.
"""

from __future__ import annotations

import re

__all__ = [
    "ACROSS_GRAPHS",
    "FOLDED",
    "FORGOTTEN",
    "IDLE_TAP",
    "IN_A_BRANCH",
    "NESTED_ATTENTION",
    "NOT_CALLED",
    "NOT_CALLED_OR_COMPILED",
    "NOT_IN_A_GRAPH",
    "NOT_PUT_IN",
    "NO_ARGUMENT",
    "NO_ATTENTION",
    "NO_BACKWARD",
    "NO_ELEMENT",
    "NO_EQUAL",
    "NO_EQUAL_GRADIENT",
    "NO_FORWARD",
    "NO_FUNCTION_CALL",
    "NO_GRADIENT",
    "NO_KIND",
    "NO_LEAF",
    "NO_LOCAL_GRADIENT",
    "NO_OPERATION",
    "NO_OPTIMIZER_STATE",
    "NO_OPTIMIZER_STEP",
    "NO_PARAMETER_GRADIENT",
    "NO_STEP_ENDED",
    "NO_TENSOR",
    "NO_TENSOR_TYPE",
    "NO_VALUE",
    "OFF_SCHEDULE",
    "REPLACED",
    "SEVERAL_UPDATES",
    "SHARED_MEMORY",
    "UNMARKED",
    "UNPLACED",
    "is_known",
]

# Every form.
OFF_SCHEDULE = "off schedule: no step was live for its taps"
IDLE_TAP = "off schedule: no pass was live for this tap; what there is of these sites came by other taps"
NOT_CALLED = "module not called"
NOT_CALLED_OR_COMPILED = (
    "module not called, or called in code that torch.compile made before these taps were on: "
    "give torchtap the compiled model, or call torch.compiler.reset() after putting taps on"
)
NO_FORWARD = "a {name} has no forward: it holds modules and is not called itself"
REPLACED = "its module was replaced after the taps were put on; nothing came since then"
NO_BACKWARD = "no backward pass reached it"
NO_GRADIENT = "the value does not require grad"
NO_PARAMETER_GRADIENT = "its gradient was None: frozen, or not part of the loss"
NO_LOCAL_GRADIENT = "FSDP hands out gradients that are reduced already"
NO_ELEMENT = "this rank holds no element of the parameter: another one's shard has it"
NO_OPTIMIZER_STATE = "the optimizer keeps nothing for it"
NO_OPTIMIZER_STEP = "no optimizer stepped with it while it was live"
SEVERAL_UPDATES = "several updates in one step: from the next live step on it is estimated from a sample"
NO_STEP_ENDED = "no step ended while it was live"
NO_LEAF = "none of its leaves is one that the selector picks"
NO_TENSOR = "{kind} is not a tensor but {name}"
NO_ARGUMENT = "no argument is a tensor"
NO_ATTENTION = (
    "no call of a fused attention function was seen inside these modules; attention that is written out in Python is "
    "not (transformers has attn_implementation='sdpa'; with 'eager' the map is the second output of its attention "
    "modules, such as 'attn:output.1')"
)
NESTED_ATTENTION = "attention over nested tensors is not taken apart"
NO_FUNCTION_CALL = "no call of torch's {function} was seen in the code of this module itself"
NO_KIND = (
    "the module was called, but this form has no value of this kind: a constant, or used for its shape only"
)
NO_VALUE = "no torchtap.emit() with this name ran inside these modules"
# Compiled models.
IN_A_BRANCH = (
    "it is inside a branch or loop (torch.cond, while_loop, scan) of a compiled model, from which torch's compilers "
    "hand nothing out; the eager model has it, and tt.instrument before torch.export"
)
ACROSS_GRAPHS = (
    "the value was made in one graph of torch.compile and is used outside of it: only that graph has its whole "
    "gradient, and no tap is on it there; tap the output of the module that made it, or give torchtap the compiled "
    "model"
)
SHARED_MEMORY = (
    "another result of the model shares its memory, and torch.compile makes such results anew behind the graph: "
    "whether its gradient holds that of the other is not known; the eager model has it"
)
# Graphs and traces.
FOLDED = "folded into its parent when the model was frozen"
NOT_IN_A_GRAPH = "a graph gives no {kind}: capture it before the model is traced"
NO_TENSOR_TYPE = "its types in TorchScript hold no tensor that can be handed over: {types}"
NO_OPERATION = (
    "no operation in the graph is marked as its own: it handed on what it was given, was not called, is inside a "
    "branch (torch.cond), or nothing used what it made; `like=` the eager model tells"
)
UNPLACED = (
    "it came, numbered ({names}): this form does not tell where in the module's return these tensors stand; "
    "`like=` the eager model tells"
)
UNMARKED = (
    "what it holds is used in the graph, but nothing is marked as its own: it was not called itself, is inside a "
    "branch (torch.cond), or the model had been exported or traced before; `like=` the eager model tells"
)
FORGOTTEN = "if the model has more, this form does not know it: {what} left no sure mark; `like=` the eager model tells"
# Forms whose sites are chosen before.
NOT_PUT_IN = "not among the sites that were put into this model before it was compiled"
# With the model at hand.
NO_EQUAL_GRADIENT = (
    "several values of this form are equal to it, and none of them is known to have its gradient: it has another place "
    "in the graph, or the form computes gradients otherwise"
)
NO_EQUAL = (
    "no value of this form is equal to it, or near: nothing used it, or the form computes something else"
)


def is_known(text: str) -> bool:
    """Whether a text is one of the reasons of this file, filled in."""
    known = [value for name, value in globals().items() if name.isupper() and isinstance(value, str)]
    return any(re.fullmatch(_pattern(reason), text, re.DOTALL) for reason in known)


def _pattern(reason: str) -> str:
    return re.sub(r"\\\{\w+\\\}", ".+", re.escape(reason))
