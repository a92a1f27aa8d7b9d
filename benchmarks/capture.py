"""Whole tensors from one forward pass, beside the bare call: torchtap, a hook by hand, and peers.

The model is that of `benchmarks.steps`, without gradients. Each case is one use from beginning to end: hooks go on,
the model runs, hooks come off. ``fixed`` is what the same use adds to a twin of width 8 with one token, where nothing
but overhead is left. ``residue`` is how much slower that twin is after 11 uses than before them.
A hook by hand keeps the very tensors; a later in-place op would change them. torchtap keeps copies; ``by reference`` it
keeps the tensors and knows whether they were changed.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import torchtap as tt
from benchmarks.models import GPT
from benchmarks.timing import Ratio, case, compare, fastest, one_thread

__all__ = ["run"]

Use = Callable[[nn.Module, Tensor], Any]


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Rows of ours first, then those of peers, some of which change torch when they are imported."""
    with one_thread(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        rounds = 5 if quick else 9
        ours = _measure(_ours(), rounds)
        peers = _measure(_peers(), 3 if quick else 5)
    by_hand = ours["hook by hand, copied: blocks"][0].ratio
    bars = {
        "torchtap: blocks": (
            f"≤ 1.02 and within 0.01 of a hook by hand ({by_hand:.3f})",
            min(1.02, by_hand + 0.01),
        ),
        "torchtap: all modules": ("≤ 1.05", 1.05),
    }
    rows = []
    for name, (ratio, fixed, residue) in {**ours, **peers}.items():
        said, bar = bars.get(name, ("", 0.0))
        rows.append(
            {
                "case": name,
                "with / without": str(ratio),
                "fixed ms": f"{fixed * 1e3:.2f}",
                "residue": f"{residue:+.1%}",
                "bar": said,
                "holds": ratio.verdict(bar) if bar else "",
            }
        )
    return rows


def _measure(uses: dict[str, Use], rounds: int) -> dict[str, tuple[Ratio, float, float]]:
    model, tokens = GPT(), torch.randint(0, 1024, (8, 128))
    twin, token = GPT(width=8, heads=1), torch.zeros(1, 1, dtype=torch.long)
    measured = compare(
        {name: case(lambda use=use: use(model, tokens)) for name, use in uses.items()},
        base="bare call",
        rounds=rounds,
        warm_up=0,  # each use is whole; only the first of all finds no memory that was used before
    )
    bare = _fastest(lambda: twin(token))
    found = {}
    for name, use in uses.items():
        fixed = _fastest(lambda use=use: use(twin, token)) - bare  # type: ignore[misc]
        found[name] = measured[name], fixed, _fastest(lambda: twin(token)) / bare - 1
    return found


def _fastest(work: Callable[[], Any]) -> float:
    work()
    return fastest(work, rounds=10, clock=time.process_time)


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
