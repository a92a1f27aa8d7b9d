"""Compare a trainer's model with what an engine computed, token by token: ``tt.compare(model, run, by="token")``.

The reference runs on the tokens of each request. Rows meet by request and position, so batches, chunks, caches and
drafts of the engine do not matter. The noise floor is measured: how far the reference is from itself if the output of
each layer is moved by one unit of the engine's precision. Log-probabilities of the generated tokens are compared too.
If all values agree and log-probabilities do not, known causes are tried one by one: another temperature, truncation to
top-k or top-p, a head in lower precision. A cause is named only if it explains every token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from torchtap import edit
from torchtap.comparison.align import Unaligned
from torchtap.comparison.result import Comparison, FirstDifference, Row
from torchtap.errors import CompareError
from torchtap.serving.addresses import RequestTokens
from torchtap.serving.engine_capture import capture
from torchtap.serving.values import ServedRun, ServedValues
from torchtap.spi import Name

__all__ = ["compare_tokens"]

_MARGIN = 20  # times the measured noise
_LOGPROBS = "logprobs"


@final
@dataclass
class _Distance:
    """Sums of squares over all rows of a site."""

    difference: float = 0.0
    reference: float = 0.0
    rows: int = 0

    def add(self, expected: Tensor, got: Tensor) -> None:
        self.difference += float((expected.double() - got.double()).square().sum())
        self.reference += float(expected.double().square().sum())
        self.rows += len(got)

    @property
    def error(self) -> float:
        return (self.difference / self.reference) ** 0.5 if self.reference else float(self.difference > 0)


@final
@dataclass
class _Heads:
    """What is needed to explain log-probabilities: for each generated token its logits and the engine's number."""

    logits: list[Tensor] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)
    moved: list[Tensor] = field(default_factory=list)

    def own(self, logits: Tensor) -> Tensor:
        at = torch.tensor(self.tokens)[:, None]
        return logits.double().log_softmax(-1).gather(1, at).flatten()


@torch.no_grad()
def compare_tokens(model: Any, run: Any) -> Comparison:
    """Compare a model of transformers with recorded requests of an engine."""
    if not isinstance(model, nn.Module) or not hasattr(model, "generate"):
        raise CompareError(
            f"by='token' runs the reference on the tokens of requests: give a model of transformers, not a "
            f"{type(model).__name__}"
        )
    if not isinstance(run, (ServedRun, ServedValues)):
        raise CompareError(
            f"by='token' takes what torchtap.serving recorded as target (capture, open_run), not a {type(run).__name__}"
        )
    requests = [run.of_request(name) for name in run.requests]
    if not requests:
        raise CompareError("the recording has no request")
    names = list(dict.fromkeys(site for each in requests for site in each))
    modules = dict(model.named_modules())
    # An engine's module may return more than the reference's, such as a residual beside the value.
    sites = [
        name for name in names if Name.parse(name).path in modules and Name.parse(name).leaf in ("", "0")
    ]
    why = "the reference has no value of this name"
    absent = tuple(Unaligned(name, "target", why) for name in names if name not in sites)
    if not sites:
        raise CompareError(f"the reference has none of the recorded modules, such as {', '.join(names[:3])}")
    step = max((torch.finfo(each[sites[0]].dtype).eps for each in requests if sites[0] in each), default=1e-7)
    distances = {site: _Distance() for site in sites}
    noise = {site: _Distance() for site in sites}
    heads = _Heads()
    for each in requests:
        _add_request(model, each, sites, step, distances, noise, heads)
    rows = []
    for index, site in enumerate(sites):
        floor = max(_MARGIN * noise[site].error, 8 * step)
        rows.append(_row(index, site, distances[site].error, floor, f"{distances[site].rows} rows"))
    facts: dict[str, Any] = {
        "requests": len(requests),
        "tokens": sum(len(each.positions) for each in requests),
    }
    if heads.theirs:
        last = _logprobs_row(heads, len(rows), step)
        rows.append(last)
        facts |= {"logprob_error": last.error, "logprob_floor": last.floor, "logprobs": len(heads.theirs)}
    first = next((row for row in rows if row.status == "diverged"), None)
    difference = None
    if first is not None:
        module, what = _cause(model, heads, first.floor) if first.site == _LOGPROBS else (first.module, "")
        before = rows[first.index - 1].site if first.index else None
        difference = FirstDifference(
            site=first.site, module=module, index=first.index, error=first.error, floor=first.floor, origin="local",
            sure="likely", what=what, after=before, evidence="every site before it agrees" if before else "",
        )  # fmt: skip
    return Comparison(
        reference=type(model).__name__,
        target=f"{len(requests)} requests",
        rows=tuple(rows),
        first=difference,
        verdict=_verdict(difference, facts, heads),
        basis=f"the reference with its layers moved by {step:.1e}",
        unaligned=absent,
        forwards=2 * len(requests),
        facts=facts,
        outcome="differs" if difference else "same",
    )


