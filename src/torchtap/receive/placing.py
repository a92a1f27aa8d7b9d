"""Each value's placement: from the value itself, else the user, else the parallel plan, else the wrapper.

It guarantees:
- nothing is communicated: a DTensor's own facts are read, its values are not gathered;
- what nobody says is said to be unknown;
- a placement is told once for each site, and again where it changes.

A plain tensor's placement follows from its site. It is worked out once, when the site's first step is over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, final

from torch import Tensor, nn

from torchtap._torch_distributed import (
    MeshAxis,
    calling_wrapper,
    flat_pieces,
    fsdp_axes,
    group_axis,
    infers_shapes,
    mesh_axes,
    meshes_of,
    output_plan,
    placed,
    spec_of,
    wrapper_group,
)
from torchtap.errors import PlanError
from torchtap.placement import Axis, Box, Layout, Placement, Share, Stage, read_layout
from torchtap.plan.names import first_part
from torchtap.plan.sites import Selectable, Selector, Site
from torchtap.rank_identity import identity

__all__ = ["Placing", "ProcessMesh", "layouts_of", "process_mesh"]

_PLAIN = frozenset({Tensor, nn.Parameter, nn.Buffer})
_HELD = ("param", "buffer", "update", "optim_state", "lr")
_FLATTENED = ("param", "param_grad", "param_grad_accumulated", "param_grad_unclipped", "update")
_UNKNOWN, _REPLICATE = Share("unknown"), Share("replicate")


@final
@dataclass(slots=True)
class ProcessMesh:
    """The axes that this process has a place on."""

    rank: int
    world: int
    axes: dict[str, MeshAxis] = field(default_factory=dict)
    data: set[str] = field(default_factory=set)  # axes along which ranks read different data
    flat: dict[tuple[int, str], tuple[tuple[int, ...], int, int]] = field(
        default_factory=dict
    )  # FSDP 1's pieces
    plans: dict[int, dict[str, tuple[Share, ...]]] = field(
        default_factory=dict
    )  # by id of a module, then axis

    @property
    def root(self) -> int:
        """Return the lowest rank on these axes."""
        count = 1
        for axis in self.axes.values():
            count *= len(axis.ranks)
        if count >= self.world or not self.axes:
            return 0
        return min(rank for axis in self.axes.values() for rank in axis.ranks)

    def add(self, axis: MeshAxis) -> str:
        """Add an axis, unless one that runs along it is known. Return the name that it has here."""
        for known in self.axes.values():
            if known.runs_along(axis) or known.ranks == axis.ranks:
                return known.name
        name = axis.name
        while name in self.axes:
            name += "'"
        self.axes[name] = axis._replace(name=name)
        return name

    def add_axes_of(self, module: nn.Module) -> None:
        """Add the axes of a module: its parameters' meshes, its wrapper's groups, its plan for outputs."""
        for mesh in meshes_of(module):
            for axis in mesh_axes(mesh):
                self.add(axis)
        self.data.update(self.add(axis) for axis in fsdp_axes(module))
        groups = wrapper_group(module)
        names = ("dp",) if len(groups) == 1 else ("replicate", "shard")
        for group, name in zip(groups, names, strict=False):
            axis = group_axis(group, name)
            if len(axis.ranks) > 1:
                self.data.add(self.add(axis))
        if (plan := output_plan(module)) is not None:
            mesh, layouts = plan
            named = [self.add(axis) for axis in mesh_axes(mesh)]
            if len(named) == 1:
                self.plans[id(module)] = {named[0]: layouts}


def process_mesh(model: nn.Module) -> ProcessMesh | None:
    """Return the mesh of a model and its wrappers; None if this process is alone."""
    here = identity()
    if here.world == 1:
        return None
    found = ProcessMesh(here.rank, here.world)
    if here.told_by != "process group":
        return found
    for module in model.modules():
        found.add_axes_of(module)
    found.flat = flat_pieces(model)
    return found


class PlacedSite(Protocol):
    """A site that a value came from."""

    name: str
    site: Site
    shape: tuple[int, ...] | None


def layouts_of(layout: Mapping[Selectable, str]) -> list[tuple[Selector, tuple[Layout, ...]]]:
    """What a user says of values, by selector; the last one that picks a site counts."""
    if not isinstance(layout, Mapping):
        raise PlanError(f"layout={layout!r}: give a mapping of selectors, such as {{'*:output': 'batch'}}")
    return [(Selector.of(selector), read_layout(str(text))) for selector, text in layout.items()]


@final
class Placing:
    """Knows the placements of one watch's values."""

    def __init__(
        self, mesh: ProcessMesh, layouts: Sequence[tuple[Selector, tuple[Layout, ...]]] = ()
    ) -> None:
        self._mesh = mesh
        self._layouts = layouts
        self._given: tuple[int, ...] = ()  # the shape of what the model was given first
        self._specs: dict[str, object] = {}  # by site: what its newest value said; None for a plain one
        self._fresh: dict[tuple[str, str], Placement] = {}  # by site and phase: not told yet
        self._told: dict[tuple[str, str], Placement] = {}
        self._settled = 0  # so many sites were looked at
        self._waiting: list[PlacedSite] = []  # of these nothing has come yet
        for _, statements in layouts:
            for statement in statements:
                if statement.axis is not None and statement.axis not in mesh.axes:
                    has = ", ".join(mesh.axes) or "none: it is not sharded, wrapped or parallelized by torch"
                    raise PlanError(f"layout names the axis {statement.axis!r}; the model's axes are {has}")

    # -- while the model runs -----------------------------------------------------------------------------

    def see_inputs(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Remember the shape of the first input: a value with another number of samples is no part of a batch.

        A model that is watched inside its DDP wrapper shows the wrapper only now.
        """
        if not self._given:
            wrapper = calling_wrapper()
            if wrapper is not None:
                self._mesh.add_axes_of(wrapper)
            found = (each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each.dim())
            self._given = tuple(next((each.shape for each in found), ()))

    def infers_shapes(self) -> bool:
        """Whether the call that begins is no pass: a pipeline stage only learns the shapes of what comes out."""
        return infers_shapes()

    def note(self, entry: PlacedSite, value: Tensor, phase: str) -> None:
        """Look at a value that came."""
        plain = type(value) in _PLAIN
        known = self._specs.get(entry.name)
        if plain and known is None:
            return
        spec = None if plain else spec_of(value)
        if spec is known or spec == known:
            return
        self._specs[entry.name] = spec
        if spec is not None:
            facts = placed(spec)
            if facts is not None:
                self._fresh[entry.name, phase] = self._among_others(entry, *facts)
        else:  # it was spread over ranks before
            self._fresh[entry.name, phase] = self._of_plain(entry)

    # -- at the end of a step -----------------------------------------------------------------------------

    def relabel(self, key: str, phase: str) -> None:
        """The values that were folded under ``key`` turned out to be of this phase."""
        for site, noted in [each for each in self._fresh if each[1] == key]:
            self._fresh[site, phase] = self._fresh.pop((site, noted))

    def changes(self, entries: Sequence[PlacedSite], phase: str) -> dict[str, Any] | None:
        """What was not told yet, as an event of a run; None where nothing is new."""
        news: dict[str, Placement] = {}
        if len(entries) < self._settled:  # the taps have gone over to another tree of modules
            self._settled, self._waiting = 0, []
        looked_at = [*self._waiting, *entries[self._settled :]]
        self._settled = len(entries)
        self._waiting = [entry for entry in looked_at if entry.shape is None]
        for entry in looked_at:
            if entry.shape is not None and self._specs.get(entry.name) is None:
                news[entry.name] = self._of_plain(entry)
        for (site, _), placement in [each for each in self._fresh.items() if each[0][1] == phase]:
            del self._fresh[site, phase]
            if self._told.get((site, phase)) != placement:
                self._told[site, phase] = news[site] = placement
        return _event(news, phase) if news else None

    def _among_others(self, entry: PlacedSite, axes: Sequence[MeshAxis], facts: Placement) -> Placement:
        """A DTensor's facts beside the axes that it is not on."""
        here = self._mesh
        rest = [
            axis.holding(self._share_of(entry, axis.name))
            for axis in here.axes.values()
            if not any(axis.runs_along(own) or axis.ranks == own.ranks for own in axes)
        ]
        root = here.root if rest else facts.root
        return replace(facts, axes=(*rest, *facts.axes), root=root, stage=self._stage(entry.site.kind))

    def _of_plain(self, entry: PlacedSite) -> Placement:
        here = self._mesh
        axes = tuple(axis.holding(self._share_of(entry, name)) for name, axis in here.axes.items())
        if not axes:
            axes = (Axis("world", here.world, here.rank, self._stated(entry, "world") or _UNKNOWN),)
        found = Placement(axes, root=here.root, stage=self._stage(entry.site.kind))
        site = entry.site
        piece = here.flat.get((id(site.module), site.leaf)) if site.kind in _FLATTENED else None
        return found if piece is None or entry.shape != piece[2:] else self._flat(found, *piece)

    def _flat(self, found: Placement, shape: tuple[int, ...], start: int, count: int) -> Placement:
        """A stretch of a parameter that lies in one row: the innermost data axis divides it."""
        inner = [axis.name for axis in found.axes if axis.name in self._mesh.data][-1:]
        shards = dict.fromkeys(inner, Share("shard", 0))
        return replace(found.with_shares(shards), shape=shape, boxes=(Box((start,), (count,)),), flat=True)

    def _stage(self, kind: str) -> Stage | None:
        """Whether a gradient is of this rank's own loss, or of all ranks' together."""
        if kind == "param_grad_local" or (kind.startswith("grad") and self._mesh.data):
            return "local"
        return "reduced" if kind.startswith("param_grad") else None

    def _share_of(self, entry: PlacedSite, axis: str) -> Share:
        """What a plain value of a site is along one axis."""
        stated = self._stated(entry, axis)
        if stated is not None:
            return _of_dim(stated, entry.shape)
        if entry.site.kind == "param_grad_local" and axis in self._mesh.data:
            return Share("partial", op="avg")
        if entry.site.kind in _HELD or entry.site.kind.startswith("param"):
            return _UNKNOWN if _differs_by_rank(entry.site) else _REPLICATE
        planned = self._planned(entry, axis)
        if planned is not None:
            return _of_dim(planned, entry.shape)
        return self._batch_share(entry.shape) if axis in self._mesh.data else _UNKNOWN

    def _batch_share(self, shape: tuple[int, ...] | None) -> Share:
        """A part of the batch, where the first dimension can be one: a table of positions is none."""
        if not shape:
            return _UNKNOWN
        samples, rest = (self._given[0], self._given[1:]) if self._given else (1, ())
        whole_samples = shape[0] >= samples and shape[0] % max(samples, 1) == 0
        as_long_as_a_sample = shape[0] != samples and shape[0] in rest
        return Share("batch", 0) if whole_samples and not as_long_as_a_sample else _UNKNOWN

    def _stated(self, entry: PlacedSite, axis: str) -> Share | None:
        """What the user says of a site along an axis."""
        for selector, statements in reversed(self._layouts):
            if not selector.picks(entry.site):
                continue
            for share, named in statements:
                if named == axis or (named is None and self._means(share, axis)):
                    return share
        return None

    def _means(self, share: Share, axis: str) -> bool:
        """Whether a statement without an axis is about this one: a batch is spread over data axes alone."""
        return share.kind != "batch" or not self._mesh.data or axis in self._mesh.data

    def _planned(self, entry: PlacedSite, axis: str) -> Share | None:
        """What the parallel plan says of a module's output, and so of its gradient."""
        site = entry.site
        layouts = self._mesh.plans.get(id(site.module), {}).get(axis)
        if layouts is None or site.kind not in ("output", "grad_output"):
            return None
        number = first_part(site.leaf)[0]
        place = int(number) if number.isdecimal() else 0
        return layouts[place] if place < len(layouts) else None


def _of_dim(share: Share, shape: tuple[int, ...] | None) -> Share:
    """The share with its dimension counted from the front."""
    if share.kind != "shard" or share.dim is None or share.dim >= 0 or not shape:
        return share
    return share._replace(dim=share.dim + len(shape))


def _differs_by_rank(site: Site) -> bool:
    """Whether each rank has its own: running statistics are of what a rank has seen, unless they are synchronized."""
    if site.kind != "buffer" or site.module is None:
        return False
    module = site.module
    running = getattr(module, "track_running_stats", False)
    return bool(running) and not isinstance(module, nn.SyncBatchNorm)


def _event(news: Mapping[str, Placement], phase: str) -> dict[str, object]:
    """Sites by the placements that they share: a thousand sites have a handful of them."""
    numbers: dict[Placement, int] = {}
    sites = {site: numbers.setdefault(each, len(numbers)) for site, each in news.items()}
    return {"phase": phase, "placements": [each.to_json() for each in numbers], "sites": sites}
