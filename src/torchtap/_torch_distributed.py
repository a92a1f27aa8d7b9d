"""What torch's distributed parts say of this process and of its values, private names included. No collective, ever.

Everything here reads what this process holds already. Where torch has no such thing (another version, nothing
distributed in use) the answers are "nothing known", and values are recorded as plain tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from torchtap.placement import Axis, Box, Placement, Share, Spans, boxes_of, chunk

__all__ = [
    "MeshAxis",
    "calling_wrapper",
    "flat_pieces",
    "fsdp_axes",
    "fsdp_sharded",
    "group_axis",
    "infers_shapes",
    "local_part",
    "mesh_axes",
    "meshes_of",
    "output_plan",
    "placed",
    "spec_of",
    "wrapper_group",
]

_UNKNOWN = Share("unknown")
_INFERENCE = ("_forward_metadata_inference", "_shape_inference")  # newer and older torch
_FRAMES = 40


@final
class MeshAxis(NamedTuple):
    """An axis on which this process has a place."""

    name: str
    ranks: tuple[int, ...]  # in the order of the axis
    at: int

    def holding(self, share: Share) -> Axis:
        return Axis(self.name, len(self.ranks), self.at, share)

    def runs_along(self, other: MeshAxis) -> bool:
        """Return True if two axes have more in common than this process: they are one, or one contains the other."""
        return len(set(self.ranks).intersection(other.ranks)) > 1


def group_axis(group: Any, name: str) -> MeshAxis:
    """A process group as an axis."""
    ranks = tuple(torch.distributed.get_process_group_ranks(group))
    return MeshAxis(name, ranks, ranks.index(torch.distributed.get_rank()))


# -- meshes ---------------------------------------------------------------------------------------------------


def mesh_axes(mesh: Any) -> tuple[MeshAxis, ...]:
    """The axes of a ``DeviceMesh``; none where this process is not in it."""
    if mesh.get_coordinate() is None:
        return ()
    return tuple(group_axis(mesh.get_group(number), name) for number, name in enumerate(_axis_names(mesh)))


def _axis_names(mesh: Any) -> tuple[str, ...]:
    named = mesh.mesh_dim_names
    return tuple(named) if named else tuple(f"axis_{number}" for number in range(mesh.ndim))


def meshes_of(module: nn.Module) -> Iterator[Any]:
    """The meshes that a module's own parameters, its sharding and its parallel plan are on."""
    for parameter in module._parameters.values():
        spec = None if parameter is None else spec_of(parameter)
        if spec is not None:
            yield spec.mesh
    for group in _fsdp_groups(module):
        yield group.mesh_info.mesh
    if (plan := output_plan(module)) is not None:
        yield plan[0]


def infers_shapes() -> bool:
    """Return True if a pipeline stage calls its module only to learn the shapes of what comes out."""
    if "torch.distributed.pipelining.stage" not in sys.modules:
        return False
    frame = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame.f_code.co_name in _INFERENCE and frame.f_code.co_filename.endswith("stage.py"):
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


# -- DTensor --------------------------------------------------------------------------------------------------


def spec_of(value: Tensor) -> Any:
    """What a DTensor says of its placement; None for everything else."""
    loaded = sys.modules.get("torch.distributed.tensor")
    if loaded is None or not isinstance(value, loaded.DTensor):
        return None
    return getattr(value, "_spec", None)


def local_part(value: Tensor) -> Tensor:
    """This rank's part of a DTensor, and the value of a collective that the model itself has begun."""
    spec = spec_of(value)
    if spec is not None:
        value = value._local_tensor  # type: ignore[attr-defined]
    wait = getattr(value, "wait", None)
    return wait() if callable(wait) and hasattr(value, "elem") else value


def placed(spec: Any) -> tuple[tuple[MeshAxis, ...], Placement] | None:
    """The placement that a DTensor's spec says, with this rank's boxes; None for a rank outside of its mesh."""
    axes = mesh_axes(spec.mesh)
    if not axes:
        return None
    shape = tuple(int(size) for size in spec.shape)
    found = tuple(axis.holding(_share(each)) for axis, each in zip(axes, spec.placements, strict=True))
    boxes = _boxes(shape, axes, spec.placements)
    return axes, Placement(found, shape, boxes, root=int(spec.mesh.mesh.min()))


def _share(placement: Any) -> Share:
    if placement.is_replicate():
        return Share("replicate")
    if placement.is_partial():
        return Share("partial", op=str(getattr(placement, "reduce_op", "sum")))
    dim = getattr(placement, "dim", None)
    return Share("shard", int(dim)) if dim is not None else _UNKNOWN


def _boxes(
    shape: tuple[int, ...], axes: tuple[MeshAxis, ...], placements: tuple[Any, ...]
) -> tuple[Box, ...] | None:
    """Where this rank's part lies: each axis deals out what the axes before it have left, as DTensor does."""
    spans: list[Spans] = [((0, size),) for size in shape]
    for axis, placement in zip(axes, placements, strict=True):
        dim = getattr(placement, "dim", None)
        if dim is None or placement.is_replicate() or placement.is_partial():
            continue
        pieces = int(getattr(placement, "split_factor", 1))  # a strided shard is cut into these first
        dealt = (chunk(spans[dim], pieces, number) for number in range(pieces))
        spans[dim] = tuple(span for piece in dealt for span in chunk(piece, len(axis.ranks), axis.at))
    return boxes_of(spans)


