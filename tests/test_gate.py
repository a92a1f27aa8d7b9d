"""Foreign files, documents and text go through `torchtap.sanitize`: no code opens, parses or prints them by itself."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.torture.names import CURSES
from tests.torture.showing import harmful_in_a_terminal
from torch import nn, ones

import torchtap as tt
from torchtap.errors import PlanError
from torchtap.integrations.zero_code.settings import Settings, read_plan_file
from torchtap.sanitize import open_file, parse_json, parse_toml, read_file

SOURCE = Path(tt.__file__).parent

# What goes around the gate, by the last part of a call's name. A call of a module is written with it.
READS = {"open", "read_text", "read_bytes", "json.loads", "json.load", "fromfile", "os.open", "tomllib.loads",
         "tomllib.load", "yaml.safe_load", "yaml.load", "pickle.loads", "pickle.load", "torch.load", "np.load",
         "load_npz", "safe_open", "print", "Console"}  # fmt: skip

# Calls that may stay, by package, each with its reason. A new one goes through the gate, or states here why it cannot.
ALLOWED: dict[str, dict[str, str]] = {
    "sanitize": {
        "os.open": "the gate",
        "json.loads": "the gate",
        "tomllib.loads": "the gate",
        "print": "the gate",
    },
    "store": {
        "os.open": "the gate of run folders, which never follows a link",
        "open": "exports write the file that the user named",
        "json.loads": "its own text",
    },
    "sinks": {"open": "appends to the file that the user named"},
    "viewer": {"read_bytes": "files of this package", "json.loads": "its own answers"},
    "cli": {"read_text": "a file of this package", "read_bytes": "a run that it made itself"},
    "forms": {"read_text": "a file of this package", "torch.load": "only where the user says unsafe=True"},
    "comparison": {
        "json.loads": "its own text",
        "torch.load": "weights only",
        "open": "members of an archive are bounded before they are read",
    },
    "datasets": {"pickle.loads": "jobs, units and answers of its own processes"},
    "serving": {"safe_open": "has no code in it"},
    "assistant": {"json.loads": "its own text"},
    "testing": {"json.loads": "its own text"},
    "diagnosis": {
        "torch.load": "weights only",
        "read_text": "a file of this package",
        "tomllib.loads": "a file of this package",
    },
    "monitors": {
        "torch.load": "weights only",
        "yaml.safe_load": "text that the gate has read",
        "np.load": "without pickles",
        "safe_open": "has no code in it",
        "open": "archives of tensors, read by numpy without pickles, and written",
    },
}

# Methods named open that read a folder of a run through its own gate, or open no file.
OTHER_OPEN = {
    "self",
    "folder",
    "_folder",
    "channel",
    "_channel",
    "segment",
    "LocalFolder",
    "Catalog",
    "webbrowser",
    "tt",
    "archive",
}


def package_of(path: Path) -> str:
    """Return the first part of a module's name below torchtap."""
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def calls_of(tree: ast.AST) -> set[str]:
    """Return the calls of a file that read, parse or print by themselves."""
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if name == "warnings.warn" and not isinstance(node.args[0], ast.Constant):
            if not ast.unparse(node.args[0]).startswith("shown("):
                found.add("warnings.warn without shown")
            continue
        last = name.rpartition(".")[2]
        owner = name.rpartition(".")[0].replace("(", ".").split(".")
        if last == "open" and OTHER_OPEN & set(owner):
            continue
        if last == "print" and owner != [""]:
            continue  # a console's, which is a Terminal
        if name in READS:
            found.add(name)
        elif last in READS:
            found.add(last)
    return found


def test_every_foreign_file_document_and_line_goes_through_the_gate() -> None:
    problems = []
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        if name.startswith("integrations/inject/"):
            continue  # it runs before anything of torchtap may be imported
        found, allowed = (
            calls_of(ast.parse(path.read_text(encoding="utf-8"))),
            set(ALLOWED.get(package_of(path), ())),
        )
        problems += [
            f"{name} calls {call}: use torchtap.sanitize (open_file, read_file, parse_json, parse_toml, say) or "
            "torchtap.terminal.Terminal, or state in tests/test_gate.py why it cannot"
            for call in sorted(found - allowed)
        ]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    "code",
    [
        "open('x')",
        "json.loads(t)",
        "Path(p).read_text()",
        "f.open('rb')",
        "print(x)",
        "tomllib.load(f)",
        "Console()",
        "warnings.warn(name)",
    ],
)
def test_a_call_around_the_gate_is_noticed(code: str) -> None:
    assert calls_of(ast.parse(f"def f():\n    {code}\n"))


