"""Take the rows of chosen sites while a model runs inside an engine.

A `FollowedEngine` reads an engine's tables and calls ``begin_pass(table)`` of a `RowVisitor` before each call of the
model. The visitor's hooks then see the values of that pass. `RowRecorder` keeps them; steering replaces them.

The hooks call Python in eager code. If a compiler traces the model, they put the op ``torchtap_serving::rows`` into the
graph instead. Both call `RowVisitor.see`. It guarantees:
- a row is copied before anything can change it in place;
- between `end_pass` and `begin_pass` nothing is taken: warm-up and profiling runs have no requests.

A layer that returns ``(hidden_states, residual)``, as the layers of vLLM do, has their sum at ``layer:output``: the
value that the layer of Hugging Face returns. The parts are ``layer:output.0`` and ``layer:output.1``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from typing import Any
from weakref import WeakValueDictionary
from zlib import crc32

import torch
from torch import Tensor, nn

from torchtap import Full, Plan, Site, make_plan
from torchtap._torch import keep_in_order
from torchtap.errors import PlanError
from torchtap.serving.addresses import PassTable, Request, RowLog, audit
from torchtap.spi import Hooks, input_names, leaves

__all__ = ["FollowedEngine", "RowRecorder", "RowVisitor", "outputs_of"]

_MOST_LEAVES = 8
_OP = "torchtap_serving::rows"
_library: torch.library.Library | None = None
_listening: WeakValueDictionary[int, RowVisitor] = WeakValueDictionary()
_numbers = itertools.count(1)


def outputs_of(model: nn.Module, sites: Sequence[str]) -> Plan:
    """Bind selectors to the outputs of a model's modules."""
    if not sites:
        raise PlanError("no site was chosen: give selectors such as 'model.layers.*:output'")
    plan: Plan = make_plan(model, list(sites), Full())
    for port in plan.ports:
        if port.site.kind != "output":
            raise PlanError(
                f"{port.site.name}: inside an engine the outputs of modules can be taken, and this is "
                f"{port.site.kind}; select '{port.site.path}:output'"
            )
    return plan


class RowVisitor:
    """Hooks on the outputs that a plan selects. Subclasses see each of them with its site.

    in_graph: put ops into the graph if a compiler traces the model now. Without it a compiled model has no rows.
    """

    def __init__(self, model: nn.Module, sites: Sequence[str], *, in_graph: bool = False) -> None:
        self.plan = outputs_of(model, sites)
        self.requests: dict[str, Request] = {}
        self._in_graph = in_graph
        self._hooks = Hooks(model)
        self._number = self._graph_number() if in_graph else next(_numbers)
        _listening[self._number] = self
        for index, port in enumerate(self.plan.ports):
            module = port.site.module
            assert module is not None
            fused = {"hidden_states", "residual"} <= set(input_names(module) or ())
            traced = self._traced(index, fused) if in_graph else _no_op
            self._hooks.after(module, self.hook(index, fused), traced=traced)

    def _graph_number(self) -> int:
        """Return a number that is the same in each process, because compiled graphs are kept on disk."""
        _register_op()
        return crc32(" ".join(port.site.name for port in self.plan.ports).encode()) + (1 << 32)

    def hook(self, index: int, fused: bool) -> Callable[[Any], Any]:
        """Return what is called with each output of a port; a result other than None replaces the output."""

        def hook(output: Any) -> None:
            for leaf, value in values_of(output, fused):
                self.see(index, leaf, value)

        return hook

    def _traced(self, index: int, fused: bool) -> Callable[[Any], None]:
        """Return what a compiler traces in place of the hook: an op for each selected leaf."""
        number, whole = self._number, self.wanted(index, "")
        parts = tuple(str(leaf) for leaf in range(_MOST_LEAVES) if self.wanted(index, str(leaf)))

        def traced(output: Any) -> None:
            if isinstance(output, Tensor):
                torch.ops.torchtap_serving.rows(output, number, index, "")
            elif whole and fused and len(output) == 2 and output[0].shape == output[1].shape:
                torch.ops.torchtap_serving.rows(output[0] + output[1], number, index, "")
            elif isinstance(output, tuple):
                for leaf, value in enumerate(output):
                    if isinstance(value, Tensor) and str(leaf) in parts:
                        torch.ops.torchtap_serving.rows(value, number, index, str(leaf))

        return traced

    def wanted(self, index: int, leaf: str) -> bool:
        """Return True if a tap selects this leaf of a port's output."""
        port = self.plan.ports[index]
        names = [Site(each.path, each.kind, leaf, 0, module=each.module) for each in port.names]
        return any(self.plan.taps[tap].wants(names) for tap in port.taps)

    def follow(self, requests: dict[str, Request]) -> None:
        """Use the requests of an engine from now on."""
        self.requests = requests

    def begin_pass(self, table: PassTable) -> None:
        """Receive the addresses of the pass that begins."""
        raise NotImplementedError

    def end_pass(self) -> None:
        """Ignore values until the next pass."""
        raise NotImplementedError

    def see(self, index: int, leaf: str, value: Tensor) -> None:
        """Receive a leaf of the output of a port."""
        raise NotImplementedError

    def report(self, problem: str) -> None:
        """Receive why a pass has no addresses."""

    def finished(self, request: Request) -> None:
        """Receive a request that ended."""

    def remove(self) -> None:
        """Remove the hooks. Ops in a graph stay for the next capture, and do nothing until then."""
        self.end_pass()
        if not self._in_graph:
            self._hooks.remove()
            _listening.pop(self._number, None)


