"""Probes of the model: copied rows, broken ties, unregistered modules, attention, dropout, padding."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from torchtap._torch_distributed import local_part, placed, spec_of
from torchtap.diagnosis.probes.base import (
    ListeningProbe,
    Patient,
    Telling,
    held_anywhere,
    is_nonzero,
    read_flags,
)
from torchtap.diagnosis.probes.loop import ModeProbe
from torchtap.diagnosis.probes.losses import padding
from torchtap.hooks.leaves import Args, Kwargs
from torchtap.placement import Box
from torchtap.plan.names import join_path, site_name
from torchtap.spi import Hooks, ask_for_gradient, parameters_of

_WEIGHT_LOOKS = 2


@final
class WeightProbe(ListeningProbe):
    """Looks at the first updates of a training, and at ties in each live step."""

    def __init__(self, patient: Patient, tell: Telling) -> None:
        self._patient = patient
        self._tell = tell
        self._tied = _tied(patient)
        self._twins = _twins(patient)
        self._looks = 0

    def start(self) -> None:
        super().start()
        for site, times in _repeated(self._patient):
            self._tell.fact("one-for-many", site, float(times))

    def ready(self, optimizer: Optimizer) -> None:
        if self._tell.live and self._looks < _WEIGHT_LOOKS:
            held = set(map(id, parameters_of(optimizer)))
            known = self._patient.parameters.items()
            with torch.no_grad():
                pairs = {name: _first_rows(each) for name, each in known if id(each) in held}
                alike = {name: _same(*rows) for name, rows in pairs.items() if rows is not None}
                for name, same in zip(alike, read_flags([*alike.values()]), strict=True):
                    parameter = self._patient.parameters[name]
                    if same and _has_equal_rows(parameter):
                        self._tell.fact("equal-rows", name, float(len(parameter)))

    def updated(self, optimizer: Optimizer) -> None:
        if not self._tell.live:
            return
        self._looks += 1
        self._look_at_ties()
        if self._twins and self._looks <= _WEIGHT_LOOKS:
            self._look_at_twins(optimizer)

    def _look_at_ties(self) -> None:
        for names in self._tied:
            holders = {id(module._parameters.get(leaf)) for _, module, leaf in names}
            if len(holders) > 1:
                path, _, leaf = names[-1]
                text = "they were one parameter at the start"
                self._tell.fact("untied", site_name(path, "param", leaf), text=text)

    def _look_at_twins(self, optimizer: Optimizer) -> None:
        held = set(map(id, parameters_of(optimizer)))
        for one, other in self._twins:
            first, second = self._patient.parameters[one], self._patient.parameters[other]
            if {id(first), id(second)} <= held and not _equal(first, second):
                text = f"it had the values of {one} when the training began"
                self._tell.fact("untied", other, text=text)


def _first_rows(parameter: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the first two rows of a parameter and of its gradient."""
    gradient = None if parameter.grad is None else local_part(parameter.grad)
    parameter = local_part(parameter)
    if parameter.dim() < 2 or len(parameter) < 2 or gradient is None or gradient.is_sparse:
        return None
    return parameter[:2], gradient[:2]


def _same(parameter: Tensor, gradient: Tensor) -> Tensor:
    return (parameter[0] == parameter[1]).all() & (gradient[0] == gradient[1]).all()


def _has_equal_rows(parameter: Tensor) -> bool:
    assert parameter.grad is not None
    gradient, parameter = local_part(parameter.grad), local_part(parameter)
    if not torch.equal(parameter, parameter[:1].expand_as(parameter)):
        return False
    return torch.equal(gradient, gradient[:1].expand_as(gradient)) and is_nonzero(gradient)


def _repeated(patient: Patient) -> list[tuple[str, int]]:
    """Layers with parameters that stand several times in one list, and how often."""
    found = []
    for place in patient.places:
        if isinstance(place.module, (nn.ModuleList, nn.Sequential)):
            inside = list(place.module._modules.values())
            for each in dict.fromkeys(inside):
                times = inside.count(each)
                if times > 1 and each is not None and next(each.parameters(), None) is not None:
                    found.append((site_name(patient.paths[id(each)], "output"), times))
    return found


