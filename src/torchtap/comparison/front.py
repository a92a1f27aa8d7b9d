"""`torchtap.compare`: take whatever the user has, make recordings of it, compare them, and say what was found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, fx, nn

from torchtap._torch import runs_compiled
from torchtap.comparison.causes import broken_flow, harmless_copies, located, usual_dtype
from torchtap.comparison.judge import decide
from torchtap.comparison.live import (
    PassEvidence,
    as_batches,
    function_answer,
    gather_batches,
    judge_live,
)
from torchtap.comparison.passes import Feed, default_dtype, feed_of, golden_copy, jitter, record
from torchtap.comparison.recorded import compare_all_phases, compare_stored, known_harmless, listed
from torchtap.comparison.recordings import MemoryRecording, Recording, describe, is_live, recording_of
from torchtap.comparison.result import Comparison
from torchtap.comparison.rules import PairingRule
from torchtap.errors import CompareError
from torchtap.hooks.leaves import leaves, map_leaves
from torchtap.plan.names import site_name
from torchtap.progress import Listener, showing
from torchtap.untouched import untouched

if TYPE_CHECKING:
    from torchtap.forms.match.site_map import SiteMap

__all__ = ["captured", "compare", "is_eager", "perturbed"]


def is_eager(thing: object) -> bool:
    """Return True if every module of this runs as plain Python, so that its hooks see all and may replace all."""
    if not isinstance(thing, nn.Module) or isinstance(thing, (torch.jit.ScriptModule, fx.GraphModule)):
        return False
    return not any(
        isinstance(module, torch.jit.ScriptModule) or runs_compiled(module) for module in thing.modules()
    )


def captured(
    thing: Any,
    feed: Feed,
    label: str,
    *,
    selectors: tuple[str, ...] = ("*:output",),
    loss: Callable[[Any], Tensor] | None = None,
    like: nn.Module | None = None,
    inputs: Any = None,
) -> MemoryRecording:
    """Run something once and keep what its form lets out; with ``loss`` a backward pass is run as well.

    A graph that does not tell its names gets those of ``like``, an eager model, which runs once on ``inputs``.
    """
    from torchtap.plan.names import in_passing_order
    from torchtap.session.capture import capture

    with untouched(thing, in_place=True):
        torch.manual_seed(0)
        try:
            with (
                torch.set_grad_enabled(loss is not None),
                capture(thing, *selectors, all_threads=True, like=_names_of(thing, like, inputs)) as seen,
            ):
                output = feed(thing)
                if loss is not None:
                    loss(output).backward()
            values = {
                name: value for name in in_passing_order(seen) if isinstance(value := seen[name], Tensor)
            }
            if values:
                return MemoryRecording(values, label)
            hidden = "its form lets no value out"
        except CompareError:
            raise
        except Exception as error:
            hidden = _brief(error)
        return _results_alone(thing, feed, label, hidden)


def _names_of(thing: object, like: nn.Module | None, inputs: object) -> SiteMap | None:
    """The map of a form's values to the sites of the eager model; None where it has none, or needs none."""
    from torchtap.session.matching import has_names, match

    if like is None or callable(inputs) or has_names(thing):
        return None
    with suppress(Exception), untouched(like):
        return match(thing, like, inputs)
    return None


def _results_alone(thing: Any, feed: Feed, label: str, hidden: str) -> MemoryRecording:
    """What something returns, when nothing inside it can be seen; ``hidden`` says why."""
    torch.manual_seed(0)
    try:
        with torch.no_grad():
            output = feed(thing)
    except Exception as error:
        raise CompareError(f"{label} does not run on these inputs: {_brief(error)}") from error
    named = {site_name("", "output", leaf): value.detach() for leaf, value in leaves(output)}
    if not named:
        raise CompareError(f"{label} returned no tensor, and nothing inside it can be seen: {hidden}")
    return MemoryRecording(named, label, (f"{label}: only its results can be seen: {hidden}",))


def _brief(error: BaseException) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def perturbed(inputs: object, seed: int = 1) -> Feed | None:
    """The same inputs moved by about one ULP; ``None`` when they are not numbers that can be moved a little."""
    if callable(inputs) and not isinstance(inputs, (Tensor, nn.Module)):
        return None
    generator = torch.Generator().manual_seed(seed)
    moved = False

    def move(_: str, value: Tensor) -> Tensor:
        nonlocal moved
        moved = moved or value.is_floating_point()
        return jitter(value.detach(), generator) if value.is_floating_point() else value

    changed = map_leaves(inputs, move)
    return feed_of(changed) if moved else None


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
    by: Literal["site", "token"] = "site",
    progress: bool | Listener | None = None,
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
    ``by``         "token": the target is a recording of a serving engine (`torchtap.serving`); the reference, a model
                   of transformers, runs on the tokens of its requests, and rows meet by request and position
    ``progress``   True shows a bar; a function is called with what is done, how many parts, and of how many
    """
    with showing(progress):
        if by == "token":
            from torchtap.serving.token_compare import compare_tokens

            return compare_tokens(reference, target)
        if by != "site":
            raise CompareError(f"by={by!r}: rows are compared by 'site' or by 'token'")
        return _compare(reference, target, inputs, rules, repeat, golden, steps, gradients, shadow)


def _compare(
    reference: Any,
    target: Any,
    inputs: Any,
    rules: Sequence[str | PairingRule],
    repeat: Any,
    golden: Any,
    steps: Sequence[int] | None,
    gradients: bool | Loss,
    shadow: bool,
) -> Comparison:
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
    if found.beside.differs_at_padding:
        also += f" at the positions that count; at those that a mask hides, {found.beside.differs_at_padding} differs"
    function = function_answer(found)
    outcome, verdict = decide(first, rows, found.alignment.unaligned, live=True, also=also, function=function)
    return Comparison(
        function=function,
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
