"""A model that also gives its intermediate values: ``output, values = features(model, ["blocks.3:output"])(x)``.

The result is an ordinary ``nn.Module`` over the same parameters and buffers. It guarantees:
- the given model is not touched: hooks are on a second tree of modules that shares its tensors;
- the values are those of the pass itself, so gradients flow through them and with respect to them;
- it can be compiled (``fullgraph=True``), exported and, where torch.fx can trace the model, scripted;
- with ``until`` nothing after that site is run (a program of ``torch.export`` with ``strict=False`` still lists the
  operations after it, of which nothing is used, until ``run_decompositions`` drops them).

The second tree has a train/eval mode of its own, taken over when it is made; a module that is put into the model
later is not in it. Copies and files of it hold the model and the sites, and make a second tree of their own.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from torchtap import Plan, Selector, Site, Stats, Tap, make_plan
from torchtap._torch import version_of
from torchtap.editing.eager_only import hookable
from torchtap.errors import PlanError, SelectionError
from torchtap.hooks.leaves import Args, Kwargs
from torchtap.plan.plan import Port
from torchtap.plan.sites import Selectable, selectors_of
from torchtap.sanitize import shown
from torchtap.spi import Call, Stop, Visiting, input_leaves, leaves

__all__ = ["Features", "features"]

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


def features(
    model: object, sites: Selectable | Sequence[Selectable], *, until: Selectable | None = None
) -> Features:
    """A module whose forward gives ``(output, {site name: tensor})``.

    ``sites`` are of the kinds output and input. ``until`` names a site after which the forward stops; the output
    is then None.
    """
    return Features(model, sites, until)


class _Reached(Exception):
    """The site after which nothing more is wanted."""


@final
class Features(nn.Module):
    """Made by `features`."""

    def __init__(
        self, model: Any, sites: Selectable | Sequence[Selectable], until: Selectable | None = None
    ) -> None:
        super().__init__()
        root = hookable(model, "features")
        selectors = list(selectors_of(sites))
        if not selectors:
            raise PlanError("features needs at least one site, e.g. 'blocks.3:output'")
        self.until = None if until is None else Selector.of(until)
        taps = [Tap((each,), Stats()) for each in (*selectors, *([self.until] if self.until else []))]
        self._asked = (selectors, self.until)
        self._plan: Plan = make_plan(root, taps)
        self._stop = len(selectors) if self.until else None  # index of the tap that ends the forward
        _check(self._plan.ports, self._stop)
        self._original = (root,)  # in a tuple, so that its parameters are not listed a second time
        second: dict[int, nn.Module] = {}
        self.model = _second_tree(root, second)
        self._found: dict[str, Tensor] = {}
        self._versions: dict[str, int] = {}
        self._passed: set[int] = set()  # numbers of the ports whose modules were called
        self._visiting = Visiting(
            self.model,
            self,
            [
                Stop(
                    port.site.path,
                    second[id(port.site.module)],
                    inputs=port.site.kind == "input",
                    outputs=port.site.kind == "output",
                    key=number,
                )
                for number, port in enumerate(self._plan.ports)
            ],
        )
        self._visiting.begin()

    def __reduce__(self) -> tuple[object, ...]:
        """Hooks do not travel with a module; what they were made of does."""
        modes = [module.training for module in self.modules()]
        return _made_again, (self._original[0], *self._asked, modes)

    @property
    def sites(self) -> tuple[str, ...]:
        """The places that are listened to, without leaves and calls."""
        return tuple(port.site.name for port in self._plan.ports if port.taps != (self._stop,))

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Tensor]]:
        found = self._found
        found.clear()
        self._passed.clear()
        self._visiting.start_pass()
        try:
            output = self.model(*args, **kwargs)
        except _Reached:  # torch.compile follows this, and not contextlib.suppress
            output = None
        if self.until is not None:
            output = None  # also in a plain export, which runs the whole forward
        values = dict(found)
        found.clear()
        self._check_complete(values)
        if not torch.compiler.is_compiling():
            self._warn_of_changes(values)
        return output, values

    def __prepare_scriptable__(self) -> nn.Module:
        """Return the traced model with the values among its outputs, for torch.jit.script."""
        from torchtap.editing.features_graph import graph_with_values

        return graph_with_values(self._original[0], self._plan, self._stop)

    def before(self, call: Call, args: Args, kwargs: Kwargs) -> None:
        """A module is given these values."""
        self._take(call, input_leaves(call.input_names, args, kwargs))

    def after(self, call: Call, output: object) -> None:
        """A module returned this."""
        self._take(call, leaves(output))

    def _take(self, call: Call, values: Any) -> None:
        port = self._plan.ports[call.key]
        self._passed.add(call.key)
        for leaf, tensor in values:
            for index in port.taps:
                site = port.names[0]
                name = Site(site.path, site.kind, leaf, call.number, module=site.module)
                if index != self._stop and self._plan.taps[index].wants((name,)):
                    self._found[name.name] = tensor
                    if not torch.compiler.is_compiling():
                        self._versions[name.name] = version_of(tensor)
        if self._stop is not None and self._stop in port.taps and not _in_plain_export():
            raise _Reached

    def _check_complete(self, values: dict[str, Tensor]) -> None:
        for number, port in enumerate(self._plan.ports):
            if number not in self._passed:
                after = f" before {self.until}" if self.until is not None else ""
                raise SelectionError(
                    f"{port.site.name} did not pass{after} in this call: its module was not called"
                )
        if not values and self.sites:
            raise SelectionError(f"none of {', '.join(self.sites)} produced a selected tensor")

    def _warn_of_changes(self, values: dict[str, Tensor]) -> None:
        changed = [
            name for name, tensor in values.items() if version_of(tensor) != self._versions.get(name, -1)
        ]
        if changed:
            warnings.warn(
                shown(
                    f"{changed[0]} was changed in place by a later module, and is handed out as changed; make that "
                    "module not work in place, or use torchtap.capture, which copies",
                    5000,
                    lines=True,
                ),
                RuntimeWarning,
                stacklevel=4,
            )


def _made_again(model: object, sites: list[Selector], until: Selector | None, modes: list[bool]) -> Features:
    again = Features(model, sites, until)
    for module, training in zip(again.modules(), modes, strict=True):
        module.training = training
    return again


def _in_plain_export() -> bool:
    """Return True if torch.export runs this code itself. No exception may cross modules then."""
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


def _check(ports: tuple[Port, ...], stop: int | None) -> None:
    for port in ports:
        if port.site.kind not in ("input", "output"):
            raise PlanError(
                f"{port.site.name}: features are of the kinds output and input; use torchtap.capture"
            )
    ends = [port.site.name for port in ports if stop is not None and stop in port.taps]
    if len(ends) > 1:
        raise PlanError(f"until= has to pick one place, and picks {len(ends)}: {', '.join(ends[:3])} …")


def _second_tree(module: nn.Module, made: dict[int, nn.Module]) -> nn.Module:
    """Modules of the same classes that share parameters, buffers and attributes, with hooks of their own."""
    known = made.get(id(module))
    if known is not None:
        return known
    second = module.__class__.__new__(module.__class__)
    made[id(module)] = second
    attributes = dict(module.__dict__)
    attributes["_modules"] = {
        name: None if child is None else _second_tree(child, made) for name, child in module._modules.items()
    }
    for name in _HOOKS:
        attributes[name] = type(attributes[name])(attributes[name])
    object.__setattr__(second, "__dict__", attributes)
    return second