def _tied(patient: Patient) -> list[list[tuple[str, nn.Module, str]]]:
    """The places of each parameter that has several."""
    slots: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for place in patient.places:
        for leaf, parameter in place.module._parameters.items():
            if parameter is not None:
                slots.setdefault(id(parameter), []).append((place.path, place.module, leaf))
    return [names for names in slots.values() if len(names) > 1]


def _twins(patient: Patient) -> list[tuple[str, str]]:
    """Embeddings and linear layers with the same values in different memory: as if tied."""
    embeddings, layers = [], []
    for name, parameter in patient.parameters.items():
        owner = patient.owners[name]
        if isinstance(owner, nn.Embedding):
            embeddings.append((name, parameter))
        elif isinstance(owner, nn.Linear) and parameter.dim() == 2:
            layers.append((name, parameter))
    with torch.no_grad():
        return [
            (one, other)
            for one, first in embeddings
            for other, second in layers
            if first.shape == second.shape and _equal(first, second) and bool(local_part(first).std() > 0)
        ]


def _equal(first: Tensor, second: Tensor) -> bool:
    """Whether two weights have the same values, as far as this rank holds both: to ask others would be a collective."""
    parts = _box(first), _box(second)
    if parts[0] == parts[1]:
        return torch.equal(local_part(first), local_part(second))
    if None in parts:  # one is whole
        box = parts[0] or parts[1]
        assert box is not None
        inside = tuple(slice(start, start + size) for start, size in zip(box.offset, box.size, strict=True))
        one, other = (
            local_part(each) if part else each[inside]
            for each, part in zip((first, second), parts, strict=True)
        )
        return torch.equal(one, other)
    return False  # they are divided otherwise: nobody holds both


def _box(weight: Tensor) -> Box | None:
    """The part of a weight that this rank holds; None for all of it."""
    spec = spec_of(weight)
    found = None if spec is None else placed(spec)
    if found is None or not found[1].boxes:
        return None
    (box, *more) = found[1].boxes
    return box if not more else Box((), ())


_HIDDEN_LOOKS = 3
_DEEP = 4  # lists in lists
_LONG = 10_000


@final
class HiddenProbe(ListeningProbe):
    """After the first backwards: what is hidden and got a gradient is used, and learns nothing."""

    def __init__(self, patient: Patient, tell: Telling) -> None:
        self._patient = patient
        self._tell = tell
        self._looks = 0

    def backward_ends(self) -> None:
        if self._looks >= _HIDDEN_LOOKS or not self._tell.live:
            return
        self._looks += 1
        found = {site: tensor for site, tensor in self._hidden() if is_nonzero(tensor.grad)}
        if found:
            held = held_anywhere()
            for site, tensor in found.items():
                if id(tensor) not in held:
                    self._tell.fact("hidden-module", site, float(tensor.numel()))

    def _hidden(self) -> Iterator[tuple[str, Tensor]]:
        known = {id(place.module) for place in self._patient.places}
        for place in self._patient.places:
            for name, value in vars(place.module).items():
                if not name.startswith("_"):
                    yield from self._inside(join_path(place.path, name), place.path, name, value, known, 0)

    def _inside(
        self, path: str, owner: str, name: str, value: object, known: set[int], depth: int
    ) -> Iterator[tuple[str, Tensor]]:
        if isinstance(value, nn.Module):
            if id(value) not in known:
                for leaf, parameter in value.named_parameters():
                    yield site_name(path, "param", leaf), parameter
        elif isinstance(value, Tensor):
            if value.requires_grad and value.is_leaf and id(value) not in self._patient.names:
                yield site_name(owner, "param", name), value
        elif depth < _DEEP:
            for key, each in _items(value):
                inner = join_path(path, str(key))
                yield from self._inside(inner, owner, f"{name}.{key}", each, known, depth + 1)


def _items(value: object) -> list[tuple[object, object]]:
    """What of a plain container may hold a parameter, by key; nothing of a very long one: it is data."""
    if not isinstance(value, (list, tuple, dict)) or len(value) >= _LONG:
        return []
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return [(key, each) for key, each in items if isinstance(each, (nn.Module, Tensor, list, tuple, dict))]


