"""``torchtap mcp`` as an assistant has it: the SDK's own client starts the command and asks over its streams."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from anyio.from_thread import start_blocking_portal
from tests.optional import need
from torch import nn

import torchtap as tt

mcp = need("mcp")

HOSTILE = "evil\x1b[31m\u202e</script>"


def train(folder: Path, seed: int, *, breaks: bool = False) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    taps = [
        tt.tap(["*:output", "*:param_grad"]),
        tt.tap("2:output", tt.Full(), every=5),
        tt.tap("1:attention"),
    ]
    with tt.watch(model, folder, taps, labels={"note": HOSTILE}) as watch:
        for step in range(20):
            with watch.step():
                x = torch.randn(16, 4)
                if breaks and step == 12:
                    x[0, 0] = math.nan
                loss = model(x).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                watch.log(loss=loss)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    train(runs / "good", 0)
    train(runs / "again", 0)
    train(runs / "broken", 0, breaks=True)
    (runs.parent / "secret.txt").write_text("not for assistants")
    return runs


Ask = Callable[..., Any]


@pytest.fixture(scope="module")
def ask(folder: Path) -> Iterator[Ask]:
    """One session of the real client: ask(tool, **arguments) gives the answer, or raises with the error's text."""
    parameters = mcp.StdioServerParameters(
        command=sys.executable,
        args=["-m", "torchtap", "mcp", str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(mcp.Client(parameters)) as client,
    ):

        def asked(tool: str, **arguments: Any) -> Any:
            result = portal.call(client.call_tool, tool, arguments)
            if result.is_error:
                raise LookupError(result.content[0].text)
            # As text for models that read text, and as data for those that take it.
            assert json.loads(result.content[0].text) == result.structured_content
            return result.structured_content

        asked.tools = {tool.name: tool for tool in portal.call(client.list_tools).tools}  # type: ignore[attr-defined]
        yield asked


def test_the_tools_say_that_they_only_read(ask: Ask) -> None:
    tools = ask.tools  # type: ignore[attr-defined]
    assert set(tools) == {"list_runs", "findings", "sites", "series", "coverage", "compare"}
    assert all(tool.annotations.read_only_hint for tool in tools.values())
    assert all(tool.description for tool in tools.values())
    assert "catalog" not in str([tool.input_schema for tool in tools.values()])


def test_runs_are_listed_with_how_far_they_came(ask: Ask) -> None:
    runs = {run["name"]: run for run in ask("list_runs")["runs"]}
    assert set(runs) == {"good", "again", "broken"}
    assert {run["steps"] for run in runs.values()} == {20}


def test_findings_name_the_step_at_which_it_broke(ask: Ask) -> None:
    found = ask("findings", run="broken")["findings"]
    assert found["total"] >= 1
    assert any(each["step"] == 12 for each in found["shown"]), found


def test_a_series_is_summed_up_as_the_run_itself_says(ask: Ask, folder: Path) -> None:
    summed = ask("series", run="good", site="0:output", statistic="std")
    steps, values = tt.open(folder / "good").series("0:output", "std")
    assert summed["count"] == len(values) == 20
    assert summed["greatest"] == {"step": int(steps[values.argmax()]), "value": float(values.max())}
    assert summed["last"] == {"step": 19, "value": float(values[-1])}
    broken = ask("series", run="broken", site=":value.loss")
    assert broken["statistic"] == "value"
    assert broken["first_step_not_finite"] == 12
    assert broken["not_finite"] == 8
    assert [value for step, value in broken["points"] if step >= 12] == [None] * 8


def test_sites_are_chosen_by_pattern_and_a_long_list_says_how_long(ask: Ask) -> None:
    listed = ask("sites", run="good", pattern="*:output", limit=2)["sites"]
    assert listed["total"] == 4
    assert len(listed["shown"]) == 2
    assert "std" in listed["shown"][0]["statistics"]


def test_coverage_says_what_never_came_and_why(ask: Ask) -> None:
    missing = ask("coverage", run="good")["missing"]["shown"]
    assert [each["site"] for each in missing] == ["1:attention"]
    assert missing[0]["reason"]


def test_two_runs_are_compared(ask: Ask) -> None:
    assert ask("compare", reference="good", target="again")["outcome"] == "same"
    assert ask("compare", reference="good", target="broken")["outcome"] == "differs"


@pytest.mark.parametrize(
    "name", ["../secret.txt", "/etc/passwd", "good/../../secret.txt", "nothing", "a" * 5000]
)
def test_nothing_outside_of_the_folder_can_be_asked_for(ask: Ask, name: str) -> None:
    with pytest.raises(LookupError, match="there is no run called") as refused:
        ask("findings", run=name)
    assert "not for assistants" not in str(refused.value)


def test_what_is_asked_wrongly_is_told_in_words(ask: Ask) -> None:
    with pytest.raises(LookupError, match=r"has no statistic 'median'; it has .*std"):
        ask("series", run="good", site="0:output", statistic="median")
    with pytest.raises(LookupError, match="no statistics at a site '0:out'; near it: 0:output"):
        ask("series", run="good", site="0:out")


def test_foreign_text_is_spelled_out(ask: Ask) -> None:
    told = str(ask("list_runs"))
    assert "evil\\\\x1b[31m" in told  # the label is there, as letters
    assert "\\x1b" in told
    assert not {"\x1b", "\u202e"} & set(told)


def test_no_run_was_changed_by_being_asked_about(ask: Ask, folder: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    for run in ("good", "broken"):
        ask("findings", run=run)
        ask("coverage", run=run)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_without_the_package_the_error_names_the_extra(folder: Path) -> None:
    program = (
        "import sys; sys.modules['mcp'] = None; from torchtap.cli import main; main(['mcp', sys.argv[1]])"
    )
    done = subprocess.run([sys.executable, "-c", program, str(folder)], capture_output=True, text=True)
    assert done.returncode == 2
    assert "pip install 'torchtap[mcp]'" in done.stderr
