"""The grammar of names: what is printed parses back, foreign text harms nothing, order is that of execution."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtap.errors import SelectionError
from torchtap.plan.names import (
    KINDS,
    Name,
    belongs_to,
    execution_order,
    in_passing_order,
    is_inside,
    join_path,
    last_part,
    parent_path,
    parse_name,
    path_parts,
    paths_around,
    read_name,
    selector_parts,
    site_name,
    without_wrappers,
)

words = st.text(st.sampled_from("ab:0#~ |é"), min_size=1, max_size=5)
paths = st.lists(words, max_size=3).map(".".join)


def ends_like_a_call(leaf: str) -> bool:
    return leaf.rpartition("#")[2].isdigit() and "#" in leaf


@given(paths, st.sampled_from(KINDS), paths, st.integers(0, 999))
def test_a_printed_name_parses_back_to_the_same_parts(path: str, kind: str, leaf: str, call: int) -> None:
    if ends_like_a_call(leaf) and not call:
        return
    assert parse_name(site_name(path, kind, leaf, call)) == (path, kind, leaf, call)


def test_a_leaf_may_be_any_key_of_a_dict() -> None:
    assert parse_name("heads:output.logits:main#2") == ("heads", "output", "logits:main", 2)
    assert parse_name("a:output.x#y") == ("a", "output", "x#y", 0)


def test_a_module_may_have_a_colon_in_its_name() -> None:
    assert parse_name("adapter:default.fc:input") == ("adapter:default.fc", "input", "", 0)


@pytest.mark.parametrize("text", ["", "a", "a:outputs", "a:output#x", "a:output#", "a:", "a:output#²"])
def test_what_is_no_name_is_an_error_that_shows_the_grammar(text: str) -> None:
    with pytest.raises(SelectionError, match=r"<module path>:<kind>\[.<leaf>\]\[#<call>\]"):
        parse_name(text)


@given(st.text(max_size=40))
def test_any_text_is_read(text: str) -> None:
    name = read_name(text)
    assert isinstance(name.call, int)
    assert "#" not in name.kind or ":" not in text


def test_names_that_others_wrote_are_read_as_far_as_they_go() -> None:
    assert read_name("blocks.0") == ("blocks.0", "output", "", 0)
    assert read_name("a:mine.x#3") == ("a", "mine", "x", 3)
    assert read_name("a:output#x") == ("a", "output", "", 0)
    assert read_name("a:output#" + "9" * 5000) == ("a", "output", "", 0)


def test_a_long_hostile_name_is_read_in_linear_time() -> None:
    assert read_name(":output#1x" * 20_000).kind == "output"
    assert read_name(":output." * 20_000).kind == "output"


def test_a_selector_may_leave_the_kind_out() -> None:
    assert selector_parts("blocks.*") == ("blocks.*", "output", "", "")
    assert selector_parts("a", "input") == ("a", "input", "", "")
    assert selector_parts("a:grad_*.0#*") == ("a", "grad_*", "0", "*")


def test_paths_are_taken_apart_and_put_together() -> None:
    assert list(paths_around("a.b.c")) == ["a.b", "a", ""]
    assert list(paths_around("")) == []
    assert (parent_path("a.b"), last_part("a.b"), join_path("", "a"), join_path("a", "b")) == (
        "a",
        "b",
        "a",
        "a.b",
    )
    assert path_parts("") == []
    assert is_inside("a.b", "a")
    assert is_inside("a", "")
    assert not is_inside("", "")
    assert not is_inside("ab", "a")
    assert not is_inside("a", "a")


def test_wrappers_leave_no_trace() -> None:
    assert without_wrappers("_orig_mod.module.blocks._checkpoint_wrapped_module.0") == "blocks.0"


def test_a_site_has_its_leaves_and_calls() -> None:
    assert belongs_to("a:output.0", "a:output")
    assert belongs_to("a:output#1", "a:output")
    assert not belongs_to("a:output_2", "a:output")


def test_parameters_come_first_and_gradients_pass_in_reverse() -> None:
    given = ["a:param.w", "a:output", "a:grad_output", "b:output", "b:grad_output", "b:param_grad.w"]
    assert in_passing_order(given) == [
        "a:param.w", "a:output", "b:output", "b:grad_output", "a:grad_output", "b:param_grad.w",
    ]  # fmt: skip


def test_a_container_begins_before_and_ends_after_what_is_inside_it() -> None:
    executed = [
        "a.x:param.w", ":input", "a:input", "a.x:input", "a.x:output", "a:output", "b:output", ":output",
        "a:output#1", "b:grad_output", "a:grad_output", "a.x:grad_output", "a.x:grad_input", "a:grad_input",
    ]  # fmt: skip
    key = execution_order(executed)
    shuffled = list(executed)
    random.Random(0).shuffle(shuffled)
    assert sorted(shuffled, key=key.__getitem__) == executed


def test_parts_print_as_the_name() -> None:
    assert str(Name("a", "output", "0", 2)) == "a:output.0#2"
    assert Name("a", "output", "0", 2).bare == "a:output"
