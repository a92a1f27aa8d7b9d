"""The two ways in: `capture` looks inside once, `watch` accompanies a training.

Both bind a plan to a model, attach it in whatever form the model has, and give back what arrives.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, final

from torch import Tensor, nn

from torchtap.errors import PlanError, SessionError
from torchtap.forms.attach import tree_of
from torchtap.hooks.hooks import WayName
from torchtap.plan.names import Kind
from torchtap.plan.plan import Plan, candidates, make_plan
from torchtap.plan.sites import Selectable, places
from torchtap.plan.tap import Tap, tap
from torchtap.rank_identity import identity
from torchtap.reduce.base import AnyReduction
from torchtap.schedule.base import Moment, schedule_of
from torchtap.session.compiled_parts import warn_of_missing_parts
from torchtap.session.outlets import warn
from torchtap.session.seen import Seen
from torchtap.session.tapping import Tapping
from torchtap.session.watching import Watch
from torchtap.store.record import Consumer
from torchtap.store.write.pool import pool_of

if TYPE_CHECKING:
    from torchtap.forms.match.site_map import SiteMap
    from torchtap.receive.placing import Placing

__all__ = ["Capture", "capture", "list_sites", "watch"]

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
        self._taps = Tapping(
            model,
            plan,
            strict=strict,
            copy=copy,
            on_lost=lost.append,
            way=way,
            apart=apart,
            site_map=site_map,
        )
        self.seen = Seen(self._taps.receiver, lost)
        self._any_thread = all_threads

    def __enter__(self) -> Seen:
        live = self.plan.live(_AT_ONCE)
        receiver = self._taps.receiver
        receiver.turn_to("train", live)
        receiver.begin_step(None if self._any_thread else threading.get_ident())
        self._taps.arm(live)
        return self.seen

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._taps.read_state()
        except Exception:
            # Where the block raised, its own error is the one to see, not one of the values that are still to be read.
            if error is None:
                raise
        finally:
            self._taps.receiver.end_step()
            self._taps.detach()
        if error is None:
            self._warn_of_silence()
            if self._taps.receiver.overheard:
                warn(
                    "torchtap: other threads called the model inside this capture; their values were not taken. "
                    "capture(..., all_threads=True) takes those of every thread"
                )

    def _warn_of_silence(self) -> None:
        """One warning for the selectors that brought nothing at all."""
        silent = self._taps.receiver.silent_taps()
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
    wrappers and parallel plans tell. ``layout`` tells what they do not know, by selector: ``"batch"``,
    ``"replicated"``, or ``"shard(-1, tp)"`` for a dimension and an axis of the mesh.

    Where modules are added, removed or replaced meanwhile, the run says so; with ``follow_model`` the taps go over to
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
        from torchtap.session.manifest import Claim, run_manifest
        from torchtap.session.model_tree import environment
        from torchtap.store.read.lookup import recorded_steps
        from torchtap.store.write.writer import RunWriter

        here = identity()
        if "://" not in os.fspath(run):
            consumers.append(Claim(os.fspath(run), here.rank))
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
    from torchtap.receive.mesh import process_mesh
    from torchtap.receive.placing import Placing, layouts_of

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
            raise PlanError("keep=, every= and phase= of a watch are for bare selectors: a tap says its own")
        return asked
    return tap(asked, keep, **when)


def _together(models: dict[str, nn.Module], *, in_parts: bool) -> nn.Module:
    """One tree for several models, or for the parts of one."""
    if not in_parts and "" not in models:
        return nn.ModuleDict(models)
    from torchtap.session.staged import joined

    if in_parts:
        return joined(list(models.values()))
    named = nn.ModuleDict({name: model for name, model in models.items() if name})
    return joined([models[""], named])


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
        if not isinstance(name, str) or "." in name or not isinstance(each, nn.Module):
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
