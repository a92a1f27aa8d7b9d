"""Prove that taps change nothing: run a model without and with them, and compare every bit.

Outputs, the gradients of parameters and inputs, buffers and the state of the random generators are compared. A
model that does not even repeat itself without taps is found out by running it so as well, as often as with them and in
turn: what differs then is reported as its own, not as torchtap's. Afterwards everything is as it was.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any, final

import torch
from torch import Tensor

from torchtap._torch import pytree
from torchtap.errors import PlanError, VerificationError
from torchtap.hooks.leaves import Args, Kwargs
from torchtap.plan.sites import Selectable
from torchtap.plan.tap import Tap
from torchtap.sanitize import say
from torchtap.session.capture import capture

__all__ = ["Verification", "verify"]

_EVERYTHING = ("*:input", "*:output", "*:grad_input", "*:grad_output")

# Runs that count for nothing: TorchScript changes its code after the first runs of a graph.
_WARMING = 2

# Measured by `python -m benchmarks.last_bit`.
_ABOUT_THREADS = (
    "sums that are made thread by thread, such as layer norm's backward, have other bits when OpenMP gives torch "
    "another number of threads: OMP_DYNAMIC does that on a busy machine, and so does a backward in a new thread after "
    "any thread has called torch.set_num_threads"
)

Facts = dict[str, dict[str, Tensor]]


@final
@dataclass(frozen=True, slots=True)
class Verification:
    """What was compared: for each aspect how many tensors, which of them taps changed, which vary by themselves.

    ``repeat`` is how often the model ran with taps and, beyond the first time, without; ``threads`` how many torch had.
    """

    compared: Mapping[str, int]
    changed: Mapping[str, tuple[str, ...]]
    unsteady: Mapping[str, tuple[str, ...]]
    sites: int
    repeat: int = 1
    threads: int = 1

    @property
    def identical(self) -> bool:
        """Return True if taps changed nothing."""
        return not any(self.changed.values())

    @property
    def repeatable(self) -> bool:
        """Return True if the model without taps gave the same bits every time."""
        return not any(self.unsteady.values())

    def __str__(self) -> str:
        lines = [f"{'':<12}{'tensors':>8}  with taps"]
        for aspect, count in self.compared.items():
            changed, unsteady = self.changed[aspect], self.unsteady[aspect]
            verdict = f"{len(changed)} differ: {', '.join(changed[:3])}" if changed else "identical"
            if unsteady:
                verdict += f" ({len(unsteady)} vary without taps: {', '.join(unsteady[:3])})"
            lines.append(f"{aspect:<12}{count:>8}  {verdict if count else 'none'}")
        itself = "repeats itself" if self.repeatable else "does not repeat itself"
        runs = f"{self.repeat} runs each" if self.repeat > 1 else "one run each"
        lines.append(f"without taps the model {itself} ({runs}, torch threads: {self.threads})")
        if self.threads > 1 and (not self.repeatable or _team_may_change()):
            lines.append(_ABOUT_THREADS)
        return "\n".join([*lines, f"{self.sites} values were taken"])


def verify(
    model: object,
    *inputs: object,
    taps: tuple[Tap | Selectable, ...] = (),
    backward: bool | None = None,
    threads: int | None = None,
    repeat: int = 1,
    file: IO[str] | None = None,
    **kwargs: object,
) -> Verification:
    """Run a model without and with taps; print a table; raise if a single bit differs.

    ``inputs`` are given as to `torchtap.compare`: one value, a tuple of arguments, or a mapping of keywords; several
    values and further keywords are arguments as they stand. ``taps`` are all inputs, outputs and their gradients
    unless given. ``backward`` says whether to run autograd; None does where an output requires grad.

    What several threads compute may differ from one time to the next. ``repeat`` compares so many runs with taps, and
    as many without between them, with the first; ``threads`` is how many torch has meanwhile (None: as it is).
    """
    if repeat < 1 or (threads is not None and threads < 1):
        raise PlanError(f"verify(threads={threads}, repeat={repeat}): both are numbers from 1 on")
    args, kwargs = _arguments(inputs, kwargs)
    before, had = _snapshot(model), torch.get_num_threads()
    chosen = taps or _kinds_for(model, backward)

    def plain() -> Facts:
        return _run(model, args, kwargs, backward, before)

    def tapped() -> tuple[Facts, int]:
        with capture(model, *chosen, strict=False) as seen:
            facts = _run(model, args, kwargs, backward, before)
        return facts, len(seen)

    torch.set_num_threads(threads or had)
    try:
        result = _in_turn(plain, tapped, repeat)
    finally:
        torch.set_num_threads(had)
        _restore(model, before)
    say(str(result), file or sys.stdout)
    if not result.identical:
        raise VerificationError(f"taps changed the model:\n{result}")
    return result


def _team_may_change() -> bool:
    """Return True if OpenMP was told to choose the number of threads by the machine's load."""
    return os.environ.get("OMP_DYNAMIC", "").strip().lower() in ("true", "1", "yes")


