"""Run torchtap on the test device under random schedules: ``python -m tests.device.campaign [--seeds 1000]``.

A seed decides the program (model, streams, optimizer, autocast), the delays of every kernel, and whether the device
stands still while the host runs ahead. Every number is compared with plain torch: hooks written by hand, which copy
values on the device and read them when everything is over. Host waits are counted from the first step to the last.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.device import lag
from torch import Tensor, nn
from torch.nn import functional as F

import torchtap as tt
from torchtap.reduce.moments import STATISTICS

__all__ = ["SCENARIOS", "Program", "doctor_waits", "run_seed"]


class Beside(nn.Module):
    """A block that runs on a stream of its own, as a careful user would write it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.stream: Any = None

    def forward(self, value: Tensor) -> Tensor:
        if value.device.type == "cpu":
            return self.inner(value)
        here = torch.accelerator.current_stream(value.device)
        if self.stream is None:
            self.stream = torch.Stream(value.device)
        self.stream.wait_stream(here)
        with self.stream:
            made = self.inner(value)
        here.wait_stream(self.stream)
        value.record_stream(self.stream)
        made.record_stream(here)
        return made


class Decoder(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        width = program.width
        self.embed_tokens = nn.Embedding(17, width)
        blocks: list[nn.Module] = []
        for index in range(program.depth):
            block: nn.Module = nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 2 * width),
                program.activation(),
                nn.Linear(2 * width, width),
            )
            blocks.append(Beside(block) if program.beside and index == 1 else block)
        self.layers = nn.ModuleList(blocks)
        self.drop = nn.Dropout(program.dropout)
        self.head = nn.Linear(width, 5)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed_tokens(ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        made: Tensor = self.head(self.drop(hidden))
        return made


@dataclass
class Program:
    """A training, made from a seed."""

    seed: int

    def __post_init__(self) -> None:
        chance = random.Random(self.seed)
        self.width, self.depth = chance.choice([8, 16, 33]), chance.choice([2, 3])
        self.activation = chance.choice([nn.ReLU, nn.GELU, partial(nn.ReLU, inplace=True)])
        self.dropout = chance.choice([0.0, 0.1])
        self.beside = chance.random() < 0.3
        self.steps, self.batch = chance.choice([3, 4]), chance.choice([2, 5])
        self.parts = chance.choice([1, 1, 2])
        self.device = torch.device("lag", chance.choice([0, 0, 1]))
        self.autocast = chance.random() < 0.2
        self.adam = chance.random() < 0.5
        self.own_stream = chance.random() < 0.2
        self.mean = chance.choice([0.0, 20.0, 200.0])
        self.held = chance.random() < 0.4

    def model(self) -> Decoder:
        torch.manual_seed(self.seed)
        return Decoder(self)

    def inputs(self) -> list[list[tuple[Tensor, Tensor]]]:
        made = torch.Generator().manual_seed(self.seed)
        draw = lambda most: torch.randint(0, most, (self.batch, 6), generator=made)  # noqa: E731
        return [[(draw(17), draw(5)) for _ in range(self.parts)] for _ in range(self.steps)]

    def train(
        self, model: nn.Module, around: Callable[[nn.Module, Any], Any], each: Callable[[int], Any]
    ) -> Trained:
        """Train inside ``around``; ``each`` gives a block for a step. Waits are counted inside it."""
        optimizer = (torch.optim.AdamW if self.adam else torch.optim.SGD)(model.parameters(), lr=0.05)
        data = [[(ids.to(self.device), aim.to(self.device)) for ids, aim in parts] for parts in self.inputs()]
        torch.manual_seed(self.seed)
        losses = []
        lag.reset(self.seed, self.mean)
        stream = torch.Stream(self.device) if self.own_stream else nullcontext()
        if self.own_stream:
            stream.wait_stream(torch.accelerator.current_stream(self.device))
        with torch.accelerator.device_index(self.device.index), stream, around(model, optimizer):
            before = lag.counts()
            with lag.held() if self.held else nullcontext():
                for step, parts in enumerate(data):
                    with each(step):
                        for ids, aim in parts:
                            with torch.autocast("lag", torch.bfloat16, enabled=self.autocast):
                                loss = F.cross_entropy(model(ids).flatten(0, 1), aim.flatten())
                            loss.backward()
                            losses.append(loss.detach())
                        optimizer.step()
                        optimizer.zero_grad()
                after = lag.counts()
        lag.settle()
        return Trained([loss.cpu() for loss in losses], {name: after[name] - before[name] for name in after})


@dataclass
class Trained:
    losses: list[Tensor]
    counts: dict[str, int]


@contextmanager
def nothing(*_: Any) -> Iterator[None]:
    yield


@contextmanager
def hooks(model: nn.Module, kept: dict[str, list[Tensor]]) -> Iterator[None]:
    """Copy every output and its gradient by hand."""

    def take(name: str, module: nn.Module, args: Any, output: Tensor) -> None:
        kept.setdefault(f"{name}:output", []).append(output.detach().clone())
        if output.requires_grad:
            output.register_hook(
                lambda gradient: kept.setdefault(f"{name}:grad_output", []).append(gradient.detach().clone())
            )

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if not isinstance(module, (nn.ModuleList, nn.Sequential)) and not getattr(
                module, "inplace", False
            ):
                stack.callback(module.register_forward_hook(partial(take, name)).remove)
        yield


def statistics(values: list[Tensor]) -> np.ndarray:
    """Return the twelve statistics of finite values, from scratch."""
    numbers = np.concatenate([value.cpu().double().reshape(-1).numpy() for value in values])
    square = float((numbers**2).sum())
    found = {
        "count": len(numbers),
        "mean": numbers.mean(),
        "std": numbers.std(ddof=1) if len(numbers) > 1 else np.nan,
        "min": numbers.min(),
        "max": numbers.max(),
        "absmax": np.abs(numbers).max(),
        "l1": np.abs(numbers).sum(),
        "l2": square**0.5,
        "rms": (square / len(numbers)) ** 0.5,
        "zeros": (numbers == 0).mean(),
        "nans": 0,
        "infs": 0,
    }
    return np.array([found[name] for name in STATISTICS])


class Sink:
    def __init__(self) -> None:
        self.records: list[Any] = []
        self.tensors: list[dict[str, Tensor]] = []

    def write(self, record: Any) -> None:
        # Read now, as a sink would: a number that is not there yet is a fault, whatever happens later.
        self.tensors.append({item.site: item.value.clone() for item in record.tensors})
        self.records.append(record)

    def close(self) -> None: ...


def by_hand(program: Program) -> tuple[Trained, list[dict[str, list[Tensor]]]]:
    """Train with hooks by hand; return what passed in each step."""
    kept: list[dict[str, list[Tensor]]] = []

    @contextmanager
    def each(_: int) -> Iterator[None]:
        kept.append({})
        with hooks(model, kept[-1]):
            yield

    model = program.model().to(program.device)
    return program.train(model, nothing, each), kept


def expect(condition: bool, text: str) -> Iterator[str]:
    if not condition:
        yield text


def same_losses(one: Trained, other: Trained) -> Iterator[str]:
    yield from expect(
        all(map(torch.equal, one.losses, other.losses)) and len(one.losses) == len(other.losses),
        f"losses differ: {one.losses} and {other.losses}",
    )


def waits(found: int, stated: int, *, behind: bool = True) -> Iterator[str]:
    """Host waits are exactly those stated; or fewer, if the device may be done before the host looks."""
    right = found == stated if behind else found <= stated
    yield from expect(right, f"{found} host waits, {stated} are stated")


def close(found: np.ndarray, wanted: np.ndarray) -> bool:
    # Means are compared at the scale of the numbers that they are of.
    scale = np.maximum(np.abs(wanted), np.abs(wanted[STATISTICS.index("rms")]) * 1e-1)
    return bool((np.abs(found - wanted) <= 2e-6 * scale + 1e-30).all())


# -- scenarios ----------------------------------------------------------------------------------------------------


def doctor_waits(program: Program) -> int:
    """Return the host waits of the doctor's first looks, as `docs/devices.md` states them."""
    waits, backward = 0, 0
    for step in range(program.steps):
        if step < 16:  # gradients: after each backward, and before the update
            waits += program.parts + 1
        waits += step < 2  # weights
        for _ in range(program.parts):
            if backward < 6:  # the loss, the tokens, the targets
                waits += 3
            waits += backward == 0  # the order of classes, which is mixed
            waits += backward < 4 and program.batch >= 4  # padding
            backward += 1
    return waits


def watch(program: Program) -> Iterator[str]:
    plain, kept = by_hand(program)
    sink = Sink()

    @contextmanager
    def around(model: nn.Module, optimizer: Any) -> Iterator[None]:
        with tt.watch(model, None, ["*:output", "*:grad_output"], sinks=[sink]) as watching:
            watching.follow(optimizer)
            yield

    trained = program.train(program.model().to(program.device), around, nothing)
    yield from same_losses(plain, trained)
    yield from waits(trained.counts["waits"], 0)
    yield from expect(
        trained.counts["to_host"] <= program.steps, f"{trained.counts['to_host']} copies to the host"
    )
    yield from expect(len(sink.records) == program.steps, f"{len(sink.records)} records")
    for record, values in zip(sink.records, kept, strict=False):
        found = {
            site: row for block in record.scalars for site, row in zip(block.sites, block.values, strict=True)
        }
        for site, tensors in values.items():
            yield from expect(
                site in found and close(found[site], statistics(tensors)),
                f"step {record.step}, {site}: {found.get(site)} is not {statistics(tensors)}",
            )


def watch_tensors(program: Program) -> Iterator[str]:
    plain, kept = by_hand(program)
    sink = Sink()

    @contextmanager
    def around(model: nn.Module, optimizer: Any) -> Iterator[None]:
        with tt.watch(model, None, ["*:output", "*:grad_output"], keep=tt.Full(), sinks=[sink]) as watching:
            watching.follow(optimizer)
            yield

    trained = program.train(program.model().to(program.device), around, nothing)
    yield from same_losses(plain, trained)
    yield from waits(trained.counts["waits"], 0)
    yield from expect(len(sink.records) == program.steps, f"{len(sink.records)} records")
    for step, (found, values) in enumerate(zip(sink.tensors, kept, strict=False)):
        for site, tensors in values.items():
            yield from expect(
                site in found and torch.equal(found[site], torch.cat(tensors).cpu()),
                f"step {step}, {site}: not the tensor that passed",
            )


def module_monitor(program: Program) -> Iterator[str]:
    plain, kept = by_hand(program)
    monitor = tt.ModuleMonitor(monitor_step_fn=lambda step: True)

    @contextmanager
    def around(model: nn.Module, optimizer: Any) -> Iterator[None]:
        monitor.set_module(model)
        monitor.add_activation_metric("rms", "rms")
        monitor.add_activation_metric("mean_abs", lambda value: value.float().abs().mean())
        yield

    @contextmanager
    def each(step: int) -> Iterator[None]:
        monitor.begin_step(step)
        yield
        monitor.end_step()

    trained = program.train(program.model().to(program.device), around, each)
    yield from same_losses(plain, trained)
    # Fewer than 14 values are sent when they are asked for, after the other metric's numbers.
    few = program.parts * (3 + 4 * program.depth) < 14
    yield from waits(trained.counts["waits"], (1 + few) * program.steps, behind=program.held)
    for step, values in enumerate(kept):
        found = monitor.get_all_metrics()[step]
        for site, tensors in values.items():
            name, _, kind = site.rpartition(":")
            if kind != "output" or not name:
                continue
            wanted = statistics(tensors)[STATISTICS.index("rms")]
            seen = found[f"activation/{name}/rms"]
            yield from expect(abs(seen - wanted) <= 2e-5 * wanted, f"{name}: rms {seen} is not {wanted}")
            wanted = np.mean([tensor.cpu().double().abs().mean().item() for tensor in tensors])
            seen = found[f"activation/{name}/mean_abs"]
            yield from expect(abs(seen - wanted) <= 2e-5 * wanted, f"{name}: mean {seen} is not {wanted}")
    monitor.close()


def doctor(program: Program) -> Iterator[str]:
    plain, _ = by_hand(program)

    @contextmanager
    def around(model: nn.Module, optimizer: Any) -> Iterator[None]:
        with tt.doctor(model, optimizer, quiet=True, share=None) as seen:
            yield
        findings.extend(seen.findings())

    findings: list[Any] = []
    trained = program.train(program.model().to(program.device), around, nothing)
    yield from same_losses(plain, trained)
    # Reductions that the host finishes: one wait for each step that was collected, if the device is behind.
    looks, collected = doctor_waits(program), program.steps - 1
    yield from waits(max(trained.counts["waits"] - looks, -1), collected, behind=program.held)
    yield from expect(trained.counts["waits"] >= looks, "fewer looks than are stated")


def capture(program: Program) -> Iterator[str]:
    model = program.model().to(program.device).eval()
    ids = program.inputs()[0][0][0].to(program.device)
    kept: dict[str, list[Tensor]] = {}
    with torch.no_grad(), hooks(model, kept):
        wanted = model(ids)
    lag.reset(program.seed, program.mean)
    with lag.held() if program.held else nullcontext(), torch.no_grad(), tt.capture(model) as seen:
        made = model(ids)
        found = lag.counts()
    yield from expect(found["waits"] == 0, f"{found['waits']} host waits in a captured pass")
    yield from expect(torch.equal(made.cpu(), wanted.cpu()), "the captured pass gave another output")
    for site, tensors in kept.items():
        reference, before = tensors[0].cpu(), lag.counts()["waits"]
        yield from expect(torch.equal(seen[site].cpu(), reference), f"{site}: not the tensor that passed")
        yield from waits(lag.counts()["waits"] - before, 1)


def record_layers(program: Program) -> Iterator[str]:
    program.beside = False  # blocks are found by being alike
    model = program.model().to(program.device).eval()
    ids = program.inputs()[0][0][0].to(program.device)
    with torch.no_grad():
        hidden = model.embed_tokens(ids)
        wanted = [hidden, model.layers[0](hidden.clone())]
    lag.reset(program.seed, program.mean)
    with tempfile.TemporaryDirectory() as folder:
        with lag.held() if program.held else nullcontext():
            with torch.no_grad(), tt.record_layers(model, Path(folder, "layers")):
                model(ids)
        yield from waits(lag.counts()["waits"], 1, behind=program.held)
        first = torch.load(Path(folder, "layers", "embedding_output.pt"), weights_only=True)
        second = torch.load(Path(folder, "layers", "layer_1_output.pt"), weights_only=True)
        yield from expect(
            torch.equal(_tensor(first), wanted[0].cpu()), "embedding_output.pt is another tensor"
        )
        yield from expect(
            torch.equal(_tensor(second), wanted[1].cpu()), "layer_1_output.pt is another tensor"
        )


def _tensor(loaded: Any) -> Tensor:
    found: Tensor = loaded if isinstance(loaded, Tensor) else next(iter(loaded.values()))
    return found


def features(program: Program) -> Iterator[str]:
    model = program.model().to(program.device).eval()
    ids = program.inputs()[0][0][0].to(program.device)
    kept: dict[str, list[Tensor]] = {}
    with torch.no_grad(), hooks(model, kept):
        wanted = model(ids)
    lag.reset(program.seed, program.mean)
    with lag.held() if program.held else nullcontext(), torch.no_grad():
        made, values = tt.features(model, ["embed_tokens:output", "head:output"])(ids)
        found = lag.counts()
    yield from expect(found["waits"] == 0, f"{found['waits']} host waits for features")
    yield from expect(torch.equal(made.cpu(), wanted.cpu()), "another output")
    for site, value in values.items():
        yield from expect(torch.equal(value.cpu(), kept[site][0].cpu()), f"{site}: another value")


def edit(program: Program) -> Iterator[str]:
    model = program.model().to(program.device).eval()
    ids = program.inputs()[0][0][0].to(program.device)
    change = lambda value: value * 0.5 + 1  # noqa: E731
    with torch.no_grad():
        handle = model.embed_tokens.register_forward_hook(lambda module, args, output: change(output))
        wanted = model(ids)
        handle.remove()
    lag.reset(program.seed, program.mean)
    with lag.held() if program.held else nullcontext(), torch.no_grad():
        with tt.edit(model, {"embed_tokens:output": change}):
            made = model(ids)
        found = lag.counts()
    yield from expect(found["waits"] == 0, f"{found['waits']} host waits for an edit")
    yield from expect(torch.equal(made.cpu(), wanted.cpu()), "the edited output is another")


def compare(program: Program) -> Iterator[str]:
    one, other = (program.model().to(program.device).eval() for _ in range(2))
    planted = program.seed % 2 == 0
    if planted:
        with torch.no_grad():
            other.head.weight.mul_(1.5)
    ids = program.inputs()[0][0][0].to(program.device)
    lag.reset(program.seed, program.mean)
    result = tt.compare(one, other, inputs=(ids,))
    if not planted:
        yield from waits(lag.counts()["waits"], 2 * len(result.rows) + 4)  # and for what the models return
    first = result.first
    yield from expect((first is not None) == planted, f"first is {first}")
    if planted and first is not None:
        yield from expect(first.module == "head", f"the first divergence is {first.module}")


SCENARIOS: dict[str, Callable[[Program], Iterator[str]]] = {
    "watch": watch,
    "watch_tensors": watch_tensors,
    "capture": capture,
    "doctor": doctor,
    "module_monitor": module_monitor,
    "record_layers": record_layers,
    "features": features,
    "edit": edit,
    "compare": compare,
}


def run_seed(seed: int, only: str = "") -> list[str]:
    """Run the scenario of a seed; return what is wrong."""
    lag.load()
    names = [only] if only else list(SCENARIOS)
    name = names[seed % len(names)]
    program = Program(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = list(SCENARIOS[name](program))
    lag.settle()
    counts = lag.counts()
    found += [
        f"{counts[what]} {what}: {lag.load().error()}"
        for what in ("faults", "races", "errors")
        if counts[what]
    ]
    return [f"seed {seed} ({name}): {each}" for each in found]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.device.campaign", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", default="", choices=["", *SCENARIOS])
    asked = parser.parse_args()
    if why := lag.missing():
        print(why)
        return 2
    wrong, began = 0, time.perf_counter()
    for seed in range(asked.first, asked.first + asked.seeds):
        try:
            found = run_seed(seed, asked.only)
        except Exception as error:
            found = [f"seed {seed}: {type(error).__name__}: {error}"]
        wrong += bool(found)
        for text in found[:3]:
            print(text[:600], flush=True)
    print(f"{asked.seeds} schedules, {wrong} wrong, {time.perf_counter() - began:.0f} s")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
