"""`torchtap.compare`: take whatever the user has, make recordings of it, compare them, and say what was found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from torchtap.comparison.align.rules import PairingRule
from torchtap.comparison.given import describe, is_live, recording_of
from torchtap.comparison.judge.outcome import decide
from torchtap.comparison.judge.result import Comparison
from torchtap.comparison.judge.source import located
from torchtap.comparison.judge.verdict import judge_live
from torchtap.comparison.live.batches import as_batches, gather_batches
from torchtap.comparison.live.evidence import PassEvidence
from torchtap.comparison.live.gradients import broken_flow, harmless_copies
from torchtap.comparison.live.parameters import usual_dtype
from torchtap.comparison.live.tracing import Feed, default_dtype, feed_of, golden_copy, record
from torchtap.comparison.recorded.phases import compare_all_phases
from torchtap.comparison.recorded.recordings import MemoryRecording, Recording
from torchtap.comparison.sources import captured, is_eager, perturbed
from torchtap.comparison.stored import compare_stored, known_harmless, listed
from torchtap.errors import CompareError
from torchtap.hooks.leaves import leaves

__all__ = ["compare"]

Loss = Callable[[Any], Tensor]
_GRADIENTS = ("*:output", "*:grad_output", "*:grad_input", "*:param_grad")


def compare(
    reference: Any,
    target: Any,
    *,
    inputs: Any = None,
    rules: Sequence[str | PairingRule] = (),
    repeat: Any = None,
    golden: Any = None,
    steps: Sequence[int] | None = None,
    gradients: bool | Loss = False,
    shadow: bool = True,
) -> Comparison:
    """Compare a target with a reference, site by site, and name the first module that differs.

    Both are runs (paths or opened), folders of layer files, mappings from names to tensors, or things that can be
    called on ``inputs`` (a tuple of arguments, a mapping of keywords, one value, a function of the model, or a list
    of several of these: batches). No tolerance is needed: the noise floor is found from what there is. Models,
    their gradients, their buffers and the random state are left as they were.

    The outcome is "same", "differs" or "cannot tell"; what was not compared can decide as well as what was.

    ``rules``      which names belong together and how values are laid out, e.g. ``"model.*=*"``
    ``repeat``     one or more further recordings of the reference that are known to be right
    ``golden``     a recording of the reference in higher precision
    ``steps``      compare these steps of two runs alone
    ``gradients``  also compare gradients; a function of the model's output gives the loss
    ``shadow``     run the target's modules on the reference's inputs as well (live eager models only)
    """
    if not any(map(is_live, (reference, target, golden, *listed(repeat)))):
        return compare_stored(reference, target, rules=rules, repeat=repeat, golden=golden, steps=steps)
    if inputs is None:
        raise CompareError("comparing a model needs inputs=..., for example inputs=(x,)")
    batches = as_batches(inputs)
    alone = repeat is None and golden is None
    if alone and all(is_live(each) and is_eager(each) for each in (reference, target)):
        result = located(_live(reference, target, batches, tuple(rules), shadow), target)
        if gradients is False or result.first is not None:
            return result
        return _gradients(reference, target, batches[0], rules, gradients, result)
    return located(_recorded(reference, target, batches[0], rules, gradients, repeat, golden, steps), target)


def _feed_of_target(reference: object, target: object, inputs: object) -> Feed:
    """A target of another precision gets its inputs in that precision."""
    mine, theirs = usual_dtype(reference)[0], usual_dtype(target)[0]
    return feed_of(inputs, theirs if theirs != mine else None)


def _live(
    reference: nn.Module,
    target: nn.Module,
    batches: list[object],
    rules: tuple[str | PairingRule, ...],
    shadow: bool,
) -> Comparison:
    feeds = [(feed_of(inputs), _feed_of_target(reference, target, inputs)) for inputs in batches]
    results = [
        _judged(found, len(batches)) for found in gather_batches(reference, target, feeds, rules, shadow)
    ]
    differing = [result for result in results if result.first is not None]
    if differing:
        chosen = min(differing, key=lambda result: result.first.index if result.first is not None else 0)
    else:
        chosen = next((result for result in results if result.outcome != "same"), results[0])
    return replace(chosen, forwards=sum(result.forwards for result in results))


def _judged(found: PassEvidence, batches: int) -> Comparison:
    rows, first = judge_live(found)
    also = f" in each of {batches} batches" if batches > 1 else ""
    if found.lowered_to:
        also += f" in {found.lowered_to}, in which the reference was run too"
    outcome, verdict = decide(first, rows, found.alignment.unaligned, live=True, also=also)
    return Comparison(
        reference=describe(found.reference),
        target=describe(found.target),
        rows=rows,
        first=first,
        verdict=verdict,
        basis=", ".join(found.basis) or "none",
        unaligned=found.alignment.unaligned,
        problems=tuple(found.problems),
        forwards=found.forwards,
        outcome=outcome,
        pairing=found.alignment.pairs,
        facts={"precision": found.lowered_to, "from_full_precision": found.from_full}
        if found.from_full
        else {},
    )


def _gradients(
    reference: nn.Module,
    target: nn.Module,
    inputs: object,
    rules: Sequence[str | PairingRule],
    gradients: bool | Loss,
    forward: Comparison,
) -> Comparison:
    """The backward pass of two models whose forward passes agree."""
    backward = _recorded(reference, target, inputs, rules, gradients, None, None, None)
    forwards = backward.forwards + forward.forwards + 2
    cut = broken_flow(reference, target, feed_of(inputs), _feed_of_target(reference, target, inputs))
    if cut is None:
        return replace(backward, forwards=forwards)
    outcome, verdict = decide(cut, backward.rows, backward.unaligned, live=True)
    return replace(backward, first=cut, outcome=outcome, verdict=verdict, forwards=forwards)


def _recorded(
    reference: Any,
    target: Any,
    inputs: Any,
    rules: Sequence[str | PairingRule],
    gradients: bool | Loss,
    repeat: Any,
    golden: Any,
    steps: Sequence[int] | None,
) -> Comparison:
    """Record what is live, and compare the recordings."""
    loss = None if gradients is False else (_default_loss if gradients is True else gradients)
    selectors = ("*:output",) if loss is None else _GRADIENTS
    feed = feed_of(inputs)
    forwards = 0

    def take(thing: Any, label: str, how: Feed = feed) -> Recording:
        nonlocal forwards
        if not is_live(thing):
            return recording_of(thing)
        forwards += 1
        like = reference if thing is target and is_live(reference) and is_eager(reference) else None
        return captured(thing, how, label, selectors=selectors, loss=loss, like=like, inputs=inputs)

    left, right = (
        take(reference, describe(reference)),
        take(target, describe(target), _feed_of_target(reference, target, inputs)),
    )
    harmless = known_harmless(repeat, golden, take)
    if is_live(reference):
        harmless += _harmless_runs(reference, feed, inputs, take, backward=loss is not None)
    live = is_live(reference) and is_live(target)
    result = compare_all_phases(left, right, rules=rules, harmless=harmless, only=steps, live=live)
    return replace(result, forwards=forwards)


def _harmless_runs(
    reference: Any, feed: Feed, inputs: Any, take: Callable[..., Recording], *, backward: bool
) -> list[tuple[str, Recording]]:
    """Runs of a live reference that show how much it differs from itself."""
    found: list[tuple[str, Recording]] = [("repeat", take(reference, "repeat"))]
    moved = perturbed(inputs)
    if moved is not None:
        found.append(("one ULP", take(reference, "one ULP", moved)))
    if not is_eager(reference):
        return found
    if backward:
        for source, make, dtype in harmless_copies(reference):
            # A copy that cannot be made or does not run teaches nothing.
            with suppress(Exception), default_dtype(dtype):
                found.append((source, take(make(), source, feed_of(inputs, dtype))))
        return found
    found.append(("one ULP", MemoryRecording(record(reference, feed, noise=1).values, "one ULP")))
    copied = golden_copy(reference)[0]
    if copied is not None:
        # A forward that insists on a dtype of its own has no float64 twin to learn from.
        with suppress(Exception):
            trace = record(copied, feed, cast=torch.float64)
            found.append(("float64", MemoryRecording(trace.values, "float64")))
    return found


def _default_loss(output: object) -> Tensor:
    """A loss that every element of every result takes part in, with weights that do not cancel."""
    terms = []
    for _, value in leaves(output):
        if value.is_floating_point() and value.requires_grad:
            weights = torch.linspace(0.5, 1.5, value.numel(), device=value.device, dtype=value.dtype)
            terms.append((value * weights.view(value.shape)).mean())
    if not terms:
        raise CompareError("the model's output has no gradient; give gradients=a function of the output")
    return torch.stack(terms).sum()
