"""Whole tensors from one forward pass, beside the bare call: torchtap, a hook by hand, and peers.

The model is that of `benchmarks.steps`, without gradients. Each case is one use from beginning to end: hooks go on,
the model runs, hooks come off. ``fixed`` is what the same use adds to a twin of width 8 with one token, where nothing
but overhead is left, and ``of a hook's`` that over what a hook by hand that copies adds there: the bar for a capture
that is not the first one with its words is 1.5. ``residue`` is how much slower that twin is after 11 uses than before
them.
A hook by hand keeps the very tensors; a later in-place op would change them. torchtap keeps copies; ``by reference`` it
keeps the tensors and knows whether they were changed.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

import torchtap as tt
from benchmarks.models import GPT
from benchmarks.timing import Case, Ratio, case, compare, fastest, one_thread, verdict

__all__ = ["run"]

Use = Callable[[nn.Module, Tensor], Any]


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Rows of ours first, then those of peers, some of which change torch when they are imported."""
    with one_thread(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        ours = _measure(
            _ours(), _Effort(rounds=5 if quick else 15, twin_rounds=31 if quick else 201, uses=10)
        )
        few = _Effort(rounds=3 if quick else 5, twin_rounds=3 if quick else 5, uses=1)
        peers = _measure(_peers(), few)
    by_hand = ours["hook by hand, copied: blocks"].large.ratio
    bars = {
        "torchtap: blocks": (
            f"≤ 1.02 and within 0.01 of a hook by hand ({by_hand:.3f})",
            min(1.02, by_hand + 0.01),
        ),
        "torchtap: all modules": ("≤ 1.05", 1.05),
    }
    rows = []
    for name, found in {**ours, **peers}.items():
        said, bar = bars.get(name, ("", 0.0))
        rows.append(
            {
                "case": name,
                "with / without": str(found.large),
                "bar": said,
                "holds": found.large.verdict(bar) if bar else "",
                "fixed ms": f"{found.fixed * 1e3:.2f}",
                "of a hook's": _beside_a_hook(name, found, ours[f"hook by hand, copied: {_what(name)}"]),
                "residue": f"{found.residue:+.1%}",
            }
        )
    return rows


@final
@dataclass(frozen=True)
class _Effort:
    """How often things are measured: the large model, its twin, and uses of the twin that are timed together."""

    rounds: int
    twin_rounds: int
    uses: int


@final
@dataclass(frozen=True)
class _Found:
    """What a use costs: beside the bare call of the large model, and on its twin."""

    large: Ratio
    twin: Ratio
    fixed: float
    residue: float


def _measure(uses: dict[str, Use], effort: _Effort) -> dict[str, _Found]:
    model, tokens = GPT(), torch.randint(0, 1024, (8, 128))
    twin, token = GPT(width=8, heads=1), torch.zeros(1, 1, dtype=torch.long)

    def cases(on: nn.Module, given: Tensor) -> dict[str, Case]:
        return {name: case(lambda use=use: use(on, given)) for name, use in uses.items()}

    # Each use is whole; only the first of all finds no memory that was used before.
    large = compare(cases(model, tokens), base="bare call", rounds=effort.rounds, warm_up=0)
    bare = _fastest(lambda: twin(token))
    residues = {}
    for name, use in uses.items():
        _fastest(lambda use=use: use(twin, token))  # type: ignore[misc]
        residues[name] = _fastest(lambda: twin(token)) / bare - 1
    small = compare(
        cases(twin, token), base="bare call", rounds=effort.twin_rounds, repeats=effort.uses, warm_up=2
    )
    seconds = small["bare call"].seconds
    return {
        name: _Found(large[name], small[name], (small[name].ratio - 1) * seconds, residues[name])
        for name in uses
    }


def _fastest(work: Callable[[], Any]) -> float:
    work()
    return fastest(work, rounds=10, clock=time.process_time)


def _what(name: str) -> str:
    return "all modules" if "all modules" in name else "blocks"


def _beside_a_hook(name: str, found: _Found, hook: _Found) -> str:
    """What a use adds to the twin over what a hook by hand adds; of ours, whether that holds."""
    if name.startswith("bare"):
        return ""
    share, error = found.twin.share_of(hook.twin)
    bar = 1.5 if name in ("torchtap: blocks", "torchtap: all modules") else None
    return f"{share:.2f}" + ("" if bar is None else f" ± {error:.2f} (≤ {bar}: {verdict(share, error, bar)})")


def _ours() -> dict[str, Use]:
    return {
        "bare call": lambda model, tokens: model(tokens),
        "bare call again": lambda model, tokens: model(tokens),
        "hook by hand, by reference: blocks": _by_hand(_blocks, copied=False),
        "hook by hand, copied: blocks": _by_hand(_blocks, copied=True),
        "torchtap: blocks": _captured("blocks.*:output"),
        "torchtap: blocks, each value read": _captured("blocks.*:output", read=True),
        "torchtap, by reference: blocks": _captured("blocks.*:output", tt.Full(copy=False)),
        "hook by hand, by reference: all modules": _by_hand(_modules, copied=False),
        "hook by hand, copied: all modules": _by_hand(_modules, copied=True),
        "torchtap: all modules": _captured("**:output"),
        "torchtap: all modules, each value read": _captured("**:output", read=True),
        "torchtap, by reference: all modules": _captured("**:output", tt.Full(copy=False)),
    }


def _captured(selector: str, keep: tt.Full | None = None, *, read: bool = False) -> Use:
    def use(model: nn.Module, tokens: Tensor) -> Any:
        with tt.capture(model, selector, keep=keep) as seen:
            model(tokens)
        return list(seen.values()) if read else seen

    return use


def _blocks(model: Any) -> list[nn.Module]:
    return list(model.blocks)


def _modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if not isinstance(module, nn.ModuleList)]


def _by_hand(choose: Callable[[nn.Module], list[nn.Module]], *, copied: bool) -> Use:
    def use(model: nn.Module, tokens: Tensor) -> dict[nn.Module, Tensor]:
        kept: dict[nn.Module, Tensor] = {}

        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            kept[module] = output.detach().clone() if copied else output

        handles = [module.register_forward_hook(hook) for module in choose(model)]
        model(tokens)
        for handle in handles:
            handle.remove()
        return kept

    return use


def _peers() -> dict[str, Use]:
    return {
        "bare call": lambda model, tokens: model(tokens),
        "peer: tdhook: blocks": _tdhook(r"blocks\.\d+$"),
        "peer: tdhook: all modules": _tdhook(".+"),
        "peer: nnsight: blocks": _nnsight,
        "peer: torchlens record: all modules": _torchlens,
    }


def _tdhook(pattern: str) -> Use:
    from tdhook.latent.activation_caching import ActivationCaching
    from tensordict import TensorDict

    def use(model: nn.Module, tokens: Tensor) -> Any:
        caching = ActivationCaching(pattern).prepare(model, in_keys=["tokens"], out_keys=["logits"])
        with caching as hooked:
            return hooked(TensorDict({"tokens": tokens}, batch_size=[]))

    return use


def _nnsight(model: nn.Module, tokens: Tensor) -> Any:
    import nnsight

    wrapped = nnsight.NNsight(model)
    with wrapped.trace(tokens):
        kept = nnsight.save([block.output for block in wrapped.blocks])
    return kept  # noqa: RET504 (nnsight takes the block out and runs it elsewhere)


def _torchlens(model: nn.Module, tokens: Tensor) -> Any:
    import torchlens

    return torchlens.record(model, tokens, default_module=True)
