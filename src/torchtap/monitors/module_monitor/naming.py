"""How modules and parameters are called: as in ``named_modules``, with no trace of wrappers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from torchtap.errors import MonitorError
from torchtap.plan.names import WRAPPED_ATTRIBUTES, join_path
from torchtap.plan.sites import unwrap

__all__ = [
    "ROOT",
    "check_same_structure",
    "default_format_module_name_fn",
    "extract_activation_tensor",
    "leaf_name",
    "named_modules",
    "named_parameters",
]

ROOT = "[root module]"

# Wrappers whose attribute is left in the raw name, because a user's own format function may look for it.
_SPELLED_WRAPPERS = tuple(name for name in WRAPPED_ATTRIBUTES if name != "_checkpoint_wrapped_module")


def default_format_module_name_fn(name: str) -> str:
    """A module's or parameter's name without wrappers; the root module is ``[root module]``."""
    if name == "" or name in _SPELLED_WRAPPERS:
        return ROOT
    for wrapper in _SPELLED_WRAPPERS:
        name = name.replace(f"{wrapper}.", "")
    return name


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
    """``(name, module, whether it is a wrapper)``, each module once.

    The name is that of ``model.named_modules()`` without the ``module.`` of DDP and the like.
    """
    seen: set[int] = set()

    def visit(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module, bool]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        wrapper = _is_wrapper(module)
        yield name, module, wrapper
        for child_name, child in module._modules.items():
            if child is None:
                continue
            if wrapper and child_name not in _SPELLED_WRAPPERS:
                yield from visit(child, name)
            else:
                yield from visit(child, join_path(name, child_name))

    return visit(model, "")


def named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """``(name, parameter)``, each parameter once, in the order of ``model.named_parameters()``."""
    seen: set[int] = set()
    found: list[tuple[str, nn.Parameter]] = []
    for name, module, _ in named_modules(model):
        for leaf, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                found.append((join_path(name, leaf), parameter))
    return found


def check_same_structure(own: set[str], reference: set[str]) -> None:
    """A reference has to have modules of the same names."""
    if reference == own:
        return
    differing = sorted(reference ^ own)
    shown = ", ".join(
        f"{name!r} (only in the {'reference' if name in reference else 'module'})" for name in differing[:5]
    )
    raise MonitorError(
        "The reference module must have the same structure as the monitored module (there are modules with different "
        f"names): {shown}{' …' if len(differing) > 5 else ''}"
    )


def extract_activation_tensor(output: object) -> object:
    """The tensor of an output that is ``(tensor, cache, ...)``; any other output as it is."""
    if isinstance(output, (tuple, list)) and output and isinstance(output[0], Tensor):
        return output[0]
    return output


def leaf_name(module_name: str, leaf: str) -> str:
    """The name of one tensor of an output that has several: ``lstm[1.0]``."""
    return f"{module_name}[{leaf}]" if leaf else module_name


def _is_wrapper(module: Any) -> bool:
    return unwrap(module) is not module