def values_of(output: Any, fused: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield the leaves of an output; of a layer with a fused residual the sum comes first, without a leaf name."""
    if fused and isinstance(output, tuple) and len(output) == 2:
        hidden, residual = output
        if isinstance(hidden, Tensor) and isinstance(residual, Tensor) and hidden.shape == residual.shape:
            yield "", hidden + residual
    yield from leaves(output)


class RowRecorder(RowVisitor):
    """Keep the rows of the chosen sites in a `RowLog`."""

    def __init__(self, model: nn.Module, sites: Sequence[str], *, in_graph: bool = False) -> None:
        self.log = RowLog()
        self._wanted: dict[tuple[int, str], bool] = {}
        self._calls: dict[tuple[int, str], int] = {}
        self._summed: set[int] = set()
        self._pass: tuple[int, PassTable] | None = None
        super().__init__(model, sites, in_graph=in_graph)

    def follow(self, requests: dict[str, Request]) -> None:
        super().follow(requests)
        self.log = RowLog()
        self.log.requests = requests

    def begin_pass(self, table: PassTable) -> None:
        self._calls.clear()
        self._summed.clear()
        self._pass = (self.log.add(table), table) if table.counts else None

    def end_pass(self) -> None:
        self._pass = None

    def report(self, problem: str) -> None:
        self.log.problems[""] = problem

    def see(self, index: int, leaf: str, value: Tensor) -> None:
        if self._pass is None or (leaf in ("0", "1") and index in self._summed):
            return
        key = index, leaf
        wanted = self._wanted.get(key)
        if wanted is None:
            wanted = self._wanted[key] = self.wanted(index, leaf)
        if not wanted:
            return
        call = self._calls.get(key, 0)
        self._calls[key] = call + 1
        site = self.plan.ports[index].site
        if not leaf:
            self._summed.add(index)
        name = Site(site.path, "output", leaf, call).name
        number, table = self._pass
        rows = table.rows(value)
        if rows is None:
            self.log.problems[name] = (
                f"its shape {tuple(value.shape)} does not have one row for each of the {table.shape} tokens of a pass"
            )
        else:
            self.log.put(number, name, rows)


# -- engines --------------------------------------------------------------------------------------------------------


class FollowedEngine:
    """Give a visitor the addresses of each pass of an engine's model, until `remove`.

    Subclasses read the tables of one engine, and keep ``requests``: every request that was scheduled since.
    """

    def __init__(self, model: nn.Module, visitor: RowVisitor) -> None:
        self.requests: dict[str, Request] = {}
        self._visitor = visitor
        visitor.follow(self.requests)
        hooks = Hooks(model)
        hooks.before(model, self._before)
        hooks.around(lambda: None, visitor.end_pass)
        self._undo = [hooks.remove]

    def wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Call ``around(method, *args)`` in place of a method while this lasts."""
        self._undo.append(_wrap(owner, name, around))

    def table(self, args: Any, kwargs: dict[str, Any]) -> PassTable | None:
        """Return the addresses of a call of the model; None if it has no requests."""
        raise NotImplementedError

    def read_outputs(self) -> None:
        """Read the output tokens of the requests, before the engine is left."""
        raise NotImplementedError

    def remove(self) -> None:
        """Leave the engine as it was."""
        self.read_outputs()
        for undo in (*self._undo, self._visitor.remove):
            undo()

    def _before(self, args: Any, kwargs: dict[str, Any]) -> None:
        try:
            table = self.table(args, kwargs)
            problem = "" if table is None else audit(table, self.requests)
        except (AttributeError, KeyError, TypeError, IndexError) as error:
            problem = f"the engine's step could not be read: {type(error).__name__}: {error}"
        if problem:
            self._visitor.report(problem)
        elif table is not None:
            self._visitor.begin_pass(table)


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> Callable[[], None]:
    """Call ``around(method, *args)`` in place of a method of an object or a class. Return a function that ends it.

    Several may wrap one method, and end in any order; the last one leaves the owner as it was.
    """
    call = vars(owner).get(name)
    if not hasattr(call, "torchtap_around"):
        was, method = call, getattr(owner, name)

        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            step = method
            for each in call.torchtap_around:
                step = partial(each, step)
            return step(*args, **kwargs)

        call.torchtap_around, call.torchtap_was = [], was
        setattr(owner, name, call)
    call.torchtap_around.append(around)

    def end() -> None:
        call.torchtap_around.remove(around)
        if call.torchtap_around:
            return
        if call.torchtap_was is None:
            delattr(owner, name)
        else:
            setattr(owner, name, call.torchtap_was)

    return end


# -- in a compiled graph ------------------------------------------------------------------------------------------


def _no_op(*_: object) -> None:
    """Add nothing to a compiler's graph."""


def _rows(value: Tensor, number: int, index: int, leaf: str) -> None:
    visitor = _listening.get(number)
    if visitor is not None:
        visitor.see(index, leaf, value)


def _register_op() -> None:
    """Make the op known to torch. Further calls do nothing."""
    global _library
    if _library is None:
        library = torch.library.Library("torchtap_serving", "DEF")
        library.define("rows(Tensor value, int number, int index, str leaf) -> ()")
        library.impl("rows", _rows, "CompositeExplicitAutograd")
        torch.library.register_fake(_OP, lambda *_: None, lib=library)
        op = torch.ops.torchtap_serving.rows.default
        keep_in_order(op)
        torch.fx.node.has_side_effect(op)
        _library = library