_AT_ONCE = 2  # modules whose attention is measured in one step, in turn; all of them the first time
_WIDEST = 512  # positions
_DROPOUTS = ("dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d")
_NO_OWNER = ""


@final
class FunctionProbe:
    """Looks at the arguments of a few functions in live steps."""

    def __init__(self, patient: Patient, tell: Telling, modes: ModeProbe) -> None:
        self._patient = patient
        self._tell = tell
        self._modes = modes
        self._originals: list[tuple[object, str, object]] = []
        self._attended: dict[str, int] = {}  # module to the step at which it was measured last
        self._measured = (-1, 0)  # how many were in this step

    def start(self) -> None:
        self._replace(F, "scaled_dot_product_attention", None, self._after_attention)
        for owner in (torch, torch.Tensor):  # F.softmax calls the method
            self._replace(owner, "softmax", None, self._after_softmax)
        for name in _DROPOUTS:
            if hasattr(F, name):
                self._replace(F, name, self._on_dropout)

    def stop(self) -> None:
        while self._originals:
            owner, name, original = self._originals.pop()
            if original is None:
                delattr(owner, name)  # it was inherited
            else:
                setattr(owner, name, original)

    def _replace(
        self,
        owner: object,
        name: str,
        before: Callable[..., None] | None,
        after: Callable[..., None] | None = None,
    ) -> None:
        original = getattr(owner, name)
        tell = self

        @functools.wraps(original)
        def looked_at(*args: object, **kwargs: object) -> object:
            if torch.compiler.is_compiling() or not tell._wanted():
                return original(*args, **kwargs)
            if before is not None:
                tell._quietly(before, *args, **kwargs)
            result = original(*args, **kwargs)
            if after is not None:
                tell._quietly(after, result, *args, **kwargs)
            return result

        self._originals.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, looked_at)

    def _wanted(self) -> bool:
        return self._tell.live or self._modes.in_evaluation

    def _quietly(self, look: Callable[..., None], *args: object, **kwargs: object) -> None:
        """Whatever is odd about the arguments is the function's own business."""
        try:
            with torch.no_grad():
                look(*args, **kwargs)
        except Exception:
            pass

    # -- attention ----------------------------------------------------------------------------------------

    def _after_softmax(self, result: Tensor, given: Tensor, *args: Any, **kwargs: Any) -> None:
        if result.dim() < 3 or result.shape[-1] != result.shape[-2] or not self._tell.live:
            return
        dim = kwargs.get("dim", args[0] if args else -1)
        if dim in (-1, result.dim() - 1) and self._is_due():
            self._measure(result.flatten(0, -3)[:2], given.flatten(0, -3)[:2] > -1e4)

    def _after_attention(
        self, result: Tensor, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any
    ) -> None:
        if not self._tell.live or q.dim() < 3 or q.shape[-2] != k.shape[-2] or not self._is_due():
            return
        given = {**dict(zip(("attn_mask", "dropout_p", "is_causal"), args, strict=False)), **kwargs}
        length = min(q.shape[-2], _WIDEST)
        one, other = (each.flatten(0, -3)[0, :length].float() for each in (q, k))
        scores = one @ other.mT * (given.get("scale") or 1 / math.sqrt(q.shape[-1]))
        scores = _masked(scores, given.get("attn_mask"), causal=bool(given.get("is_causal")))
        self._measure(scores.softmax(-1).nan_to_num()[None], (scores > -1e4)[None])

    def _is_due(self) -> bool:
        """Return True if it is this module's turn: those that were measured longest ago come first."""
        path, step = self._caller(), self._tell.step
        last = self._attended.get(path)
        count = self._measured[1] if self._measured[0] == step else 0
        if last is not None:
            waited_more = sum(other < last for other in self._attended.values())
            if last == step or count >= _AT_ONCE or waited_more >= _AT_ONCE:
                return False
            self._measured = (step, count + 1)
        self._attended[path] = step
        return True

    def _measure(self, weights: Tensor, allowed: Tensor) -> None:
        length = min(weights.shape[-1], _WIDEST)
        if length < 4:
            return
        weights, allowed = weights[:, :length, :length].float(), allowed[:, :length, :length]
        path = self._caller()
        total = weights.sum().clamp_min(1e-12)
        above = float(weights.triu(1).sum() / total)
        self._tell.fact("attention-above", site_name(path, "attention"), above)
        counts = allowed.sum(-1)
        even = counts.float().log()
        rows = counts > 1
        entropy = torch.special.entr(weights).sum(-1)
        if bool(rows.any()):
            share = (entropy[rows] / even[rows]).mean()
            self._tell.number(site_name(path, "value", "attention_entropy"), share.clamp(0, 1))

    # -- dropout ------------------------------------------------------------------------------------------

    def _on_dropout(
        self, given: Tensor, p: float = 0.5, training: bool = True, *args: object, **kwargs: object
    ) -> None:
        if not (self._modes.in_evaluation and training and p > 0):
            return
        owner = self._owner_of_caller()
        if owner is not None and not type(owner).__module__.startswith("torch.nn.modules.dropout"):
            path = self._patient.paths[id(owner)]
            self._tell.fact(
                "ignores-eval", site_name(path, "output"), text="functional dropout with training=True"
            )

    def _caller(self) -> str:
        owner = self._owner_of_caller()
        return _NO_OWNER if owner is None else self._patient.paths[id(owner)]

    def _owner_of_caller(self) -> nn.Module | None:
        """The innermost module of this model whose code is running."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            owner = frame.f_locals.get("self") if "self" in frame.f_code.co_varnames[:1] else None
            if isinstance(owner, nn.Module) and id(owner) in self._patient.paths:
                return owner
            frame = frame.f_back
        return None


def _masked(scores: Tensor, mask: Tensor | None, *, causal: bool) -> Tensor:
    """The scores of one head, with what it may not look at set to minus infinity."""
    if mask is not None:
        shown = mask.flatten(0, -3)[0] if mask.dim() > 2 else mask
        shown = shown[: len(scores), : len(scores)]
        scores = scores.masked_fill(~shown, -torch.inf) if shown.dtype == torch.bool else scores + shown
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return scores


_PADDING_LOOKS = 4


@final
class PaddingProbe:
    """Stops at embeddings."""

    def __init__(self, patient: Patient, tell: Telling) -> None:
        self._patient = patient
        self._tell = tell
        self._hooks = Hooks(patient.tree)
        self._padded: dict[str, Tensor] = {}
        self._looked: dict[str, int] = {}

    def start(self) -> None:
        if self._patient.compiled:
            return
        for place in self._patient.places:
            if isinstance(place.module, nn.Embedding):
                self._hooks.before(place.module, partial(self._on_tokens, place.path))
                self._hooks.after(place.module, partial(self._on_output, place.path))

    def stop(self) -> None:
        self._hooks.remove()
        self._padded.clear()

    def _on_tokens(self, path: str, args: Args, kwargs: Kwargs) -> None:
        looked = self._looked.get(path, 0)
        if not (self._tell.live and torch.is_grad_enabled()) or looked >= _PADDING_LOOKS:
            return
        self._looked[path] = looked + 1
        tokens = args[0] if args else kwargs.get("input")
        found = padding(tokens) if isinstance(tokens, Tensor) else None
        if found is not None:
            self._padded[path] = found

    def _on_output(self, path: str, output: Any) -> None:
        padded = self._padded.pop(path, None)
        if padded is not None and isinstance(output, Tensor) and output.requires_grad:
            ask_for_gradient(output, partial(self._on_gradient, path, padded))

    def _on_gradient(self, path: str, padded: Tensor, gradient: Tensor | None) -> None:
        if gradient is None:
            return
        if gradient.shape[:2] == padded.shape and bool((gradient[padded] != 0).any()):
            share = float(padded.float().mean())
            self._tell.fact(
                "padding-learns",
                site_name(path, "output"),
                share,
                f"{share:.0%} of the positions are padding",
            )
