"""Names are data: whatever a site is called, a terminal, a file, a page and a notebook get mere text."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.torture.names import CURSES, hostile_names
from tests.torture.showing import check_every_way_out, harmful_in_a_terminal, record_names

import torchtap as tt
from torchtap.cli.console import Terminal
from torchtap.sanitize import browser_text, file_component, in_html, shown, storable

ANY_TEXT = st.text(st.characters(codec=None, exclude_categories=()), max_size=50)


def test_hostile_names_come_back_as_they_are_and_leave_as_mere_text(tmp_path: Path) -> None:
    names = hostile_names(120, seed=1)
    record_names(tmp_path / "run", names)
    assert check_every_way_out(tmp_path / "run", names, tmp_path) > 200


@pytest.mark.parametrize("what", CURSES)
def test_what_is_shown_holds_nothing_but_text(what: str) -> None:
    assert harmful_in_a_terminal(shown(CURSES[what])) is None
    assert len(shown(CURSES[what])) < 4000
    in_html(CURSES[what]).encode("utf-8")


@given(ANY_TEXT)
def test_any_text_can_be_shown_stored_and_named(text: str) -> None:
    assert harmful_in_a_terminal(shown(text)) is None
    storable(text).encode("utf-8")
    assert "/" not in file_component(text)
    assert file_component(text) not in ("", ".", "..")
    browser_text(text).encode("utf-8")
    assert "<" not in in_html(text)


@given(st.lists(ANY_TEXT, unique=True, min_size=2, max_size=2))
def test_names_that_differ_stay_different_for_files_and_the_page(names: list[str]) -> None:
    one, other = names
    if "\\" not in one + other and " (name)" not in one + other:
        assert storable(one) != storable(other)
        assert file_component(one) != file_component(other)
        assert browser_text(one) != browser_text(other)


@pytest.mark.parametrize(
    "name", ["blocks.0.attn:output", "h.3:grad_output.0#2", "größe:output", "日本:output", ""]
)
def test_an_ordinary_name_passes_unchanged(name: str) -> None:
    assert shown(name) == storable(name) == browser_text(name) == name


def test_long_names_that_begin_alike_stay_different() -> None:
    one, other = "x" * 100_000 + "a", "x" * 100_000 + "b"
    assert file_component(one) != file_component(other)
    assert browser_text(one) != browser_text(other)
    assert len(file_component(one)) < 500


def test_an_error_about_a_hostile_name_is_safe_to_print_and_to_pickle() -> None:
    error = tt.SelectionError("no site \x1b[2J\u202e\ud800", nearest=("\x1b",))
    assert harmful_in_a_terminal(str(error)) is None
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert "first line\nsecond" in str(tt.TorchtapError("first line\nsecond"))


def test_a_terminal_takes_no_string_for_markup(capsys: pytest.CaptureFixture[str]) -> None:
    Terminal().print("[/]x [red]y[/red] :skull:")
    assert capsys.readouterr().out.strip() == "[/]x [red]y[/red] :skull:"