# -- HTML -----------------------------------------------------------------------------------------------------

MAKERS = {"viewer", "comparison"}


def raw_in_html(tree: ast.AST) -> list[str]:
    """Return what is put into HTML without `in_html`: attributes, elements and texts of values."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.JoinedStr):
            continue
        fixed = "".join(str(part.value) for part in node.values if isinstance(part, ast.Constant))
        if not any(
            f"<{tag}" in fixed for tag in ("div", "td", "tr", "li", "b>", "h1", "h2", "p ", "text", "title")
        ):
            continue
        for part in node.values:
            if isinstance(part, ast.FormattedValue) and part.format_spec is None:
                value = part.value
                text = isinstance(value, ast.Call) and ast.unparse(value.func) in ("str", "repr", "format")
                if text or (isinstance(value, ast.Attribute | ast.Subscript) and "." in ast.unparse(value)):
                    found.append(ast.unparse(value))
    return found


# Numbers and colours of ours.
HARMLESS = {"result.compared", "axes.TOP", "axes.HEIGHT"}


def test_a_value_in_html_passes_the_gate_and_html_is_made_in_few_packages() -> None:
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert set(raw_in_html(tree)) <= HARMLESS, name
        if "<div" in path.read_text(encoding="utf-8"):
            assert package_of(path) in MAKERS, f"{name} makes HTML, which is the viewer's part"


def test_a_value_put_raw_into_html_is_noticed() -> None:
    assert raw_in_html(ast.parse("x = f'<td>{row.site}</td>'")) == ["row.site"]
    assert raw_in_html(ast.parse("x = f'<td>{in_html(row.site)}</td>{n:.3g}'")) == []


# -- the gate itself ------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes with names are POSIX")
def test_a_pipe_and_a_device_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(OSError, match=r"not a regular file|Is a directory"):
            open_file(path)
        with pytest.raises(PlanError, match="cannot be read"):
            read_plan_file(str(path))


def test_a_file_that_is_too_large_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "plan.toml").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(PlanError, match="more than 1048576 bytes"):
        read_plan_file(str(tmp_path / "plan.toml"))
    (tmp_path / "small").write_bytes(b"1234")
    assert read_file(tmp_path / "small", 4) == b"1234"


@pytest.mark.parametrize(
    "text", ["[" * 200_000, '{"a":' * 100_000, "{", "\x00", "1" * 5000, "[" + "[]," * 3_000_000 + "1]"]
)
def test_json_that_is_not_accepted_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        parse_json(text)
    with pytest.raises(PlanError):
        Settings.from_environment("{" + text)


def test_nan_is_refused_where_json_is_strict() -> None:
    assert parse_json("[NaN]")
    with pytest.raises(ValueError, match="NaN is not JSON"):
        parse_json("[NaN]", strict=True)


@pytest.mark.parametrize("raw", [b"\xff", b"a = " + b"[" * 50_000, b"a"])
def test_toml_that_is_not_accepted_is_a_value_error(raw: bytes) -> None:
    with pytest.raises(ValueError):
        parse_toml(raw)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes with names are POSIX")
def test_a_plan_that_is_a_pipe_does_not_stop_a_command(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "plan")
    words = [sys.executable, "-m", "torchtap", "run", "--plan", "plan", "x.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert "not a regular file" in done.stderr


@pytest.mark.parametrize("what", CURSES)
def test_what_a_capture_prints_is_mere_text_whatever_a_module_is_called(what: str) -> None:
    name = CURSES[what].replace(".", "")
    if not name:
        pytest.skip("a module needs a name")
    model = nn.Sequential()
    model.add_module(name, nn.Identity())
    with tt.capture(model, "*:output") as seen:
        model(ones(1))
    assert len(seen) == 2
    assert harmful_in_a_terminal(str(seen)) is None
    assert harmful_in_a_terminal(repr(seen)) is None