# -- FSDP -----------------------------------------------------------------------------------------------------


def _fsdp_groups(module: nn.Module) -> list[Any]:
    """The groups of parameters that ``fully_shard`` made of a module."""
    state = getattr(module, "_get_fsdp_state", None)
    if not callable(state):
        return []
    found = state()
    several = getattr(found, "_fsdp_param_groups", None)
    if several is None:
        one = getattr(found, "_fsdp_param_group", None)
        several = [] if one is None else [one]
    return list(several)


def fsdp_axes(module: nn.Module) -> list[MeshAxis]:
    """The axes along which ``fully_shard`` lets ranks read different data."""
    found: list[MeshAxis] = []
    for group in _fsdp_groups(module):
        info = group.mesh_info
        axes = mesh_axes(info.mesh)
        dims = (info.replicate_mesh_dim, info.shard_mesh_dim)
        found += [axes[number] for number in dims if number is not None and axes]
    return found


def fsdp_sharded(root: nn.Module) -> dict[tuple[int, str], Any]:
    """By module and name: what holds each parameter that ``fully_shard`` manages, gathered or not.

    Its ``sharded_param`` is the one that the optimizer changes. Between a forward and its backward the module may
    show the gathered one in its place.
    """
    found: dict[tuple[int, str], Any] = {}
    for module in root.modules():
        for group in _fsdp_groups(module):
            for held in group.fsdp_params:
                info = held._module_info
                found[id(info.module), info.param_name] = held
                shared = zip(info.shared_modules, info.shared_param_names, strict=True)
                found.update(((id(other), name), held) for other, name in shared)
    return found


def flat_pieces(root: nn.Module) -> dict[tuple[int, str], tuple[tuple[int, ...], int, int]]:
    """By module and name: a parameter's shape, and from where to where it lies in this rank's flat shard (FSDP 1)."""
    found: dict[tuple[int, str], tuple[tuple[int, ...], int, int]] = {}
    for module in root.modules():
        flat = getattr(getattr(module, "_handle", None), "flat_param", None)
        held = getattr(flat, "_shard_param_infos", None)
        if flat is None or held is None:
            continue
        for info, shape, shard in zip(flat._param_infos, flat._shapes, held, strict=True):
            first = shard.intra_param_start_idx if shard.in_shard else 0
            count = shard.numel_in_shard if shard.in_shard else 0
            found[id(info.module), info.param_name] = tuple(shape), int(first), int(count)
    return found


# -- wrappers and plans ---------------------------------------------------------------------------------------


def wrapper_group(module: nn.Module) -> list[Any]:
    """The process groups over which a wrapper (DDP, FSDP 1) gives ranks different data."""
    if type(module).__name__ not in ("DistributedDataParallel", "FullyShardedDataParallel"):
        return []
    across = getattr(module, "_inter_node_pg", None)  # of hybrid sharding
    return [group for group in (across, getattr(module, "process_group", None)) if group is not None]


def calling_wrapper() -> nn.Module | None:
    """Return the DDP wrapper whose forward is running; None outside of one. The wrapped module does not know it."""
    found = getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
    return found if isinstance(found, nn.Module) else None


def output_plan(module: nn.Module) -> tuple[Any, tuple[Share, ...]] | None:
    """The mesh and the layouts in which a parallel plan has a module hand out plain tensors; None without one.

    ``parallelize_module`` leaves them in the hooks that it registers, and nowhere else.
    """
    for hook in reversed(module._forward_hooks.values()):
        held = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or () if _is_set(cell)]
        mesh = next((each for each in held if type(each).__name__ == "DeviceMesh"), None)
        if mesh is None:
            continue
        for each in held:
            layouts = _layouts(each, module)
            if layouts is not None:
                return mesh, layouts
    return None


def _is_set(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _layouts(function: Any, module: nn.Module) -> tuple[Share, ...] | None:
    if isinstance(function, partial):
        match function.args:
            case [tuple(layouts), True]:  # column and row parallel
                return tuple(map(_share, layouts))
            case [True]:  # sequence parallel: its pre-hook knows the dimension
                return _sequence_layout(module)
        return None
    style = getattr(function, "__self__", None)  # a prepared output
    desired = getattr(style, "desired_output_layouts", None)
    if desired is None or not getattr(style, "use_local_output", False):
        return None
    return tuple(_share(each) if each is not None else _UNKNOWN for each in desired)


def _sequence_layout(module: nn.Module) -> tuple[Share, ...] | None:
    for hook in module._forward_pre_hooks.values():
        for cell in getattr(hook, "__closure__", None) or ():
            if _is_set(cell) and isinstance(cell.cell_contents, partial):
                match cell.cell_contents.args:
                    case [tuple(sharding)]:
                        return tuple(map(_share, sharding))
    return None
