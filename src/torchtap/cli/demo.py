"""``torchtap demo``: train a small GPT, record it, and show the result."""

from __future__ import annotations

import shutil
import sys
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import torch
import torch.nn.functional as F
from rich.live import Live
from rich.table import Table
from torch import Tensor, nn

from torchtap.cli.console import Terminal, say_json

if TYPE_CHECKING:
    from torchtap import Watch

__all__ = ["SmallGPT", "Text", "command"]


class Text:
    """The text that ships with the package, as characters."""

    def __init__(self, seed: int = 0) -> None:
        text = (files("torchtap.cli") / "data" / "demo.txt").read_text(encoding="utf-8").replace("\n", " ")
        self.alphabet = sorted(set(text))
        index = {character: number for number, character in enumerate(self.alphabet)}
        self._tokens = torch.tensor([index[character] for character in text])
        self._generator = torch.Generator().manual_seed(seed)

    def batch(self, size: int, length: int) -> tuple[Tensor, Tensor]:
        """Random windows and what follows each of their characters."""
        starts = torch.randint(len(self._tokens) - length - 1, (size,), generator=self._generator)
        windows = torch.stack([self._tokens[start : start + length + 1] for start in starts.tolist()])
        return windows[:, :-1], windows[:, 1:]

    def decode(self, tokens: Tensor) -> str:
        return "".join(self.alphabet[token] for token in tokens.tolist())


class Attention(nn.Module):
    """Causal self-attention through torch's fused kernel: its maps exist only if they are captured."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.ln2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        out: Tensor = x + self.mlp(self.ln2(x))
        return out


class SmallGPT(nn.Module):
    def __init__(
        self, characters: int, length: int = 64, width: int = 64, layers: int = 4, heads: int = 4
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(characters, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, characters)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


_SHOWN = (
    "tokens",
    "blocks.0.attn",
    "blocks.0.mlp",
    "blocks.0",
    "blocks.3.attn",
    "blocks.3.mlp",
    "blocks.3",
    "head",
)


@click.command("demo")
@click.option("--steps", default=200, show_default=True, help="Training steps.")
@click.option("--out", default="demo-run", show_default=True, help="The run folder; made anew each time.")
@click.option(
    "--json", "as_json", is_flag=True, help="At the end what was made, as JSON; the rest goes to stderr."
)
def command(steps: int, out: str, as_json: bool) -> None:
    """Train a small GPT on a few kilobytes of text and look inside it while it learns."""
    console = Terminal(stderr=as_json)
    folder = Path(out)
    if folder.exists():
        if not any(folder.glob("rank-*")):
            raise click.UsageError(f"{out} exists and is not a run; choose another --out")
        shutil.rmtree(folder)
    console.print("Training a character GPT (4 layers, 64 wide) and watching every module of it.\n")
    loss = _train(console, folder, steps)
    console.print(f"\nloss after {steps} steps: {loss:.3f}")
    facts = _show(console, folder)
    if as_json:
        say_json({"run": out, "loss": loss, **facts})


def _train(console: Terminal, folder: Path, steps: int) -> float:
    import torch
    import torch.nn.functional as F

    import torchtap as tt

    torch.set_num_threads(1)  # the model is too small to be shared between cores
    torch.manual_seed(0)
    text = Text()
    model = SmallGPT(len(text.alphabet))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    example = text.batch(1, 32)[0]
    taps = [
        tt.tap(["*:output", "*:grad_output", "*:param", "*:param_grad"], phase="train"),
        tt.tap(["blocks.*:output", "head:output"], tt.Histogram(), every=10, phase="train"),
        tt.tap("blocks.*:attention", tt.Full(), phase="eval"),
    ]
    loss_value = float("nan")
    with tt.watch(model, folder, taps, labels={"tokens": list(text.decode(example[0]))}) as watch:
        with Live(console=console, refresh_per_second=4) as live:
            for step in range(steps):
                if step % 25 == 0:
                    _look_at_attention(model, example)
                tokens, following = text.batch(16, 64)
                with watch.step():
                    loss = F.cross_entropy(model(tokens).flatten(0, 1), following.flatten())
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    watch.log(loss=loss)
                if step % 5 == 0 or step == steps - 1:
                    loss_value = loss.item()
                    live.update(_table(watch, step, steps, loss_value))
        _look_at_attention(model, example)
    return loss_value


def _look_at_attention(model: Any, example: Any) -> None:
    """One sentence, the same each time, so that its attention maps can be followed through the training.

    An evaluation belongs to the step that ended last, and makes none of its own.
    """
    import torch

    model.eval()
    with torch.no_grad():
        model(example)
    model.train()


def _table(watch: Watch, step: int, steps: int, loss: float) -> Table:
    table = Table(title=f"step {step + 1} of {steps}   loss {loss:.3f}", title_justify="left")
    table.add_column("module", min_width=14)
    for heading in ("output std", "output absmax", "zeros", "gradient l2"):
        table.add_column(heading, justify="right", min_width=11)
    for module in _SHOWN:
        table.add_row(
            module,
            f"{watch.latest(f'{module}:output', 'std'):.4f}",
            f"{watch.latest(f'{module}:output', 'absmax'):.3f}",
            f"{watch.latest(f'{module}:output', 'zeros'):.0%}",
            f"{watch.latest(f'{module}:grad_output', 'l2'):.2e}",
        )
    return table


def _show(console: Terminal, folder: Path) -> dict[str, object]:
    """Print the contents of the run, its findings and the next commands; with ``--json`` the same as data."""
    from torchtap import open as open_run
    from torchtap.diagnosis.diagnose import diagnose

    run = open_run(folder)
    files = [path for path in folder.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files) / 1e6
    console.print(
        f"\nThe run: {folder}/ with {len(run.sites())} sites and {len(run.steps())} steps, "
        f"{size:.1f} MB in {len(files)} files."
    )
    findings = diagnose(run)
    console.print(f"What looks wrong in it: {'nothing.' if not findings else ''}")
    for finding in findings[:5]:
        console.print(f"  {finding}")
    if len(findings) > 5:
        console.print(f"  … and {len(findings) - 5} more; the report has them all")
    report = _write_report(console, folder)
    # From a checkout the command is in the environment that make has set up, which may not be on the path.
    name = "torchtap" if shutil.which("torchtap") else sys.argv[0]
    console.print(f"\nLook further:\n  {name} show {folder}\n  {name} view {folder}")
    return {
        "sites": len(run.sites()),
        "steps": len(run.steps()),
        "findings": [finding.to_dict() for finding in findings],
        "report": report,
    }


def _write_report(console: Terminal, folder: Path) -> str | None:
    from torchtap.errors import MissingExtraError
    from torchtap.viewer.report import write_report

    page = folder.with_suffix(".html")
    try:
        write_report([folder], page)
    except MissingExtraError as error:
        console.print(f"No report: {error}")
        return None
    console.print(f"The report: {page}")
    return str(page)