def _in_turn(
    plain: Callable[[], Facts], tapped: Callable[[], tuple[Facts, int]], repeat: int
) -> Verification:
    """Run both ways in turn, and compare each run with the first without taps."""
    for _ in range(_WARMING):
        plain()
    first = plain()
    for _ in range(_WARMING):
        tapped()
    unsteady: dict[str, set[str]] = {aspect: set() for aspect in first}
    differing: dict[str, set[str]] = {aspect: set() for aspect in first}
    sites = 0
    for _ in range(repeat):
        _note(unsteady, _differences(first, plain()))
        facts, sites = tapped()
        _note(differing, _differences(first, facts))
    return Verification(
        compared={aspect: len(tensors) for aspect, tensors in first.items()},
        changed={aspect: tuple(sorted(names - unsteady[aspect])) for aspect, names in differing.items()},
        unsteady={aspect: tuple(sorted(names)) for aspect, names in unsteady.items()},
        sites=sites,
        repeat=repeat,
        threads=torch.get_num_threads(),
    )


def _note(found: dict[str, set[str]], names: dict[str, tuple[str, ...]]) -> None:
    for aspect, some in names.items():
        found[aspect].update(some)


def _kinds_for(model: object, backward: bool | None) -> tuple[str, ...]:
    if backward is False or not isinstance(model, torch.nn.Module):
        return _EVERYTHING[:2]
    return _EVERYTHING


def _run(model: Any, args: Any, kwargs: Any, backward: bool | None, start: Facts) -> Facts:
    _restore(model, start)
    args, kwargs = copy.deepcopy((args, kwargs))
    output = model(*args, **kwargs)
    results = {str(n): leaf for n, leaf in enumerate(pytree.tree_leaves(output)) if isinstance(leaf, Tensor)}
    loss = [
        leaf.float().square().mean()
        for leaf in results.values()
        if leaf.requires_grad and leaf.is_floating_point()
    ]
    if loss and backward is not False:
        torch.stack(loss).sum().backward()
    facts = _snapshot(model)
    inputs = pytree.tree_leaves((args, kwargs))
    gradients = {
        f"input {n}": leaf.grad for n, leaf in enumerate(inputs) if isinstance(leaf, Tensor) and leaf.is_leaf
    }
    facts["gradients"] |= {name: gradient for name, gradient in gradients.items() if gradient is not None}
    return {"outputs": {name: leaf.detach().clone() for name, leaf in results.items()}, **facts}


def _parameters(model: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(model, torch.nn.Module):
        yield from model.named_parameters()


def _buffers(model: object) -> Iterator[tuple[str, Tensor]]:
    if isinstance(model, torch.nn.Module):
        yield from model.named_buffers()


def _snapshot(model: object) -> Facts:
    random = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        random |= {f"cuda:{n}": state for n, state in enumerate(torch.cuda.get_rng_state_all())}
    return {
        "gradients": {n: p.grad.detach().clone() for n, p in _parameters(model) if p.grad is not None},
        "buffers": {name: buffer.detach().clone() for name, buffer in _buffers(model)},
        "random": random,
    }


def _restore(model: object, facts: Facts) -> None:
    with torch.no_grad():
        for name, parameter in _parameters(model):
            gradient = facts["gradients"].get(name)
            parameter.grad = None if gradient is None else gradient.clone()
        for name, buffer in _buffers(model):
            buffer.copy_(facts["buffers"][name])
    torch.set_rng_state(facts["random"]["cpu"])
    for name, state in facts["random"].items():
        if name.startswith("cuda:"):
            torch.cuda.set_rng_state(state, name)


def _differences(left: Facts, right: Facts) -> dict[str, tuple[str, ...]]:
    return {
        aspect: tuple(
            name
            for name in sorted(left[aspect].keys() | right[aspect].keys())
            if not _same_bits(left[aspect].get(name), right[aspect].get(name))
        )
        for aspect in left
    }


def _same_bits(left: Tensor | None, right: Tensor | None) -> bool:
    if left is None or right is None or left.dtype != right.dtype or left.shape != right.shape:
        return False
    if left.dtype.is_complex:
        left, right = torch.view_as_real(left), torch.view_as_real(right)
    if not left.dtype.is_floating_point:
        return torch.equal(left, right)
    # NaN equals itself here, and 0 is not -0.
    return torch.equal(_bytes_of(left), _bytes_of(right))


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)  # a number of no dimension has no bytes to view


def _arguments(inputs: tuple[object, ...], kwargs: dict[str, object]) -> tuple[Args, Kwargs]:
    if len(inputs) != 1:
        return inputs, kwargs
    if isinstance(inputs[0], Mapping):
        return (), {**inputs[0], **kwargs}
    return (inputs[0] if isinstance(inputs[0], tuple) else inputs), kwargs
