"""Hooks that travel: they hand a module's inputs and outputs to the op, wherever the model goes.

A carrier knows names only, no session. It guarantees:
- it can be traced by Dynamo, ``torch.jit.trace``, ``torch.export`` and FX, and is called by an eager model;
- with nobody listening it returns at once;
- copies of the model have it; pickles have its name, packages a file about it, and both load and run where torchtap
  cannot be imported (`travelling`).

Not here: TorchScript, which compiles hooks from source (`script/source`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, final
from weakref import ref

from torch import Tensor, fx, nn
from torch.compiler import is_compiling, is_dynamo_compiling

from torchtap._torch import is_traced_by_fx, is_traced_by_script
from torchtap.forms.op import op
from torchtap.forms.op.channel import Channel, Emitted
from torchtap.forms.op.emitted import emit_leaves
from torchtap.forms.op.travelling import NAMES, CopiedAlong, Packaged
from torchtap.hooks.conceal import Traveller, conceal, reveal
from torchtap.hooks.hooks import after, before
from torchtap.hooks.leaves import Args, Kwargs
from torchtap.receive import by_name
from torchtap.spi import input_leaves, input_names, leaves, places

__all__ = [
    "Carriers",
    "EnterCarrier",
    "InputCarrier",
    "LeaveCarrier",
    "OutputCarrier",
    "Scriptable",
    "carried",
    "carriers_for",
    "note_the_way",
    "put_carriers",
    "put_copies",
    "put_on_root",
    "remove_carriers",
]


def _hears(what: Emitted) -> bool:
    """Return True if an op call would be of use: someone listens, or the call is being put into a graph."""
    # Tracers first: what follows would become guards of the compiled code.
    return _traced() or "|" in what.address or op.heard()


def _traced() -> bool:
    return is_compiling() or is_traced_by_script() or is_traced_by_fx()


class _Carrier(Emitted, Traveller):
    """A hook that knows what it emits."""

    def __init__(self, address: str, kinds: tuple[str, ...]) -> None:
        op.register()
        super().__init__(address, kinds)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), self._state()  # for modules whose class makes their pickles: graph modules

    def __deepcopy__(self, memo: object) -> Any:
        return type(self)(*self._state())

    def _state(self) -> tuple[Any, ...]:
        return self.address, self.kinds


@final
class OutputCarrier(_Carrier):
    """A forward hook: ``kinds`` are of ``output`` and ``grad_output``."""

    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        if is_dynamo_compiling() or _hears(self):
            # Most outputs are bare tensors, and Dynamo takes its time to follow a generator.
            emit_leaves(self, (("", output),) if isinstance(output, Tensor) else leaves(output), args)


@final
class InputCarrier(_Carrier):
    """A forward pre-hook with keywords: ``kinds`` are of ``input`` and ``grad_input``."""

    def __init__(self, address: str, kinds: tuple[str, ...], names: tuple[str, ...] | None) -> None:
        super().__init__(address, kinds)
        self.names = names

    def __call__(self, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        if is_dynamo_compiling() or _hears(self):
            emit_leaves(self, input_leaves(self.names, args, kwargs))

    def _state(self) -> tuple[Any, ...]:
        return self.address, self.kinds, self.names


@final
class EnterCarrier(_Carrier):
    """A forward pre-hook: while a tracer follows, notes that the module's forward begins."""

    def __call__(self, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        if _traced():
            by_name.paths.append(self.address)


@final
class LeaveCarrier(_Carrier):
    """A forward hook: while a tracer follows, notes that the module's forward is over."""

    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        if _traced() and by_name.paths:
            by_name.paths.pop()


@final
class Scriptable(Traveller):
    """Kept by a model with carriers as its ``__prepare_scriptable__``, which ``torch.jit.script`` asks for."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __call__(self) -> nn.Module:
        from torchtap.forms.script.source import scriptable

        return scriptable(self._model)


@final
class Carriers:
    """The carriers of some sites (path, module, kind) on a channel. They can be switched on and off again and again.

    They are kept for the next session on the same sites, and keep no model alive.
    """

    def __init__(
        self,
        sites: Iterable[tuple[str, nn.Module, str]],
        ways: Iterable[tuple[str, nn.Module]] = (),
        measured: frozenset[tuple[str, str]] = frozenset(),
        purpose: str = "",
        root_names: tuple[str, ...] | None = None,
    ) -> None:
        op.register()
        self.channel = Channel(purpose)
        self._ways = [(ref(module), self.channel.prefix + path) for path, module in ways]
        self._handles: list[Any] = []
        self._modules: list[tuple[ref[nn.Module], InputCarrier | None, OutputCarrier | None]] = []
        kinds_of: dict[str, tuple[nn.Module, list[str]]] = {}
        for path, module, kind in sites:
            kinds_of.setdefault(path, (module, []))[1].append(kind)
        for path, (module, kinds) in kinds_of.items():
            carriers = carriers_for(module, self.channel.prefix + path, kinds)
            if carriers[0] is not None and not path and root_names is not None:
                carriers[0].names = root_names
            for carrier in carriers:
                if carrier is not None:
                    carrier.measured = tuple(kind for kind in carrier.kinds if (path, kind) in measured)
            self._modules.append((ref(module), *carriers))

    def switch_on(self) -> None:
        """Have the modules emit."""
        for held, address in self._ways:
            if (module := held()) is not None:
                self._handles += note_the_way(module, address)
        for held, given, returned in self._modules:
            if (module := held()) is None:
                continue
            if given is not None:
                self._handles.append(before(module, given, copied=True))
            if returned is not None:
                self._handles.append(after(module, returned, copied=True))

    def switch_off(self) -> None:
        """The modules are as they were."""
        handles, self._handles = self._handles, []
        for handle in reversed(handles):
            handle.remove()


def note_the_way(module: nn.Module, address: str) -> list[Any]:
    """Have a tracer know when it is inside a module."""
    return [
        before(module, EnterCarrier(address, ("value",)), copied=True),
        after(module, LeaveCarrier(address, ()), copied=True),
    ]


def carriers_for(
    module: nn.Module, address: str, kinds: Iterable[str]
) -> tuple[InputCarrier | None, OutputCarrier | None]:
    """The carriers that a module needs for these kinds."""
    given = tuple(kind for kind in kinds if kind in ("input", "grad_input"))
    returned = tuple(kind for kind in kinds if kind in ("output", "grad_output"))
    return (
        InputCarrier(address, given, input_names(module)) if given else None,
        OutputCarrier(address, returned) if returned else None,
    )


def put_carriers(model: nn.Module, kinds_of: Mapping[str, Iterable[str]]) -> None:
    """Have these modules of a model emit these kinds, wherever it goes."""
    modules = {place.path: place.module for place in places(model)}
    if any("value" in kinds for kinds in kinds_of.values()):
        for path, module in modules.items():
            note_the_way(module, path)
            _mark(module)
    for path, kinds in kinds_of.items():
        module = modules[path]
        given, returned = carriers_for(module, path, kinds)
        if given is not None:
            before(module, given, copied=True)
        if returned is not None:
            after(module, returned, copied=True)
        _mark(module)


def put_on_root(model: nn.Module, kinds_of: Mapping[str, Iterable[str]]) -> None:
    """`put_carriers`, for a model that can then be scripted and packaged as well."""
    put_carriers(model, kinds_of)
    _mark(model)
    model.__dict__.update(
        {"__prepare_scriptable__": Scriptable(model), "__reduce_package__": Packaged(model)}
    )
    conceal([model])


def _mark(module: nn.Module) -> None:
    """From now on copies of a module take its carriers along."""
    if not isinstance(module, fx.GraphModule):
        module.__dict__["__deepcopy__"] = CopiedAlong(module)


def put_copies(module: nn.Module, made: nn.Module) -> None:
    """Have the copy of a module emit what the module does."""
    for hook in _carriers_on(module, "_forward_pre_hooks"):
        before(made, copy.deepcopy(hook), copied=True)
    for hook in _carriers_on(module, "_forward_hooks"):
        after(made, copy.deepcopy(hook), copied=True)
    _mark(made)
    if "__reduce_package__" in module.__dict__:
        put_on_root(made, {})


def _carriers_on(module: nn.Module, table: str) -> list[Any]:
    return [
        hook
        for hook in getattr(module, table).values()
        if isinstance(hook, _Carrier) and "|" not in hook.address
    ]


def carried(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Which kinds a model's carriers emit, by path."""
    found: dict[str, tuple[str, ...]] = {}
    for place in places(model):
        for table in ("_forward_pre_hooks", "_forward_hooks"):
            for hook in _carriers_on(place.module, table):
                kinds = (*found.get(place.path, ()), *hook.kinds)
                found[place.path] = tuple(dict.fromkeys(kinds))
    return {path: kinds for path, kinds in found.items() if kinds}


def remove_carriers(model: nn.Module) -> None:
    """Take every carrier off a model, also those that came with it, and the names that a pickle left."""
    for module in model.modules():
        every: tuple[dict[int, Any], ...] = (module._forward_hooks, module._forward_pre_hooks)
        for hooks in every:
            for key, hook in list(hooks.items()):
                if isinstance(hook, _Carrier):
                    del hooks[key]
                    module._forward_pre_hooks_with_kwargs.pop(key, None)
                    reveal([module])
        for name, value in list(module.__dict__.items()):
            if isinstance(value, Traveller) or name == NAMES:
                del module.__dict__[name]
                if isinstance(value, Packaged):
                    reveal([module])
