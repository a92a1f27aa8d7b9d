"""The two ways in: `capture` records one call, `watch` records a training.

Both bind a plan to a model, attach it in the form that the model has, and return what arrives.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, final

from torch import Tensor, nn

from torchtap.errors import PlanError, ReductionError, SelectionError, SessionError
from torchtap.forms.attach import attach, tree_of
from torchtap.hooks.hooks import WayName
from torchtap.native_check import warn_of_missing_parts
from torchtap.plan.names import Kind, belongs_to, first_part, is_doubtful, read_name, site_name
from torchtap.plan.plan import Plan, candidates, make_plan
from torchtap.plan.sites import Selectable, input_names, places, unwrap
from torchtap.plan.tap import Tap, tap
from torchtap.rank_identity import identity
from torchtap.receive.collect import result_of
from torchtap.receive.receiver import Context, Receiver, SiteState
from torchtap.reduce.reduction import AnyReduction
from torchtap.sanitize import shown
from torchtap.schedule.base import Moment, schedule_of
from torchtap.session.consumers import warn
from torchtap.session.watch import Watch
from torchtap.store.record import Consumer
from torchtap.store.write.pool import pool_of

if TYPE_CHECKING:
    from torchtap.forms.match.site_map import SiteMap
    from torchtap.receive.placing import Placing
    from torchtap.session.coverage import Missing

__all__ = ["Capture", "Seen", "capture", "joined", "list_sites", "watch"]

_AT_ONCE = Moment(0)  # when a capture looks


@final
class Capture:
    """Made by `capture`: entering puts the taps on, leaving takes them off, whatever happened in between."""

    def __init__(
        self,
        model: object,
        plan: Plan,
        *,
        apart: frozenset[int],
        all_threads: bool,
        strict: bool,
        copy: Callable[[Tensor], Tensor],
        way: WayName = "hook",
        site_map: SiteMap | None = None,
    ) -> None:
        self.plan = plan
        lost: list[str] = []
        # None: calls of all threads and asyncio tasks are received.
        self._context = None if all_threads else Context(plan.places[0].module)
        self._receiver = Receiver(plan, apart=apart, strict=strict, copy=copy, on_lost=lost.append)
        self._attachment = attach(model, self._receiver, way, site_map)
        self.seen = Seen(self._receiver, lost)

    def __enter__(self) -> Seen:
        live, receiver = self.plan.live(_AT_ONCE), self._receiver
        receiver.switch("train", live)
        receiver.begin_step(self._context)
        self._attachment.arm(live)
        # Last: if anything above raises, no context may hold a capture that never ends.
        if self._context is not None:
            self._context.join()
        return self.seen

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        receiver = self._receiver
        try:
            self._attachment.finish_step()
        except Exception:
            # Where the block raised, its own error is the one to see, not one of the values that are still to be read.
            if error is None:
                raise
        finally:
            receiver.end_step()
            self._attachment.detach()
            if self._context is not None:
                self._context.leave()
        if error is None:
            self._warn_of_silence()
            if receiver.totals.other_thread_calls:
                warn(
                    "torchtap: other threads or asyncio tasks called the model inside this capture; their values were "
                    "not taken. capture(..., all_threads=True) takes those of all of them"
                )

    def _warn_of_silence(self) -> None:
        """One warning for the selectors that brought nothing at all."""
        silent = self._receiver.silent_taps()
        if silent:
            asked = ", ".join(repr(s.text) for index in silent for s in self.plan.asked[index].selectors)
            reason = self._why_silent(silent)
            warn(f"torchtap: nothing came from {asked}" + (f": {reason}" if reason else ""))

    def _why_silent(self, taps: list[int]) -> str:
        reasons = {missing.site: missing.reason for missing in self.seen.coverage()}
        # Attention maps and named values are missed by the selector: they come from somewhere inside.
        asked = [selector.text for index in taps for selector in self.plan.asked[index].selectors]
        ports = [port.site.name for port in self.plan.ports if port.taps[0] in taps]
        return next((reasons[name] for name in (*asked, *ports) if name in reasons), "")

    def __getitem__(self, name: object) -> Any:
        raise SessionError(
            f"capture(...)[{name!r}]: a capture is entered first. Write `with tt.capture(model, ...) as seen:`, "
            "call the model inside, and ask `seen`"
        )


def capture(
    model: object,
    *taps: Tap | Selectable | Plan,
    keep: AnyReduction | Sequence[AnyReduction] | None = None,
    merge: bool | None = None,
    all_threads: bool = False,
    strict: bool = True,
    way: WayName = "hook",
    like: nn.Module | SiteMap | str | os.PathLike[str] | None = None,
    inputs: object = None,
) -> Capture:
    """Look inside a model: ``with capture(model, "blocks.*:output") as seen: model(x)``.

    Whole tensors are kept unless ``keep`` names another reduction. Calling the model again inside the block
    gives further calls (``#1``, ``#2`` …) of whole tensors, while other reductions fold all calls into one
    result; ``merge`` decides it the other way. Only values of the entering thread are taken, unless
    ``all_threads`` is set. ``way`` is how taps are put on an eager model: by hooks, by wrapping modules
    (``"wrap"``), or by replacing their forward (``"forward"``). A requested site that never came is warned of.

    A graph or trace does not tell every name. ``like`` the eager model, with ``inputs`` to run both once, gives each
    value the name that it has there; ``like`` also takes what `match` made, or its file.
    """
    taps = taps or ("*:output",)
    tree: Any = tree_of(model)
    site_map = None
    if like is not None:
        tree, site_map = _named_like(tree, model, like, inputs)
    bound = make_plan(tree, taps, keep)
    apart = bound.whole if merge is None else frozenset(() if merge else range(len(bound.taps)))
    return Capture(
        model,
        bound,
        apart=apart,
        all_threads=all_threads,
        strict=strict,
        copy=pool_of(tree).copy,
        way=way,
        site_map=site_map,
    )


def watch(
    model: object,
    run: str | os.PathLike[str] | None = None,
    taps: Plan | Tap | Selectable | Iterable[Tap | Selectable | Sequence[Tap]] = "*:output",
    *,
    keep: AnyReduction | Sequence[AnyReduction] | None = None,
    every: int | None = None,
    phase: str | None = None,
    sinks: Sequence[Consumer] = (),
    strict: bool = False,
    way: WayName = "hook",
    labels: dict[str, Any] | None = None,
    layout: Mapping[Selectable, str] | None = None,
    follow_model: bool = False,
    **writer_options: Any,
) -> Watch:
    """Accompany a training: take what the taps ask for at each live step, into a run folder and to sinks.

    ``run`` is the folder, or None to keep none. ``taps`` are taps, selectors or a plan. A bare selector keeps
    statistics at each step, unless ``keep``, ``every`` or ``phase`` say otherwise. ``labels`` go into the run's
    manifest as they are (tokens, hyperparameters …); ``writer_options`` go to the run's writer; ``way`` is as in
    `capture`. Passes in training and in evaluation are recorded apart, each under its phase. Several models of one
    training, as ``{"G": generator, "D": discriminator}``, share the clock and the run; their sites begin with their
    names. Parts of one model, such as the pipeline stages of a rank, are given as a list and keep their names. A folder
    that holds steps already is continued after them.

    Of several processes each writes its own part of the run, with which part of the whole each value is. DTensors,
    wrappers and parallel plans state it. ``layout`` adds what they do not know, by selector: ``"batch"``,
    ``"replicated"``, or ``"shard(-1, tp)"`` for a dimension and an axis of the mesh.

    If modules are added, removed or replaced meanwhile, the run reports it; with ``follow_model`` the taps move to
    the model as it is then, from the next step on.
    """
    _check_destinations(run, sinks)
    warn_of_missing_parts()
    models = _models(model)
    if models is not None:
        model = _together(models, in_parts=isinstance(model, (list, tuple)))
    tree = tree_of(model)
    bound = make_plan(tree, [_tapped(each, keep, every=every, phase=phase) for each in _one_by_one(taps)])
    if any(each.keep.refers for each in bound.taps):
        raise PlanError(
            "Full(copy=False) is for capture: a watch writes while the training goes on and changes values"
        )
    if writer_options:
        _check_run_options(writer_options, run)
    placing = _placing(model, layout or {})
    consumers = list(sinks)
    recorded = range(0)
    if run is not None:
        # Loaded here, as whatever a session may do without: starting is felt.
        from torchtap.store.read.lookup import recorded_steps
        from torchtap.store.write.manifest import environment, run_manifest
        from torchtap.store.write.writer import RunWriter

        here = identity()
        recorded = recorded_steps(run, here.rank)
        writer = RunWriter(
            run,
            manifest=run_manifest(tree, bound, environment(), labels or {}),
            rank=here.rank,
            world=here.world,
            strict=strict,
            **writer_options,
        )
        consumers.insert(0, writer)
    return Watch(
        model,
        bound,
        consumers,
        models=models,
        strict=strict,
        way=way,
        recorded=recorded,
        follow_model=follow_model,
        placing=placing,
    )


def _check_destinations(run: object, sinks: object) -> None:
    if run is not None and not (isinstance(run, (str, os.PathLike)) and os.fspath(run)):
        raise PlanError(f"run={run!r} names no folder: it comes second, None keeps none; taps come third")
    if not isinstance(sinks, Sequence) or not all(hasattr(each, "write") for each in sinks):
        raise PlanError(
            f"sinks={sinks!r}: give a list of things with write(record) and close(); CallbackSink makes one of a "
            "function, make_sink of a text"
        )


def _named_like(
    tree: Any, model: object, like: nn.Module | SiteMap | str | os.PathLike[str], inputs: object
) -> tuple[Any, SiteMap | None]:
    """The tree with the names that the values have in another model, and which value is which."""
    from torchtap.forms.match.mapped import with_paths
    from torchtap.session.matching import site_map_of

    site_map = site_map_of(model, like, inputs)
    return (tree, None) if site_map is None else (with_paths(tree, site_map), site_map)


def _placing(model: object, layout: Mapping[Selectable, str]) -> Placing | None:
    """What knows the placements of values; None where this process is alone."""
    if identity().world == 1 and layout == {}:
        return None
    from torchtap.receive.placing import Placing, layouts_of, process_mesh

    layouts = layouts_of(layout)
    mesh = process_mesh(model) if isinstance(model, nn.Module) else None
    return None if mesh is None else Placing(mesh, layouts)


def _one_by_one(taps: object) -> list[Any]:
    """What was asked for, whether it is one thing or several."""
    if isinstance(taps, Iterable) and not isinstance(taps, (str, nn.Module)):
        return list(taps)
    return [taps]


def _tapped(asked: Any, keep: Any, **when: Any) -> Any:
    """A bare selector with what was said of all of them; taps say it for themselves."""
    given = keep is not None or any(value is not None for value in when.values())
    if isinstance(asked, (Tap, Plan, list, tuple)):
        if given:
            raise PlanError("keep=, every= and phase= of a watch are for bare selectors: a tap has its own")
        return asked
    return tap(asked, keep, **when)


def _together(models: dict[str, nn.Module], *, in_parts: bool) -> nn.Module:
    """One tree for several models, or for the parts of one."""
    if not in_parts:
        tree: nn.Module = nn.ModuleDict(models)
    else:
        from torchtap.session.capture import joined

        tree = joined(list(models.values()))
    tree.__dict__["_torchtap_tree"] = True  # no model of the user
    return tree


def _parts(stages: Sequence[object]) -> dict[str, nn.Module]:
    modules = [each for each in stages if isinstance(each, nn.Module)]
    if not modules or len(modules) < len(stages):
        raise PlanError(
            "parts of one model are given as a list of nn.Modules, such as a rank's pipeline stages"
        )
    return {str(number): each for number, each in enumerate(modules)}


def _models(model: object) -> dict[str, nn.Module] | None:
    """Several models by name, parts of one by number, or None where one was given."""
    if isinstance(model, (list, tuple)):
        return _parts(model)
    if not isinstance(model, dict) or not model:
        return None
    for name, each in model.items():
        if not isinstance(name, str) or not name or "." in name or not isinstance(each, nn.Module):
            raise PlanError(
                f"several models are given as {{name: nn.Module}}, with names without dots; {name!r} is "
                f"{type(each).__name__}"
            )
    return dict(model)


def list_sites(model: object, *kinds: Kind) -> list[str]:
    """The names of a model's sites as far as they are known before it runs."""
    wanted = frozenset(kinds) if kinds else None
    found = places(tree_of(model))
    listed = candidates(found) if wanted is None else candidates(found, wanted)
    return [names[0].name for names in listed]


def _check_run_options(options: Mapping[str, object], run: object) -> None:
    from torchtap.store.write.writer import RunWriter

    known = [
        name for name in RunWriter.__init__.__kwdefaults__ or () if name not in ("rank", "world", "strict")
    ]
    for name in options:
        if name in (schedule_of.__kwdefaults__ or ()):
            raise PlanError(f"{name}= is said of a tap: tt.watch(model, run, tt.tap('*:output', {name}=...))")
        if name not in known:
            raise PlanError(f"watch has no option {name!r}; those of a run are {', '.join(known)}")
    if run is None:
        raise PlanError(f"{', '.join(options)}: these are options of a run, but no run folder was given")


@final
class Seen(Mapping[str, Any]):
    """Site name → tensor, or the named results of another reduction; in the order of execution.

    A name may also be an alias, a further name of a shared module or tied parameter, or an input by position.
    """

    def __init__(self, receiver: Receiver, lost: list[str]) -> None:
        self.lost = lost  # what could not be kept, a sentence each; a strict capture raises instead
        self._receiver = receiver
        self._by_name: dict[str, SiteState] = {}

    def __getitem__(self, name: str | nn.Module) -> Any:
        name = self._named(name)
        entry = self._find(name)
        if entry is None:
            from torchtap.plan.names import no_such_site

            reason = self._why_not(name)
            raise no_such_site(name, list(self), "the captured", reason)
        if self._is_lost(entry):
            reasons = ", ".join(self._losses(entry))
            raise SelectionError(f"{name!r} came, but nothing of it could be kept: {reasons}")
        return self._result(entry)

    def _named(self, name: str | nn.Module) -> str:
        """A module of the model stands for its output."""
        if not isinstance(name, nn.Module):
            return name
        path = self._receiver.path_of(unwrap(name))
        if path is None:
            raise SelectionError(
                f"this {type(name).__name__} is not a module of the model that was looked into"
            )
        return site_name(path, "output")

    def __contains__(self, name: object) -> bool:
        if isinstance(name, nn.Module):
            path = self._receiver.path_of(unwrap(name))
            name = None if path is None else site_name(path, "output")
        entry = self._find(name) if isinstance(name, str) else None
        return entry is not None and not self._is_lost(entry)

    def get(self, name: str | nn.Module, default: object = None) -> Any:
        entry = self._find(self._named(name))
        return default if entry is None or self._is_lost(entry) else self._result(entry)

    def _losses(self, entry: SiteState) -> list[str]:
        return [message for message in self.lost if message.startswith(f"{entry.name}: ")]

    def _is_lost(self, entry: SiteState) -> bool:
        """Whether a value came of which nothing could be kept. Of one reduction of several there may be something."""
        if not self._losses(entry):
            return False
        result = self._result(entry)
        return isinstance(result, dict) and not result

    def _result(self, entry: SiteState) -> Any:
        try:
            return result_of(self._receiver.accumulator, entry)
        except ReductionError as error:
            raise ReductionError(f"{entry.name}: {error}") from error

    def __iter__(self) -> Iterator[str]:
        return (entry.name for entry in self._came())

    def _came(self) -> Iterator[SiteState]:
        for entry in self._receiver.sites:
            if entry.shape is not None and not self._is_lost(entry):
                yield entry

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def coverage(self) -> list[Missing]:
        """What was asked for and did not come, and why."""
        from torchtap.session.coverage import missing_sites

        return missing_sites(self._receiver, frozenset(range(len(self._receiver.plan.taps))))

    def _repr_html_(self) -> str:
        from torchtap.display import drawn

        return str(drawn("captured values", self))

    def __repr__(self) -> str:
        lines = [f"Seen({len(self)} sites)"]
        for entry in self._came():
            # Statistics that a compiled graph makes come without the value's own dtype.
            dtype = "" if entry.dtype is None else str(entry.dtype).removeprefix("torch.")
            # Two backward passes of one forward, for instance, are joined: what is given counts.
            shape = self._shape(entry)
            lines.append(f"  {entry.name}  {dtype}{list(shape)}")
        return shown("\n".join(lines), 100_000, lines=True)

    def _shape(self, entry: SiteState) -> Sequence[int]:
        try:
            result = result_of(self._receiver.accumulator, entry)
        except ReductionError:  # it cannot be given any more
            return entry.shape or ()
        return result.shape if isinstance(result, Tensor) else entry.shape or ()

    def _find(self, name: str) -> SiteState | None:
        entries = self._receiver.sites
        if len(self._by_name) != len(entries):
            self._by_name = {entry.name: entry for entry in entries}
        for spelling in self._spellings(name):
            entry = self._by_name.get(spelling)
            if entry is not None and entry.shape is not None:
                return entry
        return self._only_leaf(name)

    def _only_leaf(self, name: str) -> SiteState | None:
        """A value that came inside a structure, such as ``(hidden, None)``, needs no leaf if it is alone."""
        asked = read_name(name)
        if asked.leaf:
            return None
        found = [
            entry
            for entry in self._by_name.values()
            if (entry.site.path, entry.site.kind, entry.site.call) == (asked.path, asked.kind, asked.call)
            and entry.shape is not None
        ]
        return found[0] if len(found) == 1 and not is_doubtful(found[0].site.leaf) else None

    def _spellings(self, name: str) -> Iterator[str]:
        yield name
        plan = self._receiver.plan
        for table in (plan.aliases, plan.other_names):
            for other, first in table.items():
                if belongs_to(name, other):
                    yield first + name[len(other) :]
        yield str(read_name(name))
        yield from self._by_position(name)

    def _by_position(self, name: str) -> Iterator[str]:
        """``x:input.1`` for the second parameter, and ``x:output.0`` for an output that is one tensor."""
        path, kind, leaf, call = read_name(name)
        first, more = first_part(leaf)
        if not first.isdecimal():
            return
        if leaf == "0" and (self._receiver.form.knows_positions or not path):
            yield site_name(path, kind, "", call)
        if kind not in ("input", "grad_input"):
            return
        modules = [place.module for place in self._receiver.plan.places if place.path == path]
        for names in filter(None, map(input_names, modules)):
            if int(first) < len(names):
                named = names[int(first)]
                yield site_name(path, kind, f"{named}.{more}" if more else named, call)

    def _why_not(self, name: str) -> str:
        bare = read_name(name).bare
        leaves = [known for known in self if known.startswith(f"{bare}.")]
        if leaves:
            return f"That value has several leaves: {', '.join(leaves[:6])}."
        for missing in self.coverage():
            if missing.site == name:
                return f"It was asked for and did not come: {missing.reason}."
        forgets = self._receiver.form.unnamed_reason
        return f"The form may have forgotten it: {forgets}." if forgets else ""


def joined(parts: Sequence[nn.Module]) -> nn.Module:
    """A module that holds what the parts hold, under the names that it has there."""
    whole = nn.Module()
    for part in parts:
        _add(whole, part, "")
    return whole


def _add(whole: nn.Module, part: nn.Module, path: str) -> None:
    for name, parameter in part._parameters.items():
        whole._parameters.setdefault(name, parameter)
    for name, buffer in part._buffers.items():
        whole._buffers.setdefault(name, buffer)
    for name, child in part._modules.items():
        known = whole._modules.get(name)
        if child is None or known is child:
            continue
        here = f"{path}.{name}" if path else name
        if known is None:
            whole._modules[name] = _held(child)
            if whole._modules[name] is not child:
                _add(whole._modules[name], child, here)  # type: ignore[arg-type]
        elif _is_container(child):
            _add(known, child, here)
        else:
            raise PlanError(
                f"{here!r} is in two of the parts that are watched together, and is two modules: give parts of one "
                "model, whose modules have the names of the whole, or several models by name"
            )


def _held(child: nn.Module) -> nn.Module:
    """The module itself; of a container, which other parts may have more of, an empty one in its place."""
    return nn.Module() if _is_container(child) else child


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.ModuleDict))
