"""``torchtap selftest``: list the parts of this installation and prove in under a minute that they work here."""

from __future__ import annotations

import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import click
import torch
from torch import Tensor, nn

from torchtap.cli.console import say, say_json

__all__ = ["PROOFS", "command", "devices", "facts"]


_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool)
_EXTRAS = ("zstandard", "h5py", "pyarrow", "onnxruntime", "starlette", "matplotlib", "fsspec", "triton")


def facts() -> Iterator[tuple[str, str]]:
    """Versions, native parts, the page and the limits."""
    from torchtap._torch import TORCH_VERSION
    from torchtap.native_check import missing_parts
    from torchtap.store.files.layout import FORMAT_VERSION
    from torchtap.store.format.checksum import JSON_LIMIT
    from torchtap.viewer.server import built

    yield "torchtap", f"{_version('torchtap')}, run format {FORMAT_VERSION}"
    yield "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield "torch", f"{TORCH_VERSION}, {torch.get_num_threads()} threads"
    missing = [f"{part} ({instead})" for part, instead in missing_parts().items()]
    yield "compiled parts", f"MISSING: {', '.join(missing)}" if missing else "all here"
    yield "page", "built" if built() else "MISSING: torchtap view and report need it"
    yield "extras", ", ".join(name for name in _EXTRAS if find_spec(name) is not None) or "none"
    yield "limits", f"JSON {JSON_LIMIT >> 20} MiB, tensors on the page 256 MiB"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed as a package"


def devices(asked: tuple[str, ...]) -> list[str]:
    """Return the requested devices, or all available ones."""
    if asked:
        return list(asked)
    found = ["cpu"]
    if torch.cuda.is_available():
        found += [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        found.append("mps")
    return found


def _values(dtype: torch.dtype, device: str) -> Tensor:
    made = torch.randn(257, 33, generator=torch.Generator().manual_seed(7)) * 5
    if dtype == torch.float64 and device.startswith("mps"):
        dtype = torch.float32
    return (made > 0 if dtype == torch.bool else made.to(dtype)).to(device)


def prove_kernels(device: str) -> str:
    """Statistics of every dtype against torch's own in float64."""
    import torchtap as tt

    model = nn.Sequential(nn.Identity())
    worst = 0.0
    for dtype in _DTYPES:
        value = _values(dtype, device)
        with tt.capture(model, "0:output", keep=tt.Stats()) as seen:
            model(value)
        exact = value.cpu().to(torch.float64)
        for name, expected in (
            ("mean", exact.mean()),
            ("std", exact.std()),
            ("absmax", exact.abs().max()),
            ("l2", exact.norm()),
            ("zeros", (exact == 0).double().mean()),
        ):
            found = float(seen["0:output"][name])
            error = abs(found - float(expected)) / max(1.0, abs(float(expected)))
            assert error < 1e-6, f"{name} of {dtype}: {found}, and {float(expected)} in float64"
            worst = max(worst, error)
    return f"{len(_DTYPES)} dtypes against float64, largest error {worst:.1e}"


def prove_handover(device: str) -> str:
    """Numbers that cross from the device during training, step by step, against a plain copy; losses unchanged."""
    import torchtap as tt

    losses, expected = _train(device, None)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        watched, _ = _train(device, folder)
        found = tt.open(folder).series("0:output", "mean").values.tolist()
    assert losses == watched, "a watched training has other losses"
    assert len(found) == 12, f"{len(found)} of 12 steps arrived"
    error = max(abs(one - other) for one, other in zip(found, expected, strict=True))
    assert error < 1e-6, f"means that crossed differ by {error}"
    return f"12 steps, losses bit by bit the same, means within {error:.1e}"


def _train(device: str, folder: Path | None) -> tuple[list[float], list[float]]:
    """The losses of a short training; watched into a folder, or else with the means of its first layer's output."""
    import torchtap as tt

    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = None if folder is None else tt.watch(model, folder, ["*:output", "*:grad_output"])
    losses, means = [], []
    for step in range(12):
        if watch is not None:
            watch.set_step(step)
        value = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).to(device)
        if watch is None:
            means.append(float(model[0](value).detach().double().mean()))
        loss = model(value).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    if watch is not None:
        watch.close()
    return losses, means