def _add_request(
    model: nn.Module,
    request: RequestTokens,
    sites: Iterable[str],
    step: float,
    distances: Mapping[str, _Distance],
    noise: Mapping[str, _Distance],
    heads: _Heads,
) -> None:
    chosen = [site for site in sites if site in request]
    device = next(model.parameters()).device
    tokens = torch.tensor([request.tokens], device=device)
    bare = [str(Name(Name.parse(site).path, "output")) for site in chosen]
    with capture(model, *bare) as clean:
        output = model(tokens, output_hidden_states=True, use_cache=False)
    generator = torch.Generator().manual_seed(0)

    def move(value: Tensor) -> Tensor:
        return value * (1 + step * torch.randn(value.shape, generator=generator).to(value))

    with edit(model, {"**.layers.*:output": move}), capture(model, *bare) as moved:
        other = model(tokens, use_cache=False)
    own, own_moved = clean.of_request("0"), moved.of_request("0")
    for site, name in zip(chosen, bare, strict=True):
        at = request.positions
        distances[site].add(own[name][at], request[site].to(own[name].dtype))
        noise[site].add(own[name][at], own_moved[name][at])
    if request.logprobs:
        at = [len(request.request.prompt) - 1 + number for number in range(len(request.logprobs))]
        heads.logits.append(output.logits[0, at].float().cpu())
        heads.moved.append(other.logits[0, at].float().cpu())
        heads.hidden.append(output.hidden_states[-1][0, at].cpu())
        heads.tokens += request.request.output[: len(at)]
        heads.theirs += request.logprobs


def _row(index: int, site: str, error: float, floor: float, note: str) -> Row:
    """Return what was measured at a site, or for the log-probabilities."""
    status: Any = "equal" if error == 0 else "within" if error <= floor else "diverged"
    values = site != _LOGPROBS
    return Row(
        index=index, site=site, target_site=site, module=Name.parse(site).path if values else "",
        kind="output" if values else "value", status=status, error=error, floor=floor, excess=error / floor,
        origin="local" if status == "diverged" else None, note=note,
    )  # fmt: skip


# -- log-probabilities ----------------------------------------------------------------------------------------------


def _logprobs_row(heads: _Heads, index: int, step: float) -> Row:
    own, moved = heads.own(torch.cat(heads.logits)), heads.own(torch.cat(heads.moved))
    floor = _MARGIN * float((own - moved).abs().max()) + 32 * step
    error = float((own - torch.tensor(heads.theirs, dtype=torch.float64)).abs().max())
    return _row(index, _LOGPROBS, error, floor, f"{len(heads.tokens)} generated tokens; absolute")


def _cause(model: Any, heads: _Heads, floor: float) -> tuple[str, str]:
    """Return the module and the cause that explains every token; the head without a cause if none does."""
    logits, theirs = torch.cat(heads.logits), torch.tensor(heads.theirs, dtype=torch.float64)
    head = next(
        (name for name, each in model.named_modules() if each is model.get_output_embeddings()), "lm_head"
    )
    temperature = _temperature(heads, logits, theirs)
    if float((heads.own(logits / temperature) - theirs).abs().max()) <= 4 * floor:
        return "", f"they are those at temperature {temperature:.3g}; the reference's are at temperature 1"
    truncated = _truncation(heads, logits, theirs, floor)
    if truncated:
        return "", truncated
    weight = model.get_output_embeddings().weight.detach().cpu()
    before = float((heads.own(logits) - theirs).abs().mean())
    for dtype in (torch.bfloat16, torch.float16):
        hidden = torch.cat(heads.hidden)
        for rounded in (
            hidden.to(dtype).float() @ weight.to(dtype).float().T,
            hidden @ weight.to(dtype).float().T,
        ):
            for made in (rounded, rounded.to(dtype).float()):
                if float((heads.own(made) - theirs).abs().mean()) < 0.2 * before:
                    return head, f"the engine's head computes in {str(dtype).removeprefix('torch.')}"
    return head, "the head differs: its input agrees and its log-probabilities do not"


def _temperature(heads: _Heads, logits: Tensor, theirs: Tensor) -> float:
    """Return the temperature that fits best."""
    low, high = 0.05, 8.0
    for _ in range(6):
        grid = torch.logspace(math.log10(low), math.log10(high), 25)
        errors = [float((heads.own(logits / each) - theirs).abs().mean()) for each in grid.tolist()]
        best = min(range(len(errors)), key=errors.__getitem__)
        low, high = float(grid[max(best - 1, 0)]), float(grid[min(best + 1, len(errors) - 1)])
    return float(grid[best])


def _truncation(heads: _Heads, logits: Tensor, theirs: Tensor, floor: float) -> str:
    """Return how the engine renormalised over the most probable tokens; "" if that does not explain the numbers."""
    kept = (heads.own(logits) - theirs).exp()  # the probability of the tokens that were left
    ordered = logits.double().softmax(-1).sort(-1, descending=True).values.cumsum(-1)
    far, size = (ordered - kept[:, None]).abs().min(-1)
    if float(kept.max()) > 1 + floor or float((far / kept).max()) > 4 * floor:
        return ""
    if int(size.min()) == int(size.max()):
        return f"they are renormalised over the {int(size[0]) + 1} most probable tokens (top-k)"
    before = torch.where(size > 0, ordered.gather(1, (size - 1).clamp(min=0)[:, None]).flatten(), 0.0)
    if float(before.max()) < float(kept.min()) + floor:
        return (
            f"they are renormalised over the most probable tokens that sum to {float(kept.min()):.2g} (top-p)"
        )
    return ""


def _verdict(first: FirstDifference | None, facts: Mapping[str, Any], heads: _Heads) -> str:
    compared = f"{facts['tokens']:,} tokens of {facts['requests']} requests"
    if first is None:
        text = f"same: every compared layer agrees on {compared}"
        return text + (f", and so do {len(heads.theirs)} log-probabilities" if heads.theirs else "")
    if first.site == _LOGPROBS:
        return (
            f"differs: the layers agree on {compared}, the log-probabilities do not (up to {first.error:.2g}, "
            f"{first.floor:.1g} is noise): {first.what}"
        )
    return (
        f"differs first at {first.site} ({first.error:.2g} of its size, {first.floor:.1g} is noise)"
        + (f"; {first.after} before it agrees" if first.after else "")
        + f"; compared on {compared}"
    )