def prove_forms(device: str) -> str:
    """One model through each form: the same sites, the same values."""
    import torchtap as tt

    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).to(device).eval()
    value = torch.randn(3, 8, generator=torch.Generator().manual_seed(1)).to(device)
    with torch.no_grad(), tt.capture(model, "2:output") as seen:
        model(value)
    expected = seen["2:output"]
    made: dict[str, Callable[[], object]] = {
        "compiled": lambda: torch.compile(model, backend="eager"),
        "exported": lambda: torch.export.export(model, (value,)).module(),
        "traced by fx": lambda: torch.fx.symbolic_trace(model),
    }
    for form, make in made.items():
        call = make()
        with torch.no_grad(), tt.capture(call, "2:output") as seen:
            call(value)  # type: ignore[operator]
        torch.testing.assert_close(seen["2:output"], expected, msg=f"{form}: other values")
    return f"eager, {', '.join(made)}: the same values"


def prove_run(device: str) -> str:
    """Write a run, damage it and read it: intact values are read, damage is reported."""
    import torchtap as tt

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        root = nn.Sequential(nn.Linear(4, 4)).to(device)
        watch = tt.watch(root, folder, ["0:output"])
        for step in range(3):
            watch.set_step(step)
            root(torch.ones(2, 4, device=device))
            watch.end_step()
            watch.flush()
        parts = sorted(folder.rglob("scalars-*"))
        run = tt.open(folder)
        assert run.steps().tolist() == [0, 1, 2], "steps are missing"
        parts[-1].write_bytes(parts[-1].read_bytes()[:-7])
        damaged = tt.open(folder)
        assert damaged.problems, "a cut file was not noticed"
        assert set(damaged.steps().tolist()) < {0, 1, 2}, "a cut file was read"
        watch.close()
    return "written, read, damaged, and the damage reported"


PROOFS: dict[str, Callable[[str], str]] = {
    "kernels": prove_kernels,
    "hand-over": prove_handover,
    "forms": prove_forms,
    "run": prove_run,
}

if sys.platform == "win32":  # the store's locks and the forms' compilers are those of POSIX
    del PROOFS["run"]


@click.command("selftest")
@click.option("--json", "as_json", is_flag=True, help="The same for programs.")
@click.option(
    "--device", "asked", multiple=True, help="Only this device, e.g. cuda; default: all that are there."
)
def command(asked: tuple[str, ...], as_json: bool) -> None:
    """Say what this installation is made of, and prove that it works here. Paste the output into a bug report.

    Exit code: 0 everything held, 1 something did not.
    """

    tell: Callable[[str], object] = (lambda line: None) if as_json else say
    parts = dict(facts())
    for name, fact in parts.items():
        tell(f"{name + ':':<17} {fact}")
    results = []
    for device, (name, proof) in product(devices(asked), PROOFS.items()):
        results.append(_tried(device, name, proof))
        tell(results[-1].line())
    failed = sum(not result.held for result in results)
    if as_json:
        say_json({"facts": parts, "proofs": [asdict(result) for result in results], "held": not failed})
    tell("everything held" if not failed else f"{failed} did not hold")
    raise SystemExit(1 if failed else 0)


@dataclass(frozen=True)
class Result:
    """The outcome of one proof."""

    device: str
    name: str
    held: bool
    seconds: float
    seen: str

    def line(self) -> str:
        """For a person."""
        verdict = "held" if self.held else "DID NOT HOLD"
        return f"{self.device:<8} {self.name:<10} {verdict:<6} {self.seconds:5.1f} s  {self.seen}"


def _tried(device: str, name: str, proof: Callable[[str], str]) -> Result:
    started = time.monotonic()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            seen, held = proof(device), True
    except Exception as error:  # whatever goes wrong on this machine is what the report is for
        seen, held = f"{type(error).__name__}: {error}", False
    return Result(device, name, held, time.monotonic() - started, seen)
